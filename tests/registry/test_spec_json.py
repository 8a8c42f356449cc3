"""Specs as JSON: what is written is read back equal, and is of the schema that ships."""

import functools
import json
from pathlib import Path

import jsonschema
import pytest
from helpers import every_model

from layerfuse.registry import default, spec_json

ROOT = Path(__file__).parents[2]


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(spec_json.schema())


@pytest.mark.parametrize("name", every_model())
def test_every_entry_is_read_back_equal_and_is_of_the_schema(name) -> None:
    entry = default.model(name)
    for tp, published in ((1, False), (2, True)):
        if entry.refusal(tp, None) is not None:
            continue
        specs = entry.specs(tp, published=published)
        said = json.loads(json.dumps(spec_json.to_json(specs)))
        assert spec_json.from_json(said) == specs
        seen = {json.dumps({**layer["spec"], "layer_index": 0}): layer for layer in said["layers"]}
        validator().validate({**said, "layers": list(seen.values())})


def test_the_schema_that_ships_is_the_one_of_the_classes() -> None:
    assert (ROOT / "specs.schema.json").read_text() == spec_json.text(), (
        "run: python -m layerfuse.registry.spec_json > specs.schema.json"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"layers": 3},
        {"layers": [{"path": "a", "spec": {"type": "Popen"}}]},
        {"layers": [{"path": "a"}]},
    ],
)
def test_what_is_no_specs_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(spec_json.SpecJsonError):
        spec_json.from_json({"version": 1, "layers": []} | change)
