"""What vLLM fuses by itself, as data: by a pass of its compiler, or in the code of a model that it does not compile.

Read in vLLM 0.26.0 and 0.33.0. Needs no vLLM, so that plans are made beforehand from the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

from ...fusion.catalog import FUSIONS
from ...fusion.engine import Engine
from ...fusion.sites import FINAL, OWN_PLACE
from ..mla import QUANTISED, SPARSE_MODELS
from ..seams import quantised
from .decode_facts import CLASS, why_no_mla
from .switches import BLOCK_LINEARS, SHARED_IN_TURN, block_switch, is_set


@frozen(kw_only=True)
class Place:
    """Where a plan is for, as far as it decides what vLLM fuses."""

    vendor: str
    "nvidia, amd or cpu."
    arch: str
    "As `Target.arch`."
    ranks: int = 1
    "The tensor-parallel size."
    aiter: bool = False
    "Whether vLLM uses AITER (VLLM_ROCM_USE_AITER)."


@frozen
class Pass:
    """One pass of vLLM's compiler on one vendor's GPUs, on AMD's with AITER, and the chains of the catalog that it takes."""

    vendor: str
    switch: str
    "In vLLM's `pass_config`."
    by: str
    "The class of the pass."
    fusions: tuple[str, ...]
    "Those of which vLLM's defaults switch it on for a model with such a chain."
    others: tuple[str, ...] = ()
    "What it takes where it is switched on."
    archs: tuple[str, ...] = ()
    "Where its defaults switch it on; empty: everywhere."
    given: str = ""
    "What it depends on besides, as part of a sentence."

    def takes(self, place: Place, switched: Mapping[str, bool] | None) -> tuple[str, ...]:
        """The chains that it does there; the arguments are those of `by_passes`."""
        if place.vendor != self.vendor or (place.vendor == "amd" and not place.aiter):
            return ()
        if switched is not None:
            return (*self.fusions, *self.others) if switched.get(self.switch) else ()
        return self.fusions if place.arch in (self.archs or (place.arch,)) else ()


NEEDS_FLASHINFER = ", where FlashInfer is there and has a workspace for as many tokens"
"""What vLLM's fused all-reduces need on NVIDIA's GPUs. Their limits of bytes differ by GPU and ranks."""

EXPERTS = (
    "vLLM runs a mixture's experts, shared ones too, in ops of its own (vllm::moe_forward_shared), which take what they read "
    "unquantised, and which no graph shows"
)
"""Why no quantised fusion stands in front of experts, nor any in shared ones."""

_REDUCED = "all_reduce_add_rms_norm"
_REDUCTIONS = _REDUCED, *quantised(_REDUCED)
_NORMS = "add_rms_norm", "rms_norm", "mla_dual_rms_norm"

PASSES = (
    Pass(
        "nvidia", "fuse_allreduce_rms", "AllReduceFusionPass", (_REDUCED, f"{_REDUCED}_static_quant"),
        archs=("sm90", "sm100", "sm103"), given=NEEDS_FLASHINFER,
    ),
    Pass("amd", "fuse_allreduce_rms", "RocmAiterAllReduceFusionPass", (_REDUCED, f"{_REDUCED}_group_quant")),
    # In its place come a reduce-scatter, the norm of a part of the tokens and an all-gather; not in 0.33 any more.
    Pass("nvidia", "enable_sp", "SequenceParallelismPass", (), _REDUCTIONS),
    # Of both latent norms it takes the one that is quantised. Where nothing makes the norm or the quantisation an op of its own, that is left to
    # Inductor. NVFP4 is FlashInfer's kernel, where it has one (read in 0.33).
    Pass(
        "nvidia", "fuse_norm_quant", "RMSNormQuantFusionPass", quantised(*_NORMS, per=("group",)),
        (*quantised(*_NORMS, per=("static", "per_token")), "add_rms_norm_nvfp4_quant"),
    ),
    Pass(
        "amd", "fuse_norm_quant", "RocmAiterRMSNormQuantFusionPass",
        (*quantised("add_rms_norm", "rms_norm"), "gated_rms_norm_group_quant"),
    ),
    Pass(
        "amd", "fuse_mla_dual_rms_norm", "MLADualRMSNormFusionPass",
        ("mla_dual_rms_norm", *quantised("mla_dual_rms_norm", per=("per_token", "group"))),
    ),
    Pass("nvidia", "fuse_act_quant", "ActivationQuantFusionPass", ("silu_mul_group_quant",), ("silu_mul_static_quant",)),
    Pass("amd", "fuse_act_quant", "RocmAiterSiluMulFp8GroupQuantFusionPass", ("silu_mul_group_quant",)),
)  # fmt: skip
"""The passes of 0.26 and 0.33 that take a chain of the catalog."""

GROUPS = {"nvidia": (64, 128), "amd": (128,), "cpu": ()}
"""Vendor -> columns that share a scale in the patterns of its passes."""


