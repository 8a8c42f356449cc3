"""The shadow check in vLLM: what its compiled graphs and its modules call is held to the reference, on the tensors of the call."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

pytest.importorskip("vllm_started")
from helpers import shown
from reports import Said, told
from vllm_paged import paged
from vllm_started import BLOCK_FP8, ONE_LAYER, fp8, quantised_as_on_cuda, started

from layerfuse import FinalNormSpec, NormSpec, Parallel, bisecting, registry
from layerfuse.engines import reporting, shadowing
from layerfuse.engines.compiled_module import CompiledModule, Piece
from layerfuse.engines.host import here
from layerfuse.engines.linears import AtSeams
from layerfuse.engines.rank_report import Outcome, rank_report_of
from layerfuse.engines.shadowing import COMPARES, NONE_SEEN, SILENT
from layerfuse.fusion import ResultsDifferError, Target, backends, plan
from layerfuse.fusion.live_plan import module_index_of
from layerfuse.fusion.ops import FUNCTIONS
from layerfuse.fusion.report import GraphRecord, Use
from layerfuse.fusion.shadow import Compared
from layerfuse.testing import small_model

ADD, DUAL = "add_rms_norm", "mla_dual_rms_norm"
BOTH = {"fusions": [DUAL, ADD]}
SHORT = {"overrides": ONE_LAYER}


def compared(cache: Path) -> dict[tuple[str, str], dict[str, Any]]:
    (path,) = cache.rglob("layerfuse-report.json")
    ((_, module),) = json.loads(path.read_text())["modules"].items()
    return {(each["site"], each["fusion"]): each for each in module["shadow"]}


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
def test_a_kernel_that_is_right_is_compared_so_often_and_then_nobody_listens(
    mode: str, tmp_path: Path, said: Said, standing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    standing(ADD, 1.0)
    monkeypatch.setenv("LAYERFUSE_SHADOW", "2")
    with started("deepseek-v3", tmp_path, **SHORT, mode=mode, layerfuse={**BOTH, "strict": True}) as engine:
        first = engine()
        assert {each["calls"] for (_, name), each in compared(tmp_path).items() if name == ADD} == {1}
        said.clear()
        assert torch.equal(engine(), first)
        name, prefix, final = (
            ("DeepseekV2Model", "", "final")
            if mode == "VLLM_COMPILE"
            else ("DeepseekV3ForCausalLM", "model.", "model:final")
        )
        page = shown("docs/vllm.md", "shadow check of")
        assert sorted(said()) == sorted(
            line.replace("DeepseekV2Model", name).replace("layers.0", f"{prefix}layers.0") for line in page
        )
        monkeypatch.setattr(backends, "listening", None)
        assert torch.equal(engine(), first)
        assert "forward" not in vars(engine.model) and COMPARES not in vars(engine.model.model)
        assert type(engine.model.model).__call__.__name__ == "__call__", "vLLM's own again"
    found = compared(tmp_path)
    assert {site for site, name in found if name == ADD} == {f"{prefix}layers.0:post_attention", final}
    assert all(each["calls"] == 2 and each["beyond"] is None for (_, name), each in found.items() if name == ADD)
    assert found[f"{prefix}layers.0.self_attn:latents", DUAL]["not_compared"] == "its reference is what runs"


def test_a_kernel_that_is_wrong_at_one_site_is_named_with_it_and_stops_a_strict_engine(
    tmp_path: Path, said: Said, standing: Callable[..., None]
) -> None:
    weights: list[int] = []
    standing(ADD, 1.01, at=lambda *given: given[2].data_ptr() in weights)
    for strict in (False, True):
        asked = {**BOTH, "shadow": 1, "strict": strict}
        with started("deepseek-v3", tmp_path / str(strict), **SHORT, layerfuse=asked) as engine:
            weights[:] = [engine.model.model.norm.weight.data_ptr()]
            if strict:
                with pytest.raises(ResultsDifferError, match=f"{ADD} at final "):
                    engine()
            else:
                engine()
                wrong = [line for line in said() if "away from the reference" in line]
                # A warning as it is found, and the summary.
                assert len(wrong) == 2 and all(
                    f"{ADD} at final (at_hand): call 1: normed, float32" in line for line in wrong
                )
        assert told(ADD, 2) in said.new()
        found = compared(tmp_path / str(strict))
        assert [site for (site, _), each in found.items() if each["beyond"] is not None] == ["final"]
        assert found["layers.0:post_attention", ADD]["largest"] == 0


def test_each_site_that_is_wrong_has_a_line_of_its_own(
    tmp_path: Path, said: Said, standing: Callable[..., None]
) -> None:
    standing(ADD, 1.5)
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse={**BOTH, "shadow": 1}) as engine:
        said.clear()
        engine()
    lines = [line.strip() for line in said() if line.strip().startswith(ADD) and "1 call compared" in line]
    assert [line.partition(": call 1: ")[0] for line in lines] == [
        f"{ADD} at {site} (at_hand)" for site in ("layers.0:post_attention", "final")
    ]


@pytest.mark.parametrize("tokens", [6, 2])
def test_sites_whose_graphs_do_not_run_are_said_not_to_be_compared(
    tokens: int, tmp_path: Path, said: Said, standing: Callable[..., None]
) -> None:
    """Beyond what vLLM captures in CUDA graphs its own graph runs, until a step is short enough."""
    standing(ADD, 1.01)
    asked = {"fusions": [ADD], "shadow": 1}
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=asked, captured=4) as engine:
        engine(tokens=6)
        lines = said()
        assert lines[lines.index("layerfuse: shadow check of 1 call at each site of DeepseekV2Model:") + 1] == (
            f"{ADD} at layers.0:post_attention and 1 more: not compared: {SILENT}"
        )
        engine(tokens=tokens)
        engine(tokens=6)
        if tokens == 2:
            assert {each["calls"] for each in compared(tmp_path).values()} == {1}
            assert all(each["beyond"] and each["not_compared"] is None for each in compared(tmp_path).values())
        else:
            assert not list(tmp_path.rglob("layerfuse-report.json"))
            assert COMPARES in vars(engine.model.model)


def test_quantised_ops_are_compared_in_their_format(tmp_path: Path, standing: Callable[..., None]) -> None:
    op = "add_rms_norm_group_quant"
    standing(op, 1.0)
    asked = {"fusions": [op], "shadow": 1, "strict": True}
    overrides = {**BLOCK_FP8, **ONE_LAYER}
    with (
        quantised_as_on_cuda(),
        fp8("triton:TritonFp8BlockScaledMMKernel"),
        started("deepseek-v3", tmp_path, overrides=overrides, dtype="bfloat16", layerfuse=asked) as engine,
    ):
        engine()
    found = compared(tmp_path)
    assert found and {(each["calls"], each["beyond"]) for each in found.values()} == {(1, None)}


def test_a_report_of_vllm_is_searched_in_the_checkpoint_with_transformers(tmp_path: Path) -> None:
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH) as engine:
        engine()
    (path,) = tmp_path.rglob("layerfuse-report.json")
    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
    found = bisecting.matched(model, bisecting.reported_in(path))
    assert set(found.pairs) == {
        ("model.layers.0:post_attention", ADD),
        ("model.layers.0.self_attn:latents", DUAL),
        ("model:final", ADD),
    }
    assert not found.renamed and not found.unmatched


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
def test_what_stands_in_an_mla_layer_is_compared_once_a_step_decodes(
    mode: str, tmp_path: Path, said: Said, standing: Callable[..., None]
) -> None:
    wrong = False
    standing("mla_query_absorb", 1.01, at=lambda *_: wrong)  # when the model is loaded it is right
    standing("mla_norm_rope_cache_into", 1.0)
    asked = {"fusions": ["mla_decode"], "shadow": 1}
    with paged("deepseek-v3", tmp_path, **SHORT, mode=mode, layerfuse=asked) as engine:
        engine.step(((0, 5),))
        layer = "layers.0.self_attn" if mode == "VLLM_COMPILE" else "model.layers.0.self_attn"
        decode, norm = (f"{layer}:decode", "mla_decode"), (f"{layer}.q_a_layernorm", "mla_norm_rope_cache_into")
        found = compared(tmp_path)
        assert found[decode]["not_compared"] == SILENT and found[norm]["calls"] == 1
        wrong = True
        said.clear()
        engine.step(((0, 1),))
        found = compared(tmp_path)
        assert found[decode]["calls"] == 1 and "query, float32" in found[decode]["beyond"]
        assert any(
            line.startswith(f"layerfuse: mla_decode at {layer}:decode (at_hand): call 1: query") for line in said()
        )
    assert found[norm]["beyond"] is None


# ---- modules made here, in which ops are called as in those that vLLM compiles

SILU = "silu_mul_group_quant"
RANGE = "(1, 64)"


class Inner(nn.Module):
    """Layers of one norm, and a product of silu behind each, in a class with a __call__ of its own."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in self.layers:
            layer.norm = nn.RMSNorm(128, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = FUNCTIONS[ADD](x, x, layer.norm.weight, 1e-6, 0.0)
            FUNCTIONS[SILU](x, x)
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Outer(nn.Module):
    """Two of them."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.first, self.second = Inner(layers), Inner(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def compiled(model: nn.Module, path: str, strict: bool = False, products: str = "", missed: str = "") -> CompiledModule:
    """As after its compilation, with its norms in one graph and these products at seams."""
    norm = NormSpec(width=128, epsilon=1e-6, module="norm")
    final = FinalNormSpec(hidden_size=128, layer_index=1, parallel=Parallel(size=1, rank=0), final_norm=norm)
    module = model.get_submodule(path)
    decided = plan([(f"layers.{i}", final) for i in range(len(module.layers))], Target(arch="cpu", vendor="cpu"))
    made = CompiledModule(
        name="Inner", model="Outer", path=path, plan=decided, around=module_index_of(module), config=None,
        device=torch.device("cpu"), strict=strict,
    )  # fmt: skip
    uses = tuple(Use(site=f"layers.{i}:final", fused=ADD, form=ADD) for i in range(len(module.layers)))
    made.pieces.append(Piece(number=0, tokens=RANGE, source="rewritten", record=GraphRecord(graph=0, uses=uses)))
    counts = {site: Counter({SILU: 0}) for site in products.split()}
    made.placements["seams"] = AtSeams(fusion=SILU, counts=counts, missed=dict.fromkeys(missed.split(), "refused"))
    return made


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and no report to bring anything into."""
    monkeypatch.setattr(type(here()), "ranks", lambda _: (0, 1, None))
    monkeypatch.setattr(shadowing, "write_again", lambda _: None)


def run(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randn(2, 128, generator=torch.Generator().manual_seed(0)))


def found_in(made: CompiledModule) -> dict[str, Compared]:
    assert made.shadow is not None
    return {each.site: each for each in made.shadow.found}


@pytest.mark.usefixtures("_alone")
def test_two_compiled_modules_of_one_model_hear_their_own_calls(standing: Callable[..., None]) -> None:
    model = Outer()
    wrong = model.second.layers[0].norm.weight.data_ptr()
    standing(ADD, 1.5, at=lambda *given: given[2].data_ptr() == wrong)
    standing(SILU, 1.0)
    first, second = (compiled(model, path, products="layers.0:product") for path in ("first", "second"))
    for made in (first, second):
        shadowing.compare_calls(model, made, 1)
    run(model)
    for made in (first, second):
        assert {site: each.calls for site, each in found_in(made).items()} == {
            "layers.0:final": 1,
            "layers.0:product": 1,
        }
    assert first.shadow.beyond == () and [each.site for each in second.shadow.beyond] == ["layers.0:final"]
    assert not any(COMPARES in vars(each) for each in (model.first, model.second))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("first", [0, 1])
def test_a_class_is_left_when_the_models_that_were_compared_have_gone(first: int) -> None:
    own, models = Inner.__call__, [Outer(), Outer()]
    for model in models:
        shadowing.compare_calls(model, compiled(model, "first"), 2)
    assert Inner.__call__ is not own
    del model
    for place in (first, 0):
        del models[place]
        gc.collect()
    run(Outer())
    assert Inner.__call__ is own


@pytest.mark.usefixtures("_alone")
def test_a_model_that_is_compiled_as_a_whole_is_compared(standing: Callable[..., None]) -> None:
    standing(ADD, 1.0)
    model = Inner()
    made = compiled(model, "")
    shadowing.compare_calls(model, made, 1)
    run(model)
    assert found_in(made)["layers.0:final"].calls == 1


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("missed", "site", "calls"), [("", "one of 2 sites", 2), ("layers.0:product", "layers.1:product", 1)]
)
def test_sites_that_nothing_tells_apart_are_one_of_so_many(
    missed: str, site: str, calls: int, standing: Callable[..., None]
) -> None:
    standing(ADD, 1.0)
    standing(SILU, 1.0)
    model = Outer(2)
    made = compiled(model, "first", products="layers.0:product layers.1:product", missed=missed)
    shadowing.compare_calls(model, made, 1)
    run(model)
    run(model)
    found = found_in(made)
    assert found.keys() == {"layers.0:final", "layers.1:final", site} and found[site].calls == calls


