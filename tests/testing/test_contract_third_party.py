"""A third party holds its own model to the contract in five lines."""

from __future__ import annotations

from pathlib import Path

import contract_mylib
import pytest
from helpers import run_copy

from layerfuse import testing
from layerfuse.testing import AdapterContract, run_contract
from layerfuse.testing.run import results_of


class TestMyEngine(AdapterContract):
    """Layers that are built for one rank and say so, as vLLM's do."""

    model, registry = "my-model", contract_mylib.registry_of()
    decoder_layers = False

    def build(self):
        return contract_mylib.meta_model(make=contract_mylib.MyShardedAttention)

    def build_sharded(self, size, rank):
        return contract_mylib.meta_model(make=lambda i: contract_mylib.MyShardedAttention(i, size, rank))


class TestFiveLines:
    """As the documentation shows it, run by pytest in a process of its own."""

    def test_pytest_collects_the_class(self, pytester_file):
        result = pytester_file(
            "import contract_mylib\n"
            "from layerfuse.testing import AdapterContract\n\n"
            "class TestMine(AdapterContract):\n"
            "    model, registry = 'my-model', contract_mylib.registry_of()\n"
            "    decoder_layers = False\n"
            "    def build(self): return contract_mylib.meta_model()\n"
        )
        assert "12 passed, 2 skipped" in result, result
        assert "build_small is not defined" in result
        assert "holds no inner kernel layer" in result


@pytest.fixture
def pytester_file(tmp_path):
    def run(text):
        (tmp_path / "test_mine.py").write_text(text)
        asked = ["-q", "-rs", "-p", "no:cacheprovider", "test_mine.py"]
        done = run_copy(
            f"import os, pytest; os.chdir({str(tmp_path)!r}); pytest.main({asked!r})", Path(__file__).parent
        )
        return done.stdout + done.stderr

    return run


def test_without_build_the_remedy_is_said():
    class Empty(AdapterContract):
        model, registry = "my-model", contract_mylib.registry_of()

    results = {result.scenario: result for result in results_of(Empty())}
    assert results["C1"].outcome == "failed"
    assert "Empty.build() must return the model" in results["C1"].reason
    # What needs no model is held all the same.
    assert results["C9"].outcome == "passed"


def test_run_contract_names_every_scenario_once_and_in_order():
    results = run_contract("kimi-k3", full=False)
    assert [result.scenario for result in results] == [f"C{number}" for number in range(1, 15)]
    assert {result.outcome for result in results} == {"passed", "skipped"}
    assert [r.scenario for r in results if r.outcome == "passed"] == ["C9"]
    assert "transformers (read up to 5.24) has no kimi_k3" in str(results[0])


def test_an_unknown_model_is_an_error_with_the_closest_name():
    with pytest.raises(LookupError, match="did you mean deepseek-v3"):
        run_contract("deepseek-v33")


@pytest.mark.parametrize(("decoder_layers", "outcome"), [(True, "failed"), (False, "passed")])
def test_an_entry_in_part_is_named_unless_it_is_of_attention_alone(decoder_layers, outcome):
    from torch import nn

    from layerfuse import registry

    model = testing.full_model(registry.model("qwen3-4b"))
    parts = nn.Module()
    parts.blocks, parts.norm = model.model.layers, model.model.norm
    body = {"model": "qwen3-4b", "decoder_layers": decoder_layers, "build": lambda _: parts}
    result = next(r for r in results_of(type("Mine", (AdapterContract,), body)(), full=False) if r.scenario == "C2")
    assert result.outcome == outcome
    if outcome == "failed":
        assert (
            "no adapter knows 1 parts of the model:  (torch.nn.modules.module:Module as FinalNormSpec" in result.reason
        )
