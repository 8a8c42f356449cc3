"""Which backend runs: chosen once, forced by name where an op has it, and never by a choice that is out of date."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from layerfuse.fusion import FUSIONS, Target, backends, ops
from layerfuse.fusion.backends import Backend
from layerfuse.fusion.declare import Like, Op, Rows
from layerfuse.fusion.ops.library import define, repeating
from layerfuse.fusion.target import target_of


@pytest.fixture(autouse=True)
def _unforced() -> Iterator[None]:
    yield
    backends.force(None)


# ---- a forced backend concerns the ops that have it (finding 10)


def test_an_op_without_the_forced_backend_runs_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT, "triton")
    backends.force(None)
    values, scales = ops.quantise_per_token(torch.randn(3, 64))
    assert values.shape == (3, 64) and scales.shape == (3, 1)
    assert backends.wanted_for("quantise_per_token") is None
    assert backends.wanted_for("add_rms_norm") == "triton"
    assert backends.choose("quantise_per_token", "cpu").name == "reference"


# ---- force() while a backend is being chosen (finding 11)


@pytest.mark.usefixtures("_spare")
def test_a_choice_that_began_before_force_is_not_kept() -> None:
    asked, go = threading.Event(), threading.Event()

    class Slow(Backend):
        name = "slow"

        def refuses(self, case: object) -> None:
            asked.set()
            go.wait(10)

    name = "forced_meanwhile"
    op = Op(name=name, doc="", args=(Rows(name="x"),), results=(Like(name="y", of="x"),), reference=lambda x: x.clone())
    define(op)
    backends.register(Slow(op=op))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(backends.choose(name, "cpu", 1).name))
    thread.start()
    assert asked.wait(10)
    backends.force("reference")
    go.set()
    thread.join(10)
    assert found == ["reference"]
    assert backends.choose(name, "cpu", 1).name == "reference"


# ---- targets (finding 9)


@pytest.mark.parametrize(
    ("name", "fp8"),
    [
        ("sm80", None), ("sm86", None), ("sm89", "e4m3fn"), ("sm90", "e4m3fn"), ("sm100", "e4m3fn"), ("sm103", "e4m3fn"),
        ("sm120", "e4m3fn"), ("sm130", "e4m3fn"), ("gfx90a", None), ("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"),
        ("gfx1100", None), ("gfx1201", "e4m3fn"), ("gfx1300", "e4m3fn"), ("cpu", None),
    ],
)  # fmt: skip
def test_every_architecture_has_its_format(name: str, fp8: str | None) -> None:
    target = Target.named(name)
    assert (target.arch, target.fp8) == (name, fp8)
    assert target.vendor == ("cpu" if name == "cpu" else "nvidia" if name.startswith("sm") else "amd")


def test_detection_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 1))
    monkeypatch.setattr(torch.version, "hip", None)
    assert Target.detect() == Target(arch="sm121", vendor="nvidia", fp8="e4m3fn")


@pytest.mark.parametrize(
    ("devices", "arch"), [((), "cpu"), (("cpu",), "cpu"), (("cpu", "meta"), "sm90"), (("meta", "cpu"), "sm90")]
)
def test_a_model_runs_where_any_of_its_parameters_is(
    devices: tuple[str, ...], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may be kept on the CPU for want of memory."""
    monkeypatch.setattr(Target, "detect", lambda: Target.named("sm90"))
    assert target_of(torch.nn.ModuleList(torch.nn.Linear(2, 2, device=device) for device in devices)).arch == arch


# ---- ops are what their declarations say


@pytest.mark.parametrize("name", list(ops.FUNCTIONS))
def test_every_op_has_its_docstring_and_its_schema(name: str) -> None:
    function = ops.FUNCTIONS[name]
    assert function.__doc__ and "Args:" in function.__doc__ and "Raises:" in function.__doc__
    schema = getattr(torch.ops.layerfuse, name).default._schema
    assert [argument.name for argument in schema.arguments] == list(function.__annotations__)[:-1]


