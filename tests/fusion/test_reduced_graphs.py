"""The all-reduce in front of a residual add, in graphs: what is found, and what only looks like it, with its reason.

No rank is there but this one, and no number is looked at: `test_all_reduce_ranks` and `test_reduced_models` do that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from engine_ops import op
from fusion_support import Traced, trace
from helpers import in_turn
from quant_support import vllm_group, vllm_per_token
from reduced_support import FORMS, REDUCED, Joined, Over, c10d, one_of_two, reduced, sharded_spec
from stream_support import SITE, Layer, form_of, rows, run
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from layerfuse.fusion import FUSIONS, FusionConfig, Target, plan
from layerfuse.fusion.chain import TokenLimit
from layerfuse.fusion.dynamo_floats import floats_as_constants
from layerfuse.fusion.rewrite import Pipeline


@pytest.fixture(autouse=True)
def over() -> Iterator[Over]:
    with one_of_two() as found:
        yield found


def traced(join: Any, over: Over, quant: str | None = None, dtype: Any = torch.bfloat16, **changes: Any) -> Traced:
    reads = changes.pop("reads", torch.exp)
    given = [each.view(1, 5, -1) for each in rows(dtype=dtype)]
    with floats_as_constants():
        return run(Joined(join, over, reads=reads), quant, *given, specs=[("layer", sharded_spec())], **changes)


def missed(found: Traced) -> str:
    assert "layerfuse.all_reduce" not in found.after[0]
    return str(found.report.of(REDUCED).missed[SITE])


# ---- found


@pytest.mark.parametrize(("name", "dynamic"), in_turn(FORMS, [False, True]))
def test_found(name: str, dynamic: bool, over: Over) -> None:
    found = traced(FORMS[name], over, dynamic=dynamic)
    (text,) = found.after
    assert text.count(f"layerfuse.{REDUCED}") == 1, str(found.report)
    # Behind a vocabulary-parallel embedding the other one stays.
    assert text.count("_c10d_functional") == (2 if name == "stream_too" else 0)
    assert f", {over.group}, 0.0)" in text


def test_several_all_reduces_become_one_sum_on_each_rank(over: Over) -> None:
    (text,) = traced(FORMS["three"], over).after
    assert text.count("aten.add.Tensor") == 2 and text.count("wait_tensor") == 0


@pytest.mark.parametrize(
    ("quant", "reads", "form"),
    [
        ("group128", vllm_group, "group_quant"),
        ("per_token", vllm_per_token, "per_token_quant"),
        ("group128", lambda x: (*vllm_group(x), x.exp()), "group_quant_with_norm"),
        (None, lambda x: pad(x, (0, 32)), "pad"),
    ],
)
def test_forms(quant: str | None, reads: Any, form: str, over: Over) -> None:
    assert form_of(traced(FORMS["routed_and_shared"], over, quant, reads=reads)) == f"{REDUCED}_{form}"


# ---- left alone


def in_float32(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + reduced(part.float(), over).to(part.dtype)


def averaged(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + reduced(part, over, "avg")


def largest(part: Tensor, residual: Tensor, _over: Over) -> Tensor:
    part = part * 1
    dist.all_reduce(part, op=dist.ReduceOp.MAX)
    return residual + part


def with_a_bias(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    """As transformers' row-parallel linears with a bias."""
    return residual + (reduced(part, over) + torch.ones(part.shape[-1], dtype=part.dtype))


