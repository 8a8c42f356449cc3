"""What `layerfuse plan --engine vllm` says beforehand is what is planned when vLLM has loaded that model: every architecture of models.toml.

vLLM's own classes on the meta device, of small configs, as an H100 would have them. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")
from vllm_host import config_on_cpu, import_model, vllm_parallel, without_gpu  # isort: skip  (before vllm)
import vllm.config.vllm as configs
from few_token_linears import BLOCKS
from helpers import ROOT, in_turn
from test_vllm_classes import config_of
from test_vllm_specs import BLOCK, PER_TOKEN
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry, registry
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_layers import RELEASE, fp8_kernel

from layerfuse import doctor
from layerfuse.cli.main import main
from layerfuse.engines.host import enter
from layerfuse.engines.loading import NotFusedError
from layerfuse.engines.mla import HELD
from layerfuse.engines.options import Options
from layerfuse.engines.switches import SWITCHES
from layerfuse.engines.vllm import hooks, loading, native_fusions
from layerfuse.engines.vllm.decode_facts import taking
from layerfuse.engines.vllm.host import VLLM
from layerfuse.engines.vllm.releases import NEWEST, RELEASES
from layerfuse.engines.vllm.switches import (
    BLOCK_LINEARS,
    BLOCKS_INSIDE,
    DEEP_GEMM,
    SHARED_IN_TURN,
    block_switch,
    is_off,
)
from layerfuse.fusion import Target
from layerfuse.fusion.sites import DECODE, PRODUCTS

newest = pytest.mark.skipif(RELEASE != NEWEST, reason="an older release builds no model for a GPU that is not there")

H100 = Target.named("sm90")
MODELS = tomllib.loads((ROOT / "models.toml").read_text())["models"]
ARCHITECTURES = sorted({name for model in MODELS.values() for name in model["architectures"]})
OWN = {
    name: place
    for name, place in {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}.items()
    if place[0] != "transformers"
}
"""Architecture -> file and class of vLLM's own."""
BREAKABLE = RELEASES[RELEASE].breakable


def test_architectures_without_code_in_vllm_are_recorded() -> None:
    assert RELEASES[RELEASE].without == {name for name in ARCHITECTURES if name not in OWN} - {"Mistral4ForCausalLM"}


@newest
def test_which_linears_vllm_asks_first_on_hopper_is_recorded() -> None:
    from vllm import envs
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms import PlatformEnum

    first = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA][0].__name__
    assert (first == "FlashInferFp8DeepGEMMDynamicBlockScaledKernel") is (RELEASES[RELEASE].inside == {"sm90"})
    assert envs.environment_variables[BLOCKS_INSIDE]() is True


@newest
@pytest.mark.parametrize("name", [name for name in SWITCHES if name.startswith("VLLM_")])
def test_vllm_reads_its_switches_as_the_doctor_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    read, switch = envs.environment_variables[name], SWITCHES[name]
    monkeypatch.delenv(name, raising=False)
    assert bool(read()) is switch.default
    monkeypatch.setenv(name, "false")
    with pytest.raises(ValueError, match="invalid literal") if switch.reads == "number" else contextlib.nullcontext():
        assert not read()


