"""What is checked of every real engine: whole models, read at several tensor-parallel sizes and ranks.

Shared by the tests of the engines, each of which runs in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import slow_reading

from layerfuse import registry
from layerfuse.adapters import (
    FinalNormSpec,
    GQAKernelSpec,
    GQASpec,
    InnerLayerError,
    KernelSpec,
    MLAKernelSpec,
    MLASpec,
    ResidualSpec,
)
from layerfuse.adapters.specs import Parallel
from layerfuse.fusion import Target, plan

CPU = Target.named("cpu")

ENTRIES = {
    "deepseek-v3-mla-off": "deepseek-v3",
    "deepseek-v3.2-rocm": "deepseek-v3.2",
    "kimi-k2": "kimi-k2-instruct",
    "kimi-linear": "kimi-linear-48b-a3b",
    "kimi-linear-rocm": "kimi-linear-48b-a3b",
    "kimi-k3-rocm": "kimi-k3",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5-35b": "qwen3.5-35b-a3b",
}
"""The models.toml entry of each model whose name here differs: another platform's classes, or a shorter name."""


def cases(models: Mapping[str, Any]) -> list[Any]:
    """(name, tp, rank) for every model at each size that divides its heads."""
    return [
        pytest.param(name, tp, rank, id=f"{name}-tp{tp}-rank{rank}")
        for name, model in models.items()
        for tp, rank in ((1, 0), (2, 1), (8, 5))
        if tp in model.tp_sizes
    ]


def check_every_layer(model: Any, engine: str, name: str, tp: int, rank: int, *, all_dense: bool = False) -> None:
    """Every decoder layer, attention and MLP reads as models.toml declares, on this rank, and alone as well as in the model.

    ``all_dense``: the model was built without mixtures, so that each of its MLPs is like those of its dense layers.
    """
    entry = registry.model(ENTRIES.get(name, name))
    if all_dense:
        entry = attrs.evolve(entry, mlps={"dense": attrs.evolve(entry.mlps["dense"], at="all")}, experts=None)

    read = registry.specs_in(model)

    assert [spec for _, spec in read] == [spec for _, spec in entry.specs(tp, rank, engine=engine)]
    assert {spec.parallel for _, spec in read} == {Parallel(size=tp, rank=rank)}
    assert registry.unknown_in(model) == []
    for path, spec in read:
        assert registry.spec_for(model.get_submodule(path), type(spec), path=path) == spec


def check_changed(model: Any) -> None:
    """Each kind of layer whose attributes were changed is what it is now: what keeps parts gives what keeps nothing."""
    met = set()
    for path, spec in registry.specs_in(model):
        layer = model.get_submodule(path)
        kind = (type(layer), type(spec), getattr(spec, "experts", None) is None)
        if kind not in met and "layers." in path:
            met.add(kind)
            slow_reading.check(layer, path, 80)
    assert len(met) > 1


def check_stages(whole: Any, stages: Sequence[Any]) -> None:
    """What the stages of a pipeline hold is what the whole model holds, and its final norm is planned on the last alone."""
    expected = registry.specs_in(whole)
    read = [registry.specs_in(stage) for stage in stages]
    assert [pair for specs in read for pair in specs] == expected
    assert [registry.unknown_in(stage) for stage in stages] == [[]] * len(stages)
    streams = [[spec for _, spec in specs if isinstance(spec, ResidualSpec)] for specs in read]
    assert [spec.starts_stream for specs in streams for spec in specs] == [
        spec.starts_stream for _, spec in expected if isinstance(spec, ResidualSpec)
    ]
    for number, specs in enumerate(streams):
        assert [spec.handed_over for spec in specs] == [number > 0, *[False] * (len(specs) - 1)]

    planned = [plan(specs, CPU) for specs in read]
    sites = [site for stage in planned for site in stage.sites]
    first = {next(site.name for site in stage.sites if site.role == "input") for stage in planned[1:]}
    for site, alone in zip(sites, plan(expected, CPU).sites, strict=True):
        # What joins the stream at the first layer of a later stage was summed by the stage before.
        summed = 1 if site.name in first else alone.reduced
        assert (site.name, site.adds, site.reduced) == (alone.name, alone.adds, summed)
    assert [[site.role for site in stage.sites].count("final") for stage in planned] == [*[0] * (len(stages) - 1), 1]


