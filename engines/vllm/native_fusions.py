"""What vLLM fuses by itself, as data: by a pass of its compiler, or in the code of a model that it does not compile.

Read in vLLM 0.26.0 and 0.33.0. Needs no vLLM, so that plans are made beforehand from the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from attrs import frozen

from ...fusion.catalog import FUSIONS
from ...fusion.engine import Engine
from ...fusion.sites import FINAL, OWN_PLACE
from .decode_facts import CLASS, QUANTISED, SPARSE_MODELS, why_no_mla
from .switches import BLOCK_LINEARS, SHARED_IN_TURN, block_switch, is_set

_PER_QUANT = ("static_quant", "per_token_quant", "group_quant")


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


@frozen(kw_only=True)
class Pass:
    """One pass of vLLM's compiler on one vendor's GPUs, and the chains of the catalog that it takes."""

    fusions: tuple[str, ...]
    switch: str
    "In vLLM's `pass_config`."
    by: str
    "The class of the pass."
    vendor: str
    aiter: bool = False
    "Whether it needs AITER."
    by_default: bool = True
    "Whether vLLM's defaults switch it on for a model with such a chain."
    archs: tuple[str, ...] = ()
    "Where its defaults switch it on; empty: everywhere."
    given: str = ""
    "What it depends on besides, as part of a sentence."

    def there(self, place: Place) -> bool:
        """Whether it does anything in this place if it is switched on."""
        return place.vendor == self.vendor and (place.aiter or not self.aiter)


def quantised(*names: str, per: Iterable[str] = _PER_QUANT) -> tuple[str, ...]:
    """The names of chains with the quantisation behind them."""
    return tuple(f"{name}_{each}" for name in names for each in per)


_GROUP, _OTHER = ("group_quant",), ("static_quant", "per_token_quant")
_NORMS = ("add_rms_norm", "rms_norm", "mla_dual_rms_norm")

NEEDS_FLASHINFER = ", where FlashInfer is there and has a workspace for as many tokens"
"""What vLLM's fused all-reduces need on NVIDIA's GPUs. Their limits of bytes differ by GPU and ranks."""

EXPERTS = (
    "vLLM runs a mixture's experts, shared ones too, in ops of its own (vllm::moe_forward_shared), which take what they read "
    "unquantised, and which no graph shows"
)
"""Why no quantised fusion stands in front of experts, nor any in shared ones."""

PASSES = (
    Pass(
        fusions=("all_reduce_add_rms_norm", "all_reduce_add_rms_norm_static_quant"),
        switch="fuse_allreduce_rms",
        by="AllReduceFusionPass",
        vendor="nvidia",
        archs=("sm90", "sm100", "sm103"),
        given=NEEDS_FLASHINFER,
    ),
    Pass(
        fusions=("all_reduce_add_rms_norm", "all_reduce_add_rms_norm_group_quant"),
        switch="fuse_allreduce_rms",
        by="RocmAiterAllReduceFusionPass",
        vendor="amd",
        aiter=True,
    ),
    # In its place come a reduce-scatter, the norm of a part of the tokens and an all-gather; not in 0.33 any more.
    Pass(
        fusions=("all_reduce_add_rms_norm", *quantised("all_reduce_add_rms_norm")),
        switch="enable_sp",
        by="SequenceParallelismPass",
        vendor="nvidia",
        by_default=False,
    ),
    # Of both latent norms it takes the one that is quantised.
    Pass(
        fusions=quantised(*_NORMS, per=_GROUP), switch="fuse_norm_quant", by="RMSNormQuantFusionPass", vendor="nvidia"
    ),
    # Where nothing makes the norm or the quantisation an op of its own, that is left to Inductor.
    Pass(
        fusions=quantised(*_NORMS, per=_OTHER),
        switch="fuse_norm_quant",
        by="RMSNormQuantFusionPass",
        vendor="nvidia",
        by_default=False,
    ),
    # By FlashInfer's kernel, where it has one (read in 0.33).
    Pass(
        fusions=quantised("add_rms_norm", per=("nvfp4_quant",)),
        switch="fuse_norm_quant",
        by="RMSNormQuantFusionPass",
        vendor="nvidia",
        by_default=False,
    ),
    Pass(
        fusions=(*quantised("add_rms_norm", "rms_norm"), "gated_rms_norm_group_quant"),
        switch="fuse_norm_quant",
        by="RocmAiterRMSNormQuantFusionPass",
        vendor="amd",
        aiter=True,
    ),
    Pass(
        fusions=("mla_dual_rms_norm", *quantised("mla_dual_rms_norm", per=("per_token_quant", "group_quant"))),
        switch="fuse_mla_dual_rms_norm",
        by="MLADualRMSNormFusionPass",
        vendor="amd",
        aiter=True,
    ),
    Pass(
        fusions=quantised("silu_mul", per=_GROUP),
        switch="fuse_act_quant",
        by="ActivationQuantFusionPass",
        vendor="nvidia",
    ),
    Pass(
        fusions=quantised("silu_mul", per=("static_quant",)),
        switch="fuse_act_quant",
        by="ActivationQuantFusionPass",
        vendor="nvidia",
        by_default=False,
    ),
    Pass(
        fusions=quantised("silu_mul", per=_GROUP),
        switch="fuse_act_quant",
        by="RocmAiterSiluMulFp8GroupQuantFusionPass",
        vendor="amd",
        aiter=True,
    ),
)
"""The passes of 0.26 and 0.33 that take a chain of the catalog."""


def by_passes(place: Place, switched: Mapping[str, bool] | None = None) -> dict[str, str]:
    """Fusion -> the pass of vLLM's that does it.

    Args:
        place: what is planned for.
        switched: `pass_config` of an engine that is there; None: vLLM's defaults.
    """
    return {
        name: f"its pass {each.by} ({each.switch}){each.given}"
        for each in _on(place, switched)
        for name in each.fusions
    }


def _on(place: Place, switched: Mapping[str, bool] | None) -> Iterator[Pass]:
    for each in PASSES:
        on = each.by_default and place.arch in (each.archs or (place.arch,))
        if each.there(place) and (on if switched is None else switched.get(each.switch, False)):
            yield each


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

_REDUCTIONS = "all_reduce_add_rms_norm", *quantised("all_reduce_add_rms_norm")
REDUCES: Mapping[str, frozenset[str]] = {"fused_allreduce_rms_norm": _V32, "fused_allreduce_gemma_rms_norm": _M3}
"""vLLM's functions for a norm behind an all-reduce -> the architectures whose code calls them."""

