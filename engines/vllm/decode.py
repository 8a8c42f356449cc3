"""The decode chain of MLA layers at module level, as `mla_decode`: norms, ropes, cache write and absorption of a step in two launches or three.

vLLM compiles norms and ropes, writes the cache and runs its attention behind two ops at which it splits its graphs. Here the forward of
its MLA wrapper calls three ops of ours (`decode_ops`), compiled or not: two stand for the norms and ropes, and the third for both of vLLM's.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import count
from typing import Any

import attrs
import torch
from attrs import define, field
from torch import nn

from ...adapters.specs import MLASpec
from ...fusion.latent_ops import MLA_NORM_ROPE_CACHE_GROUP_QUANT
from ...fusion.planning import Plan, plan
from ...fusion.report import Use
from ...fusion.sites import DECODE
from ..host import here
from ..mla import NAME, QUANTISED
from ..native import NotNativeError, native, native_call
from ..placement import Placement, why_apart
from ..process import once
from ..seams import seam_of
from ..whose import kind_of
from .decode_facts import ATTENTION, CHANGED, CLASS, LEFT, SEAM, WHY, WRITE, taking, why_not_here
from .seams import SEAMS

_loaded = count(1)

LATENT_UNREAD = (
    "no graph shows q_b_proj's product behind the latent's norm as vLLM 0.26 and 0.33 have it: it quantises by itself"
)
"""Why a layer whose query latent was to be quantised has the plain form."""

WRITE_QUANT = MLA_NORM_ROPE_CACHE_GROUP_QUANT.name
_AS_VLLMS = "as vLLM's"
"""In the place of an op: calls of a layer that was to quantise, or to be vLLM's."""

BYPASSED = frozenset({"q_a_layernorm", "kv_a_layernorm", "rotary_emb", "mla_attn"})
"""The children of vLLM's wrapper that our forward does not call."""


