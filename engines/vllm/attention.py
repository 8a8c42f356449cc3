"""What vLLM's builder of AITER's MLA metadata has allocated, held to the plan for the same layers. On ROCm with AITER only.

The two compute the kernel's heads each for itself, as query padding, buffers and metadata once did inside vLLM
(vllm-project/vllm pull requests 38615, 43543): a difference is what crashed there, and is said before the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from ... import registry
from ...adapters.errors import first_of
from ...fusion.backends.aiter import bound
from ...fusion.metadata import HeadsRefusedError, MLAMetadataPlan, plan_metadata
from ...fusion.target import Target
from ..process import once

BUFFERS = (
    "_mla_work_meta_data",
    "_mla_work_indptr",
    "_mla_work_info_set",
    "_mla_reduce_indptr",
    "_mla_reduce_final_map",
    "_mla_reduce_partial_map",
)
"""The builder's attributes, in the order of AITER and of the plan."""


def say(builder: Any, layers: Sequence[str], vllm_config: Any) -> None:
    """Log one line for each kind of layer that a builder serves: that it is as planned, or what differs, with both numbers.

    Args:
        builder: vLLM's AiterMLAMetadataBuilder, made.
        layers: the names of its layers in vLLM's forward context.
        vllm_config: vLLM's own.
    """
    context = vllm_config.compilation_config.static_forward_context
    kinds: dict[Any, list[str]] = {}
    for name in layers:
        kinds.setdefault(_without_index(registry.spec_for(context[name])), []).append(name)
    for spec, names in kinds.items():
        what = f"layerfuse: attention metadata of {first_of(names)}"
        try:
            plan = _planned(builder, spec, vllm_config)
        except HeadsRefusedError as error:
            heads = builder._num_attention_heads
            once(logging.WARNING, "%s: vLLM allocates for %d heads, and no plan has any: %s", what, heads, error.reason)
            continue
        differences = "; ".join(_differences(builder, plan))
        if differences:
            once(logging.WARNING, "%s: %s", what, differences)
        else:
            once(logging.INFO, "%s: %d heads, %d queries, as planned", what, plan.heads.kernel_heads, plan.case.queries)


def _without_index(spec: Any) -> Any:
    import attrs

    return attrs.evolve(spec, layer_index=0, outer="every layer")


def _planned(builder: Any, spec: Any, vllm_config: Any) -> MLAMetadataPlan:
    speculative = vllm_config.speculative_config
    speculated = 0 if speculative is None else speculative.num_speculative_tokens or 0
    cache = str(vllm_config.cache_config.cache_dtype)
    # vLLM quantises queries where the cache is fp8.
    dtype = "fp8" if cache.startswith("fp8") else vllm_config.model_config.dtype
    # Attributes that differ between releases: without them nothing is speculated or split beyond the default.
    queries = getattr(builder, "_mtp_decode_qlen", 1)
    splits = getattr(builder, "_mla_max_split_per_batch", 0)
    return plan_metadata(
        spec,
        Target.detect(),
        batch=vllm_config.scheduler_config.max_num_seqs,
        max_query_length=max(1 + speculated, queries),
        q_dtype=dtype,
        kv_dtype=dtype,
        dcp=builder.dcp_world_size,
        max_split_per_batch=splits or -1,
        build=bound("mla_metadata_info"),
    )


def _differences(builder: Any, plan: MLAMetadataPlan) -> Iterator[str]:
    heads = builder._num_attention_heads
    if heads != plan.heads.kernel_heads:
        yield f"vLLM has {heads} heads, the plan {plan.heads.kernel_heads} ({plan.heads.reason})"
    for name, buffer in zip(BUFFERS, plan.buffers, strict=True):
        found = tuple(getattr(builder, name).shape)
        if found != buffer.shape:
            yield f"{buffer.name}: vLLM has {_text(found)}, the plan {_text(buffer.shape)}"


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
