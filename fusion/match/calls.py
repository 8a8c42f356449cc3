"""One call of an op as graphs hold it: by itself, or under auto_functionalized where the op writes into its arguments.

Arguments and what reads the results are given by position, since the names of arguments change between releases.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch.fx import Node

from .values import same_shape, value

aten = torch.ops.aten
_FUNCTIONALISED = torch.ops.higher_order.auto_functionalized
_FUNCTIONALISED_V2 = torch.ops.higher_order.auto_functionalized_v2
_VIEWS = (aten.permute.default, aten.as_strided.default, aten.view.default, aten.slice.Tensor, aten.alias.default)
_EMPTY = (aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default)


@frozen(kw_only=True, eq=False)
class Call:
    """One call."""

    node: Node
    name: str
    "Qualified, as `_C::rms_norm`."
    given: Mapping[str, Any]
    "Every argument by its name, defaults included; for one that is written, what was in it before."
    results: Mapping[int, Node]
    """What is read: of an op that writes, the position of each written argument -> the node that holds it afterwards; of
    any other, the number of each result -> its node, 0 for an only one."""
    nodes: tuple[Node, ...]
    "The call, and what takes its results apart."
    buffers: tuple[Node, ...]
    "Uninitialised tensors that nothing but this call reads."
    parts: frozenset[int] = frozenset()
    "Positions of written arguments that are views of what `given` has: a part of it, or laid out anew."

    def __getitem__(self, position: int) -> Any:
        """The argument at a position of the schema, None where it has fewer."""
        return next(iter([*self.given.values()][position : position + 1]), None)


def find_op(name: str) -> Any | None:
    """The default overload of a qualified op name, or None where no loaded library defines it."""
    namespace, op = name.split("::")
    if not torch._C._jit_get_schemas_for_operator(name):
        return None
    return getattr(getattr(torch.ops, namespace), op).default


def name_of_op(node: Node) -> str | None:
    """The qualified name of the op that a node calls, or None where it calls none."""
    op = node.args[0] if node.target in (_FUNCTIONALISED, _FUNCTIONALISED_V2) else node.target
    return str(op._schema.name) if isinstance(op, torch._ops.OpOverload) else None


def overload_of_op(node: Node) -> str | None:
    """As `name_of_op`, with the overload behind a dot where it is not the default one."""
    op = node.args[0] if node.target in (_FUNCTIONALISED, _FUNCTIONALISED_V2) else node.target
    overload = op._schema.overload_name if isinstance(op, torch._ops.OpOverload) else ""
    name = name_of_op(node)
    return f"{name}.{overload}" if overload else name


def call_of(node: Node) -> Call:
    """The call that a node with a `name_of_op` is."""
    if node.target is _FUNCTIONALISED:
        return _functionalised(node)
    if node.target is _FUNCTIONALISED_V2:
        return _functionalised_v2(node)
    schema = node.target._schema
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given.update(zip(given, node.args, strict=False))
    results = {0: node} if len(schema.returns) == 1 else _parts(node)
    nodes = (node,) if len(schema.returns) == 1 else (node, *results.values())
    return Call(node=node, name=schema.name, given={**given, **node.kwargs}, results=results, nodes=nodes, buffers=())


def _functionalised(node: Node) -> Call:
    schema = node.args[0]._schema
    given = {each.name: node.kwargs.get(each.name, each.default_value) for each in schema.arguments}
    parts, first = _parts(node), max(1, len(schema.returns))
    written = _written(schema)
    results = {position: parts[first + i] for i, position in enumerate(written) if first + i in parts}
    return _call(node, schema, given, parts, results)


def _functionalised_v2(node: Node) -> Call:
    """The written arguments are views of bases, and what reads them views of what the bases have become."""
    schema = node.args[0]._schema
    given = {each.name: node.kwargs.get(each.name, each.default_value) for each in schema.arguments}
    parts, first = _parts(node), max(1, len(schema.returns))
    bases: Any = node.kwargs["_all_bases"]
    results: dict[int, Node] = {}
    views: set[int] = set()
    for position in _written(schema):
        prefix = f"_{schema.arguments[position].name}"
        base = node.kwargs.get(f"{prefix}_base_index")
        if not isinstance(base, int):
            continue
        given[schema.arguments[position].name] = bases[base]
        after = parts.get(first + base)
        if f"{prefix}_size" in node.kwargs or f"{prefix}_slice_dim" in node.kwargs:
            # Of a view that lies as its base does torch says `alias`, and neither of the two.
            after = _view_after(node, prefix, after)
            views.add(position)
        if after is not None:
            results[position] = after
    return evolve(_call(node, schema, given, parts, results), parts=frozenset(views))


def _numbers(sizes: list[Any] | tuple[Any, ...]) -> list[Any]:
    return [value(each) if isinstance(each, Node) else each for each in sizes]


def _view_after(node: Node, prefix: str, base: Node | None) -> Node | None:
    """The one view of a base that lies as the argument did; None where there is no such view, or several."""
    size, stride = node.kwargs.get(f"{prefix}_size"), node.kwargs.get(f"{prefix}_stride")
    if base is None or not isinstance(size, list | tuple) or node.kwargs.get(f"{prefix}_storage_offset") != 0:
        return None
    wanted = [_numbers(several) for several in (size, stride)]
    views = [
        user
        for user in base.users
        if user.target in _VIEWS
        and same_shape(value(user).shape, wanted[0])
        and same_shape(value(user).stride(), wanted[1])
    ]
    return views[0] if len(views) == 1 == len(base.users) else None


def _written(schema: Any) -> list[int]:
    return [i for i, each in enumerate(schema.arguments) if each.alias_info is not None and each.alias_info.is_write]


def _parts(node: Node) -> dict[int, Node]:
    """Number of each result that is read -> its node."""
    found: dict[int, Node] = {}
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            found.setdefault(user.args[1], user)
    return found


def _call(node: Node, schema: Any, given: dict[str, Any], parts: dict[int, Node], results: dict[int, Node]) -> Call:
    buffers: list[Node] = []
    stack = [node]
    for each in stack:
        for source in each.all_input_nodes:
            if len(source.users) == 1 and (source.target in _EMPTY or (source.target in _VIEWS and _is_empty(source))):
                buffers.append(source)
                stack.append(source)
    nodes = dict.fromkeys((node, *parts.values(), *results.values()))
    return Call(node=node, name=schema.name, given=given, results=results, nodes=tuple(nodes), buffers=tuple(buffers))


def _is_empty(node: Node) -> bool:
    while node.target in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.target in _EMPTY
