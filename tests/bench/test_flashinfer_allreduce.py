"""FlashInfer's fused all-reduce: what is said where it cannot run, and how its scales are read. Its kernels need GPUs."""

import pytest
import torch

from layerfuse.bench import flashinfer_allreduce
from layerfuse.bench.arithmetic import quantise


def test_what_is_no_library_is_said_so(tmp_path):
    wanted = "FlashInfer's all-reduce is compiled code (trtllm_allreduce_fusion*.so or trtllm_comm.so), and "
    assert flashinfer_allreduce.why_not(None) == f"{wanted}no library is given"
    assert flashinfer_allreduce.why_not(tmp_path) == f"{wanted}{tmp_path.name} holds none of them"
    library = tmp_path / "trtllm_comm.so"
    library.write_text("no library")
    pytest.importorskip("tvm_ffi")
    assert flashinfer_allreduce.why_not(tmp_path).startswith("trtllm_comm.so cannot be loaded: ")


def test_a_library_built_alone_comes_before_that_of_flashinfer(tmp_path):
    alone, whole = tmp_path / "trtllm_allreduce_fusion-0.6.14-sm90a.so", tmp_path / "trtllm_comm.so"
    whole.touch()
    assert flashinfer_allreduce.library(tmp_path) == whole
    alone.touch()
    assert flashinfer_allreduce.library(tmp_path) == alone
    assert flashinfer_allreduce.library(whole) == whole


def test_rows_that_its_kernels_do_not_take():
    refuses = flashinfer_allreduce.refuses
    assert refuses(2, 2880, torch.bfloat16) is None
    assert refuses(3, 2880, torch.bfloat16) == "it says for 2, 4, 8 ranks when it takes one shot, not for 3"
    assert refuses(2, 2884, torch.bfloat16) == "a row of 2884 torch.bfloat16 is no multiple of 16 bytes"
    assert refuses(2, 2884, torch.float32) is None
    assert refuses(2, 2880, torch.float64) == "its kernels take bf16, fp16 and fp32, not torch.float64"


@pytest.mark.parametrize(("tokens", "groups"), [(1, 4), (5, 7), (8, 9)])
def test_packed_scales_are_read_as_the_kernels_write_them(tokens, groups):
    _, scales = quantise(torch.randn(tokens, 64 * groups).exp(), torch.float8_e4m3fn, 64, False, True, False)
    pitch = -(-tokens // 4) * 4
    memory = torch.zeros(-(-groups // 4) * pitch * 4, dtype=torch.uint8)
    for token in range(tokens):
        for group in range(groups):
            # comm/trtllm_allreduce_fusion.cuh, write_group_scale
            exponent = int(torch.frexp(scales[token, group]).exponent) - 1 + 127
            memory[(group // 4 * pitch + token) * 4 + group % 4] = exponent
    packed = memory.view(torch.int32).as_strided((tokens, -(-groups // 4)), (1, pitch))
    assert torch.equal(flashinfer_allreduce.unpacked(packed, groups), scales)
