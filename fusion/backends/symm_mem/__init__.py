"""Fused all-reduces on NVIDIA GPUs of one host: Triton kernels over torch's symmetric memory."""

from __future__ import annotations
