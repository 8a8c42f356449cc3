"""Fused all-reduces on NVIDIA GPUs of one host: a Triton kernel over torch's symmetric memory, without multicast.

`kernel` exchanges rows between ranks, and `crossovers` has up to how many tokens, without torch.
"""
