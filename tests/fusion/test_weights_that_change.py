"""Weights that are others at every call: graphs that sibling layers share are still told apart, and nothing of the old is kept.

The graphs are run op by op instead of by generated code.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, LlamaNorm, mla_spec
from torch import nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput, SubclassSizeAOTInput

from layerfuse import fusion
from layerfuse.adapters.specs import NormSpec
from layerfuse.fusion import FusedModel, FusionMissedError
from layerfuse.fusion.held import HeldWeights
from layerfuse.fusion.rewrite.parameters import PARAMETER, Parameter, mark

pytestmark = pytest.mark.usefixtures("_op_by_op")
DUAL = "mla_dual_rms_norm"
Q, KV, ROPE = 64, 32, 16
COUNT = 3
X = torch.randn(2, HIDDEN)


class Layer(nn.Module):
    """Latents of the shape that vLLM gives them, in a frame of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, Q + KV + ROPE, bias=False)
        self.q_norm, self.kv_norm = LlamaNorm(Q), LlamaNorm(KV)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.graph_break()
        q, kv, _ = self.down(x).split([Q, KV, ROPE], -1)
        return self.q_norm(q), self.kv_norm(kv)


class Layers(nn.Module):
    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


def compiled(model: nn.Module, count: int = COUNT) -> FusedModel:
    norms = {"q_norm": NormSpec(width=Q, epsilon=1e-6), "kv_norm": NormSpec(width=KV, epsilon=1e-6)}
    sizes = {"q_lora_rank": Q, "kv_lora_rank": KV, "qk_rope_head_dim": ROPE}
    specs = [(f"layers.{i}", mla_spec(i, **sizes, **norms)) for i in range(count)]
    fused = fusion.compile(model, specs=specs, strict=True, dynamic=False)
    with torch.no_grad():
        fused(X)
    assert fused.report.of(DUAL).compiled < count, "siblings share a graph"
    return fused


def assert_counted(fused: FusedModel, calls: int = 1) -> None:
    """Strict raises nothing, each site ran once in each call, and the numbers are the model's."""
    with torch.no_grad():
        for _ in range(calls):
            got = fused(X)
        assert fused.report.last is not None
        assert dict(fused.report.last.ran) == {(f"layers.{i}:latents", DUAL): 1 for i in range(COUNT)}
        for each, wanted in zip(got, fused.original(X), strict=True):
            torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)


@contextmanager
def kept_by_layerfuse(bytes_at_most: int) -> Iterator[None]:
    files = [tracemalloc.Filter(True, f"*/fusion/{name}.py") for name in ("compiler", "held", "report", "call_counter")]
    tracemalloc.start()
    try:
        yield
        gc.collect()
        kept = tracemalloc.take_snapshot().filter_traces(files).statistics("filename")
        assert sum(each.size for each in kept) <= bytes_at_most, kept
    finally:
        tracemalloc.stop()


def anew(fused: FusedModel) -> None:
    fused.load_state_dict({name: torch.rand_like(held) for name, held in fused.state_dict().items()}, assign=True)


def test_weights_that_are_loaded_anew_at_every_step() -> None:
    fused = compiled(Layers())
    for _ in range(10):
        anew(fused)
        assert_counted(fused)
    with kept_by_layerfuse(bytes_at_most=10_000):  # a reference to each weight of a step would be twice of that
        for _ in range(400):
            anew(fused)
            with torch.no_grad():
                fused(X)
    assert_counted(fused)
    assert fused.report.of(DUAL).executed == COUNT * fused.report.calls


def test_a_weight_that_moves_to_another_layer() -> None:
    """What is left behind by one layer is a weight of the next: by identity it would still be the first one's."""
    fused = compiled(Layers())
    for i in range(COUNT - 1):
        ours, others = fused.original.layers[i], fused.original.layers[i + 1]
        for name in ("q_norm", "kv_norm"):
            weight = ours.get_submodule(name).weight
            others.get_submodule(name).weight = weight
            ours.get_submodule(name).weight = nn.Parameter(torch.rand_like(weight))
        assert_counted(fused)


def test_weights_that_are_tied_after_a_call_and_untied_again() -> None:
    fused = compiled(Layers())
    first, second, _ = fused.original.layers
    own = second.q_norm.weight, second.kv_norm.weight
    second.q_norm.weight, second.kv_norm.weight = first.q_norm.weight, first.kv_norm.weight
    assert_counted(fused, calls=2)
    second.q_norm.weight, second.kv_norm.weight = own
    assert_counted(fused, calls=2)


@pytest.mark.parametrize("name", ["q_norm", "kv_norm"])
@pytest.mark.parametrize("whole", [True, False], ids=["module", "weight"])
def test_one_of_the_two_norms_is_that_of_another_layer_too(name: str, whole: bool) -> None:
    """From the start: the other one tells the layer."""
    model = Layers()
    first, second, _ = model.layers
    if whole:
        setattr(second, name, getattr(first, name))
    else:
        getattr(second, name).weight = getattr(first, name).weight
    assert_counted(compiled(model), calls=2)


