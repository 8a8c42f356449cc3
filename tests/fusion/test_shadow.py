"""The shadow check: results of fused ops in transformers' own models, held to their references as they come."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import backend_at_hand, outside_package, run_copy
from latent_support import Widths, latents
from linear_support import given_of
from torch.utils._python_dispatch import TorchDispatchMode

from layerfuse import FinalNormSpec, NormSpec, Parallel, fusion, registry
from layerfuse.adapters.errors import ArgumentError
from layerfuse.engines import record_cache
from layerfuse.fusion import backends
from layerfuse.fusion.closeness import compare
from layerfuse.fusion.declare import Op, Output, Rows
from layerfuse.fusion.ops import FUNCTIONS
from layerfuse.fusion.ops.cache_layout import entry_width
from layerfuse.fusion.ops.library import declared
from layerfuse.fusion.shadow import ELSEWHERE, Placed, Shadow
from layerfuse.testing import small_model

IDS = {"input_ids": torch.arange(6).reshape(1, 6), "use_cache": False}

IN_A_MODEL = """
import json, torch, warnings
torch.set_num_threads(1)
from layerfuse import fusion, registry
from layerfuse.testing import small_model
import torch._inductor.compile_fx as inductor
inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
config = fusion.FusionConfig.parse("outside_add_rms_norm,mla_dual_rms_norm")
ids = torch.arange(6).reshape(1, 6)
answers, reports, said = {}, {}, {}
for shadow in (0, 3):
    torch._dynamo.reset()
    fused = fusion.compile(model, config=config, shadow=shadow)
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        answers[shadow] = [fused(input_ids=ids, use_cache=False).logits for _ in range(5)]
    reports[shadow] = fused.report
said["unchanged"] = all(map(torch.equal, answers[0], answers[3]))
said["executed"] = [sum(report.executed.values()) for report in reports.values()]
said["warnings"] = [str(each.message) for each in warned if each.category is RuntimeWarning]
said["report"] = str(reports[3])
said["found"] = reports[3].to_dict()["shadow"]
torch._dynamo.reset()
strict = fusion.compile(model, config=config, shadow=1, strict=True)
try:
    with torch.no_grad():
        strict(input_ids=ids, use_cache=False)
except fusion.ResultsDifferError as error:
    said["strict"] = str(error)
print("SAID " + json.dumps(said))
"""


# A kernel that is right is compared below, in this process.
@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.thorough), 1.01])
def test_a_kernel_of_another_package_is_held_to_its_reference(tmp_path: Path, factor: float) -> None:
    done = run_copy(IN_A_MODEL, outside_package(tmp_path, factor), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.rpartition("SAID ")[2])
    assert said["unchanged"] and said["executed"][0] == said["executed"][1] > 0
    theirs = {each["site"]: each for each in said["found"] if each["fusion"] == "outside_add_rms_norm"}
    sites = {"model.layers.0:post_attention", "model:final"}
    assert set(theirs) == sites
    assert {(each["calls"], each["backend"]) for each in theirs.values()} == {(3, "outside")}
    ours = [each for each in said["found"] if each["fusion"] == "mla_dual_rms_norm"]
    assert [each["not_compared"] for each in ours] == ["its reference is what runs"]
    if factor == 1:
        assert "strict" not in said and said["warnings"] == []
        assert {each["beyond"] for each in theirs.values()} == {None}
        assert all(0 < each["largest"] < 1e-6 for each in theirs.values())
        assert "outside_add_rms_norm at model:final (outside): 3 calls compared, at most" in said["report"]
    else:
        assert len(said["warnings"]) == len(sites)
        for site, each in theirs.items():
            assert (
                each["beyond"].startswith("normed, float32 (1, 6, 64) is up to 0.0") and 0.005 < each["largest"] < 0.1
            )
            assert "away from the reference, first at [0, 0, 0]: " in each["beyond"]
            assert f"outside_add_rms_norm at {site} (outside): call 1: normed, float32 (1, 6, 64)" in said["strict"]
        assert "mla_dual_rms_norm" not in said["strict"]


# ---- in this process: kernels that stand in for a moment


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a kernel for an op in front of all others, until the test ends."""

    def stand(op: str, function: Callable[..., Any]) -> None:
        monkeypatch.setitem(backends._backends, op, [backend_at_hand(op, function), *backends._backends[op]])
        backends.decide_again()

    yield stand
    monkeypatch.undo()
    backends.decide_again()


