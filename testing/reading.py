"""C1 to C6: what the model says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs

from ..adapters.errors import LayerfuseError, MissingAttributeError
from ..adapters.sources import Converted, Path, Quotient
from ..adapters.specs import goes_with
from .attribute_patch import CannotOperateError, changed, without
from .contract_case import ContractCase, Sample
from .reads import GEOMETRY, Read, norms_of, paths_of, reads_of
from .scenario import BrokenContractError, scenario


class ReadingScenarios(ContractCase):
    """What is read equals what the layer says, now."""

    @scenario(1, "What is read equals what is declared")
    def test_c01_read_equals_declared(self) -> None:
        """C1. The specs read off the model's layers, in order, are those that the entry declares."""
        found = self.found()
        self.validate_under_tp(1, 0, found, self.engine_of(found, self.built()))

    @scenario(2, "No layer is overlooked")
    def test_c02_nothing_is_overlooked(self) -> None:
        """C2. No attention, gated MLP, decoder layer or final norm is left that no adapter reads or declares as ignored."""
        unknown = self.asked.unknown_in(self.built())
        if not self.decoder_layers:  # what is no attention is said to be something else
            unknown = [(path, what) for path, what in unknown if " as " not in what]
        listed = "; ".join(f"{path} ({what})" for path, what in unknown[:5])
        self.validate(not unknown, f"no adapter knows {len(unknown)} parts of the model: {listed}")

    @scenario(3, "Reading twice gives equal specs")
    def test_c03_reading_twice_is_equal(self) -> None:
        """C3. Two reads of an untouched layer are equal and hash alike."""
        for sample in self.samples():
            first, second = self.again(sample), self.again(sample)
            self.validate_spec(first, second, f"{sample}, read a second time")
            self.validate(hash(first) == hash(second), f"{sample}: equal specs hash differently")

    @scenario(4, "Every number is read, now")
    def test_c04_reading_is_live(self) -> None:
        """C4. A changed attribute shows in the next read, and no geometry is a constant of the adapter."""
        for sample in self.samples():
            for read in reads_of(sample.reader.facts, sample.spec):
                constant = read.constant
                self.validate(
                    constant is None or read.kind not in GEOMETRY or (read.kind == "count" and constant.value == 1),
                    f"{sample}: {read.field} is the constant {constant and constant.value!r} of the adapter",
                )
                for path, value in _other_values(sample.layer, read):
                    self._validate_moves(sample, read.field, path, value)
            for field, module in norms_of(sample.reader.facts, sample.spec):
                for path, value in _other_epsilons(sample, field, module):
                    self._validate_moves(sample, f"{field}.epsilon", path, value)

    def _validate_moves(self, sample: Sample, field: str, path: Path, value: Any) -> None:
        before = self.again(sample)
        try:
            with changed(sample.layer, path, value):
                try:
                    after = self.again(sample)
                except LayerfuseError:
                    after = None
        except CannotOperateError:
            return
        self.validate(after != before, f"{sample}: {field} stays the same when {path} becomes {_short(value)}")
        self.validate_spec(before, self.again(sample), f"{sample}, after {path} was changed back")

    @scenario(5, "A missing attribute is named")
    def test_c05_missing_attribute_is_named(self) -> None:
        """C5. Without what a field is read from, the error names layer, adapter, field, paths and attributes."""
        for sample in self.samples():
            reads = reads_of(sample.reader.facts, sample.spec)
            for read in reads:
                unsaid = (
                    read.field.partition(".")[0] in sample.reader.facts.inherited
                )  # is None then, which is no error
                if not unsaid and read.paths and (read.constant is None or read.kind in GEOMETRY):
                    self._validate_missing(sample, read, reads)

    def _validate_missing(self, sample: Sample, read: Read, reads: tuple[Read, ...]) -> None:
        where = f"{sample} without what its {read.field} is read from"
        with ExitStack() as stack:
            gone = []
            for path in read.paths:
                try:
                    gone.append(stack.enter_context(without(sample.layer, path)))
                except Exception:  # already gone, or an alternative that this layer never had
                    continue
            self.validate(gone, f"{sample}: none of {', '.join(map(str, read.paths))} could be taken away")
            error = self.validate_refuses(
                MissingAttributeError, partial(self.again, sample), sample.path, sample.reader.owner, where=where
            )
        # Several fields may be read from what is gone; the first of them is the one that is named.
        affected = [other for other in reads if _passes_through(other, gone)]
        named = next((other for other in affected if error.field in (other.field, other.field.split(".")[0])), None)
        if named is None:
            raise BrokenContractError(f"{where}: the error names the field {error.field}, which is not read from it")
        self.validate(
            error.adapter == sample.reader.owner,
            f"{where}: the error names the adapter {error.adapter}, not {sample.reader.owner}",
        )
        tried = " ".join(error.tried)
        for place in named.places if error.field == named.field else (Path(named.inner),):
            told = any(str(path) in tried for path in paths_of(place)) or not paths_of(place)
            self.validate(told, f"{where}: the error does not list {place} among what was tried: {error}")
        self.validate(error.existing, f"{where}: the error lists none of the attributes that exist")

    @scenario(6, "0 and None are values")
    def test_c06_zero_and_none_are_values(self) -> None:
        """C6. 0 and None come out as they are, or are refused by name; neither is taken for a missing attribute."""
        for sample in self.samples():
            reads = reads_of(sample.reader.facts, sample.spec)
            for read in reads:
                place = read.used(sample.layer)
                if isinstance(place, Path) and type(place.read(sample.layer)) in (int, float, type(None)):
                    for value in (0, None):
                        self._validate_value(sample, read, reads, place, value)
            for attribute in attrs.fields(type(sample.spec)):
                partner = goes_with(attribute)
                if partner is not None:
                    self._validate_partners(sample, attribute.name, partner)

    def _validate_value(self, sample: Sample, read: Read, reads: tuple[Read, ...], place: Path, value: Any) -> None:
        where = f"{sample} with {place} = {value}"
        sharers = [other.field for other in reads if any(path.steps == place.steps for path in other.paths)]
        try:
            with changed(sample.layer, place, value):
                spec = self.again(sample)
        except CannotOperateError:
            return
        except LayerfuseError as error:
            # A linear that tells the sharding too is asked for that first, and named itself.
            parsed: Any = sample.reader.facts.parsed
            linears = [path.steps for path in parsed.get("tp_weight", ())]
            linear = ".".join(place.steps[:-1])
            told = any(field.split(".")[-1] in str(error) for field in sharers)
            told = told or (place.steps[:-1] in linears and f"the weight of {linear}" in str(error))
            self.validate(told, f"{where}: refused without naming {' or '.join(sharers)}: {error}")
            return
        said = _field(spec, read.field)
        self.validate(
            said == value and (said is None) == (value is None), f"{where}: {read.field} was read as {said!r}"
        )

    def _validate_partners(self, sample: Sample, name: str, partner: str) -> None:
        """A latent and its norm come together: without the one the other is None, and with it the other is asked for."""
        parsed: Any = sample.reader.facts.parsed
        place = parsed[partner][0]
        if not isinstance(place, Path):  # a constant of the class: it has no other kind of layer
            return
        there = getattr(sample.spec, partner) is not None
        where = f"{sample} with {partner} {'taken away' if there else 'of 7'}"
        with changed(sample.layer, place, None if there else 7):
            if there:
                found = getattr(self.again(sample), name)
                self.validate(found is None, f"{where}: {name} was read as {found}")
            else:
                self.validate_refuses(LayerfuseError, partial(self.again, sample), name, where=where)


