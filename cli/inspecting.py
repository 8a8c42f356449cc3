"""`layerfuse inspect`: the entry on stdout, and everything said about it on stderr; or where the fields of a layer were read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..adapters.errors import ArgumentValueError, counted, did_you_mean
from .models import inspected, registry_with


def answer_inspect(path: Path, *, name: str | None, files: Sequence[Path], json: bool) -> None:
    """Print what a config describes.

    Raises:
        ConfigError: it does not say enough; everything missing is listed.
        SystemExit: with 1, after a draft that the model's own code contradicts.
    """
    registry = registry_with(files)
    found = inspected(path, registry, name)
    if not found.same_as:
        from ..testing.infer_from_code import ask_code

        found = ask_code(found, registry)
    if json:
        from ..registry.files import unstructure
        from .console import print_json

        print_json(
            {
                "entry": None if found.problems else unstructure({found.entry.name: found.entry}),
                "problems": found.problems,
                "adapter": found.entry.adapter,
                "recognised": found.recognised,
                "same_as": found.same_as,
                "differs": found.differs,
                "notes": found.notes,
            }
        )
        raise SystemExit(1 if found.problems else 0)
    said = list(found.recognised)
    if found.same_as:
        first, *others = found.same_as
        same = f" (and {', '.join(others)}, with the same layers)" if others else ""
        entry = f"the one that follows is for the name {found.entry.name}"
        quantised, theirs = (set(map(str, each.quant.values())) for each in (found.entry, registry.model(first)))
        if not found.is_of_type(registry.model(first)):
            said.append(
                f"its layers are those of {first}{same}, of another model_type: `layerfuse plan {path}` plans it without an entry; {entry}"
            )
        elif quantised == theirs and found.unread is None:
            said.append(f"this is {first}{same}: `layerfuse plan {first}` knows it without an entry; {entry}")
        else:
            how = " | ".join(sorted(quantised)) or "not, as far as that is read"
            said.append(
                f"its layers are those of {first}{same}, quantised otherwise ({how}): `layerfuse plan {path}` plans it without an entry; {entry}"
            )
    said += found.differs
    if found.problems:
        said += found.problems
        said.append(
            "so the entry is a draft, printed as comments: correct it, declare what is missing, and check "
            f"it with `layerfuse contract {found.entry.name} --models FILE`"
        )
    elif found.notes:
        said.append(f"what is left to check is noted above the entry, in {counted(len(found.notes), 'line')}")
    print("\n".join(said), file=sys.stderr)
    print(found.toml(), end="")
    if found.problems:
        raise SystemExit(1)


def answer_layer(path: Path, layer: str, *, files: Sequence[Path]) -> None:
    """Print where each field of a layer's specs was read, of the model that transformers builds from a config, on the meta device.

    Raises:
        ConfigError: the config does not say enough.
        NotBuildableError: transformers has no such model, does not take the config, or is not installed.
        ArgumentValueError: the model has no such layer, or nothing is known of its class.
    """
    from ..testing.infer_from_code import NOT_BUILT, why_not_built
    from ..testing.models import NotBuildableError, published_model

    registry = registry_with(files)
    found = inspected(path, registry)
    try:
        model = published_model(found.entry, found.config)
    except NotBuildableError:
        raise
    except Exception as error:
        raise NotBuildableError(f"{NOT_BUILT}: {why_not_built(error, found.config)}") from error
    modules = dict(model.named_modules())
    readers = registry.readers_for(type(modules[layer])) if layer in modules else ()
    if not readers:
        known = [name for name, _ in registry.specs_in(model)]
        what = "no layer that is read" if layer in modules else "no layer of this model"
        raise ArgumentValueError(f"--layer {layer}: {what}{did_you_mean(layer, known) or '.'}")
    for reader in readers:
        print(registry.explain(modules[layer], reader.facts.spec, path=layer))
