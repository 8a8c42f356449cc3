"""What is known of SGLang without SGLang, as data for plans: what its own code fuses, and where a fused op can go in.

Read in SGLang 0.5.23. It compiles no model by default: its ops are chosen one by one, and run in CUDA graphs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...adapters.specs import ExpertsSpec
from ...fusion.catalog import FUSIONS
from ...fusion.catalog.few_token_linear import BLOCKS
from ...fusion.engine import Engine
from ...fusion.target import Target
from ..mla import NAME
from ..seams import quantised
from .decode_facts import planned
from .switches import ASKS, BY_MARLIN, CHOOSES, MARLIN, OP_BACKEND, QUANT_ONCE, block_linears, is_set

if TYPE_CHECKING:
    from ...registry.published import QuantKind

RELEASE = "0.5.23"
"""Of which this is known."""

GATED = "gated_rms_norm"
LATENTS = "mla_dual_rms_norm"
PRODUCT = "silu_mul"

SEAMS = frozenset(["add_rms_norm", GATED, LATENTS, *quantised("add_rms_norm", "rms_norm", GATED, LATENTS, PRODUCT)])
"""Fusions that can go in at module level (`seams.SEAMS`)."""

UNCOMPILED = "SGLang compiles no model"

DOES = {
    "add_rms_norm": "its own kernel for the add and the norm (fused_add_rmsnorm)",
    GATED: "its own kernel for the norm and the gate",
}
"""Fusion -> what does the same in one launch there, on GPUs."""


WITHOUT_CODE = frozenset(
    [
        "BambaForCausalLM",
        "CwmForCausalLM",
        "Ernie4_5ForCausalLM",
        "Mistral4ForCausalLM",
        "OlmoHybridForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarOpenForCausalLM",
        "YoutuForCausalLM",
    ]
)
"""Declared architectures that SGLang has no class for: it can run transformers' code alone."""

OTHER_NORMS = dict.fromkeys(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), "Gemma3RMSNorm")
"""Architecture -> the class of its norms, which is none of `seams.SEAMS`."""

MAMBA2 = frozenset({"GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"})
"""Architectures whose gated norms are of a class that is none of `seams.SEAMS`: Mixer2RMSNormGated."""

ADDS_ITSELF = frozenset({"GraniteMoeHybridForCausalLM", "MiniCPM3ForCausalLM", "Olmo2ForCausalLM"})
"""Architectures whose code in SGLang adds to the stream in front of a norm, and never gives a norm the residual."""


EP = " or expert parallelism"


STANDS_AT = "Fp8LinearMethod"
"""The class that multiplies in SGLang at which fused ops can stand, alone (`seams.LINEARS`)."""

MULTIPLY = {
    "fp8": STANDS_AT,
    "modelopt": "ModelOptFp8LinearMethod",
    "compressed-tensors": "CompressedTensorsLinearMethod",
    "quark": "QuarkLinearMethod",
}
"""`quant_method` of a checkpoint in fp8 -> the class that multiplies by its weights."""

NOT_LOADED = f"SGLang {RELEASE} has no class for this checkpoint: of ModelOpt's in fp8 it takes the quant_algo FP8 alone, with a scale per weight and a static one"
"""FP8_PER_CHANNEL_PER_TOKEN is another: `ModelOptFp8Config.from_config` refuses it, and `ModelConfig` does not see it in hf_quant_config.json."""


class SharedRouted(NamedTuple):
    """On which GPUs SGLang makes a model's one shared expert another routed one, unless it is told not to.

    `resolve_shared_experts_config` asks the model's class (`shared_experts_fusion_disable_reason`); Qwen's block decides for itself. GPUs without fp8
    and checkpoints that quantise both differently (w4afp8) are not told apart: no op can stand in shared experts there.
    """

    num_experts: int | None = None
    "With so many routed experts alone; None: with any. 384 are for Quark's checkpoints, which no entry is of."
    nvidia: bool = True
    trtllm: bool = True
    "Whether FlashInfer's TRTLLM kernels are its routed experts' by default on sm10x, which keeps shared ones apart: in fp8, or not quantised."
    amd: bool = True
    aiter: bool = False
    "With `SGLANG_USE_AITER`, on AMD's."
    apart: str = f"with --disable-shared-experts-fusion{EP}"
    "With what it does not."


_QWEN = SharedRouted(amd=False, aiter=True, apart="with --disable-shared-experts-fusion or DeepEP")

SHARED_ROUTED = {
    "DeepseekV3ForCausalLM": SharedRouted(num_experts=256),
    "GlmMoeDsaForCausalLM": SharedRouted(num_experts=256),
    "Glm4MoeForCausalLM": SharedRouted(trtllm=False),
    "Glm4MoeLiteForCausalLM": SharedRouted(trtllm=False, amd=False),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN._replace(nvidia=False),
}
"""Declared architecture -> where it does."""