def routed_only(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    """Routed experts are sharded, and the shared one is whole on every rank."""
    return residual + (reduced(part, over) + part.exp())


def over_two_groups(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + (reduced(part, over) + reduced(part.exp(), over._replace(group=over.other)))


def twice(part: Tensor, _residual: Tensor, over: Over) -> Tensor:
    joined = reduced(part, over)
    return joined + joined


def gathered(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + c10d.wait_tensor(c10d.all_gather_into_tensor(part[:, :, :128].contiguous(), 2, over.group)).view(
        residual.shape
    )


def scaled(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + reduced(part, over) * 0.5


def subtracted(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return torch.add(residual, reduced(part, over), alpha=-1)


def in_place_of_an_input(part: Tensor, residual: Tensor, _over: Over) -> Tensor:
    """The caller's tensor must hold the sum."""
    dist.all_reduce(part)
    return residual + part


def turned(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    """Column by column in memory; the op reads rows."""
    return residual + reduced(part.transpose(1, 2).contiguous().transpose(1, 2), over)


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (averaged, "all_reduce reduces by avg, and the fused op sums"),
        (largest, "all_reduce reduces by max, and the fused op sums"),
        (in_float32, "all_reduce sums in torch.float32, and the add is in torch.bfloat16"),
        (with_a_bias, "is added to the all-reduce all_reduce before the residual is, and is not reduced itself"),
        (routed_only, "is added to the all-reduce all_reduce before the residual is, and is not reduced itself"),
        (over_two_groups, "adds all-reduces over two groups, '0' and '"),
        (twice, "is added to itself"),
        (gathered, "nothing is reduced in front of the add: neither"),
        (scaled, "nothing is reduced in front of the add: neither"),
        (lambda part, residual, _: part + residual, "nothing is reduced in front of the add: neither"),
        (subtracted, "is no plain sum of two tensors"),
        (in_place_of_an_input, "wait_tensor holds the sum all_reduce and has 2 readers"),
        (turned, "x has stride 5 along its last dimension"),
    ],
)
def test_left_alone(join: Any, reason: str, over: Over) -> None:
    found = traced(join, over)
    assert reason in missed(found)
    if join is not subtracted:
        # The shorter chain is there: after the all-reduce.
        assert form_of(found) == "add_rms_norm"


def test_the_sum_has_other_readers(over: Over) -> None:
    class Keeps(Joined):
        def forward(self, part: Tensor, residual: Tensor) -> Any:
            joined = reduced(part, self.over)
            total = residual + joined
            return self.norm(total), joined.sin(), total

    class KeepsBoth(Joined):
        def forward(self, part: Tensor, residual: Tensor) -> Any:
            joined = reduced(part, self.over) + reduced(part.exp(), self.over)
            total = residual + joined
            return self.norm(total), joined.sin(), total

    for kind, what in ((Keeps, "wait_tensor holds the sum all_reduce and"), (KeepsBoth, "holds the sum add and")):
        found = run(kind(FORMS["functional"], over), None, *rows(), specs=[("layer", sharded_spec())])
        assert f"{what} has 2 readers; the fused op does not give it" in missed(found)


# ---- graphs that write in place, as a backend may hand them over


def run_pass(function: Any) -> tuple[str, str | None]:
    """The graph after the pass, and why the chain was missed."""
    x, residual = rows(dtype=torch.float32)
    module = make_fx(function, tracing_mode="fake")(x, residual, torch.rand(256))
    pipeline = Pipeline(plan([("layer", sharded_spec())], Target.named("cpu")))
    pipeline(module.graph)
    module.graph.lint()
    return str(module.graph), pipeline.report.of(REDUCED).missed.get(SITE)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("waits", ["reads", "aside"])
def test_the_op_that_reduces_in_place(waits: str, over: Over) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        part = x * 2
        total = c10d.all_reduce_(part.view(-1, 256), "sum", over.group)
        waited = c10d.wait_tensor(total)
        return norm(residual + (waited if waits == "reads" else total), weight)

    text, reason = run_pass(function)
    assert reason is None and "_c10d_functional" not in text


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("input", "writes the sum over x_1, which is an input"),
        ("view of an input", "writes the sum over x_1, which is an input"),
        ("read", "which has other readers"),
    ],
)
def test_what_is_reduced_in_place_belongs_to_others(which: str, reason: str, over: Over) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        part = x * 2 if which == "read" else x if which == "input" else x.view(-1, 256)
        before = part.sin() if which == "read" else None
        total = c10d.wait_tensor(c10d.all_reduce_(part, "sum", over.group))
        return norm(residual + total, weight), before

    text, missed = run_pass(function)
    assert reason in str(missed) and "all_reduce_" in text and REDUCED not in text


@pytest.mark.parametrize(("where", "fused"), [("before", True), ("between", False), ("after", True)])
def test_the_part_is_written(where: str, fused: bool, over: Over) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        part = x * 2
        if where == "before":
            part.add_(1)
        launched = c10d.all_reduce(part, "sum", over.group)
        if where == "between":
            part.add_(1)
        normed = norm(residual + c10d.wait_tensor(launched), weight)
        if where == "after":
            part.add_(1)
        return normed, part

    text, missed = run_pass(function)
    assert (REDUCED in text) is fused
    if not fused:
        assert "add_ writes in place between all_reduce and" in str(missed)


def test_a_group_that_is_no_name(over: Over) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return norm(residual + reduced(x, over), weight)

    x, residual = rows(dtype=torch.float32)
    module = make_fx(function, tracing_mode="fake")(x, residual, torch.rand(256))
    (node,) = module.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    node.args = (*node.args[:2], 17)
    pipeline = Pipeline(plan([("layer", sharded_spec())], Target.named("cpu")))
    pipeline(module.graph)
    assert "holds the process group as 17" in pipeline.report.of(REDUCED).missed[SITE]


# ---- vLLM's own op


@op("vllm::all_reduce(Tensor tensor, str group_name) -> Tensor")
def all_reduce(tensor: Tensor, _group: str) -> Tensor:
    return tensor.clone()


torch.library.register_fake("vllm::all_reduce", lambda tensor, _group: torch.empty_like(tensor), allow_override=True)


class Coordinator:
    """What vLLM's parallel_state keeps a weak reference to."""

    def __init__(self, device_group: Any) -> None:
        self.device_group = device_group


def vllm_stream(part: Tensor, residual: Tensor, _over: Over) -> Tensor:
    return residual + torch.ops.vllm.all_reduce(part, group_name="tp:0")


def test_vllm_names_its_groups_itself(monkeypatch: pytest.MonkeyPatch, over: Over) -> None:
    monkeypatch.delitem(sys.modules, "vllm.distributed.parallel_state", raising=False)
    assert "'tp:0' is a group of vLLM's, whose parallel_state is not loaded" in missed(traced(vllm_stream, over))
    coordinator = Coordinator(dist.new_group([0, 1]))
    state = SimpleNamespace(_groups={"pp:0": weakref.ref(coordinator)})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert "vLLM has no group called 'tp:0'; known: pp:0" in missed(traced(vllm_stream, over))
    state._groups["tp:0"] = weakref.ref(coordinator)
    (text,) = traced(vllm_stream, over).after
    assert "vllm.all_reduce" not in text and f", {coordinator.device_group.group_name}, 0.0)" in text


@pytest.mark.parametrize("how", ["vllm_ir", "_C"])
def test_vllms_norms_that_add(how: str, monkeypatch: pytest.MonkeyPatch, over: Over) -> None:
    coordinator = Coordinator(dist.group.WORLD)
    state = SimpleNamespace(_groups={"tp:0": weakref.ref(coordinator)})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)

    class Layer(Joined):
        def forward(self, part: Tensor, residual: Tensor) -> Any:
            x, residual = torch.ops.vllm.all_reduce(part * 2, "tp:0"), residual * 1
            if how == "vllm_ir":
                return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, self.norm.weight, 1e-6)
            torch.ops._C.fused_add_rms_norm(x, residual, self.norm.weight, 1e-6)
            return x * 1, residual

    (text,) = run(Layer(vllm_stream, over), None, *rows(), specs=[("layer", sharded_spec())]).after
    assert text.count(f"layerfuse.{REDUCED}") == 1
    assert "vllm.all_reduce" not in text and "fused_add" not in text.replace(REDUCED, "")