@newest
def test_vllms_switches_leave_linears_in_blocks_to_whom_a_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM chooses on Hopper with all three installed, in the order of its own table."""
    from vllm import envs
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass, deep_gemm, flashinfer
    from vllm.platforms import PlatformEnum
    from vllm.utils import deep_gemm as deep_gemm_utils
    from vllm.utils import flashinfer as flashinfer_utils

    hopper = SimpleNamespace(is_cuda=lambda: True, support_deep_gemm=lambda: True)
    for module in (deep_gemm, flashinfer, deep_gemm_utils):
        monkeypatch.setattr(module, "current_platform", hopper)
    monkeypatch.setattr(deep_gemm_utils, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(flashinfer_utils, "has_flashinfer_fp8_blockscale_gemm", lambda: True)
    monkeypatch.setattr(cutlass, "CUTLASS_BLOCK_FP8_SUPPORTED", True)
    for module, name in (
        (deep_gemm, "is_deep_gemm_supported"),
        (flashinfer, "is_flashinfer_fp8_blockscale_gemm_supported"),
    ):
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))  # as in a process of its own
    for said in product((None, "1", "0", "00", " 0 ", "2"), repeat=2):
        for variable, value in zip((DEEP_GEMM, BLOCKS_INSIDE), said, strict=True):
            monkeypatch.delenv(variable, raising=False)
            if value is not None:
                monkeypatch.setenv(variable, value)
            assert envs.environment_variables[variable]() is not is_off(variable)
        first = next(k for k in _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA] if k.is_supported(90)[0])
        switch = block_switch()
        taken = (
            "FlashInferFp8DeepGEMMDynamic"
            if switch is None
            else f"{BLOCK_LINEARS[switch]}Fp8".replace("CUTLASS", "Cutlass")
        )
        assert first.__name__.lower().startswith(taken.lower()), (said, first)


@contextlib.contextmanager
def loaded(folder: Path, tp: int, eager: bool, kernel: str | None) -> Iterator[tuple[Any, Any]]:
    """The model of a config, as vLLM has it on the second of two H100s or on one, and vLLM's config."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    file, cls = OWN.get(name, ("transformers", "TransformersForCausalLM"))
    if file == "vllm.models.deepseek_v32":  # where a CPU has another
        file, cls = f"{file}.nvidia.model", "DeepseekV32ForCausalLM"
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_gpu())
        if kernel is not None:
            stack.enter_context(fp8_kernel(kernel))
        model_class = import_model(f"{'' if file.startswith('vllm') else 'vllm.model_executor.models.'}{file}:{cls}")
        ModelRegistry.register_model(name, model_class)
        config = config_on_cpu(
            str(folder),
            tp=tp,
            rank=tp - 1,
            model={"dtype": "bfloat16", "max_model_len": 512, "language_model_only": True, "enforce_eager": eager},
            compilation={"mode": CompilationMode.NONE},
            whole_experts=True,
        )
        os.environ.pop(SHARED_IN_TURN, None)  # which vLLM sets on a CPU
        compilation = config.compilation_config
        if not eager and name not in BREAKABLE:
            compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        for each in native_fusions.PASSES:
            setattr(compilation.pass_config, each.switch, False)
        for each in native_fusions.PASSES:
            if each.vendor == "nvidia" and each.fusions and H100.arch in (each.archs or (H100.arch,)):
                setattr(compilation.pass_config, each.switch, True)
        stack.enter_context(mock.patch.object(loading, "target_of", return_value=H100))
        if name in HELD:  # no CPU has the attention that it stands in front of
            taken = mock.patch.object(loading, "with_placement", lambda decided, *_: (taking(decided), None))
            stack.enter_context(taken)
        if not eager and BREAKABLE:
            listed = "default_breakable_cudagraph_architectures"
            stack.enter_context(mock.patch.object(configs, listed, return_value=BREAKABLE))
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(vllm_parallel(tp, tp - 1))
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(torch.device("meta"))
        yield initialize_model(config, model_class=model_class), config


def beforehand(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> collections.Counter[Any]:
    """Role, fusion, decision, tokens and reason -> at how many sites, by the command."""
    capsys.readouterr()
    asked = ["--engine", "vllm", "--engine-version", RELEASE, "--target", "sm90", "--json", *arguments]
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(folder), *asked])
    assert not ended.value.code
    found: collections.Counter[Any] = collections.Counter()
    for kind in json.loads(capsys.readouterr().out)["kinds"]:
        for role, several in kind["sites"].items():
            for d in several:
                kind = _kind(role, d["decision"])
                found[role, d["fusion"], kind, d["tokens"], _said(role, d["reason"])] += d["sites"]
    return found


def when_loaded(model: Any, config: Any, options: Options) -> collections.Counter[Any]:
    """The same of what is planned in the model's compiled module, or in its modules."""
    compiled_modules = list(loading.compiled_modules_of(config, model, options))
    return collections.Counter(
        (site.role, d.fusion, _kind(site.role, d.kind), str(d.tokens), _said(site.role, d.reason))
        for _, compiled in compiled_modules
        for site in compiled.plan.sites
        for d in compiled.plan.at(site.name)
    )


