"""The decode chain of MLA layers inside SGLang, as `mla_decode`: what a decode step does in front of its attention, beside `q_b_proj`, in two launches.

An instance of `DeepseekV2AttentionMLA` prepares its attention by one method. Where a step decodes one token of each sequence, or verifies drafted ones, ours is called in its place:
both latent norms, the rope of the key and the cache write in one launch, with the query latent quantised where `q_b_proj` takes it so, then the
absorbing GEMM with the rope of the query beside it. The attention is given no key, and so writes none. Any other step is SGLang's own.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType, SimpleNamespace
from typing import Any

import attrs
import torch
from attrs import define, field
from torch import Tensor, nn

from ...adapters.specs import LinearSpec
from ...fusion.latent_ops import (
    BEFORE_OPTIONS,
    MLA_NORM_ROPE_CACHE,
    MLA_NORM_ROPE_CACHE_GROUP_QUANT,
    MLA_QUERY_ABSORB,
)
from ...fusion.ops import FUNCTIONS
from ...fusion.sites import DECODE, LATENTS, Site
from .. import trial
from ..compiled_module import CompiledModule
from ..handover import keeping
from ..hooks import Hook, HookError, check
from ..host import here
from ..mla import NAME
from ..native import OURS, Look, Native, NotNativeError, held_methods
from ..placement import REFUSALS, Placement, Put, aside, is_looked_at
from ..process import once
from ..whose import kind_of, module_of, package
from .decode_facts import BACKENDS, CLASS, LAYER, PLACE, POOL, VERIFIES, WHY, WRITE, WRITES
from .seams import LINEARS, chosen, is_plain_latent

LEFT = f"layerfuse: {NAME} leaves an MLA layer alone: %s"
STEP = f"layerfuse: {NAME}: a decode step is done as SGLang does it: %s"
DECODED = f"layerfuse: {NAME}: a decode step went through the fused ops in every MLA layer"

_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_write, _write_quantised = FUNCTIONS[MLA_NORM_ROPE_CACHE.name], FUNCTIONS[MLA_NORM_ROPE_CACHE_GROUP_QUANT.name]
_absorb = FUNCTIONS[MLA_QUERY_ABSORB.name]


@define(kw_only=True, eq=False)
class Layer:
    """One MLA layer of SGLang's, with what the ops need beside a step's tensors."""

    path: str
    mla: Any = field(repr=False)
    settings: tuple[float, float, float, float]
    "Epsilons of the query's norm and the key/value's, and what is added to their weights."
    pairs: str
    "As `fusion.ops.rope.PAIRS`."
    options: tuple[Any, ...] | None
    "Of the quantisation that `q_b_proj` takes; None: it is given the latent as it is."
    stood: list[Native] = field(repr=False)
    "What SGLang would run."
    waiting: set[str] = field(repr=False)
    "Paths of the layers of its model that have not decoded yet: one set for all of them."
    unit: Tensor | None = field(default=None, repr=False)
    tried: Any = None
    "The attention backend and the cache that it was tried out with."
    left: str | None = None
    "Why SGLang's own way is gone from now on, as a sentence."
    why: str | None = None
    "Why a decode step went SGLang's way last."
    calls: int = 0

    def own(self, *given: Any) -> Any:
        """What SGLang's class does."""
        return getattr(type(self.mla), PLACE)(self.mla, *given)

    def prepare(
        self, positions: Tensor, hidden_states: Any, forward_batch: Any, zero_allocator: Any, *others: Any
    ) -> Any:
        """What the attention of a step takes, as SGLang's method gives it; without a key where its entries are in the cache."""
        given = (positions, hidden_states, forward_batch, zero_allocator, *others)
        mode = forward_batch.forward_mode
        if not (mode.is_decode() or mode.is_target_verify()):
            return self.own(*given)
        if self.left is None:
            self.why = self._why_not_step(positions, forward_batch, others) or self._why_not_tried(given)
            if self.why is not None and self.left is None:
                once(logging.INFO, STEP, self.why)
        if self.left is not None or self.why is not None:
            return self.own(*given)
        rows, slots, cache = _latents(), forward_batch.out_cache_loc, self._cache()
        if not positions.shape[0] == rows.shape[0] == slots.shape[0]:
            self.why = WHY["slots"]
            once(logging.INFO, STEP, self.why)
            return self.own(*given)
        try:
            query = self.query(rows, positions, slots, cache)
        except REFUSALS as error:
            self.leave(str(error))
            return self.own(*given)
        self.calls += is_looked_at()
        if self.path in self.waiting:
            self.waiting.discard(self.path)
            if not self.waiting:
                once(logging.INFO, DECODED)
        latent, rope = query.split_with_sizes([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], -1)
        return rope, None, latent, None, forward_batch, zero_allocator, positions, None, None, None

    def query(self, rows: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        """The absorbed query beside its roped columns, (tokens, heads, latent + rope); the entries are in the cache.

        Args:
            rows: (tokens, q_lora_rank + kv_lora_rank + rope), both latents and the key's rope columns; not written to.
            positions: (tokens,).
            slots: (tokens,), of the cache.
            cache: (slots, 1, kv_lora_rank + rope).
        """
        mla = self.mla
        q, kv, k_rope = rows.split_with_sizes([mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        table = mla.rotary_emb.cos_sin_cache
        half = table.shape[-1] // 2
        tables = table[:, :half], table[:, half:]
        if self.unit is None or self.unit.device != rows.device:
            self.unit = torch.ones(1, dtype=torch.float32, device=rows.device)
        weights = (norm.weight for norm in self._norms())
        epsilons, offsets = self.settings[:2], self.settings[2:]
        given = (q, kv, k_rope, *weights, *epsilons, *tables, positions, slots, cache, self.unit, *offsets, self.pairs)
        if self.options is None:
            made = mla.q_b_proj_forward(_write(*given))
        else:
            # SGLang's fp8 linears take values and scales in the place of a tensor.
            made = mla.q_b_proj(_write_quantised(*given, *self.options))[0]
        heads = made.view(-1, mla.num_local_heads, mla.qk_head_dim)
        nope = mla.qk_nope_head_dim
        return _absorb(heads[..., :nope], heads[..., nope:], mla.w_kc, *tables, positions, self.pairs, True)

    def leave(self, why: str) -> None:
        """Go SGLang's way from now on."""
        self.left = self.why = why
        once(logging.WARNING, LEFT, why)

    def _norms(self) -> tuple[Any, Any]:
        return self.mla.q_a_layernorm, self.mla.kv_a_layernorm

    def _cache(self) -> Tensor:
        pool, layer = _backend().token_to_kv_pool, self.mla.attn_mqa.layer_id
        cache: Tensor = pool.kv_buffer[layer - pool.start_layer]
        return cache

    def _why_not_step(self, positions: Tensor, batch: Any, others: tuple[Any, ...]) -> str | None:
        """Why this decode step is none of ours, as a sentence, or None."""
        if any(each is not None for each in others) or positions.dim() != 1:
            return WHY["scaled"]
        backend = self.mla.current_attention_backend
        if batch.forward_mode.is_target_verify():
            if backend != VERIFIES:
                return WHY["verify"].format(backend=backend)
        elif batch.spec_info is not None:
            return WHY["draft"]
        problem = next(filter(None, (each.changed() for each in self.stood)), None)
        if problem is None:
            problem = next(filter(None, map(_why_not_norm, self._norms())), None)
        if problem is not None:
            self.leave(problem)
        return problem

    def _why_not_tried(self, given: tuple[Any, ...]) -> str | None:
        """Why the backend, the cache, or what SGLang computes with both is not what the ops mean, as a sentence, or None: once for each pair."""
        backend = _backend()
        key = (backend, backend.token_to_kv_pool)
        if self.tried is not None and all(map(_is, self.tried, key)):
            return None
        problem = _why_not_backend(*key, self.mla.w_kc.dtype, self.mla.current_attention_backend)
        if problem is not None:
            return problem
        if not trial.possible():
            return WHY["captured"]
        try:
            stood = [held_methods(key[0], _decode_of(key[0])), held_methods(key[1], WRITES)]
            with torch.no_grad(), aside(), keeping():
                problem = trial.why_apart(self._pairs(key[1], given))
        except Exception as error:  # of anybody's
            problem = trial.raised(error)
        if problem is not None:
            self.leave(problem)
            return problem
        self.stood = [*self.stood[:1], *stood]
        self.tried = key
        return None

    def _pairs(self, pool: Any, given: tuple[Any, ...]) -> Iterator[tuple[Any, Tensor]]:
        """What SGLang's own method and cache write give for a few random tokens, and what ours do: queries, caches."""
        _, hidden_states, batch, allocator, *others = given
        mla, cache = self.mla, self._cache()
        width = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        rows = trial.random(mla.w_kc.new_empty(trial.ROWS, width))
        last = mla.rotary_emb.cos_sin_cache.shape[0] - 1
        positions = torch.linspace(0, last, trial.ROWS, device=rows.device).long()
        caches = cache.new_zeros(2, trial.ROWS + 2, *cache.shape[1:])  # one slot on either side stays as it is
        slots = torch.arange(1, trial.ROWS + 1, device=rows.device)
        with _given(rows.clone()):
            rope, k_rope, latent, k_latent, *_ = self.own(positions, hidden_states, batch, allocator, *others)
        getattr(pool, WRITE)(caches[0], slots, k_latent, k_rope)
        query = self.query(rows, positions, slots, caches[1])
        yield torch.cat([latent, rope], -1), query
        yield tuple(caches)


def _why_not_norm(norm: Any) -> str | None:
    """Whose forward stands in a norm's instance, as a sentence, if neither its class's nor one of ours."""
    forward = vars(norm).get("forward")
    if forward is None or package(module_of(forward)) == OURS:
        return None
    return str(NotNativeError(f"the forward of this {type(norm).__qualname__}", module_of(forward)))


def _is(one: object, other: object) -> bool:
    return one is other


def _backend() -> Any:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()


def _latents() -> Tensor:
    from sglang.srt.layers.layer_boundary import get_attn_tp_context

    found: Tensor = get_attn_tp_context().fetch_qkv_latent()
    return found


@contextmanager
def _given(rows: Tensor) -> Iterator[None]:
    """Let these be both latents of a step."""
    from sglang.srt.layers.layer_boundary import get_attn_tp_context
    from sglang.srt.runtime_context import get_forward

    before, context = get_forward().attn_inputs, get_attn_tp_context()
    context.set_attn_inputs(SimpleNamespace(fetch_qkv_latent=lambda: rows))
    try:
        yield
    finally:
        context.set_attn_inputs(before)


def _decode_of(backend: Any) -> tuple[Hook, ...]:
    every = (hook for hooks in BACKENDS.values() for hook in hooks)
    return tuple(hook for hook in every if hook.cls == kind_of(backend))


def _why_not_backend(backend: Any, pool: Any, dtype: torch.dtype, name: Any) -> str | None:
    """Why a step with this attention and this cache is none of ours, as a sentence, or None."""
    hooks = _decode_of(backend)
    if not hooks or name not in BACKENDS:
        return WHY["backend"].format(backend=f"{name} ({type(backend).__qualname__})")
    if kind_of(pool) != POOL:
        return WHY["pool"].format(kind=".".join(kind_of(pool)), known=POOL[1])
    if pool.dtype != dtype or pool.store_dtype != dtype:
        return WHY["cache"].format(
            dtype=str(pool.dtype).removeprefix("torch."), wanted=str(dtype).removeprefix("torch.")
        )
    return _why_not_as_expected((*hooks, *WRITES))


def _why_not_as_expected(hooks: tuple[Hook, ...]) -> str | None:
    try:
        for hook in hooks:
            check(hook, sys.modules[hook.module])
    except HookError as error:
        return str(error)
    return None


@define(kw_only=True, eq=False)
class DecodePlacement(Placement):
    """The MLA layers of one model."""

    fusion: str = NAME
    layers: dict[str, Layer] = field(factory=dict, repr=False)
    "Site -> the layer in which ours stands."

    @property
    def key(self) -> str:
        """Its name, if it stands anywhere."""
        return NAME if self.layers else ""

    def calls(self) -> dict[str, Counter[str]]:
        """Of each site the decode steps so far, by the op that absorbs the query."""
        found: dict[str, Counter[str]] = {site: Counter() for site in self.missed}
        for site, layer in self.layers.items():
            found[site] = Counter({MLA_QUERY_ABSORB.name: layer.calls})
        return found

    def why_left(self, site: str, run: str) -> str | None:  # noqa: ARG002 (it is what it did last)
        """Why a decode step went SGLang's way; None where there was none."""
        return self.layers[site].why

    def told(self, counted: Counter[str]) -> Counter[str]:
        """Without the launch that quantises the query latent, which is another fusion's op elsewhere and a part of this one here."""
        return super().told(Counter({op: n for op, n in counted.items() if op != MLA_NORM_ROPE_CACHE_GROUP_QUANT.name}))

    def covers(self, site: Site) -> bool:
        """Both latent norms of a layer that has decoded."""
        layer = self.layers.get(f"{site.layer}:{DECODE}") if site.role == LATENTS else None
        return layer is not None and layer.calls > 0

    def notes(self, run: str) -> Iterator[str]:
        """How many of the layers had run a decode step by the end of `run`."""
        if self.layers:
            decoded = sum(layer.path not in layer.waiting for layer in self.layers.values())
            yield f"{NAME}: {decoded or 'none'} of {len(self.layers)} layers had decoded by the end of the {run}"


def put_in(compiled: CompiledModule, model: nn.Module) -> None:
    """Let decode steps be ours where a model's plan expects that. Before anything of layerfuse's stands in the norms."""
    sites = [compiled.plan.site[each.site] for each in compiled.plan.expected(NAME)]
    if not sites:
        return
    placed, waiting = DecodePlacement(), set[str]()
    for site in sites:
        mla = model.get_submodule(site.layer)
        problem = _why_not_layer(mla)
        try:
            layer = None if problem is not None else _layer(mla, site, compiled, waiting)
        except NotNativeError as error:
            problem, layer = str(error), None
        if layer is None:
            placed.missed[site.name] = str(problem)
            once(logging.WARNING, LEFT, problem)
            continue
        placed.layers[site.name] = layer
        waiting.add(layer.path)
        _stand(layer)
        placed.put.append(Put.at(mla, PLACE))
    compiled.placements[NAME] = placed


def _stand(layer: Layer) -> None:
    """Let the method of an instance be ours. A copy of it takes this along, and runs what its class has."""
    mla = layer.mla

    @wraps(getattr(type(mla), PLACE))
    def prepare(self: Any, *given: Any, **named: Any) -> Any:
        if self is mla and not named:
            return layer.prepare(*given)
        return getattr(type(self), PLACE)(self, *given, **named)

    setattr(mla, PLACE, MethodType(prepare, mla))  # which copies are bound to anew


def _why_not_layer(mla: Any) -> str | None:
    """Why one layer cannot be ours, from what SGLang made of it."""
    if kind_of(mla) != CLASS:
        return WHY["layer"].format(kind=".".join(kind_of(mla)), known=CLASS[1])
    problem = _why_not_as_expected(LAYER)
    if problem is not None:
        return problem
    weight = mla.w_kc
    dtype = "other weights" if weight is None else str(weight.dtype).removeprefix("torch.")
    checks = (
        ("sparse", mla.use_dsa),
        ("split", mla.dcp_size != 1),
        ("gate", hasattr(mla, "prepare_attention_output_gate")),
        (
            "weight",
            mla.use_deep_gemm_bmm
            or getattr(mla, "_kimi_split_gguf_kv_b", False)
            or weight is None
            or weight.dtype not in _DTYPES,
        ),
    )
    problem = next((WHY[why].format(dtype=dtype) for why, found in checks if found), None)
    strange = next((each for name in _NORMS if not is_plain_latent(each := getattr(mla, name))), None)
    if problem is None and strange is not None:
        problem = WHY["norm"].format(kind=".".join(kind_of(strange)))
    return problem


def _layer(mla: Any, site: Site, compiled: CompiledModule, waiting: set[str]) -> Layer:
    spec: Any = site.spec
    norms = spec.q_norm, spec.kv_norm
    return Layer(
        path=site.layer,
        mla=mla,
        settings=(*(norm.epsilon for norm in norms), *(norm.weight_offset for norm in norms)),
        pairs="interleaved" if spec.rope.interleaved else "halves",
        options=_options(mla, site, compiled),
        stood=[_look(mla)],
        waiting=waiting,
    )


def _look(mla: Any) -> Native:
    """What SGLang would run in front of its attention, beside `q_b_proj`, which is called as ever.

    Raises:
        NotNativeError: some of it is not SGLang's own code, or a hook is on one of its modules.
    """
    chosen(mla.rotary_emb)
    look = Look()
    for name in (*_NORMS, "rotary_emb"):
        child = getattr(mla, name)
        look.hold(mla._modules, name, child, f"{name} of this {type(mla).__qualname__}", mla._modules)
        look.top = child if name in _NORMS else None  # an op may stand in a norm
        look.module(child)
    return Native.of_all([look.native(), held_methods(mla, LAYER)])


def _options(mla: Any, site: Site, compiled: CompiledModule) -> tuple[Any, ...] | None:
    """The options of the op that quantises what `q_b_proj` reads, in groups; None where it quantises itself, or nothing is."""
    beside = compiled.plan.site.get(f"{site.layer}:{LATENTS}")
    quant = None if beside is None else beside.quant
    if beside is None or quant is None or quant.scheme != "group":
        return None
    paths = [each.path for each in beside.norms[0].consumers if isinstance(each, LinearSpec)]
    if paths != ["q_b_proj"] or LINEARS.reader(mla.q_b_proj, quant) is None:
        return None
    said = {**attrs.asdict(quant), "dtype": here().fp8_dtype()}
    return tuple(said[argument.name] for argument in MLA_NORM_ROPE_CACHE_GROUP_QUANT.args[BEFORE_OPTIONS:])


__all__ = ["DecodePlacement", "Layer", "put_in"]