@pytest.mark.parametrize("leaves", [True, False])
def test_one_parameter_through_which_every_layer_is_loaded(leaves: bool) -> None:
    """It stands in the layer that runs, and before the second call in those that ran; or every layer has a tensor of its own again behind it."""
    model = Layers()
    staged = {name: nn.Parameter(torch.empty_like(held)) for name, held in model.layers[0].named_parameters()}

    def put(layer: nn.Module, name: str, held: nn.Parameter) -> None:
        path, _, last = name.rpartition(".")
        setattr(layer.get_submodule(path), last, held)

    for layer in model.layers:
        kept = {name: held.detach().clone().uniform_() for name, held in layer.named_parameters()}

        @torch.compiler.disable
        def load(layer: nn.Module, *_: Any, kept: dict[str, torch.Tensor] = kept) -> None:
            for name, values in kept.items():
                staged[name].data.copy_(values)
                put(layer, name, staged[name])

        @torch.compiler.disable
        def drop(layer: nn.Module, *_: Any, kept: dict[str, torch.Tensor] = kept) -> None:
            for name, values in kept.items():
                put(layer, name, nn.Parameter(torch.empty_like(values)))

        layer.register_forward_pre_hook(load)
        if leaves:
            layer.register_forward_hook(drop)
    assert_counted(compiled(model), calls=2)


def test_a_layer_of_torchscript_is_named() -> None:
    """Its modules hold what they have in no dict."""
    fused = compiled(Layers())
    fused.original.layers[1] = torch.jit.trace(fused.original.layers[1], (X,), check_trace=False)
    with torch.no_grad(), pytest.raises(FusionMissedError, match=r"layers\.1:latents: .*") as missed:
        fused(X)
    assert [*missed.value.missed[DUAL]] == ["layers.1:latents"]


class Offloading:
    """As accelerate offloads: weights are on the device while their layer runs, and nowhere else."""

    def __init__(self, layer: nn.Module) -> None:
        self._kept = {name: held.detach().clone() for name, held in layer.named_parameters()}
        layer.register_forward_pre_hook(self.load)
        layer.register_forward_hook(self.drop)
        self.drop(layer)

    @torch.compiler.disable
    def load(self, layer: nn.Module, *_: Any) -> None:
        for name, held in self._kept.items():
            self._put(layer, name, held.clone())

    @torch.compiler.disable
    def drop(self, layer: nn.Module, *_: Any) -> None:
        for name, held in self._kept.items():
            self._put(layer, name, held.to("meta"))

    @staticmethod
    def _put(layer: nn.Module, name: str, held: torch.Tensor) -> None:
        path, _, last = name.rpartition(".")
        layer.get_submodule(path)._parameters[last] = nn.Parameter(held, requires_grad=False)


def test_offloaded_weights() -> None:
    model = Layers()
    for layer in model.layers:
        Offloading(layer)
    fused = compiled(model)
    assert_counted(fused, calls=30)
    with kept_by_layerfuse(bytes_at_most=10_000):
        assert_counted(fused, calls=300)


def test_a_call_with_other_weights() -> None:
    fused = compiled(Layers())
    others = {name: torch.rand_like(held) for name, held in fused.original.named_parameters()}
    with torch.no_grad():
        for _ in range(3):
            torch.func.functional_call(fused, others, (X,))
    assert_counted(fused)


def test_a_part_of_a_tensor_subclass_is_known_as_the_parameter() -> None:
    """AOTAutograd unpacks torchao's weights and DTensors: each part is an input of the graph."""
    graph = torch.fx.Graph()
    parts = [graph.placeholder(name) for name in ("values", "scale", "size", "x")]
    weight, x = PlainAOTInput(1), PlainAOTInput(0)
    described = (
        SubclassGetAttrAOTInput(SubclassGetAttrAOTInput(weight, "inner"), "qdata"),
        SubclassGetAttrAOTInput(weight, "scale"),
        SubclassSizeAOTInput(weight, 1),
        x,
    )
    for node, what in zip(parts, described, strict=True):
        node.meta["desc"] = what
    known = Parameter(names=("down_proj.weight",), position=1, whole=True)
    mark(graph, {1: known})
    assert [node.meta.get(PARAMETER) for node in parts] == [known, known, None, None]


def test_a_module_that_is_exchanged_within_a_call_is_found_in_that_call() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    held = HeldWeights(model)
    held.watch(["0.weight", "1.weight"])
    held.start()
    assert held.names_of(model[1].weight) == ("1.weight",)
    model[1] = nn.Linear(2, 2)
    assert held.names_of(model[1].weight) == ("1.weight",)
