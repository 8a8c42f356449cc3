"""A wrong declaration is an error when it is defined, and the message says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import frozen

from layerfuse.adapters.errors import LayerfuseError
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.chain import FAMILY, Add, AllReduce, Fusion, FusionError, Norm, Quant, SiluMul
from layerfuse.fusion.declare import Epsilon, Flag, Like, Op, OpError, Rows, Weight, WeightOffset
from layerfuse.fusion.sites import FINAL, INPUT, LATENTS, ROLES, Role
from layerfuse.fusion.steps import Pad, Source, Step

X, RESIDUAL, WEIGHT = Rows(name="x"), Rows(name="residual", like="x"), Weight(name="weight", of="x")
ARGS = (X, RESIDUAL, WEIGHT, Epsilon(), WeightOffset())
RESULTS = (Like(name="normed", of="x"), Like(name="residual_out", of="x"))
NORM = Norm(weight_offset="weight_offset")


def op(**changes: Any) -> Op:
    fields: dict[str, Any] = {"name": "an_op", "doc": "", "args": ARGS, "results": RESULTS, "reference": print}
    return Op(**{**fields, **changes})


def fusion(**changes: Any) -> Fusion:
    fields: dict[str, Any] = {"name": "one", "doc": "", "level": 1, "roles": (INPUT,), "chain": (Add, NORM)}
    return Fusion(**{**fields, **changes, "op": changes["op"] if "op" in changes else op()})


def test_what_is_declared_alike_is_equal() -> None:
    one, same, other = Rows(name="x", heads=True), Rows(name="x", heads=True), Rows(name="x")
    assert one == same != other
    assert hash(one) == hash(same)
    assert repr(one) == repr(same) != repr(other)
    assert repr(one).startswith("Rows(name='x', ")


def test_right() -> None:
    assert fusion(op=op(args=(*ARGS, Flag(name="fast")))).op.name == "an_op"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "an op"}, "is no name"),
        ({"args": (*ARGS, Flag(name="class"))}, "'class' is no name"),
        ({"args": (X, *ARGS)}, "two arguments are called x"),
        ({"args": (Epsilon(), *ARGS[:3])}, "the first argument is rows"),
        ({"args": ()}, "the first argument is rows"),
        ({"results": ()}, "returns nothing"),
        ({"reference": None}, "expected a function, got None"),
        ({"args": (X, Rows(name="residual", like="z"), *ARGS[2:])}, "residual refers to 'z'"),
        ({"args": (X, RESIDUAL, Weight(name="weight", of="y"), *ARGS[3:])}, "weight refers to 'y'"),
        ({"results": (Like(name="normed", of="q"), RESULTS[1])}, "normed is of 'q'"),
    ],
)
def test_ops(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(OpError, match=says):
        op(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chain": (NORM, Add)}, "in the order sources, middle, sinks: Norm is in the middle, Add is a source"),
        ({"chain": (Add, Add, NORM)}, "has Add twice"),
        ({"chain": (Add, AllReduce, NORM)}, "AllReduce stands in front of Add"),
        ({"chain": (AllReduce, NORM)}, "AllReduce stands in front of Add"),
        ({"chain": (3,)}, "expected steps"),
        ({"chain": "Add"}, "expected steps"),
        ({"op": None}, "expected an Op, got None"),
        ({"op": op(args=(*ARGS, Rows(name="third", like="x")))}, "no step fills third"),
        ({"op": op(args=(X, Rows(name="residual", like="x", mutated=True), *ARGS[2:]))}, "an_op writes to residual; the op of a fusion writes to nothing"),
        ({"op": op(results=(*RESULTS, Like(name="more", of="x")))}, "no step gives more"),
        ({"roles": ("inputs",)}, "no role is called 'inputs'; known: input, post_attention"),
        ({"roles": ()}, "it stands at no role"),
        ({"roles": (LATENTS,)}, "the role latents has no Add"),
        ({"chain": (Add, Norm(x="y"))}, "Norm fills y, which an_op does not take"),
        ({"chain": (Add(out="sum"), NORM)}, "Add gives sum, which an_op does not return"),
        ({"chain": (Add, NORM, Quant(per="token"))}, "Quant fills dtype, use_ue8m0, which an_op does not take"),
        ({"level": 3}, "level must be 1 or 2, got 3"),
        ({"name": "My Fusion"}, "a fusion's name is lower-case letters"),
    ],
)  # fmt: skip
def test_fusions(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FusionError, match=says):
        fusion(**changes)


def test_an_op_that_is_not_given_is_composed() -> None:
    made = Fusion(name="one", doc="", level=2, roles=(INPUT,), chain=(Add, Norm, Quant(per="token")))
    assert made.op.name == "one" and made.backends == FAMILY
    assert [argument.name for argument in made.op.args] == [
        *("x", "residual", "weight", "epsilon", "weight_offset", "dtype", "use_ue8m0"),
    ]
    assert [result.name for result in made.op.results] == ["values", "scales", "residual_out"]
    assert [form.op.name for form in made.forms] == ["one", "one_with_norm"]
    assert [form.op.name for form in fusion().forms] == ["an_op"]


def test_a_norm_without_an_offset_multiplies_by_its_weight_as_stored() -> None:
    chain = (Norm.of("q"), Norm(x="kv", weight_offset=None))
    made = Fusion(name="one", doc="", level=1, roles=(LATENTS,), chain=chain)
    x, weight = torch.randn(3, 64), torch.rand(64)
    q, kv = made.op.reference(x, x, weight, weight, 1e-6, 1e-6, 0.0)
    assert torch.equal(q, kv)


@pytest.fixture
def role() -> Iterator[str]:
    """The name of a role that is no longer known behind the test."""
    yield "mine"
    ROLES.pop("mine", None)


@pytest.mark.parametrize("wrong", [{"name": "Bad Name"}, {"level": 3}, {"chain": (3,)}, {"chain": (Norm, Norm)}])
def test_a_role_is_known_once_its_fusion_is_right(role: str, wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"name": "one", "doc": "", "level": 1, "chain": (Norm,)}
    with pytest.raises(LayerfuseError):
        Fusion(**{**right, **wrong}, roles=(Role(role, 1, "a doc"),))
    assert role not in ROLES
    made = Fusion(**right, roles=(Role(role, 1, "a better doc"), INPUT))
    assert made.roles == (role, INPUT) and ROLES[role].doc == "a better doc"


def test_a_chain_may_end_in_padding() -> None:
    made = Fusion(name="padded", doc="", level=1, roles=(INPUT,), chain=(Add, Norm, Pad))
    assert [result.name for result in made.op.results] == ["padded", "residual_out"]


def test_a_role_is_the_same_in_other_words_and_another_with_other_norms(role: str) -> None:
    for doc in ("a doc", "a better doc"):
        Fusion(name="one", doc="", level=1, roles=(Role(role, 1, doc),), chain=(Norm,))
    with pytest.raises(FusionError, match="one: roles: there is a role 'mine' already, a doc; give yours another name"):
        Fusion(name="one", doc="", level=1, roles=(Role(role, 2, "a doc"),), chain=(Norm, Norm))
    both = (Role("two_of_one_name", 1, "a doc"), Role("two_of_one_name", 2, "a doc"))
    with pytest.raises(FusionError, match="there is a role 'two_of_one_name' already"):
        Fusion(name="one", doc="", level=1, roles=both, chain=(Norm,))
    assert "two_of_one_name" not in ROLES


@pytest.mark.parametrize(
    ("chain", "says"),
    [
        (
            (3,),
            r"one: chain: expected steps, such as Add, Norm or Quant\(per='token'\), got 3",
        ),
        ((Add,), "one: a chain needs a step between sources and sinks, such as a Norm, to be composed to an op"),
        (
            (Quant(per="token"), Norm),
            "in the order sources, middle, sinks: Quant is a sink, Norm is in the middle",
        ),
        ((Norm, Norm), "the role input has 1 norm, and the chain has 2"),
        ((SiluMul,), "the role input has no SiluMul"),
    ],
)
def test_chains_that_compose_to_no_fusion(chain: Any, says: str) -> None:
    with pytest.raises(FusionError, match=says):
        Fusion(name="one", doc="", level=1, roles=(INPUT,), chain=chain)


@frozen(kw_only=True)
class Halved(Norm):
    """Another norm by its arithmetic, and a norm of ours by its class."""

    def source(self, source: Source) -> Iterator[str]:
        yield f"made_{self.out} = half(_norm({source.read(self.x)}, {self.weight}, {self.epsilon}, {self.weight_offset}))"

    def reference(self) -> dict[str, Any]:
        return {"half": lambda x: x / 2}


def test_a_step_derived_from_one_of_ours_has_none_of_its_kernels() -> None:
    fusion = Fusion(name="halved", doc="halved", level=1, roles=(FINAL,), chain=(Add, Halved))
    assert fusion.backends == ()
    x = torch.randn(2, 8)
    given = (x, torch.zeros(2, 8), torch.ones(8), 1e-6, 0.0)
    plain = FUSIONS["add_rms_norm"].op.reference(*given)
    torch.testing.assert_close(fusion.op.reference(*given), (plain[0] / 2, plain[1]))


def test_two_steps_share_no_name_of_a_function() -> None:
    chain = (Halved.of("q"), Halved.of("kv"))
    with pytest.raises(FusionError, match=r"Halved\.reference: half is another function already"):
        Fusion(name="halved", doc="halved", level=1, roles=(LATENTS,), chain=chain)


def test_a_step_that_lacks_something_is_refused_where_it_is_made() -> None:
    @frozen(kw_only=True)
    class Nothing(Step):
        pass

    with pytest.raises(TypeError, match=r"abstract methods? arguments, bind"):
        Nothing()

    incomplete = type("Incomplete", (Step,), dict.fromkeys(Step.__abstractmethods__))
    with pytest.raises(FusionError, match="Incomplete does not say its stage and its roles"):
        Fusion(name="mine", doc="mine", level=1, roles=(FINAL,), chain=(incomplete, NORM))
