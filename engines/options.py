"""What the user asks of layerfuse inside an engine: by a table of the engine's options, and `LAYERFUSE_FUSIONS`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.errors import LayerfuseError, cut, did_you_mean, shown

if TYPE_CHECKING:
    from ..fusion.config import FusionConfig

KEY = "layerfuse"
"""Under this name of the table."""


BACKEND, SHADOW = "LAYERFUSE_BACKEND", "LAYERFUSE_SHADOW"

LINEARS = "few_token_linear", "few_token_linear_row_quant"
"""The fusions that an option of their own asks for, too."""


class OptionsError(LayerfuseError, ValueError):
    """Options that do not exist, or values of another type; all of them at once."""


def _is(kind: type, words: str) -> Any:
    def validate(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        # A bool is an int in Python, and no level.
        if value is not None and type(value) is not kind:
            raise OptionsError(f"{attribute.name}: expected {words}, got {shown(value)}")

    return validate


def _file(_: Any, attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and not Path(value).name:
        raise OptionsError(f"{attribute.name}: expected the path of a file, got {shown(value)}")


def _number(words: str) -> Any:
    def validate(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and (type(value) is not int or value < 0):
            raise OptionsError(f"{attribute.name}: expected {words}, or 0, got {shown(value)}")

    return validate


def _line(value: Any) -> Any:
    """A list of names as the line that it stands for."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return ",".join(value) or "none"
    return value


@frozen(kw_only=True)
class Options:
    """What is asked for."""

    fusions: str | None = field(
        default=None, converter=_line, validator=_is(str, "a line such as 'all' or '-add_rms_norm', or a list of names")
    )
    "As `LAYERFUSE_FUSIONS` has it: none, all, names, or names with a plus or a minus; None: the default, or what that variable says."
    level: int | None = field(default=None, validator=_is(int, "0, 1 or 2"))
    "The optimisation level; None: that of `fusions`."
    strict: bool = field(default=False, validator=_is(bool, "true or false"))
    "Whether an expected fusion that did not happen stops the engine, or one that is named and has no site in the model."
    eager: bool = field(default=True, validator=_is(bool, "true or false"))
    "Whether fused ops stand in the modules of a model that the engine does not compile."
    report: str | None = field(default=None, validator=[_is(str, "a path"), _file])
    "The file that the report is written to; None: beside what the engine's compiler keeps."
    few_token_linears: bool = field(default=False, validator=_is(bool, "true or false"))
    "As `few_token_linear` and `few_token_linear_row_quant`, each with a plus, among the `fusions`."
    host_bound: int | None = field(default=None, validator=_number("a number of tokens"))
    "Tokens up to which a step of more than the engine captures in CUDA graphs runs its own graph or modules, as it waits for the host; 0: none does; None: all do."

    shadow: int | None = field(default=None, validator=_number("how many calls are compared at each site"))
    "Calls of each fused op at each site that are compared with its reference; None: what `LAYERFUSE_SHADOW` says."

    @property
    def compared(self) -> int:
        """How many calls are compared at each site.

        Raises:
            ArgumentError: `LAYERFUSE_SHADOW` is no number.
        """
        if self.shadow is not None or not os.environ.get(SHADOW, "").strip():
            return self.shadow or 0
        from ..fusion.config import shadow_calls

        return shadow_calls()

    def config(self) -> FusionConfig:
        """The same for plans.

        Raises:
            FusionConfigError: a fusion that does not exist, one that is both on and off, there or by `few_token_linears`, names with a
                sign beside names without, or an unknown level.
        """
        from ..fusion.config import FusionConfig, FusionConfigError

        origin = f"additional_config[{KEY!r}]"
        line = self._line
        said = f"{'LAYERFUSE_FUSIONS' if self._from_environment else 'fusions'}={line}"
        config = FusionConfig(strict=self.strict)
        if line:
            config = FusionConfig.parse(line, origin=said, strict=self.strict)
        if self.few_token_linears:
            off = next((name for name in LINEARS if f"-{name}" in map(str.strip, line.split(","))), None)
            if off is not None:
                raise FusionConfigError(
                    f"{said} switches {off} off, and few_token_linears switches it on: leave one of the two out"
                )
            config = attrs.evolve(config, switches={**dict(config.switches), **dict.fromkeys(LINEARS, True)})
        return config if self.level is None else attrs.evolve(config, level=self.level, origin=origin)

    def check(self) -> None:
        """Ask for the config, and let an error say whose it is.

        Raises:
            FusionConfigError: as `config` says, with the name of the table where it is no error of the environment.
        """
        from ..fusion.config import ENVIRONMENT, FusionConfigError

        try:
            self.config()
        except FusionConfigError as error:
            if str(error).startswith(ENVIRONMENT):
                raise
            raise FusionConfigError(f"additional_config[{KEY!r}]: {error}") from None

    @property
    def _from_environment(self) -> bool:
        return not (self.fusions or "").strip()

    @property
    def _line(self) -> str:
        return (os.environ.get("LAYERFUSE_FUSIONS", "") if self._from_environment else self.fusions or "").strip()

    @property
    def _words(self) -> tuple[str, ...]:
        """Those that ask for something."""
        words = (word.strip() for word in self._line.split(","))
        return tuple(word.lstrip("+") for word in words if word and word[0] != "-" and word != "none")

    @property
    def named(self) -> tuple[str, ...]:
        """What is asked for by name: with `all`, nothing is."""
        return tuple(word for word in self._words if word != "all")

    @property
    def names_alone(self) -> bool:
        """Whether nothing is on but what is named: a name without a sign switches all others off."""
        return any(word.strip()[:1] not in "+-" for word in self._line.split(","))

    @property
    def asks(self) -> bool:
        """Whether anything is asked for: to switch one off asks for nothing."""
        return bool(self._words or self.level or self.few_token_linears)

    @property
    def off(self) -> bool:
        """Whether no fusion is wanted at all."""
        return self._line == "none" and not self.level and not self.few_token_linears

    @property
    def says_nothing(self) -> bool:
        """Whether what is on is left to the default."""
        said = self.fusions is not None or self.level is not None or self.few_token_linears
        return not said and not os.environ.get("LAYERFUSE_FUSIONS", "").strip()


