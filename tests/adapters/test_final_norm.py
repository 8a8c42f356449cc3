"""The norm after the last decoder layer: read off the model that holds the layers, and declared after them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import standins_atom
import torch
from fake_ranks import cut, ranks
from helpers import fresh_model, real_model
from standins import Rank, module
from torch import nn

from layerfuse import registry
from layerfuse.adapters import (
    WHOLE,
    Adapter,
    Facts,
    FinalNormSpec,
    MissingAttributeError,
    NormSpec,
    Parallel,
    SpecError,
    norm,
)


def final_norms(model: Any) -> list[tuple[str, FinalNormSpec]]:
    return registry.specs_in(model, of=FinalNormSpec)


def test_every_declared_model_ends_in_its_final_norm() -> None:
    for name, entry in registry.models().items():
        specs = entry.specs(engine="vllm")
        path, last = specs[-1]
        assert (path, type(last)) == ("final", FinalNormSpec), name
        assert isinstance(last, FinalNormSpec)
        assert (last.layer_index, last.hidden_size) == (entry.num_hidden_layers, entry.hidden_size), name
        assert last.final_norm == NormSpec(
            width=entry.hidden_size, epsilon=entry.rms_norm_eps, weight_offset=entry.norm_weight_offset
        ), name
        assert sum(isinstance(spec, FinalNormSpec) for _, spec in specs) == 1, name


def test_it_is_read_live() -> None:
    model = fresh_model("deepseek-v3")
    model.model.norm.variance_epsilon = 1e-4
    assert registry.spec_for(model.model).final_norm.epsilon == 1e-4
    del model.model.layers[-1]
    assert registry.spec_for(model.model).layer_index == 60


def test_its_width_is_the_hidden_size() -> None:
    spec = registry.model("deepseek-v3").specs()[-1][1]
    with pytest.raises(SpecError, match="final_norm: width 7168 is not the hidden_size 4096"):
        attrs.evolve(spec, hidden_size=4096)


def test_its_sharding_is_that_of_the_last_decoder_layer() -> None:
    model = fresh_model("deepseek-v3")
    with ranks((4,), ("tp",), rank=3) as mesh:
        cut(model.model.layers[0].self_attn.o_proj, mesh, 1)
        assert registry.spec_for(model.model).parallel == WHOLE
        cut(model.model.layers[-1].self_attn.o_proj, mesh, 1)
        assert registry.spec_for(model.model).parallel == Parallel(size=4, rank=3)


@pytest.mark.parametrize(
    "instead",
    [None, module("engine.utils:PPMissingLayer"), nn.Identity()],
    ids=["None", "PPMissingLayer", "Identity"],
)
def test_a_rank_of_a_pipeline_without_it_has_no_final_spec(instead: object) -> None:
    model: Any = standins_atom.MODELS["deepseek-v3"](registry.model("deepseek-v3"), Rank(8, 5))
    assert len(final_norms(model)) == 1
    before = registry.specs_in(model)
    model.model.norm = instead
    assert final_norms(model) == []
    # The last layers are on another rank too.
    model.model.layers[-1] = module("engine.utils:PPMissingLayer")
    assert final_norms(model) == []
    assert registry.specs_in(model) == before[:-4]
    with pytest.raises(MissingAttributeError, match="does not say its"):
        registry.spec_for(model.model)


def test_a_norm_that_is_built_without_the_last_layer_is_another_ranks() -> None:
    """vLLM's gpt-oss builds it on every rank of a pipeline, and runs it on the last."""
    model: Any = standins_atom.MODELS["gpt-oss-20b"](registry.model("gpt-oss-20b"), Rank(8, 5))
    before = registry.specs_in(model)
    model.model.layers[-1] = module("vllm.model_executor.models.utils:PPMissingLayer", nn.Identity)
    assert registry.specs_in(model) == before[:-3]
    with pytest.raises(MissingAttributeError) as caught:
        registry.spec_for(model.model, path="model")
    assert str(caught.value).splitlines()[1:] == [
        "  - layers.-1.hidden_size: PPMissingLayer stands for what another rank of the pipeline holds",
        "It has: layers, norm.",
        "Ask that rank for it; specs_in reads what this one holds.",
    ]


def test_a_model_in_a_model_gives_its_own_final_norm_before_what_follows() -> None:
    """A draft model beside the main one: each norm comes right after its own layers."""
    pair = module("some:Pair", main=real_model("deepseek-v3"), draft=real_model("gpt-oss-20b"))
    paths = [path for path, _ in registry.specs_in(pair)]
    assert paths[183:185] == ["main.model", "draft.model.layers.0"]
    assert paths[-1] == "draft.model"


def test_the_epsilon_of_a_norm_that_holds_none_is_the_layers() -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.eps, self.norm = nn.ModuleList([nn.Linear(64, 64)]), 1e-4, nn.Module()
            self.norm.weight = nn.Parameter(torch.ones(64))

    Trunk.__module__ = "theirs.model"
    words = {
        "hidden_size": "layers.-1.out_features",
        "layer_index": {"path": "layers", "as": "length"},
        "tp_weight": "layers.-1.in_features",
        "final_norm": norm("norm", layer_epsilon="eps"),
    }
    made = registry.Registry()
    made.register_adapter(Adapter("theirs", {"theirs.model:Trunk": Facts(FinalNormSpec, words)}))
    trunk = Trunk()
    assert made.spec_for(trunk).final_norm == NormSpec(width=64, epsilon=1e-4)
    assert "final_norm.epsilon" in str(made.explain(trunk))
    trunk.eps = None
    with pytest.raises(SpecError, match="epsilon"):
        made.spec_for(trunk)
    del trunk.eps
    with pytest.raises(MissingAttributeError, match=r"does not say its final_norm\.epsilon"):
        made.spec_for(trunk)