CODE = (
    Code(fusions=("add_rms_norm",), by="its own op for the add and the norm (fused_add_rms_norm)"),
    Code(fusions=("gated_rms_norm",), by="its own kernel for the gated norm (rms_norm_gated)"),
    Code(
        fusions=("mla_dual_rms_norm", *quantised("mla_dual_rms_norm")),
        by="fused_norm_rope in the code of the model",
        architectures=SPARSE_MODELS,
        kept=True,
    ),
    Code(
        fusions=quantised("rms_norm"),
        by="fused_embed_norm in the code of the model, for the first norm",
        architectures=_V32,
        drafts=frozenset({"DeepseekV32MTP", "Dots3NoteMTP"}),
        ranks="one",
        kept=True,
    ),
    Code(
        fusions=("mla_dual_rms_norm",),
        by="fused_q_kv_rmsnorm in the code of the model",
        architectures=_GLM5_NEXT | {"KimiK3ForConditionalGeneration"},
    ),
    Code(
        fusions=("add_rms_norm",),
        by="FlashInfer's op for the add and the norm (gemma_fused_add_rmsnorm), in the code of the model",
        architectures=_M3,
    ),
    Code(
        fusions=("qk_norm_rope",),
        by="fused_minimax_m3_qknorm_rope_kv_insert in the code of the model",
        architectures=_M3,
        kept=True,
    ),
    Code(
        fusions=("add_rms_norm", *quantised("add_rms_norm", "rms_norm")),
        by="apply_step5_add_rms_norm in the code of the model where its stream is in float32, and else an add by itself",
        architectures=_STEP5,
        kept=True,
    ),
    Code(
        fusions=("qk_norm_rope",),
        by="fused_qknorm_rope_cache in the code of the model",
        architectures=_STEP5,
        kept=True,
    ),
    Code(
        fusions=("qk_norm_rope",),
        by="fused_qk_rmsnorm_rope_gate in the code of the model, the gate with it",
        architectures=frozenset({"AliceAIForCausalLM"}),
        vendor="nvidia",
        kept=True,
    ),
    Code(
        fusions=("qk_norm_rope",),
        by="qsa_prepare in the code of the model, the gate and the indexer's with it",
        architectures=frozenset({"Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"}),
        vendor="nvidia",
        kept=True,
    ),
    Code(
        fusions=("qk_norm_rope",),
        by="beam_qk_norm_rope in the code of the model",
        architectures=frozenset({"BeamForCausalLM"}),
        kept=True,
    ),
    Code(
        fusions=quantised("silu_mul"),
        by="beam_silu_mul in the code of the model, without the quantisation",
        architectures=frozenset({"BeamForCausalLM"}),
        kept=True,
    ),
    Code(
        fusions=("add_rms_norm", *quantised("add_rms_norm", "rms_norm")),
        by="attn_res in the code of the model",
        architectures=frozenset({"KimiK3ForConditionalGeneration"}),
        drafts=frozenset({"KimiK3MTP"}),
        kept=True,
    ),
    *(
        Code(
            fusions=(fusion,),
            by=f"{function} in the code of the model{NEEDS_FLASHINFER}, and else an all-reduce and a norm with its add",
            architectures=architectures,
            ranks="several",
            vendor="nvidia",
            kept=kept,
        )
        for function, architectures in REDUCES.items()
        for fusion, kept in (*((each, False) for each in _REDUCTIONS), ("add_rms_norm", True))
    ),
)
"""What models do that vLLM runs without compiling them; later rows are the more special ones."""

