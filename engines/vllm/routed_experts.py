"""Routed experts with few tokens, which vLLM's Triton kernels multiply behind an op of its own: two launches of layerfuse's in their place.

vLLM quantises the activations in front of `TritonExperts.apply`, which launches its kernel for both products, a product with its quantisation
between them and a sum behind. For few tokens all of that is `block_scaled_experts`, which reads each chosen expert once.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from attrs import define, field
from torch import nn

from ...fusion.catalog.few_token_linear import ROUTED, tokens_of
from ...fusion.ops.linear import BLOCK
from ..compiled_module import CompiledModule
from ..hooks import HookError, check
from ..linears import AtSeams
from ..native import Native, NotNativeError, native_function, native_methods
from ..placement import is_looked_at
from ..process import once
from ..trial import possible, raised, why_apart
from .hooks import EXPERTS as APPLY

ROUNDS = "vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used"
"""What says whether vLLM rounds the scales of activations up to powers of two."""
GONE = "layerfuse: few tokens of routed experts are vLLM's own from now on: %s"
OP = "block_scaled_experts"
TOLERANCE = 5e-2
"""How far apart both ways may be: each is 0.016 to 0.019 from exact (bench/results/few_token_experts-nvidia-h100.json)."""


@define(kw_only=True, eq=False)
class AtExperts(AtSeams):
    """The mixtures in which they stand."""

    standing: dict[str, Experts] = field(repr=False)
    "By the site."

    def why_left(self, site: str, run: str) -> str:
        """Why they are vLLM's after all."""
        return self.standing[site].why_not or super().why_left(site, run)


def put_in(compiled: CompiledModule, module: nn.Module) -> None:
    """Let few tokens be layerfuse's in those mixtures of a module where the plan expects that, and count them."""
    standing: dict[str, Experts] = {}
    for site in (compiled.plan.site[each.site] for each in compiled.plan.expected(ROUTED)):
        ((method, experts),) = _experts_in(module.get_submodule(site.path))
        found = _standing_in(experts)
        if found is None:
            stood = native_methods((experts, "apply"))
            few = tokens_of(site.experts)
            found = Experts(experts=experts, rounds=native_rounds(), stood=stood, few=few, untouched=compiled.untouched)
            experts.apply = MethodType(found, experts)
            _follow(method, found, compiled.config, compiled.strict)
        standing[site.name] = found
    if standing:
        counts = {name: each.ran for name, each in standing.items()}
        compiled.placements[ROUTED] = AtExperts(fusion=ROUTED, counts=counts, standing=standing)


def why_not(vllm_config: Any, block: nn.Module) -> str | None:
    """Why nothing of ours can stand in the mixture that a module holds, as a sentence, or None."""
    several = list(_experts_in(block))
    if len(several) != 1:
        return f"vLLM does not multiply its routed experts by {APPLY.path.partition('.')[0]}, its Triton kernels"
    ((_, experts),) = several
    if vllm_config.lora_config is not None:
        return "LoRA may add to them"
    if experts.moe_config.moe_parallel_config.use_ep:
        return "with expert parallelism a rank holds some of them alone"
    if not _fits(experts):
        return "its experts are not in fp8 with scales in blocks of 128 x 128, with silu * up without a clamp and without a bias between their products"
    try:
        check(APPLY, sys.modules[APPLY.module])
        if "apply" in vars(experts) and _standing_in(experts) is None:
            return f"apply of this {type(experts).__qualname__} is another one's already"
        native_rounds()
        native_methods((experts, "apply"))
    except (HookError, NotNativeError) as error:
        return str(error)
    return None


def native_rounds() -> Callable[[], bool]:
    """VLLM's own function for that.

    Raises:
        NotNativeError: it is another one.
    """
    native_function(*ROUNDS)
    found: Callable[[], bool] = getattr(sys.modules[ROUNDS[0]], ROUNDS[1])
    return found


