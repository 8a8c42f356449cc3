"""What a third party needs to hold its own adapter, fusion, step or kernel to its contract (docs/contract.md), shipped in the wheel.

    from layerfuse.testing import AdapterContract

    class TestMyModel(AdapterContract):
        model = "my-model"

        def build(self):
            return MyModel(...)

Without pytest, `run_contract("my-model")` (on the command line `layerfuse contract my-model`) does the same for a model
that transformers can build. Importing this package imports neither torch, transformers nor pytest.
"""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
