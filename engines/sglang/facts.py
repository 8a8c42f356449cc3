"""What is known of SGLang without SGLang, as data for plans: what its own code fuses, and where a fused op can go in.

Read in SGLang 0.5.23. It compiles no model by default: its ops are chosen one by one, and run in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...fusion.catalog import FUSIONS
from ...fusion.catalog.few_token_linear import BLOCKS
from ...fusion.engine import Engine

RELEASE = "0.5.23"
"""Of which this is known."""

CHAINS = ("add_rms_norm", "rms_norm")
GATED = "gated_rms_norm"
LATENTS = "mla_dual_rms_norm"
PRODUCT = "silu_mul"
SCHEMES = ("static", "per_token", "group")

SEAMS = frozenset(
    {
        "add_rms_norm",
        GATED,
        LATENTS,
        *(f"{chain}_{scheme}_quant" for chain in (*CHAINS, GATED, LATENTS, PRODUCT) for scheme in SCHEMES),
    }
)
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


def engine_of(architectures: Sequence[str] = ()) -> Engine:
    """What a plan needs to know of SGLang.

    Args:
        architectures: of the model, as its config.json says them, or the class that SGLang has loaded.
    """
    nothing = next(filter(None, map(_why_nothing, architectures)), None)
    without = [name for name in FUSIONS if name not in SEAMS and name != BLOCKS]
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
    return Engine(
        name="sglang",
        release=RELEASE,
        uncompiled=UNCOMPILED,
        refuses=refuses if nothing is None else {"*": nothing},
        does={name: f"SGLang does it: {by}; naming the fusion takes it instead" for name, by in DOES.items()},
        inside="layerfuse knows no such linear in SGLang yet",
        experts="SGLang may run shared experts beside the routed ones, on another stream: what is quantised for them is not kept until both are done",
        linears={},
        linears_apart=True,
    )


def _why_nothing(architecture: str) -> str | None:
    """Why no fused op can stand in a model of this architecture, as a sentence, or None where some can."""
    if architecture in WITHOUT_CODE:
        return f"SGLang {RELEASE} has no code of its own for {architecture}: it can run transformers' alone"
    if architecture.startswith("Transformers"):
        return f"SGLang has no code of its own for the model, and runs transformers' ({architecture})"
    norm = OTHER_NORMS.get(architecture)
    return None if norm is None else f"layerfuse knows no place in SGLang's {norm}, which {architecture} has"
