"""What attention allocates for a model: `layerfuse plan` with --batch, --context, --kv or --aiter. No torch, no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..adapters.specs import GQASpec, Mamba2Spec, MLASpec, OtherMixerSpec
from ..fusion import Target
from ..fusion.metadata import (
    BufferSpec,
    HeadsRefusedError,
    LayerGroup,
    MLAMetadataPlan,
    byte_text,
    group_layers,
    plan_metadata,
    plan_state,
)
from .console import facts, show
from .kinds import kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

ITEM_SIZE = {"bf16": 2, "fp8": 1}


@frozen(kw_only=True)
class Asked:
    """What a user wants to know of attention."""

    batch: int = 1
    "Most sequences in a step."
    queries: int = 1
    "Per sequence and step."
    context: int | None = None
    "Tokens of a sequence, or None where only rates are asked for."
    kv: str = "bf16"
    "bf16 or fp8, of cache and query."
    release: str | None = None
    "Of AITER, or None for the newest known."


def attention_data(specs: Sequence[tuple[str, Any]], target: str, asked: Asked) -> dict[str, Any]:
    """Buffers, cache and state of one rank, as plain data.

    Raises:
        UnknownReleaseError: nothing is recorded of this release of AITER.
    """
    groups = [_group(group, Target.named(target), asked) for group in group_layers(specs)]
    return {
        "batch": asked.batch,
        "queries": asked.queries,
        "context": asked.context,
        "kv": asked.kv,
        "aiter": asked.release,
        "groups": groups,
        "cache": (cache := _cache(specs, asked)),
        "uncounted": sum(isinstance(spec, Mamba2Spec | OtherMixerSpec) for _, spec in specs),
        "state_bytes_per_sequence": (
            state := sum(group["layers"] * group["state"]["bytes_per_sequence"] for group in groups if "state" in group)
        ),
        "bytes": {
            "metadata": sum(group["metadata"]["bytes"]["buffers"] for group in groups if "metadata" in group),
            "scratch": max(
                (group["metadata"]["bytes"]["scratch"] for group in groups if "metadata" in group), default=0
            ),
            "state": state * asked.batch,
            "cache": None if asked.context is None else sum(each["bytes"] for each in cache) * asked.batch,
        },
    }


def _group(group: LayerGroup, target: Target, asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = {"group": group.name, "layers": len(group.layers)}
    if not isinstance(plan := _planned(group, target, asked), MLAMetadataPlan):
        return {**found, **plan}
    return {**found, "metadata": plan.to_dict(), "heads": str(plan.heads), "reason": plan.heads.reason}


def _planned(group: LayerGroup, target: Target, asked: Asked) -> MLAMetadataPlan | dict[str, Any]:
    if not group.is_mla:
        state = plan_state(group.spec, batch=asked.batch, speculated=asked.queries - 1)  # type: ignore[arg-type]
        return {"state": state.to_dict()}
    try:
        return plan_metadata(
            *(group.spec, target, asked.release),  # type: ignore[arg-type]
            batch=asked.batch,
            max_query_length=asked.queries,
            q_dtype=asked.kv,
            kv_dtype=asked.kv,
        )
    except HeadsRefusedError as error:
        return {"refused": error.reason, "release": error.release}


def _cache(specs: Sequence[tuple[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    """Per kind of layer: what a token takes in one of them, and what a sequence takes in all."""
    found = []
    for kind in kinds_of(specs):
        spec, window = kind.spec, None
        if isinstance(spec, MLASpec):
            width = spec.latent_width
        elif isinstance(spec, GQASpec):
            width, window = spec.num_local_kv_heads * (spec.head_dim + spec.v_head_dim), spec.sliding_window
            if spec.shares_kv:
                width = 0
        else:
            continue
        per_token = width * ITEM_SIZE[asked.kv]
        tokens = asked.context if asked.context is None or window is None else min(asked.context, window)
        found.append(
            {
                "kind": kind.name,
                "layers": len(kind.paths),
                "window": window,
                "bytes_per_token_and_layer": per_token,
                "bytes": None if tokens is None else per_token * tokens * len(kind.paths),
            }
        )
    return found


def show_attention(data: dict[str, Any], to: Console) -> None:
    """The answer for people."""
    from rich.text import Text

    queries = "1 query" if data["queries"] == 1 else f"{data['queries']} queries"
    to.print()
    to.print(
        Text.assemble(
            ("attention", "bold"), f": batch {data['batch']}, {queries} per sequence, {data['kv']} queries and cache"
        )
    )
    for group in data["groups"]:
        plural = "layer" if group["layers"] == 1 else "layers"
        to.print()
        to.print(Text.assemble((group["group"], "bold cyan"), f": {group['layers']} {plural}"))
        styles = {"warning": "yellow", "refused": "red"}
        show(facts((f"  {label}", Text(value, style=styles.get(label, ""))) for label, value in _rows(group)), to)
    to.print()
    to.print(Text("memory on this rank", style="bold cyan"))
    show(facts((f"  {label}", value) for label, value in _memory(data)), to)


def _rows(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "refused" in group:
        yield "refused", f"AITER {group['release']}: {group['refused']}"
        return
    if "state" in group:
        for name in ("conv", "recurrent"):
            yield f"{name} state", _buffer(group["state"][name])
        yield "a sequence", f"{byte_text(group['state']['bytes_per_sequence'])} in each layer, however long it is"
        return
    plan = group["metadata"]
    yield "heads", f"{group['heads']} ({group['reason']})"
    yield "sizes", f"for AITER {plan['releases']}, {plan['case']['cu_count']} compute units"
    for buffer in plan["buffers"]:
        yield buffer["name"], _buffer(buffer)
    for buffer in plan["scratch"]:
        yield f"scratch, {buffer['name']}", f"{_buffer(buffer)}, allocated in every decode"
    for warning in plan["warnings"]:
        yield "warning", warning


def _buffer(buffer: dict[str, Any]) -> str:
    made = BufferSpec(name=buffer["name"], shape=tuple(buffer["shape"]), dtype=buffer["dtype"])
    return f"{' x '.join(map(str, made.shape))} {made.dtype}, {byte_text(made.bytes)}"


def _memory(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    total = data["bytes"]
    for cache in data["cache"]:
        of, layers = cache["bytes_per_token_and_layer"], cache["layers"]
        line = f"{byte_text(of)} per token and layer, {byte_text(of * layers)} per token"
        if cache["window"] is not None:
            line += f" of the last {cache['window']}"
        if cache["bytes"] is not None:
            line += f", {byte_text(cache['bytes'])} per sequence of {data['context']}"
        yield f"{cache['kind']} cache", line
    if data["state_bytes_per_sequence"]:
        yield "state", f"{byte_text(data['state_bytes_per_sequence'])} per sequence, {byte_text(total['state'])} in all"
    if total["metadata"]:
        yield "metadata", f"{byte_text(total['metadata'])}, and {byte_text(total['scratch'])} of scratch at a time"
    if total["cache"] is not None:
        everything = sum(total.values())
        yield (
            "in all",
            f"{byte_text(everything)}, of which {byte_text(total['cache'])} are cache of {data['batch']} sequences"
            + (f"; the state of {data['uncounted']} mixers is not counted" if data["uncounted"] else ""),
        )
