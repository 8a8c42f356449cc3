"""Releases that were never made: one change to one signature. None gives a wrong number.

The check that holds the bindings to the record (`recorded`) must turn red for every change that a call by name could tell, and what is
then still called, because it does not care, must still be right.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from binding_checks import check_numbers
from check_tools import installed
from standin import Mutation, definitions, make_standin, shared_standin
from standin.recorded import parts
from test_bindings import NAMES, refused

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import Bound, Probed, Refused
from layerfuse.fusion.backends.aiter.source import Signature, read_signature
from layerfuse.fusion.backends.aiter.table import BY_NAME

SOME_RELEASES = ("v0.1.16.post6", "v0.1.20")


def mutations(function: str, release: str, whole: bool) -> Iterator[Mutation]:
    """Every change of a kind that AITER's releases have made; unless `whole`, each parameter in turn is renamed, dropped, or swapped with the next one where both are alike."""
    written = definitions(release)[function].parameters
    star = written.index("*") if "*" in written else len(written)
    parameters = [(*parts(p), place > star) for place, p in enumerate(written) if p not in ("self", "*")]
    yield Mutation("rename", function, name="renamed")
    yield Mutation("insert", function, parameters[0][0], name="inserted")
    for place, (parameter, _, default, by_name) in enumerate(parameters):
        rename = Mutation("rename_parameter", function, parameter, name=f"{parameter}_renamed")
        other = (parameters[place + 1 :] or parameters[:place][::-1])[0]
        alike = (other[2] is None) is (default is None) and other[3] is by_name
        swap = Mutation("swap", function, parameter, other[0]) if alike else rename
        changes = [rename, Mutation("drop", function, parameter), swap]
        yield from dict.fromkeys(changes) if whole else [changes[place % 3]]


def changed_cases() -> Iterator[tuple[str, str]]:
    """Every function that bindings use, in some releases, but only once where it is declared alike."""
    seen: dict[str, list[object]] = {}
    for release in reversed(SOME_RELEASES):
        used = [BY_NAME[name].function.path for name in NAMES if not refused(name, release)]
        for function in dict.fromkeys(used):
            declared = definitions(release)[function]
            if declared not in seen.setdefault(function, []):
                seen[function].append(declared)
                yield function, release


@pytest.mark.parametrize(
    ("function", "release", "whole"),
    [pytest.param(*case, False) for case in changed_cases() if case[1] == SOME_RELEASES[-1]]
    + [pytest.param(*case, True, marks=pytest.mark.thorough) for case in changed_cases()],
)
def test_every_change_turns_the_check_red(function, release, whole, tmp_path):
    users = [name for name in NAMES if BY_NAME[name].function.path == function and not refused(name, release)]
    assert users
    changes = list(mutations(function, release, whole))
    assert {each.parameter for each in changes} >= {*definitions(release)[function].names} - {"self"}
    for mutation in changes:
        with installed(make_standin(tmp_path, release, mutate=mutation)):
            changed = read_signature(tmp_path / "aiter", function)
            for binding in users:
                check_changed(binding, release, mutation, changed)


def check_changed(binding: str, release: str, mutation: Mutation, changed: Signature | None) -> None:
    """One binding after one change: refused with the lists, or right, and seen where a call by name could tell."""
    function, found = mutation.function, amd.probe(binding)
    if isinstance(found, Refused):
        if mutation.kind == "rename":
            assert "has no such function" in found.reason
        elif "this build looks like no release known here" not in found.reason and "came with" not in found.reason:
            assert f"{function} has an unknown signature: ({changed}). Known: (" in found.reason, mutation
        assert isinstance(amd.bind(binding), Refused)
        return
    known = {parameter.name: parameter for parameter in BY_NAME[binding].function.signature.parameters}
    gone = mutation.kind == "drop" and known[mutation.parameter].sometimes
    assert not found.recorded or mutation.kind == "swap" or gone, mutation
    assert f"({changed})" in found.convention
    bound = amd.bind(binding)
    assert isinstance(bound, Bound)
    check_numbers(bound)


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.20"])
def test_a_new_parameter_that_may_be_left_out_does_no_harm_and_is_seen(release, tmp_path):
    folder = make_standin(tmp_path / "a", release)
    for name in ("add_rms_norm", "mla_decode", "mla_metadata_info"):
        module, _, function = BY_NAME[name].function.path.partition(":")
        file = folder / (module.replace(".", "/") + ".py")
        source = file.read_text()
        at = source.index(")", source.index(f"def {function}("))
        while source[at : at + 2] not in (")\n", ") ", "):", ") -"):
            at = source.index(")", at + 1)
        file.write_text(source[:at] + ", brand_new=None" + source[at:])
    with installed(folder):
        for name in ("add_rms_norm", "mla_decode", "mla_metadata_info"):
            found = amd.bind(name)
            assert isinstance(found, Bound), found
            assert not found.probed.recorded
            assert "brand_new=" in found.convention
            check_numbers(found)


def test_the_check_is_green_where_nothing_was_changed():
    with installed(shared_standin("v0.1.20")):
        for found in amd.probe_all():
            assert isinstance(found, Probed) and found.recorded, found