def without_products(found: collections.Counter[Any]) -> tuple[collections.Counter[Any], int]:
    """The other roles, and how many linears take the fusion of block fp8. What multiplies experts here is no kernel of vLLM's GPUs."""
    others = collections.Counter({key: sites for key, sites in found.items() if key[0] not in PRODUCTS})
    return others, sum(sites for key, sites in found.items() if key[1:3] == (BLOCKS, "expected"))


def _kind(role: str, kind: str) -> str:
    """The decision. A decode step that is on by default and cannot stand is refused beforehand, and not planned in a loaded model, which has said why."""
    return "refused" if (role, kind) == (DECODE, "not_applicable") else kind


def _said(role: str, reason: str) -> str:
    """Without the release, which a loaded vLLM does not say, and how much is known of the head, which no model that is compiled holds.

    Of several reasons against a decode step each plan says another: beforehand what is known of the model, when it is loaded what is known of its layers.
    """
    if role == DECODE:
        return ""
    head = re.sub(r"^(the linears that read the final site).*", r"\1", reason)
    return head.replace(f"vLLM {RELEASE} ", "vLLM ")


NAMED = ("add_rms_norm", "mla_dual_rms_norm", "gated_rms_norm", "all_reduce_add_rms_norm")
WAYS: dict[str, dict[str, Any]] = {
    "two ranks": {"tp": 2},
    "fp8 in blocks": {"fp8": (BLOCK, "triton:TritonFp8BlockScaledMMKernel"), "environment": {BLOCKS_INSIDE: "0"}},
    "fp8 in blocks, as installed": {
        "fp8": (BLOCK, "flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel"),
        "environment": {"VLLM_USE_DEEP_GEMM_E8M0": "0"},  # as on a CPU
    },
    "fp8 per token, two ranks, all of it": {
        "tp": 2,
        "fp8": (PER_TOKEN, "cutlass:CutlassFP8ScaledMMLinearKernel"),
        "fusions": ("all",),
    },
    "enforce_eager, named": {"eager": True, "fusions": NAMED},
}
UNFIT = {"DeepseekV2ForCausalLM", "MiniCPM3ForCausalLM"}
"""Whose default configs have sizes that blocks of 128 do not divide."""
ASKS = {
    "BambaForCausalLM": "vLLM has no code of its own for it, and does not run transformers'",
    "Mistral4ForCausalLM": "vLLM reads its checkpoint in Mistral's own format, and runs DeepSeek's code (MistralLarge3ForCausalLM)",
    "Gemma3ForConditionalGeneration": "it asks for torchvision",
    "KimiK25ForConditionalGeneration": "transformers has no config for it (`test_vllm_specs.py` has its layers)",
    "KimiK3ForConditionalGeneration": "transformers has no config for it (`test_vllm_specs.py` has its layers)",
    "OlmoHybridForCausalLM": "it asks for Triton's allocator while it is imported",
}
"""Which cannot be built here."""


AS_DECLARED: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
}
"""What a default config says otherwise than the declared model: a mixture, beside which Granite's shared MLP stands, is not declared."""


BEHIND = {"Exaone4ForCausalLM"}
"""Whose norms stand behind attention and MLP, so that half of the linears are listed by no norm."""


