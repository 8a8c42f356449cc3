"""How a Hugging Face config says that its checkpoint is quantised: `quantization_config`, in the words of entries.

What it leaves out is held to the names that the linears have in checkpoints. Where part of them is left out, or the method is not
known here, nothing is written, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from ..adapters.errors import FOREIGN, LayerfuseError, cut, shown
from .kinds import GatedDeltaNetKind, GQAKind, LayerKind, MLAKind
from .published import LINEARS, Linears, QuantKind
from .quant_methods import METHODS, UNREAD, MalformedError, UnreadError, left_out

_NAMES: Mapping[Linears, tuple[str, ...]] = {
    "mlps": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared_experts": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
}
"""Of each, linears as checkpoints call them below a decoder layer. Those of attention differ by its kind (`_attention`)."""


def _attention(kind: LayerKind) -> list[list[str]]:
    """The linears of such a layer, in each of the ways in which checkpoints cut them."""
    if isinstance(kind, MLAKind):
        queries = ["q_proj"] if kind.q_lora_rank == "none" else ["q_a_proj", "q_b_proj"]
        ways = [["o_proj", *queries, "kv_a_proj_with_mqa", "kv_b_proj"]]
    elif isinstance(kind, GQAKind) and not kind.shares_kv:
        values = [] if kind.values_are_keys else ["v_proj"]
        ways = [["o_proj", "q_proj", "k_proj", *values], ["o_proj", "qkv_proj"]]
    elif isinstance(kind, GatedDeltaNetKind):
        ways = [["o_proj", "q_proj", "k_proj", "v_proj"]]
        if kind.output_norm.activation == "silu":  # Qwen's and Olmo's; Kimi's are called as its attention
            ways += [["out_proj", "in_proj_qkvz"], ["out_proj", "in_proj_qkv", "in_proj_z"]]
            return [[f"linear_attn.{name}" for name in way] for way in ways]
    else:
        ways = [["o_proj", "q_proj"]]
    return [[f"self_attn.{name}" for name in way] for way in ways]


_LEFT_OUT = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules"),
    *("llm_int8_skip_modules", "skip_modules"),
)
"""Where the methods say what they leave out."""

MOST_NAMES = 2_000
"""More names that are left out than any config has are not held to the linears."""

_PATTERN = re.compile(r"[\w.*\\()|^$-]{1,200}")
"""Of the patterns of compressed-tensors those that are tried: a pattern may take longer than any file is worth."""


def quant_of(
    said: Any, held: Sequence[Linears], layers: Sequence[LayerKind], file: str, where: str
) -> tuple[dict[str, QuantKind], str | None]:
    """The tables of an entry, and a note where there are none though the config has some.

    Args:
        said: its `quantization_config`, what ModelOpt's file says in its place, or None.
        held: what the model has linears of.
        layers: the kind of each decoder layer.
        file: where it was read, as the source of the tables.
        where: what notes call it.

    Raises:
        MalformedError: it is no table, or has a value that its method cannot have there.
    """
    if said is None:
        return {}, None
    if not isinstance(said, Mapping):
        raise MalformedError(f'expected a table, as {{"quant_method": "fp8", ...}}, got {shown(said)}')
    noting = _Noting(said)
    try:
        return _read(noting, held, layers, file), None
    except UnreadError as why:
        return {}, f"{where} is not read: {why}; declare it under quant"
    except MalformedError:
        raise
    except FOREIGN:
        key, value = noting.last
        raise MalformedError(
            f"{key}: got {shown(value)}, which {shown(said.get('quant_method'))} does not have there"
        ) from None


class _Noting(Mapping[str, Any]):
    """A table that knows what of it was looked at last: where a value is of another type than any method has, that is the one."""

    def __init__(self, table: Mapping[str, Any], above: _Noting | None = None, name: str = "") -> None:
        self._table = table
        self._top = above or self
        self._name = name
        self.last: tuple[str, Any] = ("", table)

    def __getitem__(self, key: str) -> Any:
        value, place = self._table[key], f"{self._name}{key}"
        self._top.last = place, value
        return _Noting(value, self._top, f"{place}.") if isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return repr(self._table)


def _read(
    said: Mapping[str, Any], held: Sequence[Linears], layers: Sequence[LayerKind], file: str
) -> dict[str, QuantKind]:
    method = said.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise MalformedError(f'quant_method: expected a text, as "fp8", got {shown(method)}')
    if method is None and (said.get("producer") or {}).get("name") == "modelopt":
        method = "modelopt"
    inner = said.get("quantization")  # in ModelOpt's own file
    if isinstance(inner, Mapping):
        said = {**said, **inner}
    elif inner is not None and method == "modelopt":
        raise MalformedError(f'quantization: expected a table, as {{"quant_algo": "FP8"}}, got {shown(inner)}')
    own = said.get("linear_fp8_config")
    if method == "compressed-tensors" and own is not None:
        return _with_linears_in_fp8(said, own, held, layers, file)
    reading = METHODS.get(str(method))
    if reading is None:
        why = UNREAD.get(str(method), f"{', '.join(METHODS)} are known here")
        raise UnreadError(f"its quant_method is {shown(method)}: {why}")
    left = [text for key in _LEFT_OUT for text in _texts(said, key)] + left_out(said)
    if len(left) > MOST_NAMES:
        raise UnreadError(f"it leaves out {len(left)} names")
    linears = [each for each in LINEARS if each in held and not _is_left_out(each, left, layers)]
    if not linears:
        raise UnreadError("it leaves out every linear that is known here")
    kind = QuantKind(linears=linears, source=file, method=method, **reading(said))
    try:
        problems = list(kind.problems())
    except LayerfuseError as error:
        problems = [str(error)]
    if problems:
        raise UnreadError("; ".join(problems))
    return {str(method) if str(method).startswith(("fp8", "mx", "nv")) else kind.weight.partition("_")[0]: kind}


def _with_linears_in_fp8(
    said: Mapping[str, Any], own: Any, held: Sequence[Linears], layers: Sequence[LayerKind], file: str
) -> dict[str, QuantKind]:
    """SGLang's `CompressedTensorsConfig.from_config`: all linears as a config of fp8 of their own says, and routed experts by the groups."""
    if not isinstance(own, Mapping) or own.get("quant_method") != "fp8":
        raise UnreadError("its linear_fp8_config has no quant_method fp8, and SGLang then quantises as it loads")
    groups = {key: value for key, value in said.items() if key != "linear_fp8_config"}
    found = _read(own, [each for each in held if each != "experts"], layers, f"{file}, linear_fp8_config")
    return found | (_read(groups, ["experts"], layers, file) if "experts" in held else {})


