"""The contract as a test class: subclass it in five lines and run pytest."""

from __future__ import annotations

from .classes import ClassScenarios
from .fusing import FusingScenarios
from .reading import ReadingScenarios
from .scenario import Scenario, scenarios_of
from .sharding import ShardingScenarios


class AdapterContract(ReadingScenarios, ShardingScenarios, ClassScenarios, FusingScenarios):
    """What an adapter must do, one test per scenario of docs/contract.md.

        class TestMyModel(AdapterContract):
            model = "my-model"

            def build(self):
                return MyModel(...)

    `model` is the name of a declared entry and `build` returns the model with its published dimensions. See `ContractCase`
    for what else can be set: `registry`, `engine`, `parallel`, `build_small`, `build_sharded`.
    """


SCENARIOS: tuple[Scenario, ...] = scenarios_of(AdapterContract)
"""All scenarios, in order."""