@newest
@pytest.mark.parametrize(("name", "way"), in_turn(ARCHITECTURES, WAYS))
def test_a_plan_made_beforehand_is_the_one_of_the_loaded_model(
    name: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site by site of a role: the decisions, their reasons, and how many there are."""
    asked = WAYS[way]
    if name in ASKS or (name in UNFIT and "blocks" in way):
        pytest.skip(ASKS.get(name, "blocks do not divide it"))
    tp, eager, fusions = asked.get("tp", 1), asked.get("eager", False), asked.get("fusions")
    quantization, kernel = asked.get("fp8", (None, None))
    enter(VLLM)
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join(fusions or ()))
    for variable, value in asked.get("environment", {}).items():
        monkeypatch.setenv(variable, value)
    config = {
        **config_of(name),
        **AS_DECLARED.get(name, {}),
        **({} if quantization is None else {"quantization_config": quantization}),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = ["--enforce-eager"] if eager else []
    plan = beforehand(tmp_path, capsys, "--tp", str(tp), "--rank", str(tp - 1), *more)
    with loaded(tmp_path, tp, eager, kernel) as (model, config):
        real = when_loaded(model, config, Options(fusions=fusions))
    if name not in OWN or (name in BREAKABLE and not fusions):  # nothing is looked for
        assert not real and not {key for key in plan if key[2] in ("expected", "fallback")}
        return
    assert plan
    (plan, linears), (real, loaded_linears) = map(without_products, (plan, real))
    assert plan == real
    if kernel is not None and kernel.startswith("triton"):
        assert not loaded_linears, "beforehand it is one of those whose product is known"
    elif name in BEHIND:
        assert loaded_linears == linears // 2
    elif any(role == "output" for role, *_ in plan) and "Qwen3" not in name:
        assert loaded_linears >= linears, "those of Mamba-2 are not declared"
    else:
        assert loaded_linears == linears


@newest
def test_strict_stops_where_vllm_runs_the_code_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layers hold linears of vLLM's, which no adapter of transformers' layers reads."""
    enter(VLLM)
    caplog.set_level("INFO", logger="vllm.layerfuse")
    (tmp_path / "config.json").write_text(json.dumps(config_of("SmolLM3ForCausalLM")))
    why = "vLLM has no code of its own for SmolLM3ForCausalLM: it can run transformers' alone, with linears of its own in it"
    with loaded(tmp_path, 1, False, None) as (model, config):
        with pytest.raises(NotFusedError, match=why):
            list(loading.compiled_modules_of(config, model, Options(fusions=NAMED, strict=True)))
        assert not list(loading.compiled_modules_of(config, model, Options(fusions=NAMED)))
    assert f"nothing is fused in TransformersForCausalLM: {why}" in caplog.text


def test_the_doctor_lists_each_place_of_vllms_once() -> None:
    names = [place.name for place in doctor.places_in("vllm")]
    assert len(set(names)) == len(names) and {hook.place for hook in hooks.PRODUCTS} < set(names)
    assert RELEASE != NEWEST or {place.state for place in doctor.places_in("vllm")} == {"found"}


@pytest.mark.parametrize(("ranks", "width"), [(16, 1600), (8, 3200)])
def test_vllm_refuses_a_share_in_parts_of_blocks_as_plans_say(ranks: int, width: int) -> None:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape

    said = pytest.raises(ValueError, match=f"{width} is not divisible") if width % 128 else contextlib.nullcontext()
    with mock.patch("vllm.distributed.get_tensor_model_parallel_world_size", return_value=ranks), said:
        validate_fp8_block_shape(torch.nn.Module(), ranks * width, 5120, width, [5120], [128, 128])


@pytest.mark.parametrize(("ranks", "width"), [(8, 192), (4, 384), (1, 1984)])
def test_vllm_refuses_a_share_of_experts_in_parts_of_blocks_as_plans_say(ranks: int, width: int) -> None:
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    if not hasattr(fp8_utils, "validate_fp8_block_shape_moe"):
        pytest.skip("this release has the check in its methods")
    said = pytest.raises(ValueError, match=f"{width} is not divisible") if width % 128 else contextlib.nullcontext()
    with mock.patch("vllm.distributed.get_tensor_model_parallel_world_size", return_value=ranks), said:
        fp8_utils.validate_fp8_block_shape_moe(width, [128, 128])


@pytest.mark.parametrize("name", ["rms_quant_fusion", "act_quant_fusion"])
def test_vllms_passes_quantise_groups_of_so_many_columns_as_plans_say(name: str) -> None:
    """By their source: without a GPU's ops they cannot be imported."""
    (file,) = Path(configs.__file__).parents[1].glob(f"compilation/**/{name}.py")
    groups = {int(columns) for columns in re.findall(r"kFp8Dynamic(\d+)Sym", file.read_text())}
    assert groups == {*native_fusions.GROUPS["nvidia"]}