def engine_of(
    architectures: Sequence[str] = (),
    *,
    target: Target | None = None,
    mixtures: Iterable[ExpertsSpec | None] = (),
    kinds: Iterable[QuantKind] = (),
    backend: str = "auto",
) -> Engine:
    """What a plan needs to know of SGLang. Its switches in the environment (`switches`) are read as it reads them.

    Args:
        architectures: of the model, as its config.json says them, or the class that SGLang has loaded.
        target: what the plan is for; None: it is not known.
        mixtures: of a model's layers, as its entry declares them; none where they were read, and say themselves how shared experts are run.
        kinds: how a checkpoint's linears are quantised, without those of routed experts; none: SGLang quantises them itself, or they were read.
        backend: its `--fp8-gemm-backend`.
    """
    mixture, kinds = next(filter(None, mixtures), None), tuple(kinds)
    shared = (_why_shared_routed(each, target, mixture) for each in architectures)
    refused = any((kind.method, kind.scheme) == ("modelopt", "channel") for kind in kinds)
    chooses = CHOOSES if OP_BACKEND in os.environ else None
    nothing = next(filter(None, [chooses, NOT_LOADED if refused else None, *map(_why_nothing, architectures)]), None)
    without = [name for name in FUSIONS if name not in SEAMS and name not in (BLOCKS, NAME)]
    nowhere = f"{UNCOMPILED}, and layerfuse knows no place for it in SGLang's code yet"
    refuses = dict.fromkeys(without, nowhere)
    for each in ADDS_ITSELF.intersection(architectures):
        adding = [name for name in SEAMS if name.startswith("add_rms_norm")]
        refuses.update(dict.fromkeys(adding, f"SGLang's code of {each} adds by itself in front of its norms"))
    for each in MAMBA2.intersection(architectures):
        gated = [name for name in SEAMS if name.startswith(GATED)]
        refuses.update(
            dict.fromkeys(gated, f"layerfuse knows no place in SGLang's Mixer2RMSNormGated, which {each} has")
        )
    if is_set(QUANT_ONCE):
        refuses[BLOCKS] = ASKS
    by_marlin = BY_MARLIN if is_set(MARLIN) else None
    for why in filter(None, [*map(_why_not_multiplied, kinds), by_marlin]):
        refuses.update(dict.fromkeys([BLOCKS, *(name for name in SEAMS if name.endswith("_quant"))], why))
    engine = Engine(
        name="sglang",
        release=RELEASE,
        uncompiled=UNCOMPILED,
        refuses=refuses if nothing is None else {"*": nothing},
        does={name: f"SGLang does it: {by}; naming the fusion takes it instead" for name, by in DOES.items()},
        inside="layerfuse knows no such linear in SGLang yet",
        experts="SGLang may run shared experts beside the routed ones, on another stream: what is quantised for them is not kept until both are done",
        shared_routed=next(filter(None, shared), None),
        block_linears=None if target is None else block_linears(target.arch, backend),
        linears={},
        linears_apart=True,
    )
    return planned(engine, architectures)


def _why_shared_routed(architecture: str, target: Target | None, mixture: ExpertsSpec | None) -> str | None:
    """That a shared expert is run as a routed one by default, as a sentence, or None."""
    where = SHARED_ROUTED.get(architecture)
    if where is None or target is None or mixture is None or mixture.shared is None:
        return None
    if (
        where.num_experts not in (None, mixture.num_experts)
        or mixture.shared.intermediate_size != mixture.intermediate_size
    ):
        return None
    if target.vendor == "amd" and where.aiter:
        return "not known: with SGLANG_USE_AITER SGLang makes this model's shared expert one of the routed ones, and runs no MLP for it"
    unlike = where.trtllm and re.match(r"sm10\d", target.arch)
    if target.fp8 is None or unlike or not (where.amd if target.vendor == "amd" else where.nvidia):
        return None
    apart = where.apart.removesuffix(EP) if target.vendor == "amd" else where.apart
    return f"by default SGLang makes this model's shared expert one of the routed ones on {target}, and runs no MLP for it; {apart} it does"


def _why_not_multiplied(kind: QuantKind) -> str | None:
    """Why linears of a checkpoint that are quantised so take nothing that a fused op has quantised, as a sentence, or None where they do."""
    method = kind.method
    by = MULTIPLY.get(str(method))
    if by == STANDS_AT:
        return None
    alone = f"layerfuse stands at {STANDS_AT}'s alone"
    if by is None:
        of = (
            "nothing says the checkpoint's quant_method"
            if method is None
            else f"the checkpoint's quant_method is {method}"
        )
        return f"not known: what multiplies these in SGLang, where {alone}; {of}"
    return f"SGLang multiplies these by {by}, and {alone}"


def _why_nothing(architecture: str) -> str | None:
    """Why no fused op can stand in a model of this architecture, as a sentence, or None where some can."""
    if architecture in WITHOUT_CODE:
        return f"SGLang {RELEASE} has no code of its own for {architecture}: it can run transformers' alone"
    if architecture.startswith("Transformers"):
        return f"SGLang has no code of its own for the model, and runs transformers' ({architecture})"
    norm = OTHER_NORMS.get(architecture)
    return None if norm is None else f"layerfuse knows no place in SGLang's {norm}, which {architecture} has"