def test_collectives_keep_an_order_that_the_graph_alone_decides(over: Over) -> None:
    """One that was launched first moves behind one in between: on every rank, as all trace the same graph."""

    def crossing(part: Tensor, residual: Tensor, over: Over) -> Tensor:
        launched = c10d.all_reduce(part * 2, "sum", over.group)
        between = reduced(residual, over, "max")
        return between + c10d.wait_tensor(launched)

    texts = [traced(crossing, over).after[0] for _ in range(2)]
    assert texts[0] == texts[1]
    assert 0 < texts[0].index("_c10d_functional.all_reduce") < texts[0].index(f"layerfuse.{REDUCED}")


# ---- ranges of tokens


@pytest.mark.parametrize(
    ("most", "dynamic", "fused"),
    [
        (5, False, REDUCED),
        (4, False, "add_rms_norm"),  # above the range the plain all-reduce stays, and that is no miss
        (4, True, REDUCED),  # for any number of tokens: beyond its range the op does the pieces
    ],
)
def test_a_graph_beyond_the_range_of_a_decision_takes_the_shorter_chain(
    most: int, dynamic: bool, fused: str, over: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = attrs.evolve(FUSIONS[REDUCED], limit=lambda *_: TokenLimit(most=most, reason="the plain all-reduce"))
    monkeypatch.setitem(FUSIONS._all(), REDUCED, limited)
    found = traced(FORMS["functional"], over, dynamic=dynamic)
    assert [use.fused for record in found.report.records for use in record.uses] == [fused]
    assert SITE not in found.report.of(REDUCED).missed
    assert SITE not in found.report.of("add_rms_norm").missed
    assert ("_c10d_functional.all_reduce" in found.after[0]) is (fused != REDUCED)
    verdict = found.report.of(REDUCED)
    assert (verdict.matched == (SITE,)) is (fused == REDUCED)
    said = {} if fused == REDUCED else {SITE: "its graphs are for 5 tokens; it is planned up to 4 tokens"}
    assert {site: why for site, why in verdict.beyond.items() if site == SITE} == said
    assert ("beyond its tokens: layer:input" in str(verdict)) is bool(said)


def test_beyond_the_range_with_no_shorter_chain_nothing_is_missed(over: Over, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = attrs.evolve(FUSIONS[REDUCED], limit=lambda *_: TokenLimit(most=4, reason="the plain all-reduce"))
    monkeypatch.setitem(FUSIONS._all(), REDUCED, limited)
    alone = FusionConfig(switches={"add_rms_norm": False})
    module, given = Layer(Joined(FORMS["functional"], over)), [each.view(1, 5, -1) for each in rows()]
    found = trace(module, *given, specs=[("layer", sharded_spec())], config=alone)
    assert [(use.fused, use.tokens) for record in found.report.records for use in record.uses] == [(None, 5)]
    assert SITE not in found.report.of(REDUCED).missed


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_empty_batch_fuses_as_one_token_does(dynamic: bool, over: Over) -> None:
    module, given = Layer(Joined(FORMS["functional"], over)), rows(0)
    with floats_as_constants():
        found = trace(module, *given, specs=[("layer", sharded_spec())], dynamic=dynamic)
    assert [use.fused for record in found.report.records for use in record.uses] == [REDUCED]
    assert SITE not in found.report.of(REDUCED).missed


def test_a_group_of_another_size_than_the_plan_says(over: Over) -> None:
    given = [each.view(1, 5, -1) for each in rows()]
    found = run(Joined(FORMS["functional"], over), None, *given, specs=[("layer", sharded_spec(4))])
    assert f"sums over the 2 ranks of group {over.group!r}, and the plan says 4" in missed(found)
    assert form_of(found) == "add_rms_norm"


@pytest.mark.parametrize(
    ("desc", "kind"),
    [("mesh_dp", "data"), ("mesh_cp", "context"), ("pp:device", "pipeline"), ("mesh_tp", None), ("mesh_dp_tp", None)],
)
def test_a_group_of_another_kind_by_its_description(desc: str, kind: str | None, over: Over) -> None:
    """DeviceMesh and vLLM describe their groups."""
    group = dist.new_group([0, 1], group_desc=desc)
    given = [each.view(1, 5, -1) for each in rows()]
    other = over._replace(group=str(group.group_name))
    found = run(Joined(FORMS["functional"], other), None, *given, specs=[("layer", sharded_spec())])
    if kind is None:
        assert form_of(found) == REDUCED
    else:
        assert f"({desc}), which is {kind}-parallel by its description" in missed(found)
        assert form_of(found) == "add_rms_norm"
