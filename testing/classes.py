"""C11 to C13: which classes are known."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..adapters.errors import InnerLayerError, UnknownLayerError
from .contract_case import ContractCase, is_kernel
from .scenario import scenario


class ClassScenarios(ContractCase):
    """A class is known by its name and its bases, and by nothing else."""

    @scenario(11, "A kernel layer names its outer layer")
    def test_c11_kernel_layer_names_its_outer_layer(self) -> None:
        """C11. What a kernel layer does not know is refused with the layer to ask."""
        kernels = [sample for sample in self.samples() if is_kernel(sample)]
        if not kernels:
            self.skip("this model holds no inner kernel layer")
        for sample in kernels:
            self.validate(sample.spec.outer.strip(), f"{sample}: its spec does not name the outer layer")
            for field in ("hidden_size", "kv_norm", "output_norm", "num_heads", "parallel"):
                self.validate_refuses(
                    InnerLayerError,
                    partial(getattr, sample.spec, field),
                    field,
                    sample.spec.outer,
                    where=f"{sample}, asked for its {field}",
                )

    @scenario(12, "A subclass is still known")
    def test_c12_subclass_is_still_known(self) -> None:
        """C12. An empty subclass, defined elsewhere, is read like its parent."""
        for sample in self.samples():
            kind = type(sample.layer)
            metaclass: Any = type(kind)
            derived = metaclass("Derived", (kind,), {"__module__": "somewhere.else"})
            sample.layer.__class__ = derived
            try:
                spec = self.again(sample)
            except UnknownLayerError as error:
                self.validate(False, f"{sample}: a subclass of {kind.__name__} is not known: {error}")
            else:
                self.validate_spec(sample.spec, spec, f"{sample}, as a subclass")
            finally:
                sample.layer.__class__ = kind

    @scenario(13, "An unknown sibling is refused")
    def test_c13_unknown_sibling_is_refused(self) -> None:
        """C13. A class of a similar name that derives from no known one is refused with the closest names."""
        for sample in self.samples():
            kind = type(sample.layer)
            name = kind.__name__ + "V9"
            of_no_kind = type(name, (), {"__module__": kind.__module__})()
            error = self.validate_refuses(
                UnknownLayerError,
                partial(self.asked.spec_for, of_no_kind),
                name,
                "register",
                where=f"a class {name} in the module of {sample.reader.key}",
            )
            tails = [key.rpartition(":")[2] for key in error.closest]
            self.validate(
                sample.reader.key.rpartition(":")[2] in tails,
                f"{name}: the closest names are {', '.join(error.closest) or 'none'}, without {sample.reader.key}",
            )
