"""What a third party needs to hold its own adapter, fusion, step or kernel to its contract (docs/contract.md), shipped in the wheel.

    from layerfuse.testing import AdapterContract

    class TestMyModel(AdapterContract):
        model = "my-model"

        def build(self):
            return MyModel(...)

Without pytest, `run_contract("my-model")` (on the command line `layerfuse contract my-model`) does the same for a model
that transformers can build. Importing this package imports neither torch, transformers nor pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .contract import SCENARIOS, AdapterContract
    from .fusion_contract import FusionContract, KernelContract, StepContract
    from .mla_decode import MLADecodeLayer, mla_decode_layer
    from .models import NotBuildableError, config_of, full_model, small_entry, small_model, why_not
    from .run import Result, iter_contract, run_contract
    from .scenario import BrokenContractError, Scenario

__all__ = [
    "SCENARIOS",
    "AdapterContract",
    "BrokenContractError",
    "FusionContract",
    "KernelContract",
    "MLADecodeLayer",
    "NotBuildableError",
    "Result",
    "Scenario",
    "StepContract",
    "config_of",
    "full_model",
    "iter_contract",
    "mla_decode_layer",
    "run_contract",
    "small_entry",
    "small_model",
    "why_not",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        **dict.fromkeys(
            ("NotBuildableError", "config_of", "full_model", "small_entry", "small_model", "why_not"), ".models"
        ),
        **dict.fromkeys(("SCENARIOS", "AdapterContract"), ".contract"),
        **dict.fromkeys(("FusionContract", "KernelContract", "StepContract"), ".fusion_contract"),
        **dict.fromkeys(("MLADecodeLayer", "mla_decode_layer"), ".mla_decode"),
        **dict.fromkeys(("BrokenContractError", "Scenario"), ".scenario"),
        **dict.fromkeys(("Result", "iter_contract", "run_contract"), ".run"),
    },
)
