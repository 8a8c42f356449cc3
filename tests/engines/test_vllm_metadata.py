"""vLLM's own builder of AITER's MLA metadata, on stand-ins that are made from AITER's recorded signatures, held to the plan.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
import vllm
from reports import Said

sys.path.append(str(Path(__file__).parents[1] / "aiter"))

from standin import imported, shared_standin
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm_started import started

from layerfuse.engines.vllm import attention
from layerfuse.fusion import Target
from layerfuse.fusion.backends import aiter as amd

MODULE = "vllm.v1.attention.backends.mla.rocm_aiter_mla"
SERVED = "layerfuse: attention metadata of model.layers.0.self_attn.attn and 2 more"
RELEASES = ("v0.1.16.post3", "v0.1.20.post1")


@contextlib.contextmanager
def built(
    cache: Path, heads: int, release: str = RELEASES[-1], *, kv: str = "auto", fixes: Any = (), **options: Any
) -> Iterator[Any]:
    """vLLM's builder for a small DeepSeek-V3 whose latents are as wide as published, as it stands on a gfx942."""
    overrides = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    with (
        imported(shared_standin(release, arch="gfx942")) as package,
        mock.patch.object(attention.Target, "detect", return_value=Target.named("gfx942")),
        contextlib.ExitStack() as stack,
    ):
        amd.forget()
        stack.callback(amd.forget)
        dtypes = package.dtypes
        dtypes.d_dtypes = {"bf16": dtypes.bf16, "fp8": dtypes.fp8}  # AITER's names of its dtypes, which 0.26 looks up
        engine = stack.enter_context(
            started("deepseek-v3", cache, mode="NONE", dtype="bfloat16", overrides=overrides, **options)
        )
        engine.config.cache_config.cache_dtype = kv
        module = importlib.import_module(MODULE)
        for fix in fixes:
            stack.enter_context(fix(module))
        layers = engine.config.compilation_config.static_forward_context
        names = [name for name, layer in layers.items() if isinstance(layer, MLAAttention)]
        for layer in layers.values():
            if vars(layer).get("prefill_backend", True) is None:  # which 0.26 copies; on a CPU there is none
                layer.prefill_backend = mock.Mock()
        spec = layers[names[0]].get_kv_cache_spec(engine.config)
        yield module.AiterMLAMetadataBuilder(spec, names, engine.config, torch.device("cpu"))


def lines(said: Said) -> list[str]:
    return [line for line in said() if "attention metadata" in line]


padded = pytest.mark.skipif(vllm.__version__ < "0.33", reason="this vLLM pads to 16 heads and no further")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("heads", "kernel"), [(8, 16), (16, 16), pytest.param(24, 32, marks=padded), (128, 128)])
def test_what_vllm_allocates_is_what_is_planned(
    heads: int, kernel: int, release: str, tmp_path: Path, said: Said
) -> None:
    with built(tmp_path, heads, release) as builder:
        assert builder._num_attention_heads == kernel
    assert lines(said) == [f"{SERVED}: {kernel} heads, 1 queries, as planned"]


def test_an_fp8_cache_is_planned_with_fp8_queries(tmp_path: Path, said: Said) -> None:
    with built(tmp_path, 16, kv="fp8"):
        pass
    assert lines(said) == [f"{SERVED}: 16 heads, 1 queries, as planned"]


@pytest.mark.skipif(vllm.__version__ >= "0.33", reason="this vLLM pads to every multiple of 16")
def test_a_vllm_that_pads_to_16_heads_only_is_warned_of(tmp_path: Path, said: Said) -> None:
    with built(tmp_path, 24):
        pass
    (line,) = lines(said)
    assert line.startswith(f"{SERVED}: vLLM has 24 heads, the plan 32 (")


def heads_as_in_38615(module: Any) -> Any:
    """What vLLM did before: below 16 heads nothing was padded."""
    return mock.patch.object(module.AiterMLAHelper, "get_actual_mla_num_heads", staticmethod(lambda heads: heads))


def heads_as_in_43543(module: Any) -> Any:
    """And then: at least 16, and never a multiple of it."""
    return mock.patch.object(
        module.AiterMLAHelper, "get_actual_mla_num_heads", staticmethod(lambda heads: max(16, heads))
    )


@padded
@pytest.mark.parametrize(
    ("heads", "fix", "found", "planned"), [(8, heads_as_in_38615, 8, 16), (24, heads_as_in_43543, 24, 32)]
)
def test_other_heads_are_a_warning_with_both_numbers(
    heads: int, fix: Any, found: int, planned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, said: Said
) -> None:
    with built(tmp_path, heads, fixes=[fix]):
        pass
    (line,) = lines(said)
    assert line.startswith(f"{SERVED}: vLLM has {found} heads, the plan {planned} (")
    (record,) = [each for each in caplog.records if "attention metadata" in each.getMessage()]
    assert record.levelname == "WARNING"


def for_half_the_sequences(_: Any) -> Any:
    """What vLLM asks AITER for, and not what it will decode."""
    own = sys.modules["aiter"].get_mla_metadata_info_v1
    return mock.patch("aiter.get_mla_metadata_info_v1", lambda batch, *args, **more: own(batch // 2, *args, **more))


def test_other_buffers_are_a_warning_with_both_numbers(tmp_path: Path, said: Said) -> None:
    with built(tmp_path, 16, fixes=[for_half_the_sequences]):
        pass
    (line,) = lines(said)
    assert re.fullmatch(re.escape(SERVED) + r": (\w+: vLLM has [\dx ]+, the plan [\dx ]+(; )?)+", line)
    assert "reduce_indptr: vLLM has 65, the plan 129" in line


def test_a_check_that_fails_leaves_vllm_its_builder(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of the tests")

    monkeypatch.setattr(attention, "plan_metadata", broken)
    with built(tmp_path, 16) as builder:
        assert builder._num_attention_heads == 16
    assert "layerfuse: checking the attention metadata failed: ZeroDivisionError: of the tests" in said()


def test_nothing_is_checked_where_layerfuse_is_off(tmp_path: Path, said: Said) -> None:
    with built(tmp_path, 16, layerfuse=False):
        pass
    assert lines(said) == []