@pytest.mark.usefixtures("_alone")
def test_layers_that_share_a_norm_are_said_to(standing: Callable[..., None]) -> None:
    standing(ADD, 1.0)
    model = Outer(2)
    layers = model.first.layers
    layers[1].norm = layers[0].norm
    made = compiled(model, "first")
    shadowing.compare_calls(model, made, 1)
    run(model)
    found = found_in(made)
    assert [site for site in found if "final" in site] == ["layers.0:final or layers.1:final"]
    assert found["layers.0:final or layers.1:final"].calls == 2


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("strict", [False, True])
def test_a_comparison_that_raises_is_a_warning_and_stops_a_strict_engine(
    strict: bool, said: Said, standing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("cannot compare")

    standing(ADD, 1.0)
    monkeypatch.setattr("layerfuse.fusion.shadow.compare", broken)
    model = Outer()
    shadowing.compare_calls(model, compiled(model, "first", strict), 1)
    with pytest.raises(ValueError, match="cannot compare") if strict else nullcontext():
        run(model)
    line = f"layerfuse: {ADD} at layers.0:final (at_hand): not compared: comparing raised ValueError: cannot compare"
    assert line in said.messages()


@pytest.mark.usefixtures("_alone")
def test_a_site_that_never_comes_ends_the_check_after_so_many_calls(
    said: Said, standing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    standing(ADD, 1.0)
    standing(SILU, 1.0)
    monkeypatch.setattr(shadowing, "PATIENCE", 2)
    looked, placed = [], shadowing._placed
    monkeypatch.setattr(shadowing, "_placed", lambda *given: looked.append(1) or placed(*given))
    model = Outer(2)
    made = compiled(model, "first", products="layers.0:product layers.1:product")
    never = Piece(number=1, tokens="(65, 99)", source="rewritten", record=GraphRecord(
        graph=1, uses=(Use(site="never:final", fused=ADD, form=ADD),)))  # fmt: skip
    made.pieces.append(never)
    made.plan.site["never:final"] = attrs.evolve(made.plan.site["layers.0:final"], layer="never")
    shadowing.compare_calls(model, made, 3)
    blocks = []
    for _ in range(6):
        run(model)
        blocks.append(sum("shadow check" in line for line in said.new()))
    assert blocks == [1, 0, 1, 0, 1, 0]
    assert len(looked) == 5  # once in each call
    assert COMPARES not in vars(model.first)
    never_came = found_in(made)["never:final"].not_compared
    assert never_came == f"{SILENT}; {shadowing.TIRED}"


@pytest.mark.usefixtures("_alone")
def test_a_model_in_which_nothing_is_to_be_compared_says_so_once(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where every site was missed."""
    monkeypatch.setattr(shadowing, "PATIENCE", 3)
    model = Outer()
    made = compiled(model, "first")
    made.pieces.clear()
    model.first.layers = model.second.layers = nn.ModuleList()
    shadowing.compare_calls(model, made, 1)
    for _ in range(4):
        run(model)
    head = "layerfuse: shadow check of 1 call at each site of Inner:"
    assert said() == [head, NONE_SEEN, head, f"{NONE_SEEN}; {shadowing.TIRED}"]


def test_a_forward_that_was_put_around_the_first_call_is_followed_by_the_models_own(
    tmp_path: Path, standing: Callable[..., None]
) -> None:
    """It is taken out one call after what stood around it."""
    standing(ADD, 1.0)
    asked = {"fusions": [ADD], "shadow": 1}
    with started("deepseek-v3", tmp_path, **SHORT, mode="NONE", layerfuse=asked) as engine:
        engine()
        engine()
        assert "forward" not in vars(engine.model)


@pytest.mark.usefixtures("_alone")
def test_a_draft_of_its_targets_class_has_a_place_of_its_own_in_the_report(tmp_path: Path) -> None:
    """Both are in one file."""
    file, models = tmp_path / "report.json", (Outer(), Outer(2))
    target, draft = (compiled(model, "first") for model in models)
    for made in (target, draft):
        outcome = Outcome(plan=made.plan, ranks=(rank_report_of(made, 0),), unknown={}, run=made.run)
        assert reporting._write(file, "an engine", made, outcome) is None
    found = json.loads(file.read_text())["modules"]
    assert {name: len({row["site"] for row in each["sites"]}) for name, each in found.items()} == {
        "Outer.first": 1,
        "Outer (2).first": 2,
    }
    assert [each.model for each in bisecting.reported_in(file)] == ["Outer", "Outer (2)"]