def _texts(said: Mapping[str, Any], key: str) -> list[str]:
    value = said.get(key)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise MalformedError(f'{key}: expected a list of texts, as ["lm_head"], got {shown(value)}')
    return list(value)


def _is_left_out(linears: Linears, left: Sequence[str], layers: Sequence[LayerKind]) -> bool:
    """Whether none of these linears is converted.

    Raises:
        UnreadError: some are, and some are not.
    """
    out: list[str] = []
    whole = True
    for index, kind in enumerate(layers):
        ways = _attention(kind) if linears == "attention" else [[*_NAMES[linears]]]
        paths = [[f"layers.{index}.{name}" for name in way] for way in ways]
        named = {path: any(_names(text, path) for text in left) for path in dict.fromkeys(chain(*paths))}
        out += [path for path, is_named in named.items() if is_named]
        whole = whole and any(all(map(named.__getitem__, way)) for way in paths)
    if out and not whole:
        raise UnreadError(f"it leaves out some of the {linears.replace('_', ' ')} ({cut(out[0])}), and not all")
    return bool(out)


def _names(text: str, name: str) -> bool:
    """Whether what a config leaves out is this linear: a pattern of compressed-tensors, a path, a path with stars, or a part of one.

    The path of the layers differs, as where a model has pictures too.
    """
    if text.startswith("re:"):
        if not _PATTERN.fullmatch(text[3:]) or text.count("*") > 2 or ")*" in text:
            raise UnreadError(f"it leaves out what matches {shown(text)}")
        return re.match(text[3:], f"model.{name}") is not None
    text = text[text.find("layers.") if "layers." in text else 0 :]
    if "*" in text:
        return fnmatchcase(name, text) or fnmatchcase(name, f"{text}.*")
    return f".{text}." in f".model.{name}."


def held_by(mlps: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Linears]:
    """What a model has linears of, by its entry's MLPs and its config."""
    yield "attention"
    if any(name != "shared_experts" for name in mlps):
        yield "mlps"
    if "shared_experts" in mlps:
        yield "shared_experts"
    if any(values.get(key) for key in ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")):
        yield "experts"
