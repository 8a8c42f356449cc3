"""What a checkpoint's safetensors files say of their tensors: names, dtypes, shapes. Their data is not read, and no library is needed.

The format is https://github.com/huggingface/safetensors: eight bytes with the length of the header, a JSON header, the data.
"""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from ..adapters.errors import LayerfuseError, cut, shown

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_MOST_DIMENSIONS = 64


class WeightsError(LayerfuseError, ValueError):
    """A file of a checkpoint that is not what its format says."""

    def __init__(self, file: str, problem: str) -> None:
        self.file = file
        self.problem = problem
        super().__init__(file, problem)

    def __str__(self) -> str:
        return f"{cut(self.file, 400)}: {self.problem}"


@frozen
class Tensor:
    """One tensor of a checkpoint."""

    dtype: str
    "In the format's words: BF16, F8_E4M3, U8."
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_headers(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint: of its one file, or of those that its index names.

    Raises:
        WeightsError: a file is missing, cut short or not of its format, or the index contradicts the files.
    """
    index = folder / INDEX
    try:
        if not index.exists():
            files = sorted(folder.glob("*.safetensors"))
            if len(files) != 1:
                raise WeightsError(str(folder), f"holds {len(files) or 'no'} *.safetensors files and no {INDEX}")
            return read_header(files[0])
        places = _weight_map(index)
        found = {file: read_header(folder / file) for file in sorted(set(places.values()))}
    except OSError as error:
        raise WeightsError(error.filename or str(folder), f"cannot be read: {error.strerror or error}") from None
    for name, file in places.items():
        if name not in found[file]:
            raise WeightsError(str(index), f"{shown(name)} is not in {file}")
    for file, tensors in found.items():
        for name in tensors:
            if places.get(name) != file:
                raise WeightsError(str(index), f"does not say that {shown(name)} is in {file}")
    return {name: found[file][name] for name, file in places.items()}


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        WeightsError: it is cut short, or not of the format.
        OSError: it cannot be read.
    """
    said = str(file)
    size = _size(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            most = "the format allows" if length > LARGEST_HEADER else f"the {size} bytes of the file hold"
            raise WeightsError(
                said, f"is cut short or no safetensors file: a header of {length} bytes is more than {most}"
            )
        header = _object(said, opened.read(length))
    _texts(said, header.pop("__metadata__", None) or {}, "__metadata__")
    spans, tensors = [], {}
    for name, words in header.items():
        tensor, begin, end = _tensor(said, name, words)
        spans.append((begin, end, name))
        tensors[name] = tensor
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise WeightsError(said, f"{shown(name)} begins at {begin}, and what is before it ends at {at}")
        at = end
    if at != size - 8 - length:
        raise WeightsError(
            said, f"is cut short or too long: its tensors take {at} bytes, and it holds {size - 8 - length}"
        )
    return tensors


def _size(file: Path) -> int:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for whoever writes it
        raise WeightsError(str(file), "is no regular file")
    return found.st_size


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says it. A file is one of the same folder."""
    if _size(index) > LARGEST_HEADER:
        raise WeightsError(str(index), f"is larger than {LARGEST_HEADER} bytes, which no index is")
    places = _texts(str(index), _object(str(index), index.read_bytes()).get("weight_map"), "weight_map")
    for file in set(places.values()):
        if Path(file).name != file or "\\" in file or "\0" in file or not file.endswith(".safetensors"):
            raise WeightsError(str(index), f"weight_map: {shown(file)} is no safetensors file of the same folder")
    return places


def _object(file: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _once(file, pairs))
    except RecursionError:
        raise WeightsError(file, "its JSON is nested too deeply") from None
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError(file, f"its header is not JSON: {cut(str(error), 200)}") from None
    if not isinstance(found, dict):
        raise WeightsError(file, f"expected a JSON object, got {shown(found)}")
    return found


def _once(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise WeightsError(file, f"{shown(twice)} stands there twice")
    return found


def _texts(file: str, words: Any, what: str) -> dict[str, str]:
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        raise WeightsError(file, f"{what}: expected an object of texts, got {shown(words)}")
    return words


def _tensor(file: str, name: str, words: Any) -> tuple[Tensor, int, int]:
    """A tensor, and where its data begins and ends behind the header."""
    if not isinstance(words, dict) or set(words) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(file, f"{shown(name)}: expected dtype, shape and data_offsets, got {shown(words)}")
    dtype, shape, offsets = words["dtype"], words["shape"], words["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightsError(file, f"{shown(name)}: {shown(dtype)} is no dtype of the format")
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise WeightsError(file, f"{shown(name)}: {key}: expected whole numbers from 0, got {shown(numbers)}")
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        raise WeightsError(file, f"{shown(name)}: {len(shape)} dimensions and {len(offsets)} data_offsets")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise WeightsError(file, f"{shown(name)}: {dtype} {shown(shape)} does not take the bytes {begin} to {end}")
    return Tensor(dtype, tuple(shape)), begin, end
