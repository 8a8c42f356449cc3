"""C14: what is done with the specs."""

from __future__ import annotations

from typing import Any, ClassVar

from .contract_case import ContractCase
from .scenario import scenario

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative to the largest output, by dtype: fusing changes the order and number of roundings, nothing else."""


class FusingScenarios(ContractCase):
    """What was planned from the specs is what happens in the graph."""

    codegen: ClassVar[bool] = False
    "True: compile with Inductor, as `fusion.compile` does. False: run the passes on the traced graph and interpret it."

    @scenario(14, "Fusions planned equal fusions matched")
    def test_c14_planned_equals_matched(self) -> None:
        """C14. The compiled small model fuses exactly the planned layers, and answers as before."""
        model = self.build_small()
        if model is None:
            self.skip("build_small is not defined: there is no model to compile")
        import torch

        from ..fusion import FUSIONS
        from ..fusion.match.adds import OTHER_GRAPH
        from ..fusion.sites import sites_in_words
        from .tracing import traced

        with torch.no_grad():
            expected = _tensor(self.call(model))
            torch.compiler.reset()
            compiled: Any
            if self.codegen:
                from ..fusion import compile as compile_

                compiled = compile_(model, registry=self.asked)
            else:
                compiled = traced(model, self.asked.specs_in(model))
            got = _tensor(self.call(compiled))
        for name in FUSIONS:
            verdict = compiled.report.of(name)
            planned = tuple(decision.site for decision in compiled.plan.expected(name))
            # A model may break its graph between an add and its norm (experts that count their tokens): no adapter's fault.
            missed = {site: why for site, why in verdict.missed.items() if OTHER_GRAPH not in why}
            self.validate(
                not missed,
                f"{name}: planned for {sites_in_words(len(planned))}, matched at {len(verdict.matched)}; "
                + "; ".join(f"{site}: {why}" for site, why in missed.items()),
            )
            silent = [decision.site for decision in compiled.plan.decisions if not decision.reason]
            self.validate(not silent, f"{name}: decided without a reason for {', '.join(silent)}")
        tolerance = TOLERANCE[str(expected.dtype).removeprefix("torch.")]
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        self.validate(error <= tolerance, f"the compiled model differs by {error:.2g} of the largest output")


def _tensor(answer: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        if hasattr(answer, name):
            return getattr(answer, name)
    return answer[0] if isinstance(answer, tuple) else answer
