"""The ops that stand in an MLA layer of vLLM's instead of its norms, ropes, cache write and attention.

Where all tokens of a step are decoded, `mla_latents` is one launch (both norms, the rope of the key, the cache write), `mla_rope` does
nothing, and `mla_attend` absorbs and ropes the query in one launch (two for many tokens). In any other step the first gives vLLM's
cache write and its prefill what they take, the second ropes the query in place, and the third does what vLLM does.

vLLM splits its graphs at the third alone. What stands before it is in the compiled pieces, and in their CUDA graphs, as vLLM's norms
and ropes are: there it is launched for prompts, whatever the step that a graph was captured in.
"""

from __future__ import annotations

import ast
import inspect
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import mla_attention as vllm_mla
from vllm.utils import torch_utils

from ...fusion.backends import listening, steps
from ...fusion.latent_ops import MLA_NORM_ROPE_CACHE_GROUP_QUANT, MLA_QUERY_ABSORB, MLA_QUERY_ABSORB_STATIC_QUANT
from ...fusion.ops.library import case_maker, declared, direct, repeating
from ...fusion.ops.linear import op_of
from ..native import Native
from ..ops import define_op
from ..placement import REFUSALS, is_looked_at
from ..process import once
from .decode_facts import CHANGED

_STEADY = True
"""Nothing writes to what absorbs the query while a step runs."""

WRITE = "mla_norm_rope_cache_into"
SPLIT = "layerfuse_vllm::mla_attend"
"""What vLLM splits its graphs at."""

_write, _rope = repeating(WRITE), repeating("mla_query_rope")
ABSORB, ABSORB_QUANT = MLA_QUERY_ABSORB.name, MLA_QUERY_ABSORB_STATIC_QUANT.name
_absorb, _absorb_quant = direct(ABSORB), direct(ABSORB_QUANT)
WRITE_QUANT = MLA_NORM_ROPE_CACHE_GROUP_QUANT.name
_write_quant = direct(WRITE_QUANT)
COUNTED = (ABSORB, ABSORB_QUANT, WRITE_QUANT)
"""The ops by which a layer may be counted."""
_kinds: dict[Hashable, object] = {}
"""`Layer.kind` -> what stands for it in a key."""


class Here(threading.local):
    """What is decided for the layer that runs in this thread: micro-batches have threads of their own."""

    decodes = False
    "Whether its latents are in the cache already, and nowhere else."


_here = Here()


