"""The buffers as tensors: allocated once by a plan, filled in every step through AITER's function, at one address.

Importing this module imports torch; planning does not.
"""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from ...adapters.arguments import expect
from ...adapters.errors import ArgumentValueError, shown
from ..backends.aiter import AiterCallError, Bound, bound
from .errors import PlanExceededError
from .plan import MLAMetadataPlan

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int32": torch.int32,
    "uint64": torch.uint64,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}

GRANULARITY = 16
"""Keys that a split is a multiple of, at least."""


def torch_dtype(name: str, plan: MLAMetadataPlan) -> torch.dtype:
    """The torch dtype of a plan's `bf16` or `fp8`, in the format of its target."""
    return DTYPES[plan.target.fp8 if name == "fp8" and plan.target.fp8 is not None else name]


@frozen(kw_only=True, eq=False)
class MetadataBuffers:
    """The six tensors of a plan. Their addresses never change: a CUDA graph may hold them."""

    plan: MLAMetadataPlan
    tensors: dict[str, Tensor]
    "By AITER's names, of exactly the planned shapes."
    whole: dict[str, Tensor] = field(repr=False)
    "What was allocated for each, one-dimensional: longer where a larger plan was served before."

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def bytes(self) -> int:
        """What is held, that of larger plans before included."""
        return sum(tensor.nbytes for tensor in self.whole.values())

    def build(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_last_page_lens: Tensor,
        *,
        is_causal: bool = True,
        uniform: bool = False,
        function: Bound | None = None,
    ) -> None:
        """Plan this step's work into the buffers. Nothing is allocated, and nothing waits for the device.

        Args:
            qo_indptr: (sequences + 1,) int32, where each sequence's queries begin. In sparse attention each query is a
                sequence of its own, with its own list of keys.
            kv_indptr: (sequences + 1,) int32, where each sequence's pages begin.
            kv_last_page_lens: (sequences,) int32, tokens on the last page.
            is_causal: whether the last query of a sequence sees all keys and each one before it one fewer.
            uniform: whether every sequence has exactly `max_query_length` queries.
            function: `bound("mla_metadata")`; None: the installed one.

        Raises:
            PlanExceededError: more sequences than were planned for.
            AiterCallError: several queries per sequence under decode context parallelism, which the binding leaves out.
            AiterUnavailableError: there is no AITER that can be called.
        """
        plan, queries = self.plan, self._check_step(qo_indptr, kv_indptr, kv_last_page_lens)
        if plan.dcp > 1 and queries > 1:
            raise AiterCallError("mla_metadata", "several queries under decode context parallelism: not bound yet")
        call = bound("mla_metadata").call if function is None else function.call
        case = plan.case
        call(
            *(qo_indptr, kv_indptr, kv_last_page_lens, plan.heads.kernel_heads, 1, is_causal, self.tensors),
            page_size=plan.page_size,
            kv_granularity=max(plan.page_size, GRANULARITY),
            max_seqlen_qo=queries,
            uni_seqlen_qo=queries if uniform or plan.sparse else -1,
            fast_mode=case.fast,
            topk=plan.topk,
            max_split_per_batch=case.max_split_per_batch,
            intra_batch_mode=case.intra_batch,
            dtype_q=torch_dtype(plan.q_dtype, plan),
            dtype_kv=torch_dtype(plan.kv_dtype, plan),
        )

    def _check_step(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_last_page_lens: Tensor) -> int:
        """Queries per sequence. Reads shapes only, without a synchronisation."""
        case, sequences = self.plan.case, kv_last_page_lens.shape[0]
        if sequences > case.sequences or not qo_indptr.shape[0] == kv_indptr.shape[0] == sequences + 1:
            raise PlanExceededError(case.sequences, sequences, (qo_indptr.shape[0], kv_indptr.shape[0]))
        return case.queries_per_sequence

    def decode(
        self,
        q: Tensor,
        kv_buffer: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        *,
        softmax_scale: float,
        function: Bound | None = None,
        **scales: Any,
    ) -> Tensor:
        """Decode by the plan that `build` made: q (tokens, num_heads, latent) to (tokens, num_heads, kv_lora_rank).

        The query is padded and the output cut by the head plan that the buffers were sized by. `scales` are q_scale and
        kv_scale, for fp8; `function` is `bound("mla_decode")`.

        Raises:
            HeadCountError: q has other heads than were planned.
            PlanExceededError: more sequences or query tokens than were planned for.
            AiterCallError: under decode context parallelism, whose ranks need the log-sum-exp: it is not bound yet.
            AiterUnavailableError: there is no AITER that can be called.
        """
        plan, queries = self.plan, self._check_step(qo_indptr, kv_indptr, kv_last_page_lens)
        tokens = plan.batch * plan.max_query_length
        if q.shape[0] > tokens:
            raise PlanExceededError(plan.batch, kv_last_page_lens.shape[0], (0, 0), (tokens, q.shape[0]))
        if plan.dcp > 1:
            raise AiterCallError(
                "mla_decode", "decode context parallelism, whose ranks need the log-sum-exp: not bound yet"
            )
        call = bound("mla_decode").call if function is None else function.call
        padded = plan.heads.pad_query(q)
        out: Tensor = call(
            *(padded, kv_buffer, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens),
            *(queries, plan.value_width),
            softmax_scale=softmax_scale,
            page_size=plan.page_size,
            buffers=self.tensors,
            intra_batch_mode=plan.case.intra_batch,
            **scales,
        )
        return plan.heads.cut_output(out)


def allocate(
    plan: MLAMetadataPlan, device: str | torch.device, reuse: MetadataBuffers | None = None
) -> MetadataBuffers:
    """The buffers of a plan, filled with zeros.

    With `reuse`, what an earlier plan's buffers hold is kept where it is large enough, at its address, and only what is
    too small is allocated anew.

    Raises:
        ArgumentError: an argument is of another type, or no device of torch's.
    """
    expect("plan", plan, MLAMetadataPlan, "what plan_metadata gives")
    expect("reuse", reuse, (MetadataBuffers, NoneType), "what allocate gave before")
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError, ValueError):
        raise ArgumentValueError(f"device: expected a device of torch's, got {shown(device)}") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    whole: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for spec in plan.buffers:
        old = None if reuse is None else reuse.whole[spec.name]
        count = math.prod(spec.shape)
        enough = old is not None and old.device == device and old.numel() >= count
        whole[spec.name] = (
            old if old is not None and enough else torch.zeros(count, dtype=DTYPES[spec.dtype], device=device)
        )
        tensors[spec.name] = whole[spec.name][:count].view(spec.shape)
    return MetadataBuffers(plan=plan, tensors=tensors, whole=whole)