@define(kw_only=True, eq=False)
class DecodePlacement(Placement):
    """The layers of one module that vLLM runs whose forward is to be ours: all of its MLA layers in which that is expected, or none."""

    fusion: str = NAME
    module: nn.Module = field(repr=False)
    layers: dict[str, MLASpec]
    "By their path in the module."
    vllm_config: Any = field(repr=False)
    why_not: str | None = None
    "Why no layer is ours, as a sentence, or None where all are."
    made: list[Any] = field(factory=list, repr=False)
    "A `decode_ops.Layer` for each."
    quantised: frozenset[str] = frozenset()
    "The layers whose query latent is to be quantised in the same launch."
    plain: bool = True
    "Whether the plain form stands where no graph quantises that; else the layer is vLLM's there."
    unread: frozenset[str] = frozenset()
    "The sites that were vLLM's in the run that is looked at, as no graph quantised there."

    @classmethod
    def of(cls, module: nn.Module, decided: Plan, vllm_config: Any) -> DecodePlacement | None:
        """What is to be done in a module; None where its plan expects it nowhere. Nothing changes yet, and what is decided here holds."""
        quantised = {decided.site[each.site].layer for each in decided.expected(QUANTISED)}
        sites = [decided.site[each.site] for name in (NAME, QUANTISED) for each in decided.expected(name)]
        if not sites:
            return None
        layers: Any = {site.layer: site.spec for site in sites}
        placed = cls(module=module, layers=layers, vllm_config=vllm_config, quantised=frozenset(quantised))
        placed.plain = bool(decided.expected(NAME) or decided.fallback(NAME))
        placed.why_not = placed._why_not_together(placed._why_not_here())
        return placed

    def _problems(self) -> Iterator[str]:
        problem = why_not_here(self.vllm_config) or SEAM.why_not()
        if problem is None and self.quantised:
            from . import inside

            problem = inside.why_not()
        if problem is not None:
            yield problem
            return
        shared = getattr(self.vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1
        for path, spec in self.layers.items():
            wrapper = self._wrapper(path)
            if wrapper is None:
                kind = ".".join(kind_of(self.module.get_submodule(path)))
                problem = f"{kind} is not vLLM's {CLASS[1]}, and holds none"
            else:
                problem = _why_not_layer(wrapper, spec, shared)
            if problem is not None:
                yield f"{path}: {problem}"

    def _wrapper(self, path: str) -> Any:
        """VLLM's wrapper at or below a layer; a class derived from it may do something else, and is none."""
        return next((m for m in self.module.get_submodule(path).modules() if kind_of(m) == CLASS), None)

    @property
    def key(self) -> str:
        """Its name, if the layers are ours."""
        return NAME if self.stands else ""

    @property
    def stands(self) -> bool:
        """Whether the layers' forward is to be ours."""
        return self.why_not is None

    def _why_not_here(self) -> str | None:
        """What this rank finds against it, at last by trying each op with what the layers have, or None."""
        try:
            problem = next(self._problems(), None)
            if problem is not None:
                return problem
            from . import decode_ops as ops
            from .decode_trial import difference

            waiting: set[str] = set()
            self.made = [
                _layer(self._wrapper(path), spec, ops, waiting, path in self.quantised)
                for path, spec in self.layers.items()
            ]
            waiting.update(layer.name for layer in self.made)
            ops.try_out(self.made, self.vllm_config)
            return difference(self.made, self.vllm_config)
        except NotNativeError as error:
            return str(error)
        except Exception as error:  # vLLM runs on, and the other ranks wait to hear of it
            return f"{type(error).__name__}: {error}"

    def _why_not_together(self, own: str | None) -> str | None:
        """The reason of all ranks of the tensor-parallel group, or of the first that has one: all of them do it, or none."""
        # What was agreed on once is not asked again, and a process may load several models.
        return why_apart(f"{NAME} of model {next(_loaded)}", own or "") or own

    def put_in(self) -> None:
        """Let each layer's forward be ours, and vLLM's graphs be split at our ops."""
        if not self.stands:
            once(logging.WARNING, LEFT, self.why_not)
            return
        from . import decode_ops as ops

        for layer in self.made:
            ops.hold(layer)
            if layer.attention.impl.dcp_world_size == -1:
                layer.attention.impl.dcp_world_size = 1  # as vLLM does at its first step
            layer.wrapper.forward = layer.forward = forward_of(layer, ops, self)
        split = self.vllm_config.compilation_config.splitting_ops
        if split and ops.SPLIT not in split:
            split.append(ops.SPLIT)

    def look_again(self) -> bool:
        """Stand aside where something was put in the place of vLLM's code since, which vLLM is about to trace; whether it does from now on."""
        if not self.stands:
            return False
        changed = (held.changed() for layer in self.made for held in (layer.around, layer.stood))
        self.why_not = self._why_not_together(next(filter(None, changed), None))
        if self.why_not is None:
            return False
        once(logging.WARNING, LEFT, self.why_not)
        for layer in self.made:
            # Graphs know weights by the way to them, which ours is not on. Where somebody has wrapped it, it stays.
            if vars(layer.wrapper).get("forward") is layer.forward:
                del layer.wrapper.forward
        return True

    def notes(self, run: str) -> Iterator[str]:
        """How many of the layers had run a decode step by the end of `run`: vLLM's profiling run makes none."""
        if self.stands:
            decoded = sum(layer.name not in layer.waiting for layer in self.made)
            yield f"{NAME}: {decoded or 'none'} of these calls decoded in the {run}"

    def calls(self) -> dict[str, Counter[str]]:
        """Of each layer the calls of its attention, whatever a step is, by the op that absorbs its query in a decode step."""
        found: dict[str, Counter[str]] = {f"{path}:{DECODE}": Counter() for path in self.layers}
        for calls, layer in zip(found.values(), self.made, strict=False):
            calls[layer.op] = layer.calls - layer.quantised
            if layer.rounds is not None:
                calls[WRITE_QUANT] = layer.quantised
                calls[_AS_VLLMS] = 0 if self.plain else layer.as_vllms
        return found

    def fusions_at(self, site: str) -> tuple[str, str]:
        """The form that quantises stands where a graph holds its op, and otherwise the plain one, unless that is off."""
        if site.removesuffix(f":{DECODE}") not in self.quantised:
            return NAME, NAME
        ran = self.ran.get(site, Counter())
        return QUANTISED, QUANTISED if ran[WRITE_QUANT] or not ran.total() else NAME

    def uses(self, run: str) -> Iterator[Use]:
        """As ever, with what no graph quantises among the misses."""
        for site in self.ran:
            if len({*self.fusions_at(site)}) == 2:
                self.missed[site] = LATENT_UNREAD
        yield from super().uses(run)

    def told(self, counted: Counter[str]) -> Counter[str]:
        """Calls as ever; a layer that quantises is counted by the op that does, and not by those of its decode steps."""
        self.unread = frozenset([site for site, ran in self.ran.items() if ran.pop(_AS_VLLMS, 0)])
        told = super().told(counted)
        if self.quantised:
            from . import decode_ops as ops

            ran = sum(self.ran.values(), Counter())
            told = Counter({op: ran[op] if op in ops.COUNTED else n for op, n in told.items()})
        return +told

    def why_left(self, site: str, run: str) -> str:
        """Why vLLM's own way was gone."""
        left = next(filter(None, (layer.left for layer in self.made)), None)
        unread = LATENT_UNREAD if site in self.unread else None
        return self.why_not or left or unread or f"{here().name} did not call this layer in the {run}"

    def modules(self) -> dict[str, nn.Module]:
        """Path of a layer -> the wrapper whose forward is ours; empty where none is."""
        return dict(zip(self.layers, (layer.wrapper for layer in self.made), strict=True)) if self.stands else {}


def with_placement(decided: Plan, module: nn.Module, vllm_config: Any) -> tuple[Plan, DecodePlacement | None]:
    """A plan with what is to stand where it expects decode steps. What is on by default and cannot stand there is not expected any more."""
    placed = DecodePlacement.of(module, decided, vllm_config)
    if placed is None or placed.stands:
        return (decided if placed is None else taking(decided)), placed
    if decided.engine is None or not {NAME, QUANTISED}.isdisjoint(decided.config.named):
        return decided, placed
    once(logging.INFO, f"{LEFT} (it is on by default here)", placed.why_not)
    engine = attrs.evolve(decided.engine, keeps={**decided.engine.keeps, DECODE: str(placed.why_not)})
    return plan(decided.specs, decided.target, decided.config, engine), None


def _why_not_layer(wrapper: Any, spec: MLASpec, shared: bool) -> str | None:
    """Why one layer cannot be ours, from what vLLM made of it; `shared`: whether its cache is split over ranks."""
    attention = wrapper.mla_attn
    if kind_of(attention) != ATTENTION:
        return WHY["attention"].format(kind=".".join(kind_of(attention)), known=ATTENTION[1])
    backend = attention.attn_backend.get_name()
    base = getattr(sys.modules[WRITE[0]], WRITE[1])
    write = getattr(attention.impl, WRITE[2], None)
    checks = (
        ("write", getattr(write, "__func__", None) is not getattr(base, WRITE[2])),
        ("no table", spec.rope is None or spec.rope.table != "cos_sin"),
        ("sparse", wrapper.is_sparse or wrapper.indexer is not None),
        ("gate", getattr(wrapper, "g_proj", None) is not None),
        ("scales", getattr(attention, "calculate_kv_scales", False)),
        ("tiers", getattr(attention, "hisparse_cache", None) is not None),
        ("aiter", attention.is_aiter_triton_fp4_bmm_enabled or attention.is_aiter_triton_fp8_bmm_enabled),
        ("amx", getattr(attention, "is_amx_bmm_enabled", False)),
        # In fp8 vLLM gives such a kernel the heads that there are, and in other forms leaves room for more behind them.
        ("padded", attention.q_pad_num_heads not in (None, attention.num_heads) and not _query_in_fp8(attention)),
        ("cache", _cache_of(attention) is None),
        ("own ranks", shared and getattr(attention, "dcp_manager", None) is None),
        ("all queries", getattr(wrapper, "dcp_q_replicate", False)),
    )
    said = {
        "backend": backend, "few": attention.num_heads, "many": attention.q_pad_num_heads, "dtype": attention.kv_cache_dtype,
    }  # fmt: skip
    problem = next((WHY[why].format(**said) for why, found in checks if found), None)
    for norm in (wrapper.q_a_layernorm, wrapper.kv_a_layernorm):
        seam = seam_of(SEAMS, type(norm), "add_rms_norm")
        if problem is None and (seam is None or not seam.plain(norm)):
            problem = f"its norm, a {'.'.join(kind_of(norm))}, does more than its spec says"
    return problem


def _cache_of(attention: Any) -> tuple[Any] | None:
    """The dtype that a layer's cache is looked at as, None for its own; or None for a form that is not known."""
    from vllm.platforms import current_platform

    name = attention.kv_cache_dtype
    if name in ("fp8", "fp8_e4m3"):
        return (current_platform.fp8_dtype(),)
    return (None,) if name in ("auto", "bfloat16", "float16", "half", "float32") else None


def _query_in_fp8(attention: Any) -> bool:
    return bool(attention.kv_cache_dtype.startswith("fp8") and attention.impl.supports_quant_query_input)


def _quantised(linear: nn.Module) -> bool:
    weight = linear._parameters.get("weight")
    return weight is None or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32)