def norms_that_feed_nothing(model: Any) -> set[str]:
    """Norms of which no layer has a linear where the adapter says that its readers are, as `layer class.norm module`."""
    found, fed = set(), set()
    for path, spec in registry.specs_in(model):
        if isinstance(spec, FinalNormSpec | GQASpec):
            continue  # the head reads it, which is outside of the module that holds it; the rope reads the norms of heads
        layer = model.get_submodule(path)
        children = dict(layer.named_modules(remove_duplicate=False))
        (facts,) = [
            reader.facts for reader in registry.default.readers_for(type(layer)) if reader.facts.spec is type(spec)
        ]
        for norm in facts.norms:
            if str(norm.module) in children:
                found.add(name := f"{type(layer).__name__}.{norm.module}")
                fed.update(name for feed in norm.consumers if str(feed) in children)
    return found - fed


def check_kernel_layers(model: Any) -> int:
    """Every kernel layer holds what the layer around it holds on this rank, and sends on whoever asks for more."""
    outer = {
        path: spec for path, spec in registry.specs_in(model) if not isinstance(spec, (ResidualSpec, FinalNormSpec))
    }
    kernels = registry.specs_in(model, of=KernelSpec)

    for path, kernel in kernels:
        around = next(spec for outer_path, spec in outer.items() if path.startswith(f"{outer_path}."))
        assert kernel.layer_index == around.layer_index
        with pytest.raises(InnerLayerError) as refused:
            _ = kernel.hidden_size
        assert kernel.outer in str(refused.value)
        if isinstance(kernel, MLAKernelSpec):
            assert kernel.softmax_scale == pytest.approx(around.softmax_scale)
            assert kernel.num_local_heads == around.num_local_heads
            assert (kernel.latent_width, kernel.q_lora_rank) == (around.latent_width, around.q_lora_rank)
        elif isinstance(kernel, GQAKernelSpec):
            assert kernel.softmax_scale == pytest.approx(around.softmax_scale)
            assert kernel.num_local_heads == around.num_local_heads
            _check_softmax_attention(kernel, around)
        else:
            assert kernel.num_local_k_heads == around.num_local_k_heads
            assert kernel.num_local_v_heads == around.num_local_v_heads
    return len(kernels)


def _check_softmax_attention(kernel: GQAKernelSpec, around: Any) -> None:
    if isinstance(around, GQASpec):
        assert kernel.num_local_kv_heads == around.num_local_kv_heads
        assert kernel.sliding_window == around.sliding_window
        return
    assert isinstance(around, MLASpec)
    # Inside MLA it is one of two things: absorbed, over the latent, or expanded, over full heads.
    absorbed = (1, around.latent_width)
    expanded = (around.num_local_heads, around.qk_head_dim)
    assert (kernel.num_local_kv_heads, kernel.head_dim) in (absorbed, expanded)


def check_mixture_places(model: Any) -> int:
    """That `registry.explain` names the place that holds each size of a mixture; how many were looked up."""
    path, spec = next(
        (path, spec) for path, spec in registry.specs_in(model) if isinstance(spec, ResidualSpec) and spec.experts
    )
    layer, looked_up = model.get_submodule(path), 0
    for field, place in registry.explain(layer, ResidualSpec, path=path).places.items():
        owner, _, name = field.partition(".")
        value = getattr(spec.experts, name) if owner == "experts" else None
        if type(value) is int and place.replace(".", "").replace("_", "").isalnum():
            held: Any = layer
            for step in place.split("."):
                held = held[int(step)] if step.isdigit() else getattr(held, step)
            assert held == value, (field, place)
            looked_up += 1
    return looked_up
