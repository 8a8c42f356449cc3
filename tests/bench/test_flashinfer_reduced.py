"""FlashInfer's fused all-reduce as a peer: what it takes of the fusions that start with an all-reduce."""

import importlib.util

from layerfuse.bench.choosing import Options, make_case
from layerfuse.bench.flashinfer_reduced import flashinfer_reduced_peer
from layerfuse.bench.peers import Setting


def reason(op, device="cuda", ranks=2, width=256, **options):
    case = make_case(op, registry=None, widths=[width], ranks=ranks, options=Options(**options))
    setting = Setting(case=case, device=device)
    return flashinfer_reduced_peer(setting).why_not(setting)


def test_the_peer_says_what_it_has_no_kernel_for():
    whole = "all_reduce_add_rms_norm"
    assert reason(whole, device="cpu") == "its kernels are for GPUs, not for cpu"
    assert reason(f"{whole}_pad").endswith(f"has no kernel for {whole}_pad")
    assert reason(f"{whole}_per_token_quant").endswith(f"has no kernel for {whole}_per_token_quant")
    assert reason(f"{whole}_static_quant", fp8="e4m3fnuz") == "its fp8 is e4m3fn, not e4m3fnuz"
    assert reason(f"{whole}_group_quant").endswith(f"has no kernel for {whole}_group_quant")
    assert reason(whole, weight_dtype="fp32").endswith("is not measured with weights of another dtype than the rows")
    assert reason(whole, ranks=3) == "it says for 2, 4, 8 ranks when it takes one shot, not for 3"
    assert reason(whole, width=252) == "a row of 252 is no multiple of 8 columns"
    if importlib.util.find_spec("flashinfer") is None:
        absent = "flashinfer-python is not installed (pip install flashinfer-python)"
        assert reason(whole, weight_offset=1.0) == reason(f"{whole}_static_quant_with_norm", fp8="e4m3fn") == absent
