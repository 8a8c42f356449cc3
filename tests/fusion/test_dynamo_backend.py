"""torch.compile(model, backend="layerfuse"): whose graph it is, numbers, the report, strict. The name itself is tests/test_package.py's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from layerfuse import FinalNormSpec, NormSpec, Parallel, fusion
from layerfuse.adapters.errors import ArgumentError
from layerfuse.fusion import FusionConfig, FusionMissedError, Target
from layerfuse.fusion.dynamo_backend import layerfuse

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(8).reshape(1, 8)
pytestmark = pytest.mark.usefixtures("_op_by_op")


def qwen(layers: int = 2) -> Any:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3Config(
        **sizes, num_hidden_layers=layers, intermediate_size=128, vocab_size=32, rms_norm_eps=1e-4
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS, use_cache=False).logits
    return found


class Final(nn.Module):
    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=epsilon)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(x + residual)


NORM = NormSpec(width=64, epsilon=1e-6, weight_offset=0.0, module="norm")
SPEC = FinalNormSpec(hidden_size=64, layer_index=1, parallel=Parallel(size=1, rank=0), final_norm=NORM)


class Broken(nn.Module):
    """Two frames, of which the second is none of a module's forward; and a module in it that is a frame of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Final(), Final(), Final()
        self.third.forward = self.breaks

    def breaks(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.third.norm(x + residual)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = self.first(x, residual)
        torch._dynamo.graph_break()
        return self.third(self.second(x, residual), residual)


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=layerfuse, options=options)


def in_place(model: Any, **options: Any) -> Any:
    model.compile(backend=layerfuse, options=options)
    return model


def by_function(model: Any, **options: Any) -> Any:
    return torch.compile(
        lambda *args, **kwargs: model(*args, **kwargs), backend=layerfuse, options={**options, "model": model}
    )


WAYS = pytest.mark.parametrize("way", [compiled, in_place, by_function])


def report(result: Any, model: nn.Module) -> Any:
    found = fusion.report_of(model)
    assert not isinstance(result, nn.Module) or fusion.report_of(result) is found
    assert (found.calls, found.of("add_rms_norm").last_call) == (0, None)
    found.check()
    return found.of("add_rms_norm")


# The other ways are those of several graphs, below, of a smaller model.
@pytest.mark.parametrize(
    "way", [compiled, *(pytest.param(way, marks=pytest.mark.thorough) for way in (in_place, by_function))]
)
def test_a_model_of_one_graph(way: Callable[..., Any]) -> None:
    model = qwen()
    wanted = logits(model)
    result = way(model, strict=True, config=FusionConfig())
    torch.testing.assert_close(logits(result), wanted, rtol=1e-5, atol=1e-5)
    assert len(report(result, model).matched) == 4


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers renames an argument: the frame that Dynamo compiles has no `self`."""
    return functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))


class Decorated(Final):
    forward = decorated(Final.forward)


HELD = Decorated()


def called(model: nn.Module, how: str) -> Callable[..., Any]:
    bound, items = model.forward, (model,)
    ways: dict[str, Callable[..., Any]] = {
        "itself": model,
        "global": lambda *rows: HELD(*rows),
        "bound method": lambda *rows: bound(*rows),
        "item": lambda *rows: items[0](*rows),
    }
    return ways[how]


@pytest.mark.parametrize("how", ["itself", "global", "bound method", "item"])
def test_a_norm_is_found_however_the_frame_holds_the_model(how: str, monkeypatch: Any) -> None:
    """And its graph is known to be of the whole model: no sibling layer can run it, so nothing of one is missed there."""
    model = Decorated()
    monkeypatch.setitem(globals(), "HELD", model)
    with torch.no_grad():
        torch.compile(called(model, how), backend=layerfuse, options={"model": model, "specs": [("", SPEC)]})(
            *torch.randn(2, 3, 64)
        )
    (use,) = fusion.report_of(model).records[0].uses
    assert (use.fused, use.how, use.whole) == ("add_rms_norm", "parameter", True)


@WAYS
def test_a_model_of_several_graphs(way: Callable[..., Any]) -> None:
    model, rows = Broken(), torch.randn(2, 3, 64)
    with torch.no_grad():
        wanted = model(*rows)
        names = ("first", "second", "third")
        result = way(
            model, strict=True, specs=[(name, attrs.evolve(SPEC, layer_index=i)) for i, name in enumerate(names)]
        )
        torch.testing.assert_close(result(*rows), wanted)
    assert report(result, model).matched == tuple(f"{name}:final" for name in names)
    assert fusion.report_of(model).graphs == 3


def test_its_options_are_those_of_compile_and_inductors() -> None:
    model = qwen(layers=1)
    with pytest.raises(BackendCompilerFailed, match="strict: expected True or False, got 3"):
        logits(compiled(model, strict=3))
    with pytest.raises(
        BackendCompilerFailed, match=r"an option 'engin'; did you mean 'engine'.* layerfuse's are model, specs"
    ):
        logits(torch.compile(model, backend=layerfuse, options={"engin": 3}))
    with pytest.raises(BackendCompilerFailed, match=r"options\['model'\]"):
        logits(torch.compile(model, backend=layerfuse, options={"model": "qwen"}))
    off = compiled(model, config=FusionConfig(level=0), max_autotune=False)
    logits(off)
    assert not fusion.report_of(off).plan.expected()
    torch._dynamo.reset()
    again = compiled(model, target=Target.named("gfx950"))  # asked for something else, it is planned anew
    logits(again)
    assert fusion.report_of(again).plan.target == Target.named("gfx950")


def test_strict_refuses_a_graph_that_lacks_what_is_expected() -> None:
    model, rows = Final(epsilon=1e-3), torch.randn(2, 3, 64)
    with torch.no_grad():
        strict = compiled(model, specs=[("", SPEC)], strict=True)
        for _ in range(2):  # what was refused is not kept
            with pytest.raises(BackendCompilerFailed, match="add_rms_norm was expected") as caught:
                strict(*rows)
        assert isinstance(caught.value.inner_exception, FusionMissedError)
        assert "has epsilon 0.001" in str(caught.value) and "the spec says 1e-06" in str(caught.value)
        torch._dynamo.reset()
        loose = compiled(model, specs=[("", SPEC)])
        torch.testing.assert_close(loose(*rows), model(*rows))
    assert set(fusion.report_of(loose).of("add_rms_norm").missed) == {"final"}


def test_a_function_has_to_say_its_model() -> None:
    model = Final()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=r"options=\{'model': model\}"):
        torch.compile(lambda x: model(x, x), backend=layerfuse)(torch.randn(3, 64))


def test_what_was_not_compiled_has_no_report() -> None:
    with pytest.raises(ArgumentError, match="no graph of this Final was compiled"):
        fusion.report_of(compiled(Final()))


def test_a_model_that_is_compiled_with_fusions_inside_is_refused() -> None:
    model = nn.ModuleDict({"inner": fusion.compile(Final(), specs=[("", SPEC)])})
    model.forward = lambda x: model["inner"](x + 1, x) * 2
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="its inner is compiled with fusions already"):
        compiled(model)(torch.randn(3, 64))


def test_nothing_keeps_a_model_but_dynamo() -> None:
    import gc
    import weakref

    model = Final()
    kept = weakref.ref(model)
    with torch.no_grad():
        compiled(model, specs=[("", SPEC)])(*torch.randn(2, 3, 64))
    torch._dynamo.reset()
    del model
    gc.collect()
    assert kept() is None