def test_every_fusion_has_a_reference_and_a_kernel_and_most_have_aiters() -> None:
    for fusion in FUSIONS.values():
        ours = "symm_mem" if fusion.across_ranks else "triton"
        # AITER has nothing for them.
        alone = fusion.name == "qk_norm_rope" or {*fusion.roles} <= {"linear", "experts", "decode"}
        named = [ours] if alone else ["aiter", ours]
        assert [kernel.backend for kernel in fusion.backends] == named
        assert [name for name, _ in backends.survey(fusion.op.name, "cpu")] == [*named, "reference"]


# ---- counting calls


def test_calls_are_counted_while_asked_for_whether_remembered_or_not() -> None:
    x, y, weight = torch.randn(3, 64), torch.randn(5, 64), torch.ones(64)

    def call(rows: torch.Tensor) -> None:
        ops.rms_norm(rows, weight, 1e-6)

    call(x)
    with backends.counting() as outer:
        call(x)
        with backends.counting() as inner:
            call(x)
            call(y)
            ops.add_rms_norm(x, x, weight, 1e-6)
        call(x)
    call(x)
    assert outer == {"rms_norm": 4, "add_rms_norm": 1}
    assert inner == {"rms_norm": 2, "add_rms_norm": 1}


def test_calls_of_a_compiled_graph_are_counted_once() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)

    @torch.compile(backend="aot_eager")
    def function(rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.layerfuse.rms_norm(rows, weight, 1e-6, 0.0) * 2

    with torch.no_grad():
        function(x)
        with backends.counting() as calls:
            function(x)
    assert calls == {"rms_norm": 1}


# ---- calls that are alike --------------------------------------------------------------------------------------------


def test_calls_said_to_be_alike_are_checked_once_and_made_by_what_the_backend_has_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from layerfuse.fusion.backends.triton import queries

    # On a GPU where there is one: Triton's interpreter, which takes tensors on the CPU, is off there.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query = torch.randn(2, 3, 24, device=device)
    tensors = (torch.randn(2, 3, 8), torch.ones(4, 4), torch.zeros(4, 4), torch.tensor([1, 2]))
    given = (*(each.to(device) for each in tensors), "halves")
    made: list[str] = []
    monkeypatch.setitem(backends.repeatable, queries.rope_into, lambda: lambda *_: made.append("alike"))
    call = repeating("mla_query_rope")

    def calls() -> None:
        call("the same", given[0], query, *given[1:])

    backends.force("triton")
    for _ in range(3):
        calls()
    assert made == ["alike"] * 2
    with backends.counting() as counted:
        calls()
    assert counted == {"mla_query_rope": 1} and len(made) == 2, "somebody listens, and a call did not come by"
    backends.force("reference")
    calls()  # by the reference, which has nothing of the kind
    torch.testing.assert_close(query[..., 16:], given[0])
    with pytest.raises(ValueError, match="cos must be"):
        call("another", given[0], query, given[1][:, :2], *given[2:])
    assert len(made) == 2


def test_a_launch_is_made_again_with_the_addresses_of_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerfuse.fusion.backends.triton import launcher

    launch = launcher.Launch(("a key",), 0, (3, 4))
    in_full: list[torch.Tensor] = []
    again: list[object] = []

    def in_full_of(x: torch.Tensor) -> launcher.Launch | None:
        in_full.append(x)
        return launch if len(in_full) > 1 else None  # the first one compiles

    def replay(*given: object) -> bool:
        again.append(given)
        return len(again) < 3

    monkeypatch.setattr(launcher, "again", replay)
    call = launcher.repeated(in_full_of, lambda x: (x, x[4:]))
    memory = torch.zeros(64)
    x, other, off = memory[:16], memory[16:], memory[17:]
    for given in (x, x, other, off, x, x):
        call(given)
    # The first two in full; one whose memory is off the grid of 16 bytes too, and one that is refused.
    assert [each.data_ptr() for each in in_full] == [each.data_ptr() for each in (x, x, off, x)]
    addresses = [(each.data_ptr(), each[4:].data_ptr()) for each in (other, x, x)]
    assert again == [(launch.key, launch.device, each, launch.numbers) for each in addresses]