@define(kw_only=True, eq=False)
class Layer:
    """One layer of vLLM's with all that the ops need beside a step's tensors."""

    name: str
    "Of its attention, in vLLM's forward context."
    wrapper: Any = field(repr=False)
    attention: Any = field(repr=False)
    epsilons: tuple[float, float]
    "Of the query's norm and the key/value's."
    offsets: tuple[float, float]
    "Added to their weights."
    pairs: str
    "As `fusion.ops.rope.PAIRS`."
    cache_dtype: torch.dtype | None
    "What a cache that vLLM keeps as bytes is looked at as; None: as it is."
    query_dtype: torch.dtype | None
    "The fp8 dtype that the attention kernel takes its query in; None: that of the layer."
    without_gaps: bool
    "Whether the projection of a prompt's keys and values wants rows without gaps, as those do that quantise."
    around: Native = field(repr=False)
    "What vLLM would run in the whole layer."
    stood: Native = field(repr=False)
    "What of it runs at every step, compiled or not: the attention."
    waiting: set[str]
    "The layers of its model that have not decoded yet, by name: one set for all of them."
    children: dict[str, Any] = field(init=False, repr=False)
    "The wrapper's. A module's attribute takes a microsecond, and these are asked for at every step."
    widths: tuple[int, int, int] = field(init=False)
    "Of the query's latent, the key/value's, and the rope."
    forward: Any = field(default=None, repr=False)
    "Ours, as it was put into the wrapper."
    halved: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)
    "The rope's table, and its columns of cos and of sin."
    kept: object = None
    "Of its kind: calls of layers of one kind differ in nothing but their tokens and where their tensors lie."
    rows: Tensor | None = field(default=None, repr=False)
    "0, 1, ... as slots of a buffer, for the most tokens of a step; a buffer of vLLM's module, which it keeps through its sleep."
    rounds: bool | None = None
    "Whether the scales of its quantised query latent are powers of two; None: it is not to be quantised."
    quantises: bool = False
    "Whether that was done for the step that is run."
    refused: bool = False
    "Whether an op did not take a step's tensors: from then on vLLM's own way is gone."
    left: str | None = None
    "Why vLLM's own way was gone last, as a sentence, or None where it was not."
    calls: int = 0
    "How often its attention was called."
    quantised: int = 0
    "How often of these the query latent was quantised in the launch of its norms."
    as_vllms: int = 0
    "How often its attention was called beside these, in graphs that are vLLM's own."

    def __attrs_post_init__(self) -> None:
        self.children = self.wrapper._modules
        attention = self.attention
        self.widths = self.norms[0]["weight"].shape[0], attention.kv_lora_rank, attention.qk_rope_head_dim

    @property
    def op(self) -> str:
        """What absorbs its query in a decode step."""
        return ABSORB if self.query_dtype is None else ABSORB_QUANT

    @property
    def norms(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of both norms, as they are now: vLLM's graphs take those of modules that are put there later too."""
        return self.children["q_a_layernorm"]._parameters, self.children["kv_a_layernorm"]._parameters

    def kind(self) -> Hashable:
        """All that decides which kernels are compiled: alike in most layers of a model."""
        return self.form(), self.cache_dtype, self.query_dtype, self.attention.kv_cache_dtype

    def form(self) -> Hashable:
        """What of it is no matter of its cache."""
        attention = self.attention
        tensors = *(each["weight"] for each in self.norms), attention.W_UK_T, *self.tables
        forms = tuple((each.dtype, each.shape, each.stride()) for each in tensors)
        return attention.W_UK_T.device, forms, self.epsilons, self.offsets, self.pairs, attention.qk_nope_head_dim

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cos and sin: (positions, half the rope's width) each."""
        table: Tensor = self.children["rotary_emb"]._buffers["cos_sin_cache"]
        if self.halved is None or self.halved[0] is not table:
            half = table.shape[-1] // 2
            self.halved = table, table[:, :half], table[:, half:]
            self.kept = _kinds.setdefault(self.kind(), object())
        return self.halved[1:]

    def buffer_slots(self, tokens: int) -> Tensor:
        """The rows of a buffer of so many tokens, in their order."""
        assert self.rows is not None, "no step runs before the ops were tried out"
        if tokens > self.rows.shape[0]:
            return torch.arange(tokens, dtype=self.rows.dtype, device=self.rows.device)
        return self.rows[:tokens]

    def decodes(self, metadata: Any, cache: Tensor, slots: Tensor | None, tokens: int) -> bool:
        """Whether every token of a step is decoded, so that nothing but the cache needs its latents.

        Never where vLLM replays graphs of the pieces between attentions: what stands in them is the same in every step.
        """
        if self.refused or metadata is None or not 0 < metadata.num_actual_tokens == metadata.num_decode_tokens:
            return False
        if in_pieces():
            once(logging.INFO, "layerfuse: mla_decode: a decode step in CUDA graphs of pieces is done as vLLM does it")
            return False
        if slots is None or slots.shape[0] != tokens or cache.numel() == 0:
            once(
                logging.WARNING,
                "layerfuse: mla_decode: a decode step without a slot for each token, or without a cache, is done as vLLM does it",
            )
            return False
        problem = self.stood.changed()
        if problem is not None:
            once(logging.WARNING, CHANGED, problem)
        return problem is None

    def refuse(self, error: Exception) -> None:
        """Go vLLM's way from now on."""
        self.refused, self.left = True, str(error)
        once(logging.WARNING, "layerfuse: mla_decode: %s: %s", self.name, error)

    def has_decoded(self) -> None:
        """Take note of a decode step: it is said once all layers have made one."""
        if self.name in self.waiting:
            self.waiting.remove(self.name)
            if not self.waiting:
                once(logging.INFO, "layerfuse: mla_decode: a decode step went through the fused ops in every MLA layer")

    def seen(self, cache: Tensor) -> Tensor:
        """The cache by the dtype of its values."""
        return cache if self.cache_dtype is None else cache.view(self.cache_dtype)

    def write(
        self, rows: tuple[Tensor, Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor, q_out: Tensor
    ) -> None:
        """Both norms, the rope of the key, and the entries to their slots."""
        given, (q, kv, k_rope) = self._given(rows, positions, slots, cache), rows
        alike = (
            self.kept, q.dtype, q.shape, q.stride(), kv.stride(), k_rope.stride(), positions.dtype, slots.dtype,
            cache.shape, cache.stride(), cache.dtype,
        )  # fmt: skip
        _write(alike, *given, q_out)

    def write_quantised(
        self, rows: tuple[Tensor, Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        """The same with the query latent quantised: its values, and scales as `inside.QUANTISE` gives them."""
        found: tuple[Tensor, Tensor] = _write_quant(*self._given(rows, positions, slots, cache), *options(rounds))
        return found

    def _given(
        self, rows: tuple[Tensor, Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor
    ) -> tuple[Any, ...]:
        q_norm, kv_norm = self.norms
        return (
            *rows,
            q_norm["weight"],
            kv_norm["weight"],
            *self.epsilons,
            *self.tables,
            positions,
            slots,
            cache,
            self.attention._k_scale,
            *self.offsets,
            self.pairs,
        )

    def query(self, q: Tensor, positions: Tensor) -> Tensor:
        """The absorbed query beside its roped columns: (tokens, heads, latent + rope).

        Args:
            q: (tokens, heads, nope + rope), not roped.
            positions: (tokens,).
        """
        attention = self.attention
        nope = attention.qk_nope_head_dim
        given = (q[..., :nope], q[..., nope:], attention.W_UK_T, *self.tables, positions)
        if self.query_dtype is not None:
            return _absorb_quant(*given, attention._q_scale, self.pairs, self.query_dtype, _STEADY)
        return _absorb(*given, self.pairs, _STEADY)

    def heads(self, q: Tensor) -> Tensor:
        """The query as (tokens, heads, nope + rope)."""
        attention = self.attention
        return q.view(-1, attention.num_heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim)

    def rope_in_place(self, q: Tensor, positions: Tensor) -> None:
        """The same rope where nothing is absorbed. q: (tokens, heads, nope + rope)."""
        tables, nope = self.tables, self.attention.qk_nope_head_dim
        _rope(
            (self.kept, q.dtype, q.shape, q.stride(), positions.dtype), q[..., nope:], q, *tables, positions, self.pairs
        )


def in_pieces() -> bool:
    """Whether vLLM runs this step in graphs of the pieces between its attentions."""
    return bool(get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE)


_HELD = "__layerfuse_decode__"


def hold(layer: Layer) -> None:
    """Let the attention of a layer hold what of ours stands there: engines of one process may have layers of one name."""
    vars(layer.attention)[_HELD] = layer


def layer_of(attention: Any) -> Layer:
    """What it holds."""
    found: Layer = vars(attention)[_HELD]
    return found


def options(rounds: bool) -> tuple[Any, ...]:
    """Of the quantisation: as `inside.TakenOut` takes it out. `rounds`: whether scales are powers of two."""
    return torch.float8_e4m3fn, 128, True, True, rounds


def _latents(rows: Tensor, positions: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    # The others are there for graphs that are to be vLLM's own. The layer knows them as they are now.
    normed, entries, apart = _made(rows, positions, *others)
    _put(rows, positions, entries, apart, others[-1], lambda layer, *given: layer.write(*given, normed))
    return normed, entries, apart


def _latents_quantised(rows: Tensor, positions: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, rounds, name = others
    entries, apart = _entries(rows, *others)

    def write(layer: Layer, rows: Any, positions: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        layer.quantises = True
        return layer.write_quantised(rows, positions, slots, cache, rounds)

    values, scales = _put(rows, positions, entries, apart, name, write)
    return values, scales, entries, apart


def _put(
    rows: Tensor, positions: Tensor, entries: Tensor, apart: Tensor, layer_name: Any, write: Callable[..., Any]
) -> Any:
    """Let a layer write a step's entries, to its cache or to `entries`: what it gives then.

    Where a projection wants the latents alone, `apart` gets them: here, as this is in CUDA graphs of pieces, and the attention is not.
    """
    metadata, attention, cache, slots = vllm_mla.get_attention_context(_plain(layer_name))
    layer, tokens = layer_of(attention), rows.shape[0]
    parts = rows.split_with_sizes(layer.widths, -1)
    _here.decodes = layer.decodes(metadata, cache, slots, tokens)
    if _here.decodes:
        try:
            return write(layer, parts, positions, slots, layer.seen(cache))
        except REFUSALS as error:
            layer.refuse(error)
            _here.decodes = False
    given = write(layer, parts, positions, layer.buffer_slots(tokens), entries)
    if layer.without_gaps:
        apart.copy_(entries[:, : layer.widths[1]])
    return given


def _made_quantised(rows: Tensor, positions: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, entries, apart = _made(rows, positions, *others)
    values, scales = torch.ops.layerfuse.quantise_group.default(normed, *options(others[-2]))
    return values, scales, entries, apart


def _made(rows: Tensor, _: Tensor, *weights: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape[0], len(weights[0])), *_entries(rows, *weights)


def _entries(rows: Tensor, q_weight: Tensor, kv_weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """For the normed latents with the ropes, and for the latents alone."""
    tokens, width = rows.shape
    return rows.new_empty(tokens, width - len(q_weight)), rows.new_empty(tokens, len(kv_weight))


def _turn(q: Tensor, positions: Tensor, *others: Any) -> None:
    if not _here.decodes:
        layer = layer_of(get_forward_context().no_compile_layers[_plain(others[-1])])
        layer.rope_in_place(layer.heads(q), positions)


def _attend(q: Tensor, entries: Tensor, apart: Tensor, positions: Tensor, output: Tensor, layer_name: Any) -> None:
    metadata, attention, cache, slots = vllm_mla.get_attention_context(_plain(layer_name))
    if apart.dim() == 3:  # the graph is vLLM's own (`decode_beyond`)
        layer_of(attention).as_vllms += is_looked_at()
        _as_vllm(attention, q, entries, apart, cache, metadata, slots, output, layer_name)
        return
    layer = layer_of(attention)
    layer.calls += is_looked_at()
    layer.quantised += layer.quantises and is_looked_at()
    layer.quantises = False
    heads = layer.heads(q)
    decodes = metadata is not None and metadata.num_actual_tokens == metadata.num_decode_tokens
    if decodes:
        # What is replayed with a graph says nothing here.
        decodes = layer.decodes(metadata, cache, slots, entries.shape[0]) if in_pieces() else _here.decodes
    _here.decodes = False
    if decodes:
        count = metadata.num_actual_tokens
        try:
            query = layer.query(heads[:count], positions[:count])
        except REFUSALS as error:
            layer.refuse(error)
            heads, slots = heads.clone(), None  # its latents are in the cache already
            layer.rope_in_place(heads, positions)
        else:
            shared = attention.dcp_manager if attention.impl.dcp_world_size > 1 else None
            if shared is not None:
                query = shared.query_gather(query)
            attended, weights = attention.impl.forward_mqa(query, layer.seen(cache), metadata, attention)
            if shared is not None:  # each rank has attended to its part of the cache, for the heads of all
                starts = metadata.query_start_loc[: metadata.num_decodes + 1]
                attended = shared.combine(attended, weights, seq_lens=metadata.decode.seq_lens, query_start_loc=starts)
            attention._v_up_proj(attended, out=output[:count])
            layer.has_decoded()
            return
    latent, rope = entries.split_with_sizes(layer.widths[1:], -1)
    latent = apart if layer.without_gaps else latent
    _as_vllm(attention, heads, latent, rope.unsqueeze(1), cache, metadata, slots, output, layer_name)


def _as_vllm(
    attention: Any, q: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, metadata: Any, slots: Tensor | None,
    output: Tensor, layer_name: Any,
) -> None:  # fmt: skip
    """What vLLM's two ops do. Without slots nothing is written."""
    if slots is not None:
        form, scale = attention.kv_cache_dtype, attention._k_scale
        if _IS_ONE_CALL:
            attention.update_kv_cache(latent, rope, cache, slots, metadata, form, scale)
        else:
            vllm_mla.unified_mla_kv_cache_update(latent, rope, layer_name, form, scale)
    attention.forward_impl(q, latent, rope, cache, metadata, output=output)


def called(function: Callable[..., Any]) -> set[str]:
    """The names of what a function calls, from its source."""
    calls = [node.func for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Call)]
    return {each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in calls}


_IS_ONE_CALL = called(vllm_mla.unified_mla_kv_cache_update) == {
    "_resolve_layer_name", "get_attention_context", "prepare_kv_cache_update", "update_kv_cache", "empty"
}  # fmt: skip
"""Whether vLLM's op finds a layer and calls its cache write, as in 0.33: ours has found it already. (What is prepared is of caches in tiers.)"""


def _plain(name: Any) -> str:
    """A layer's name of what the ops are given."""
    plain: str = getattr(name, "value", name)
    return plain


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An op whose last argument is a layer's name, in the form in which vLLM compiles layers that differ in it alone once."""
    return op_of(define_op("layerfuse_vllm", f"{name}{schema.format(name=_name_type())}", run, fake))


def _name_type() -> str:
    kind = getattr(torch_utils, "LayerNameType", str)
    if kind is str:
        return "str"
    from torch._library.opaque_object import get_opaque_type_name

    return str(get_opaque_type_name(kind))


def encoded(name: str) -> Any:
    """A layer's name as the ops take it."""
    return getattr(torch_utils, "_encode_layer_name", str)(name)


latents = _define(
    "mla_latents",
    "(Tensor rows, Tensor positions, Tensor q_weight, Tensor kv_weight, Tensor table, float[] settings, str pairs, {name} layer_name) "
    "-> (Tensor, Tensor, Tensor)",
    _latents,
    _made,
)
latents_quantised = _define(
    "mla_latents_group_quant",
    "(Tensor rows, Tensor positions, Tensor q_weight, Tensor kv_weight, Tensor table, float[] settings, str pairs, bool use_ue8m0, "
    "{name} layer_name) -> (Tensor, Tensor, Tensor, Tensor)",
    _latents_quantised,
    _made_quantised,
)
turn = _define(
    "mla_rope",
    "(Tensor(a!) q, Tensor positions, Tensor table, int heads, str pairs, {name} layer_name) -> ()",
    _turn,
    lambda *_: None,
)
attend = _define(
    "mla_attend",
    "(Tensor q, Tensor entries, Tensor apart, Tensor positions, Tensor(a!) output, {name} layer_name) -> ()",
    # Where a cache comes from elsewhere, vLLM waits for it and sends it on around its attention.
    vllm_mla.maybe_transfer_kv_layer(_attend),
    lambda *_: None,
)


def try_out(made: Iterable[Layer], vllm_config: Any) -> int:
    """Call each op with what each kind of layer has: what refuses or does not compile says so before anything stands.

    Once for each way to launch it, so that no kernel is compiled later.

    Args:
        made: a model's.
        vllm_config: vLLM's own, for the most tokens of a step and the form of the cache.

    Returns:
        How many calls that was.

    Raises:
        Exception: whatever is wrong.
    """
    made = list(made)
    most = vllm_config.scheduler_config.max_num_batched_tokens
    launches = 0
    every = torch.arange(most, dtype=torch.int64, device=made[0].norms[0]["weight"].device)
    for layer in made:
        layer.rows = every
        layer.attention.register_buffer("layerfuse_rows", every, persistent=False)
    with torch.inference_mode():
        for layer in {layer.kind(): layer for layer in made}.values():
            for call in _calls(layer, vllm_config, most):
                for count in _counts(call, most):
                    call(count)
                    launches += 1
    return launches


def _calls(layer: Layer, vllm_config: Any, most: int) -> tuple[Callable[[int], Any], ...]:
    """What a layer calls in a step, for some tokens: into a buffer, into the cache, the query of either."""
    attention, weight = layer.attention, layer.norms[0]["weight"]
    widths = layer.widths
    shape = attention.num_heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim
    form = attention.get_kv_cache_spec(vllm_config)
    every = layer.buffer_slots(most)
    first, nowhere = torch.zeros_like(every), torch.full_like(every, -1)
    # vLLM allocates its cache later, with the same entries.
    cache = layer.seen(weight.new_empty(1, form.block_size or 1, attention.head_size, dtype=form.dtype))
    few = weight.new_zeros(1, dtype=attention.W_UK_T.dtype)

    def write(tokens: int, slots: Tensor, into: Tensor) -> None:
        q, kv, rope = few.new_zeros(tokens, sum(widths)).split(widths, -1)
        layer.write((q, kv, rope), first[:tokens], slots[:tokens], into, few.new_empty(q.shape))

    def quantise(tokens: int, slots: Tensor, into: Tensor) -> None:
        q, kv, k_rope = few.new_zeros(tokens, sum(widths)).split(widths, -1)
        layer.write_quantised((q, kv, k_rope), first[:tokens], slots[:tokens], into, bool(layer.rounds))

    # A graph may hold either.
    quantised = () if layer.rounds is None else (
        lambda n: quantise(n, every, few.new_empty(n, sum(widths[1:]))),
        lambda n: quantise(n, nowhere, cache),
    )  # fmt: skip
    return (
        *quantised,
        lambda n: write(n, every, few.new_empty(n, sum(widths[1:]))),
        lambda n: write(n, nowhere, cache),
        lambda n: layer.query(few.new_zeros(n, *shape), first[:n]),
        lambda n: layer.rope_in_place(few.new_zeros(n, *shape), first[:n]),
    )


def _counts(call: Callable[[int], Any], most: int) -> list[int]:
    """The fewest tokens of each way in which a call's ops are launched, as far as a step may have them. Makes the call with one."""
    found = {1}

    def ask(op: str, given: tuple[Any, ...]) -> None:
        case = case_maker(declared(op))(*given)
        found.update(step + 1 for step in steps(op, given[0].device.type, case))

    with listening(ask):
        call(1)
    return sorted(count for count in found if count <= most)