def _experts_in(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The objects of vLLM's that multiply by Triton's kernels alone, once each, behind what makes them of weights that were loaded."""
    found: dict[int, tuple[Any, Any]] = {}
    for each in module.modules():
        method: Any = vars(each).get("quant_method")
        held = method
        for name in ("moe_kernel", "impl", "fused_experts"):
            held = None if held is None else vars(held).get(name)
        if (type(held).__module__, f"{type(held).__qualname__}.apply") == (APPLY.module, APPLY.path):
            found.setdefault(id(held), (method, held))
    yield from found.values()


def _follow(method: Any, found: Experts, vllm_config: Any, strict: bool) -> None:
    """Stand in each object too that vLLM makes in the place of this one, as it does where weights are loaded again (`reload_weights`).

    Whatever goes wrong leaves the layer to vLLM, and in `strict` is raised.
    """
    made: Callable[[nn.Module], None] = method.process_weights_after_loading

    def process_weights_after_loading(layer: nn.Module) -> None:
        made(layer)
        try:
            problem = why_not(vllm_config, layer)
            if problem is None:
                ((_, experts),) = _experts_in(layer)
                found.move_to(experts)
        except Exception as error:  # of anybody's: vLLM loads on
            if strict:
                raise
            problem = f"looking at them raised {type(error).__name__}: {error}"
        if problem is not None and found.why_not is None:
            found._leave(f"its weights were loaded again, and {problem}")

    method.process_weights_after_loading = process_weights_after_loading


def _fits(experts: Any) -> bool:
    """Whether these experts are in fp8 with scales in blocks of 128 x 128, silu * up without a clamp between them, and nothing else."""
    quant, activation = experts.quant_config, experts.activation_config
    return bool(
        quant.use_fp8_w8a8
        and quant.block_shape == [BLOCK, BLOCK]
        and experts.moe_config.activation.name == "SILU"
        and activation.clamp_limit is None
        and quant.w1_bias is None
        and quant.w2_bias is None
        and not experts.quantization_emulation
    )


@define(kw_only=True, eq=False)
class Experts:
    """The experts of one layer, called in the place of vLLM's method, whose object holds it."""

    experts: Any = field(repr=False)
    "VLLM's object."
    rounds: Callable[[], bool] = field(repr=False)
    stood: Native = field(repr=False)
    few: int
    "Tokens up to which they are layerfuse's."
    untouched: range
    "As `CompiledModule.untouched`: what these steps compare and count is not in the run that is looked at."
    tried: bool = False
    "Whether both ways were compared."
    ran: Counter[str] = field(factory=Counter)
    "Calls of layerfuse's op whose results stood."
    why_not: str | None = None
    "Why it is vLLM's way from now on, as a sentence."

    def move_to(self, experts: Any) -> None:
        """Stand in another object of vLLM's, of the same layer."""
        if experts is not self.experts:
            self.experts, self.stood = experts, native_methods((experts, "apply"))
            experts.apply = MethodType(self, experts)

    def __call__(self, _experts: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        given = dict(zip(APPLY.takes[1:], args, strict=False)) | kwargs
        if not self._takes(given):
            return self._own(given)
        tokens = len(given["hidden_states"])
        if not self.tried and tokens and tokens not in self.untouched and possible():
            self._try_out(given)
        if not self.tried or self.why_not is not None or tokens > self.few:
            return self._own(given)
        problem = self.stood.changed()
        if problem is None:
            try:
                self._ours(given)
            except Exception as error:  # vLLM's own call writes all that this one would have
                if not possible():
                    raise
                problem = f"{type(error).__name__}: {error}"
            else:
                self.ran[OP] += is_looked_at()
                return None
        self._leave(problem)
        return self._own(given)

    def _takes(self, given: dict[str, Any]) -> bool:
        """Whether a call is one that layerfuse computes."""
        experts = self.experts
        return bool(
            self.why_not is None
            and given["hidden_states"].dtype == torch.float8_e4m3fn
            and given["a1q_scale"] is not None
            and given["expert_map"] is None
            and not given["apply_router_weight_on_input"]
            and given["activation"].name == "SILU"
            and experts._lora_context is None
            and experts.post_gemm2_hook is None
        )

    def _own(self, given: dict[str, Any]) -> Any:
        return type(self.experts).apply(self.experts, **given)

    def _ours(self, given: dict[str, Any]) -> None:
        quant = self.experts.quant_config
        torch.ops.layerfuse.block_scaled_experts.default(
            given["hidden_states"], given["a1q_scale"], given["w1"], quant.w1_scale, given["w2"], quant.w2_scale, given["topk_weights"],
            given["topk_ids"], given["output"], self.rounds(), True,
        )  # fmt: skip

    def _try_out(self, given: dict[str, Any]) -> None:
        """Compare both ways on the first tokens of a call: whatever is launched for few is compiled then."""
        self.tried, problem = True, None
        try:
            names = ("hidden_states", "a1q_scale", "topk_weights", "topk_ids")
            some = given | {name: given[name][: self.few] for name in names}
            theirs, ours = (torch.empty_like(given["output"][: self.few]) for _ in range(2))
            self._own(some | {"output": theirs})
            self._ours(some | {"output": ours})
            problem = why_apart([(theirs, ours)], TOLERANCE)
        except Exception as error:  # of anybody's: vLLM runs on
            problem = raised(error)
        if problem is not None:
            self._leave(problem)
        else:
            self.ran[OP] += is_looked_at()

    def _leave(self, problem: str | None) -> None:
        self.why_not = problem
        once(logging.WARNING, GONE, problem)


def _standing_in(experts: Any) -> Experts | None:
    """What of ours stands in one of vLLM's objects."""
    found = getattr(vars(experts).get("apply"), "__func__", None)
    return found if isinstance(found, Experts) else None
