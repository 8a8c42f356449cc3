"""vLLM's draft models of multi-token prediction: their decoder layer counts on from the model's, and starts a stream of its own.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import in_turn

pytest.importorskip("vllm_started")
from reports import Said, told
from test_vllm_plugin import ADD, OwnLoader
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_host import import_model, vllm_config, vllm_parallel, without_gpu
from vllm_layers import MODELS
from vllm_started import ROUNDING, Started, apart, engine_config, in_engine, load

from layerfuse import registry
from layerfuse.adapters import FinalNormSpec
from layerfuse.adapters.specs import Parallel
from layerfuse.engines.plugins import NotHereError

DRAFTS = {
    "deepseek-v3": ("DeepSeekMTPModel", {"VLLM_COMPILE": 2, "NONE": 1}),
    "qwen3-next": ("Qwen3NextMTP", {"VLLM_COMPILE": 2, "NONE": 2}),
}
"""Class, and its sites. The first adds the residual by itself in front of its final norm, so that no module does both. The second is of two
classes that vLLM compiles, one inside of the other."""


k3 = pytest.mark.skipif("kimi-k3" not in MODELS, reason="this vLLM has no K3")


class Speculative(SimpleNamespace):
    """Of vLLM's config for speculation what is asked for here; the rest is None."""

    def __getattr__(self, _: str) -> None:
        return None


def draft(made: Any, name: str, loader: type[DummyModelLoader] = DummyModelLoader) -> Started:
    """The draft model that belongs to a small model, loaded as vLLM's proposer loads it: after that, which `loader` brings."""
    loader(made.load_config).load_model(made, made.model_config)
    config = made.model_config.hf_config
    config.update({"num_nextn_predict_layers": 1, "architectures": [DRAFTS[name][0]]})
    speculative = Speculative(draft_model_config=made.model_config, method="mtp", num_speculative_tokens=1)
    with mock.patch.dict(vars(made), speculative_config=speculative):
        return load(made)


def call(engine: Started, tokens: int = 6) -> torch.Tensor:
    hidden = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(0))
    with set_forward_context(None, engine.config, num_tokens=tokens):
        found = engine.model(torch.arange(tokens), torch.arange(tokens), hidden)
    # DeepSeek's gives the stream too.
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result


@pytest.mark.parametrize(("name", "mode"), in_turn(DRAFTS, ["NONE", "VLLM_COMPILE"]))
def test_the_block_adds_no_residual_at_its_entry_and_every_other_site_is_fused(
    name: str, mode: str, tmp_path: Path, said: Said
) -> None:
    made = engine_config(name, layerfuse={"fusions": [ADD], "strict": True}, mode=mode)
    with in_engine(made, tmp_path):
        found = call(draft(made, name))
    plain = engine_config(name, layerfuse=False, mode="NONE")
    with in_engine(plain, tmp_path):
        assert apart(found, call(draft(plain, name))) < ROUNDING
    run, sites = "first run" if mode == "NONE" else "profiling run", DRAFTS[name][1][mode]
    assert told(ADD, sites, run) in said()


def test_a_final_norm_behind_a_gather_is_not_expected(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a draft with sequence-parallel experts: the sum is gathered in front of it."""
    layer = import_model("vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer")
    init = layer.__init__

    def parallel(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.use_sequence_parallel_moe = True

    draft_module = importlib.import_module("vllm.model_executor.models.deepseek_mtp")
    monkeypatch.setattr(draft_module, "tensor_model_parallel_all_gather", lambda x, _: x.clone() * 1.0)
    monkeypatch.setattr(layer, "__init__", functools.wraps(init)(parallel))
    made = engine_config("deepseek-v3", layerfuse={"fusions": [ADD], "strict": True})
    with in_engine(made, tmp_path):
        call(draft(made, "deepseek-v3"))
    assert told(ADD, 1) in said()
    assert any(line.startswith("outside of what vLLM compiles: ") for line in said())


@pytest.mark.parametrize(
    ("name", "entry", "draft_class"),
    [
        ("deepseek-v3", "deepseek-v3", "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP"),
        ("glm-4.7-flash", "glm-4.7-flash", "vllm.model_executor.models.glm4_moe_lite_mtp:Glm4MoeLiteMTP"),
        pytest.param("kimi-k3", "kimi-k3", "vllm.models.kimi_k3.nvidia.mtp:KimiK3MTP", marks=k3),
        pytest.param("kimi-k3-rocm", "kimi-k3", "vllm.models.kimi_k3.amd.mtp:KimiK3MTP", marks=k3),
    ],
)
def test_the_norm_that_a_draft_shares_with_its_head_is_read(name: str, entry: str, draft_class: str) -> None:
    declared, recipe = registry.model(entry), MODELS[name]
    cls = import_model(draft_class)
    config = vllm_config(recipe.checkpoint, tp=2, rank=1, overrides={**recipe.overrides, "num_nextn_predict_layers": 1})
    speculative = Speculative(draft_model_config=config.model_config, num_speculative_tokens=1)
    with (
        without_gpu(),
        mock.patch.dict(vars(config), speculative_config=speculative),
        set_current_vllm_config(config),
        vllm_parallel(2, 1),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        model = initialize_model(config, model_class=cls)
    ((path, spec),) = registry.specs_in(model, of=FinalNormSpec)
    assert path == f"model.layers.{declared.num_hidden_layers}"
    assert (spec.hidden_size, spec.final_norm.width) == (declared.hidden_size, declared.hidden_size)
    assert (spec.final_norm.epsilon, spec.parallel) == (declared.rms_norm_eps, Parallel(size=2, rank=1))
    assert registry.unknown_in(model) == []


def test_a_model_that_was_not_read_is_told_though_its_draft_was(tmp_path: Path, said: Said) -> None:
    how = "vLLM loaded the model in a way that layerfuse does not know"
    for strict in (False, True):
        made = engine_config("deepseek-v3", layerfuse={"fusions": [ADD], "strict": strict}, mode="NONE")
        stopped = pytest.raises(NotHereError, match=f"layerfuse is strict, and {how}") if strict else nullcontext()
        with in_engine(made, tmp_path), stopped:
            call(draft(made, "deepseek-v3", OwnLoader))
    assert sum(line.startswith(f"layerfuse: nothing is fused: {how}") for line in said()) == 1
