"""vLLM's own QuantFP8, as its real fp8 linears hold it, behind vLLM's own norm: found and fused on CPU torch.

The matrix products behind it need a GPU, so the quantised rows and their scales are what is compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerfuse.adapters import ActivationQuant, describe_linear_quant
from layerfuse.adapters.specs import WHOLE, NormSpec, ResidualSpec
from layerfuse.fusion import FusionConfig, Target
from layerfuse.fusion import compile as fuse
from layerfuse.registry.inspect import read_modelopt

vllm_layers = pytest.importorskip("vllm_layers")
from test_vllm_specs import BLOCK, PER_TOKEN, STATIC  # noqa: E402
from vllm_layers import build_model, fp8_kernel  # noqa: E402

WIDTH = 1536
KERNELS: dict[str, Any] = {
    "group": (BLOCK, "triton:TritonFp8BlockScaledMMKernel", ActivationQuant(group_size=128)),
    "column-major": (
        BLOCK,
        "cutlass:CutlassFp8BlockScaledMMKernel",
        ActivationQuant(group_size=128, column_major=True),
    ),
    "per token": (PER_TOKEN, "cutlass:CutlassFP8ScaledMMLinearKernel", ActivationQuant()),
    "static": (STATIC, "cutlass:CutlassFP8ScaledMMLinearKernel", ActivationQuant(fixed="static")),
}


class Stream(nn.Module):
    """The add and norm of vLLM's IR, and the quantisation that the linear behind it does."""

    def __init__(self, quantise: Any, static: bool, reads: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6).bfloat16().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.02]), requires_grad=False) if static else None
        self.quantise, self.reads = quantise, reads

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, self.norm.weight, 1e-6)
        values, scales = self.quantise(normed, self.scale)
        return values, scales, total, *([normed * 2] if self.reads else [])


@pytest.mark.parametrize("reads", [False, True], ids=["quantised only", "read otherwise too"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_quantisation_of_a_real_linear_is_fused(name: str, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    quantization, kernel, quant = KERNELS[name]
    with fp8_kernel(kernel):
        model = build_model("deepseek-v3", first_k_dense_replace=1000, quantization_config=quantization)
    linear = model.get_submodule("model.layers.0.self_attn.q_b_proj")
    assert describe_linear_quant(linear) == quant
    method = getattr(linear, "scheme", None) or linear.quant_method
    op = method.fp8_linear.quant_fp8

    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda gm, _inputs, **_: gm)
    module = Stream(op.forward_native, quant.fixed == "static", reads)
    norm, other = (NormSpec(width=WIDTH, epsilon=1e-6, module=each, quant=quant) for each in ("norm", "other"))
    spec = ResidualSpec(
        hidden_size=WIDTH, layer_index=1, parallel=WHOLE, input_norms=(norm,), post_attention_norms=(other,)
    )
    target = Target(arch="cpu", vendor="cpu", fp8="e4m3fn")
    fused = fuse(module, specs=[("", spec)], target=target, config=FusionConfig(level=2))
    x, residual = torch.randn(5, WIDTH).bfloat16(), torch.randn(5, WIDTH).bfloat16()
    with torch.no_grad():
        got, wanted = fused(x, residual), module(x, residual)
    fusion = f"add_rms_norm_{quant.scheme}_quant"
    assert fused.report.of(fusion).matched == ("input",), str(fused.report)
    (use,) = [use for record in fused.report.records for use in record.uses]
    assert use.form == fusion + ("_with_norm" if reads else "")
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("said", [None, {"quant_method": "fp8", "activation_scheme": "static"}])
def test_modelopts_own_file_counts_as_layerfuse_reads_it(said: dict[str, Any] | None, tmp_path: Path) -> None:
    """Where the config has no `quantization_config`; by the name that vLLM gives the file."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
    from vllm.transformers_utils.config import get_config

    (name,) = ModelOptFp8Config.get_config_filenames()
    own = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {"quant_algo": "FP8"}}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {} if said is None else {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_modelopt(tmp_path) is None
    (tmp_path / name).write_text(json.dumps(own))
    assert read_modelopt(tmp_path) == own
    assert get_config(str(tmp_path), trust_remote_code=False).quantization_config == (said or own)
    assert ModelOptFp8Config.from_config(own).quant_method == "FP8"