def by_passes(place: Place, switched: Mapping[str, bool] | None = None) -> dict[str, str]:
    """Fusion -> the pass of vLLM's that does it.

    Args:
        place: what is planned for.
        switched: `pass_config` of an engine that is there; None: vLLM's defaults.
    """
    return {
        name: f"its pass {each.by} ({each.switch}){each.given}"
        for each in PASSES
        for name in each.takes(place, switched)
    }


@frozen(kw_only=True)
class Code:
    """What the code of some models does in one launch without a compiler."""

    fusions: tuple[str, ...]
    by: str
    "Function, and where."
    architectures: frozenset[str] = frozenset()
    "Empty: every model."
    drafts: frozenset[str] = frozenset()
    "Classes of drafts for these whose own code does not, or calls what they share with them in another way."
    ranks: Literal["any", "one", "several"] = "any"
    "Only on one rank, or with several; one that holds its whole embedding (VLLM_REPLICATE_EMBED) counts as one."
    vendor: str | None = None
    "Only on this vendor's GPUs; None: on all."
    kept: bool = False
    "Whether vLLM keeps it even where the fusion is asked for by name: nothing stands where that could go in."


_V32 = SPARSE_MODELS | {"Dots3NoteForCausalLM"}
"""Whose `forward` is DeepSeek-V3.2's."""
_M3 = frozenset({"MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"})
_STEP5 = frozenset({"Step5ForCausalLM", "Step5ForConditionalGeneration"})
_GLM5_NEXT = frozenset({"Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"})

REDUCES: Mapping[str, frozenset[str]] = {"fused_allreduce_rms_norm": _V32, "fused_allreduce_gemma_rms_norm": _M3}
"""vLLM's functions for a norm behind an all-reduce -> the architectures whose code calls them."""


def _code(
    architectures: Iterable[str],
    fusions: tuple[str, ...],
    function: str,
    more: str = "",
    kept: bool = True,
    **only: Any,
) -> Code:
    """A function that the code of a model calls."""
    by = f"{function} in the code of the model{more}"
    return Code(fusions=fusions, by=by, architectures=frozenset(architectures), kept=kept, **only)


_STREAM = "add_rms_norm", *quantised("add_rms_norm", "rms_norm")
_LATENTS = "mla_dual_rms_norm", *quantised("mla_dual_rms_norm")
_ROPED = ("qk_norm_rope",)
_K3, _BEAM, _ALICE = ["KimiK3ForConditionalGeneration"], ["BeamForCausalLM"], ["AliceAIForCausalLM"]
_QWEN4 = ["Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"]
_IN_FLOAT32 = " where its stream is in float32, and else an add by itself"
_NO_WORKSPACE = f"{NEEDS_FLASHINFER}, and else an all-reduce and a norm with its add"

CODE = (
    Code(fusions=("add_rms_norm",), by="its own op for the add and the norm (fused_add_rms_norm)"),
    Code(fusions=("gated_rms_norm",), by="its own kernel for the gated norm (rms_norm_gated)"),
    _code(SPARSE_MODELS, _LATENTS, "fused_norm_rope"),
    _code(
        _V32, quantised("rms_norm"), "fused_embed_norm", ", for the first norm", ranks="one",
        drafts=frozenset({"DeepseekV32MTP", "Dots3NoteMTP"}),
    ),
    _code([*_GLM5_NEXT, *_K3], _LATENTS[:1], "fused_q_kv_rmsnorm", kept=False),
    _code(
        _K3, ("gated_rms_norm",), "fused_kda_decode",
        " in steps of decodes alone, on Hopper and Blackwell where a rank has 12, 24, 48 or 96 heads and drafts nothing, and its own kernel for "
        "the gated norm in others", kept=False, vendor="nvidia",
    ),
    _code(_M3, _STREAM[:1], "FlashInfer's op for the add and the norm (gemma_fused_add_rmsnorm),", kept=False),
    _code(_M3, _ROPED, "fused_minimax_m3_qknorm_rope_kv_insert"),
    _code(_STEP5, _STREAM, "apply_step5_add_rms_norm", _IN_FLOAT32),
    _code(_STEP5, _ROPED, "fused_qknorm_rope_cache"),
    _code(_ALICE, _ROPED, "fused_qk_rmsnorm_rope_gate", ", the gate with it", vendor="nvidia"),
    _code(_QWEN4, _ROPED, "qsa_prepare", ", the gate and the indexer's with it", vendor="nvidia"),
    _code(_BEAM, _ROPED, "beam_qk_norm_rope"),
    _code(_BEAM, quantised("silu_mul"), "beam_silu_mul", ", without the quantisation"),
    _code(_K3, _STREAM, "attn_res", drafts=frozenset({"KimiK3MTP"})),
    *(
        _code(models, fusions, function, _NO_WORKSPACE, kept, ranks="several", vendor="nvidia")
        for function, models in REDUCES.items()
        for fusions, kept in ((_REDUCTIONS, False), (_STREAM[:1], True))
    ),
)  # fmt: skip
"""What models do that vLLM runs without compiling them; later rows are the more special ones."""