_KIMI = frozenset({"KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"})
COPIED = _KIMI | {"AliceAIForCausalLM"}
"""Whose delta nets norm inside of an op, which copies the result out of itself before a linear reads it."""

SHARED_APART = _STEP5 | {"Dots3NoteForCausalLM"}
"""Whose shared experts are called by the code of the model, and not by that of the routed ones."""

BY_ITSELF = frozenset({"MiniCPM3ForCausalLM", "HYV4ForCausalLM", "Dots3NoteForCausalLM"})
"""Whose MLA layers are written out in the code of the model, where each latent norm is called by itself."""

NO_WRAPPER = f"vLLM's code of this model has no {CLASS[1]}"

APART = {
    **{
        architecture: {
            FINAL: "vLLM applies the final norm of this model in compute_logits, apart from the residual add"
        }
        for architecture in sorted(_KIMI | _STEP5)
    },
    **{
        draft: {FINAL: "vLLM's code of this draft adds the residual by itself, and calls the final norm with the sum"}
        for draft in ("DeepSeekMTP", "Glm4MoeLiteMTP")
    },
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
    does = by_passes(place, switched)
    return Engine(
        name="vllm",
        does={name: f"vLLM does it: {by}; {INSTEAD}" for name, by in does.items()},
        experts=EXPERTS,
        shared_in_turn=is_set(SHARED_IN_TURN),
        block_linears=_block_linears(place),
        inside=_inside(place),
        linears={},
    )


def _block_linears(place: Place) -> str | None:
    switch = block_switch() if place.vendor == "nvidia" else None
    return None if switch is None else BLOCK_LINEARS[switch]


def _inside(place: Place) -> str | None:
    return None if place.vendor == "nvidia" else "vLLM has such linears on NVIDIA GPUs alone"


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
        for name in ("mla_dual_rms_norm", *quantised("mla_dual_rms_norm")):
            refuses[name] = f"{no_mla}, and calls each of their norms by itself"
    return Engine(
        name="vllm",
        uncompiled=reason,
        refuses=refuses,
        does=does,
        keeps=keeps,
        experts=EXPERTS,
        shared_apart=not SHARED_APART.isdisjoint(architectures),
        shared_in_turn=is_set(SHARED_IN_TURN),
        block_linears=_block_linears(place),
        inside=_inside(place),
        linears={},
    )