def _layer(wrapper: Any, spec: MLASpec, ops: Any, waiting: set[str], quantised: bool) -> Any:
    attention = wrapper.mla_attn
    q_norm, kv_norm, rope = spec.q_norm, spec.kv_norm, spec.rope
    (cache_dtype,) = _cache_of(attention) or (None,)
    from vllm.platforms import current_platform

    return ops.Layer(
        name=attention.layer_name,
        wrapper=wrapper,
        attention=attention,
        epsilons=(q_norm.epsilon, kv_norm.epsilon),  # type: ignore[union-attr]
        offsets=(q_norm.weight_offset, kv_norm.weight_offset),  # type: ignore[union-attr]
        pairs="interleaved" if rope.interleaved else "halves",  # type: ignore[union-attr]
        cache_dtype=cache_dtype,
        query_dtype=current_platform.fp8_dtype() if _query_in_fp8(attention) else None,
        without_gaps=_quantised(attention.kv_b_proj),
        around=native(wrapper, bypassed=BYPASSED, values=False),
        stood=native_call(attention, (attention.impl, WRITE[2])),
        waiting=waiting,
        rounds=spec.q_norm.quant.use_ue8m0 if quantised else None,  # type: ignore[union-attr]
    )


def forward_of(held: Any, ops: Any, placed: DecodePlacement) -> Callable[..., Any]:
    """A forward for the wrapper of one layer that calls our ops, for Dynamo to trace or to be run as it is.

    Args:
        held: the layer, as `decode_ops.Layer`. Where something else is put in the place of what vLLM would run, that is called.
        ops: the module `decode_ops`.
        placed: says whether it is ours at all.
    """
    wrapper, stood, layer = held.wrapper, held.around, ops.encoded(held.name)
    latents, turn, attend = ops.latents, ops.turn, ops.attend
    settings, pairs, heads = [*held.epsilons, *held.offsets], held.pairs, held.attention.num_heads

    @wraps(wrapper.forward)
    def forward(positions: Any, hidden_states: Any, llama_4_scaling: Any = None) -> Any:
        if llama_4_scaling is not None or positions.dim() != 1 or not placed.stands:
            return type(wrapper).forward(wrapper, positions, hidden_states, llama_4_scaling)
        # What is put there once vLLM has traced a model is in none of its graphs, with ours or without.
        if not torch.compiler.is_compiling() and (problem := stood.changed()) is not None:
            once(logging.WARNING, CHANGED, problem)
            held.left = problem
            return type(wrapper).forward(wrapper, positions, hidden_states, llama_4_scaling)
        rows = wrapper.fused_qkv_a_proj(hidden_states)[0]
        table = wrapper.rotary_emb.cos_sin_cache
        weights = wrapper.q_a_layernorm.weight, wrapper.kv_a_layernorm.weight
        normed, entries, apart = latents(rows, positions, *weights, table, settings, pairs, layer)
        query = wrapper.q_b_proj(normed)[0]
        turn(query, positions, table, heads, pairs, layer)
        output = query.new_empty((query.shape[0], wrapper.num_heads * wrapper.v_head_dim))
        attend(query, entries, apart, positions, output, layer)
        return wrapper.o_proj(output)[0]

    return forward