def _field(spec: Any, name: str) -> Any:
    for part in name.split("."):
        spec = getattr(spec, part)
        if isinstance(spec, tuple):
            spec = spec[0]
    return spec


def _passes_through(read: Read, gone: list[tuple[str, ...]]) -> bool:
    return any(path.steps[: len(steps)] == steps for path in read.paths for steps in gone)


def _other_values(layer: Any, read: Read) -> Iterator[tuple[Path, Any]]:
    """Paths that decide a field, each with a value that must change it."""
    place = read.used(layer)
    if isinstance(place, Converted) and place.convert == "present":
        (path, *_) = paths_of(place)
        yield path, None if path.read(layer) is not None else 1
    elif isinstance(place, (Path, Converted)):
        for path in paths_of(place):
            if path.steps[-1] == "0" and path.steps[-2:-1] == ("shape",):
                weight = Path(path.steps[:-2])
                yield weight, _wider(weight.read(layer))
            else:
                value = _other(path.read(layer))
                if value is not None:
                    yield path, value
    elif isinstance(place, Quotient):
        yield place.dividend, 2 * place.dividend.read(layer)


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 if value else 1
    if value is None:
        return 7
    if isinstance(value, str):
        return {"silu": "sigmoid", "swish": "sigmoid", "sigmoid": "silu"}.get(value, _renumbered(value))
    return None


def _renumbered(name: str) -> str:
    return ".".join(str(int(part) + 1) if part.isdigit() else part for part in name.split("."))


def _wider(weight: Any) -> Any:
    return weight.new_empty(weight.shape[0] + 2, *weight.shape[1:])


def _other_epsilons(sample: Sample, field: str, module: Path) -> Iterator[tuple[Path, Any]]:
    """Numbers on a norm module that equal the epsilon that was read: whatever they are called, they must move it."""
    norm = _field(sample.spec, field)
    for name, value in vars(module.read(sample.layer)).items():
        if isinstance(value, float) and value == norm.epsilon:
            yield Path((*module.steps, name)), value * 2


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