def times(op: str, factor: float, result: int = 0) -> Callable[..., Any]:
    """The reference, with one result multiplied."""

    def kernel(*given: Any) -> Any:
        results = declared(op).reference(*given)
        several = [*results] if isinstance(results, tuple) else [results]
        several[result] = (several[result].double() * factor).to(several[result].dtype)
        return tuple(several) if isinstance(results, tuple) else several[0]

    return kernel


def deepseek(layers: int = 2) -> Any:
    return small_model(registry.model("deepseek-v3"), layers=layers, hidden_size=64, heads=2)


def call(fused: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = fused(**IDS).logits
    return logits


def test_it_compares_what_inductor_has_compiled_and_stops_after_so_many_calls(
    standing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    standing("add_rms_norm", times("add_rms_norm", 1.0))
    monkeypatch.setenv("LAYERFUSE_SHADOW", "2")
    fused = fusion.compile(deepseek(1), strict=True)
    for _ in range(4):
        logits = call(fused)
    torch.testing.assert_close(logits, call(fused.original), rtol=1e-5, atol=1e-5)
    found = {each.site: each for each in fused.report.shadow.found if each.fusion == "add_rms_norm"}
    assert {site: (each.calls, each.largest) for site, each in found.items()} == {
        "model.layers.0:post_attention": (2, 0.0),
        "model:final": (2, 0.0),
    }
    assert fused.report.of("add_rms_norm").executed == 8
    assert not backends._listeners

    def no_more(*_: object) -> None:
        raise AssertionError("somebody listens")

    monkeypatch.setattr(backends, "listening", no_more)
    call(fused)


class Siblings(torch.nn.Module):
    """Two layers whose forward is compiled once, behind a graph break each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Added(), Added()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


class Added(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + 2 * x)


@pytest.mark.usefixtures("_op_by_op")
def test_sites_that_share_a_graph_are_told_apart(standing: Callable[..., None]) -> None:
    model = Siblings()
    second = model.layers[1].norm.weight.data_ptr()

    def kernel(x: Any, residual: Any, weight: Any, *settings: Any) -> Any:
        return times("add_rms_norm", 1.5 if weight.data_ptr() == second else 1.0)(x, residual, weight, *settings)

    standing("add_rms_norm", kernel)
    norm = NormSpec(width=64, epsilon=1e-6, weight_offset=0.0)
    final = FinalNormSpec(hidden_size=64, layer_index=1, parallel=Parallel(size=1, rank=0), final_norm=norm)
    fused = fusion.compile(model, specs=[(f"layers.{i}", final) for i in range(2)], shadow=1)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"layers\.1:final"):
        fused(torch.randn(4, 64))
    assert [each.site for each in fused.report.shadow.found] == ["layers.0:final", "layers.1:final"]
    assert [each.site for each in fused.report.shadow.beyond] == ["layers.1:final"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("op", "more", "far"),
    [
        ("rms_norm_per_token_quant", (torch.float8_e4m3fn, False), 1.02),
        ("rms_norm_per_token_quant", (torch.float8_e4m3fn, True), 1.3),
        ("rms_norm_group_quant", (torch.float8_e4m3fnuz, 128, False, False, False), 1.02),
        ("rms_norm_static_quant", (torch.tensor([0.05]), torch.float8_e4m3fn), 1.3),
        ("rms_norm_mxfp8_quant", (), 1.3),
        ("rms_norm_mxfp4_quant", (), 2.5),
        ("rms_norm_nvfp4_quant", (torch.tensor([400.0]), False), 2.5),
        ("rms_norm_nvfp4_quant", (torch.tensor(400.0), True), 2.5),
        ("rms_norm", (), 1.02),
    ],
    ids=str,
)
def test_what_a_format_rounds_is_no_difference_and_more_is_one(
    op: str, more: tuple[Any, ...], far: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 320, generator=generator).to(dtype), torch.rand(320, generator=generator) + 0.5

    def results(factor: float) -> tuple[torch.Tensor, ...]:
        made = declared(op).reference(x, weight * factor, 1e-6, 0.0, *more)
        return made if isinstance(made, tuple) else (made,)

    def first(got: tuple[torch.Tensor, ...]) -> list[Any]:
        return [each.first for each in compare(declared(op), (x, weight, 1e-6, 0.0, *more), got, results(1))]

    # Sums in another order move the sixth digit of a norm, and values on an edge become the other one.
    assert first(results(1 + 1e-6)) == [None] * len(results(1))
    assert any(first(results(far)))
    broken = results(1)
    broken[-1].view(-1)[-1:].view(torch.uint8).fill_(0x60)
    assert first(broken)[-1] == tuple(size - 1 for size in broken[-1].shape)


@pytest.mark.parametrize(
    ("op", "dtype", "allowed"),
    [
        ("few_token_linear", torch.bfloat16, 2**-9),
        ("block_scaled_linear", torch.float8_e4m3fn, 2**-5),
        ("block_scaled_experts", torch.float8_e4m3fn, 2**-5),
    ],
)
def test_a_product_may_lose_what_tensor_cores_do(op: str, dtype: torch.dtype, allowed: float) -> None:
    weights = {"x", "weight", "w13", "w2"}
    given = tuple(torch.ones(1, dtype=dtype) if each.name in weights else None for each in declared(op).args)
    wanted = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    for factor, is_near in ((0.9, True), (1.5, False)):
        got = wanted + wanted.abs().amax(-1, keepdim=True) * allowed * factor
        (apart,) = compare(declared(op), given, (got,), (wanted,))
        assert (apart.first is None) == is_near


def test_what_an_op_hands_on_is_no_call_to_be_compared(standing: Callable[..., None]) -> None:
    op = "group_quant_linear"
    standing(op, times(op, 1.0))
    library = torch.library.Library("layerfuse_shadow_tests", "FRAGMENT")
    library.define("many(Tensor x, Tensor weight, Tensor scale) -> Tensor")
    library.impl("many", lambda x, weight, _: x.new_zeros(len(x), len(weight)), "CompositeExplicitAutograd")
    shadow = Shadow(1)
    placed = Placed(site="somewhere", fusion=op, op=op, weights=())
    run = shadow.around(lambda *given: FUNCTIONS[op](*given, beyond="layerfuse_shadow_tests::many"), lambda _: [placed])
    for tokens, calls in ((32, 0), (4, 1)):
        run(*given_of(op, tokens, 256, 512).values())
        assert [each.calls for each in shadow.found] == [calls]
        assert ("it hands on to another op" in str(shadow)) == (calls == 0)


def test_threads_hear_their_own_calls_and_one_more_call_is_of_the_same_site(standing: Callable[..., None]) -> None:
    """As micro-batches of an engine do."""
    op = "add_rms_norm"
    standing(op, times(op, 1.0))
    shadow = Shadow(9)
    weights = [torch.ones(64) for _ in range(2)]
    placed = [Placed(site=f"site {i}", fusion=op, op=op, weights=(weights[i],)) for i in range(2)]

    def call(weight: torch.Tensor) -> None:
        FUNCTIONS[op](torch.randn(2, 64), torch.randn(2, 64), weight, 1e-6, 0.0)

    def another() -> None:
        with shadow.hearing(lambda: placed):
            call(weights[1])
            call(weights[1])

    with shadow.hearing(lambda: placed, "silent"):
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        call(weights[0])
    assert {each.site: each.calls for each in shadow.found} == {"site 0": 1, "site 1": 2}


def test_a_call_is_known_by_a_parameter_inside_of_what_holds_its_site(standing: Callable[..., None]) -> None:
    """As that of routed experts, or of the heads of MLA: the site before it may be left to the engine."""
    op = "few_token_linear"
    weights = {f"layers.{i}.experts.w13": torch.randn(128, 256).bfloat16() for i in range(3)}
    standing(op, times(op, 1.0))

    def holder_of(given: tuple[Any, ...]) -> str:
        return next(name.rpartition(".")[0] for name, each in weights.items() if each is given[1])

    placed = [
        Placed(site=f"layers.{i}:experts", fusion=op, op=op, weights=(), path=f"layers.{i}.experts") for i in range(2)
    ]
    shadow = Shadow(1)
    with shadow.hearing(lambda: placed, "silent", holder_of):
        for i in (1, 2):
            FUNCTIONS[op](torch.randn(2, 256).bfloat16(), weights[f"layers.{i}.experts.w13"])
    assert {each.site: (each.calls, each.not_compared) for each in shadow.found} == {
        "layers.1:experts": (1, None),
        "layers.2.experts": (1, None),
        "layers.0:experts": (0, "silent"),
    }


def test_a_call_with_weights_of_nobody_is_not_that_of_a_site_with_its_own(standing: Callable[..., None]) -> None:
    op = "add_rms_norm"
    standing(op, times(op, 1.0))
    placed = [Placed(site="model:final", fusion=op, op=op, weights=(torch.ones(64),))]
    shadow = Shadow(1)
    with shadow.hearing(lambda: placed, "silent", lambda _: None):
        FUNCTIONS[op](torch.randn(2, 64), torch.randn(2, 64), torch.ones(64), 1e-6, 0.0)
    found = {each.site: (each.calls, each.not_compared) for each in shadow.found}
    assert found == {ELSEWHERE: (1, None), "model:final": (0, "silent")}


@pytest.mark.parametrize("form", ["plain", "fp8", "fp8_ds_mla"])
def test_what_an_op_writes_is_compared_and_written_once(standing: Callable[..., None], form: str) -> None:
    name, dtype = "mla_norm_rope_cache", torch.bfloat16
    widths = Widths(q=64, kv=128, rope=32)
    kind = {"plain": dtype, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}[form]
    given = latents(widths, 4, dtype, "cpu")
    columns = entry_width(form, widths.kv, widths.rope)
    factor = [1.0]

    def kernel(*arguments: Any) -> Any:
        arguments = (*arguments[:4], arguments[4] * factor[0], *arguments[5:])
        return declared(name).reference(*arguments)

    standing(name, kernel)
    for factor[0], site in ((1.0, "right"), (1.5, "wrong")):
        cache = torch.zeros(8, columns, dtype=torch.uint8 if form == "fp8_ds_mla" else dtype).to(kind)
        wanted = cache.clone()
        arguments = (*given.values(), torch.arange(4), cache, torch.ones(1), 0.0, 0.0, "interleaved")
        shadow = Shadow(1)
        placed = Placed(site=site, fusion=name, op=name, weights=(given["kv_weight"],))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shadow.around(FUNCTIONS[name], lambda _, placed=placed: [placed])(*arguments)
        kernel(*(wanted if each is cache else each for each in arguments))
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))
        (found,) = shadow.found
        assert found.calls == 1 and (found.beyond is None) == (site == "right")
        if site == "wrong":
            assert "cache" in str(found.beyond)


class Sizes(TorchDispatchMode):
    """Adds up the elements of float64 tensors that are made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype is torch.float64:
            self.elements += made.numel()
        return made


@pytest.mark.parametrize("form", ["plain", "fp8", "fp8_ds_mla"])
def test_a_cache_is_held_where_its_bytes_differ_in_any_slot(form: str) -> None:
    op, widths = declared("mla_norm_rope_cache"), Widths(q=64, kv=128, rope=32)
    kind = {"plain": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}[form]
    columns = entry_width(form, widths.kv, widths.rope)
    pages = torch.zeros(64, 2, 16, columns, dtype=torch.uint8 if form == "fp8_ds_mla" else torch.bfloat16)
    wanted = pages.to(kind)[:, 1]  # as vLLM's, which has another layer's beside it
    given = latents(widths, 4, torch.bfloat16, "cpu")
    arguments = (*given.values(), torch.arange(4), wanted, torch.ones(1), 0.0, 0.0, "interleaved")
    results = (op.reference(*arguments),)
    got = wanted.clone()

    def of_cache() -> tuple[Any, int]:
        with Sizes() as sizes:
            *_, last = [
                each for each in compare(op, arguments, (*results, got), (*results, wanted)) if "cache" in each.name
            ]
        return last, sizes.elements

    same, _ = of_cache()
    assert (same.first, same.largest, same.shape[:2]) == (None, 0.0, (64, 16))
    got[0, 1, -2:].view(torch.uint8 if form == "fp8" else torch.int16).add_(1)  # the next value
    near, elements = of_cache()
    assert near.first is None and near.largest > 0 and elements < got.numel()
    got[63, 15] = wanted[0, 2]  # written to another slot
    wrong, _ = of_cache()
    assert wrong.first is not None and wrong.first[:2] == (63, 15) and wrong.got != 0 == wrong.wanted
    assert wrong.shape[:2] == (64, 16)


def test_an_op_of_another_package_that_writes_and_has_no_weights() -> None:
    """Its output is held as closely as other rows of its dtype are."""
    args = (Rows(name="x", width="width"), Output(name="out", of="x", doc="o"))
    op = Op(name="another_copy", doc="Copies.", args=args, results=(), reference=lambda x, out: out.copy_(x))
    x = torch.randn(2, 8)
    for factor, first in ((1, None), (1.01, (0, 0))):
        (apart,) = compare(op, (x, x), (x * factor,), (x,))
        assert apart.first == first


def test_what_is_no_number_is_text_in_a_report(standing: Callable[..., None], tmp_path: Path) -> None:
    op, weight, shadow = "add_rms_norm", torch.ones(64), Shadow(1, tell=lambda _: None)
    standing(op, times(op, float("nan")))
    placed = Placed(site="model:final", fusion=op, op=op, weights=(weight,))
    with shadow.hearing(lambda: [placed]):
        FUNCTIONS[op](torch.randn(2, 64), torch.randn(2, 64), weight, 1e-6, 0.0)
    file = tmp_path / "report.json"
    assert record_cache.write(file, {"shadow": shadow.to_dict()}) is None
    (found,) = json.loads(file.read_text())["shadow"]
    assert found["largest"] == "inf" and "nan, where it is" in found["beyond"]
    assert shadow.found[0].largest == float("inf")
    before = file.read_text()
    assert "cannot be written: " in str(record_cache.write(file, {"number": float("inf")}))
    assert file.read_text() == before and [*tmp_path.iterdir()] == [file]


def test_a_comparison_that_raises_is_told_and_stops_who_is_strict(standing: Callable[..., None]) -> None:
    given = (torch.randn(2, 64), torch.randn(2, 64), torch.ones(64), 1e-6, 0.0)
    standing("add_rms_norm", lambda x, residual, *_: (x, residual[:, :32]))  # of another shape
    shadow = Shadow(3)
    placed = Placed(site="somewhere", fusion="add_rms_norm", op="add_rms_norm", weights=())
    run = shadow.around(FUNCTIONS["add_rms_norm"], lambda _: [placed])
    with pytest.warns(RuntimeWarning, match="add_rms_norm at somewhere .*not compared: comparing raised "):
        assert run(*given)[0] is given[0]
    with pytest.raises(Exception, match="size of tensor"):
        shadow.check()


def test_a_comparison_without_memory_is_none_the_worse(
    standing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    standing("add_rms_norm", times("add_rms_norm", 1.0))
    monkeypatch.setattr("layerfuse.fusion.shadow.compare", none_left)
    shadow = Shadow(3, tell=pytest.fail)
    placed = Placed(site="somewhere", fusion="add_rms_norm", op="add_rms_norm", weights=())
    given = (torch.randn(2, 64), torch.randn(2, 64), torch.ones(64), 1e-6, 0.0)
    shadow.around(FUNCTIONS["add_rms_norm"], lambda _: [placed])(*given)
    shadow.check()
    assert "not compared: comparing raised OutOfMemoryError: no memory" in str(shadow)


def test_what_is_complete_is_counted_while_another_thread_adds_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = Shadow(1)
    wanted = shadow._wanted

    def and_one_more(found: Any) -> bool:
        shadow._record_of(Placed(site=f"{found.site}'", fusion="f", op="o", weights=()))
        return wanted(found)

    shadow._record_of(Placed(site="somewhere", fusion="f", op="o", weights=()))
    monkeypatch.setattr(shadow, "_wanted", and_one_more)
    assert shadow.complete == 0 and len(shadow.found) == 2


def test_what_no_op_was_called_for_is_said() -> None:
    """As where a CUDA graph is replayed."""
    shadow = Shadow(3)
    placed = Placed(site="somewhere", fusion="add_rms_norm", op="add_rms_norm", weights=())
    assert shadow.around(lambda: 3, lambda _: [placed])() == 3
    assert "add_rms_norm at somewhere: not compared: no call of its op was seen" in str(shadow)


@pytest.mark.parametrize("wrong", [True, -1, 1.0, "3"])
def test_a_wrong_number_of_calls(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="shadow: expected how many calls"):
        fusion.compile(torch.nn.Linear(2, 2), shadow=wrong)
    monkeypatch.setenv("LAYERFUSE_SHADOW", "some")
    with pytest.raises(ArgumentError, match="LAYERFUSE_SHADOW=some: expected how many calls"):
        fusion.compile(torch.nn.Linear(2, 2))


# ---- our own Triton kernels: on a GPU compiled, elsewhere in Triton's interpreter


@pytest.fixture
def _triton() -> Iterator[None]:
    pytest.importorskip("triton")
    backends.force("triton")
    yield
    backends.force(None)


@pytest.mark.usefixtures("_triton", "_op_by_op")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_triton_kernels_in_a_model_are_as_near_as_they_may_be(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2, dtype=dtype).to(device)
    fused = fusion.compile(model, shadow=1, strict=True)
    with torch.no_grad():
        fused(input_ids=IDS["input_ids"].to(device), use_cache=False)
    found = {each.fusion: each for each in fused.report.shadow.found}
    assert set(found) == {"mla_dual_rms_norm", "add_rms_norm"}
    assert all(each.calls == 1 and each.backend == "triton" for each in found.values())
    # On an H100 rows of bfloat16 are the reference's bit for bit.
    exact = dtype is torch.bfloat16 and device == "cuda"
    assert exact or any(each.largest > 0 for each in found.values())