_KIMI = frozenset([*_K3, "KimiLinearForCausalLM"])
COPIED = _KIMI.union(_ALICE)
"""Whose delta nets norm inside of an op, which copies the result out of itself before a linear reads it."""

SHARED_APART = _STEP5 | {"Dots3NoteForCausalLM"}
"""Whose shared experts are called by the code of the model, and not by that of the routed ones."""

BY_ITSELF = frozenset({"MiniCPM3ForCausalLM", "HYV4ForCausalLM", "Dots3NoteForCausalLM"})
"""Whose MLA layers are written out in the code of the model, where each latent norm is called by itself."""

NO_WRAPPER = f"vLLM's code of this model has no {CLASS[1]}"

_IN_LOGITS = "vLLM applies the final norm of this model in compute_logits, apart from the residual add"
_IN_DRAFT = "vLLM's code of this draft adds the residual by itself, and calls the final norm with the sum"
APART = {
    **{architecture: {FINAL: _IN_LOGITS} for architecture in sorted(_KIMI | _STEP5)},
    **{draft: {FINAL: _IN_DRAFT} for draft in ("DeepSeekMTP", "Glm4MoeLiteMTP")},
    "KimiK3MTP": {FINAL: "vLLM does it: its own op for the add and the norm, in the code of this draft"},
}
"""Architecture, or class of a draft -> role -> why no chain stands there in vLLM's code."""


def by_code(architectures: Iterable[str], place: Place) -> dict[str, Code]:
    """Fusion -> what does it in a model that is not compiled."""
    given, whole = set(architectures), ("one",) if is_set("VLLM_REPLICATE_EMBED") else ()
    return {
        name: each
        for each in CODE
        if (not each.architectures or each.architectures & given)
        and each.drafts.isdisjoint(given)
        and each.ranks in ("any", "several" if place.ranks > 1 else "one", *whole)
        and each.vendor in (None, place.vendor)
        for name in each.fusions
    }


def by_transformers(vllm: str, architecture: str) -> str:
    """Why nothing is fused in a model that vLLM has no code of its own for, as a sentence."""
    return (
        f"{vllm} has no code of its own for {architecture}: it can run transformers' alone, with linears of its own in it, "
        "which layerfuse does not read"
    )


INSTEAD = "naming the fusion takes it instead"


def compiled(place: Place, switched: Mapping[str, bool] | None = None) -> Engine:
    """What vLLM does as it compiles a model; the arguments are those of `by_passes`."""
    does = {name: f"vLLM does it: {by}; {INSTEAD}" for name, by in by_passes(place, switched).items()}
    return _engine(place, does=does, does_groups=GROUPS[place.vendor])


def _engine(place: Place, **more: Any) -> Engine:
    switch = block_switch() if place.vendor == "nvidia" else None
    return Engine(
        name="vllm",
        experts=EXPERTS,
        shared_in_turn=is_set(SHARED_IN_TURN),
        block_linears=None if switch is None else BLOCK_LINEARS[switch],
        inside=None if place.vendor == "nvidia" else "vLLM has such linears on NVIDIA GPUs alone",
        linears={},
        **more,
    )


def uncompiled(reason: str, architectures: Iterable[str], place: Place, seams: Iterable[str]) -> Engine:
    """What vLLM does as it runs a model that it does not compile.

    Args:
        reason: why it does not, as a sentence.
        architectures: of the model.
        place: what is planned for.
        seams: the fusions that can go in at module level there.
    """
    known, architectures = frozenset(seams), tuple(architectures)
    if place.vendor == "amd" or frozenset().union(*REDUCES.values()).isdisjoint(architectures):
        known -= {*_REDUCTIONS}
    does: dict[str, str] = {}
    keeps = {role: why for name in architectures for role, why in APART.get(name, {}).items()}
    for name, code in by_code(architectures, place).items():
        if code.kept or name not in known:
            keeps[name] = f"vLLM does it: {code.by}"
        else:
            does[name] = f"vLLM does it: {code.by}; {INSTEAD}"
    # Products with weights say it themselves: those of experts have a place all the same.
    without = [
        name
        for name, each in FUSIONS.items()
        if not {*OWN_PLACE}.intersection(each.roles) and name not in {*known, *keeps}
    ]
    refuses = dict.fromkeys([*without, QUANTISED], f"{reason}; at module level there is no place for it")
    if not COPIED.isdisjoint(architectures):
        copied = "vLLM copies what the norm of this delta net gives before a linear reads it"
        refuses |= dict.fromkeys(quantised("gated_rms_norm"), copied)
    no_mla = why_no_mla(architectures) or (None if BY_ITSELF.isdisjoint(architectures) else NO_WRAPPER)
    if no_mla is not None:
        refuses |= dict.fromkeys(_LATENTS, f"{no_mla}, and calls each of their norms by itself")
    apart = not SHARED_APART.isdisjoint(architectures)
    return _engine(place, uncompiled=reason, refuses=refuses, does=does, keeps=keeps, shared_apart=apart)