def is_off(additional_config: Any) -> bool:
    """Whether layerfuse is switched off as a whole: `false` in the place of its options."""
    return isinstance(additional_config, Mapping) and additional_config.get(KEY) is False


def misnamed(additional_config: Any) -> Iterator[str]:
    """A sentence on each key of an engine's table that may be meant for the options, where none is theirs."""
    if isinstance(additional_config, Mapping) and KEY not in additional_config:
        from difflib import get_close_matches  # only needed for a message

        for name in additional_config:
            letters = re.sub("[-_]", "", cut(name)).lower() if isinstance(name, str) else ""
            if get_close_matches(letters, [KEY, "layerfusion"], cutoff=0.85):  # `layers` is none
                yield f"additional_config has {shown(name)}, which layerfuse does not read; did you mean {KEY!r}?"


def unread(options: Options) -> Iterator[str]:
    """A sentence on each variable that is wrong and, as no fusion is wanted, stops no engine."""
    if options.off:
        for read in (check_backend, lambda: options.compared):
            try:
                read()
            except LayerfuseError as error:
                yield f"all fusions are switched off, so that this stops nothing: {error}"


def options_in(additional_config: Any) -> Options:
    """The options in an engine's table, as vLLM's `additional_config`; `false` in their place stands for no fusion.

    Raises:
        OptionsError: an unknown option, or a value of another type.
        FusionConfigError: a fusion that does not exist, or an unknown level.
        BackendError: `LAYERFUSE_BACKEND` names a backend that no op has.
        ArgumentError: `LAYERFUSE_SHADOW` is no number.
    """
    if is_off(additional_config):
        return Options(fusions="none")
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise OptionsError(f"additional_config[{KEY!r}]: expected a table of options or false, got {shown(given)}")
    known = [attribute.name for attribute in attrs.fields(Options)]
    problems = [
        f"no option is called {name!r}{did_you_mean(str(name), known) or '.'} Known: {', '.join(known)}"
        for name in given
        if name not in (*known, OWN)
    ]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            try:
                Options(**{name: value})
            except OptionsError as error:
                problems.append(str(error))
            values[name] = value
    if problems:
        raise OptionsError("; ".join(f"additional_config[{KEY!r}]: {problem}" for problem in problems))
    options = Options(**values)
    if not options.off:
        check_backend()
        _ = options.compared
        if not options.says_nothing:
            options.check()
    return options


STRICT, REPORT = "LAYERFUSE_STRICT", "LAYERFUSE_REPORT"
"""Where an engine has no table for options."""


def strict_here() -> bool:
    """Whether the environment asks for `strict`.

    Raises:
        OptionsError: a value that says nothing.
    """
    said = os.environ.get(STRICT, "").strip().lower()
    if said not in ("", "0", "1", "false", "true"):
        raise OptionsError(f"{STRICT}: expected 0 or 1, got {shown(said)}")
    return said in ("1", "true")


def check_backend() -> None:
    """Check the backend that the environment forces.

    Raises:
        BackendError: no op has one of that name.
    """
    if os.environ.get(BACKEND):
        from ..fusion import backends
        from ..fusion import ops as _ops  # noqa: F401 (registers the backends)

        backends.check_forced()


OWN = "key"
"""What stands in the place of the options while an engine makes the key of its cache."""
