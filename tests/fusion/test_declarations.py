"""A wrong declaration is an error when it is defined, and the message says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from layerfuse.fusion.chain import Add, Fusion, FusionError, Norm
from layerfuse.fusion.declare import Epsilon, Flag, Like, Op, OpError, Rows, Weight, WeightOffset
from layerfuse.fusion.sites import INPUT

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
        ({"chain": (NORM, Add)}, "in the order Add, Norm, Quant"),
        ({"chain": (Add, Add, NORM)}, "has Add twice"),
        ({"chain": (3,)}, "expected steps"),
        ({"chain": "Add"}, "expected steps"),
        ({"op": None}, "expected an Op, got None"),
        ({"op": op(args=(*ARGS, Rows(name="third", like="x")))}, "no step fills third"),
        ({"op": op(results=(*RESULTS, Like(name="more", of="x")))}, "no step gives more"),
    ],
)
def test_fusions(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FusionError, match=says):
        fusion(**changes)
