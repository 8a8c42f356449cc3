"""Everything that an MLA layer's persistent decode allocates, planned from its spec: buffers, scratch, warnings.

It runs without a GPU and without torch, so that memory is known before an engine allocates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ...adapters.arguments import check_counts, check_flags, check_whole, expect
from ...adapters.errors import ArgumentValueError, shown
from ...adapters.spec_fields import LARGEST
from ...adapters.specs import MLAKernelSpec, MLASpec
from ..backends.aiter.releases import ReleaseRange
from ..target import Target
from .buffers import BufferSpec, installed_shapes, largest, specs_of, total_bytes
from .dtypes import Dtype, dtype_named
from .errors import HeadsRefusedError
from .heads import MLAHeadPlan, check_layer, plan_heads
from .known_issues import Use, known_issues
from .native import releases_named
from .prefill import PrefillPlan, plan_prefill
from .sizes import Case, metadata_shapes

if TYPE_CHECKING:
    from ..backends.aiter import Bound

CU_COUNT = {"gfx942": 304, "gfx950": 256}
"""Compute units of a whole MI300X and MI325X, MI350X and MI355X. Others, and partitions of these, must be given."""


@frozen(kw_only=True)
class MLAMetadataPlan:
    """The buffers of one group of layers, and all that they were sized for."""

    heads: MLAHeadPlan
    "What the query padding, the metadata call and the output cut take too."
    case: Case
    "What the sizes depend on, heads as the kernel gets them."
    target: Target
    releases: ReleaseRange
    "The releases of AITER that the plan holds for."
    page_size: int
    topk: int
    "Keys per query of sparse attention, or -1."
    dcp: int
    latent_width: int
    "Width of a cache entry, and of a query that reaches the decode."
    value_width: int
    "Width of an output that leaves it: the kv_lora_rank."
    buffers: tuple[BufferSpec, ...] = field(repr=False)
    "The six persistent buffers, in AITER's order."
    scratch: tuple[BufferSpec, ...] = field(repr=False)
    "What every decode allocates beside them."
    prefill: PrefillPlan | str
    "The buffers of fp8 prefill, or why there are none, in a sentence."
    source: str
    "Where the sizes come from: the recorded formula, or the installed function."
    warnings: tuple[str, ...] = ()
    "Known issues of the releases that this plan meets, one sentence each."

    @property
    def batch(self) -> int:
        """Most sequences of a step."""
        return self.case.batch

    @property
    def max_query_length(self) -> int:
        """Most queries per sequence."""
        return self.case.queries

    @property
    def q_dtype(self) -> Dtype:
        """Of the query."""
        return self.case.q

    @property
    def kv_dtype(self) -> Dtype:
        """Of the cache."""
        return self.case.kv

    @property
    def sparse(self) -> bool:
        """Whether each query has its own list of keys."""
        return self.case.sparse

    @property
    def buffer_bytes(self) -> int:
        """Of the six persistent buffers."""
        return total_bytes(self.buffers)

    @property
    def scratch_bytes(self) -> int:
        """Of what a decode allocates beside them."""
        return total_bytes(self.scratch)

    @property
    def total_bytes(self) -> int:
        """Of all of it, fp8 prefill included."""
        prefill = 0 if isinstance(self.prefill, str) else self.prefill.total_bytes
        return self.buffer_bytes + self.scratch_bytes + prefill

    def buffer(self, name: str) -> BufferSpec:
        """One persistent buffer.

        Raises:
            KeyError: no buffer has this name.
        """
        return {buffer.name: buffer for buffer in self.buffers}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "heads": self.heads.to_dict(),
            "target": self.target.to_dict(),
            "releases": str(self.releases),
            "case": attrs.asdict(self.case),
            "page_size": self.page_size,
            "dcp": self.dcp,
            "buffers": [buffer.to_dict() for buffer in self.buffers],
            "scratch": [buffer.to_dict() for buffer in self.scratch],
            "prefill": self.prefill if isinstance(self.prefill, str) else self.prefill.to_dict(),
            "bytes": {"buffers": self.buffer_bytes, "scratch": self.scratch_bytes, "total": self.total_bytes},
            "source": self.source,
            "warnings": list(self.warnings),
        }


def plan_metadata(
    spec: MLASpec | MLAKernelSpec,
    target: Target,
    release: str | ReleaseRange | None = None,
    *,
    batch: int,
    max_query_length: int = 1,
    q_dtype: Any = "bf16",
    kv_dtype: Any = "bf16",
    page_size: int = 1,
    sparse: bool = False,
    topk: int = -1,
    dcp: int = 1,
    cu_count: int | None = None,
    max_split_per_batch: int = -1,
    num_kv_splits: int = 32,
    intra_batch: bool = False,
    fast: bool = True,
    experimental: bool = False,
    prefill_length: int | None = None,
    build: Bound | None = None,
) -> MLAMetadataPlan:
    """The buffers of a layer's persistent decode, for at most `batch` sequences in a step.

    Args:
        spec: the layer on its rank.
        target: gfx942 or gfx950.
        release: of AITER, or an interval of releases, whose largest buffers are taken; None: that of `build`, or else
            the newest known.
        batch: most sequences in a step.
        max_query_length: queries per sequence in one step: 1, or 1 + the tokens that are speculated.
        q_dtype: bf16 or fp8, or a torch dtype, of the query.
        kv_dtype: the same of the cache.
        page_size: tokens per cache page, a power of two.
        sparse: whether each query has its own list of keys.
        topk: how many keys, where it is sparse and only there.
        dcp: decode context parallel degree.
        cu_count: compute units; None: those of the whole device.
        max_split_per_batch: AITER's option of that name.
        num_kv_splits: the same, for `intra_batch`.
        intra_batch: AITER's intra_batch_mode.
        fast: AITER's fast_mode.
        experimental: whether AITER_ENABLE_EXPERIMENTAL is set.
        prefill_length: most tokens of a sequence in one step of fp8 prefill; None: none is planned.
        build: `backends.aiter.bound("mla_metadata_info")`: the sizes then come from the installed function, which
            asks the GPU of this process, and where it disagrees with the recorded formula a warning says so.

    Raises:
        HeadsRefusedError: there is no kernel or no plan for it; the message says why.
        UnknownReleaseError: nothing is recorded of this release.
        ArgumentValueError: a number that cannot be.
        ArgumentError: an argument is of another type.
    """
    check_layer(spec, target)
    if build is not None:
        from ..backends.aiter import Bound

        expect("build", build, Bound, 'a function of AITER, as backends.aiter.bound("mla_metadata_info") gives it')
    releases = releases_named(build.probed.releases if release is None and build is not None else release)
    check_counts(batch=batch, max_query_length=max_query_length, dcp=dcp, num_kv_splits=num_kv_splits)
    check_counts(**{n: v for n, v in (("cu_count", cu_count), ("prefill_length", prefill_length)) if v is not None})
    check_counts(least=-1, topk=topk, max_split_per_batch=max_split_per_batch)
    check_flags(sparse=sparse, intra_batch=intra_batch, fast=fast, experimental=experimental)
    check_whole(page_size=page_size)
    if page_size > LARGEST or page_size < 1 or page_size & (page_size - 1):
        raise ArgumentValueError(f"page_size is a power of two, got {shown(page_size)}")
    if sparse != (topk > 0):
        raise ArgumentValueError(
            f"topk is given for sparse attention and for nothing else, got {topk} and sparse={sparse}"
        )
    q, kv = dtype_named(q_dtype), dtype_named(kv_dtype)
    heads = plan_heads(
        *(spec, target, releases),
        q_dtype=q,
        kv_dtype=kv,
        max_query_length=max_query_length,
        sparse=sparse,
        dcp=dcp,
    )
    case = Case(
        batch=batch,
        queries=max_query_length,
        heads=heads.kernel_heads,
        q=q,
        kv=kv,
        arch=target.arch,
        cu_count=CU_COUNT[target.arch] if cu_count is None else cu_count,
        sparse=sparse,
        fast=fast,
        num_kv_splits=num_kv_splits,
        intra_batch=intra_batch,
        max_split_per_batch=max_split_per_batch,
        experimental=experimental,
    )
    recorded = {}
    for each in releases:
        try:
            recorded[each] = metadata_shapes(case, each)
        except ValueError as error:
            raise HeadsRefusedError(f"layer {spec.layer_index}", each, str(error).partition(": ")[2]) from None
    shapes, source, warnings = largest(recorded.values()), f"the recorded formula of {releases}", []
    if build is not None:
        shapes = installed_shapes(build, case)
        source = f"the installed {build.path}"
        if shapes not in recorded.values():
            warnings.append(_disagreement(shapes, next(iter(recorded.values())), releases))
    buffers = specs_of(shapes)
    use = Use(heads=heads, case=case, releases=releases, value_width=spec.kv_lora_rank)
    return MLAMetadataPlan(
        heads=heads,
        case=case,
        target=target,
        releases=releases,
        page_size=page_size,
        topk=topk,
        dcp=dcp,
        latent_width=spec.latent_width,
        value_width=spec.kv_lora_rank,
        buffers=buffers,
        scratch=tuple(_scratch(heads, case, spec, shapes["reduce_partial_map"][0])),
        prefill=plan_prefill(spec, releases, batch, prefill_length, kv, case.cu_count),
        source=source,
        warnings=(*warnings, *known_issues(use)),
    )


def _disagreement(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], releases: object) -> str:
    differ = "; ".join(
        f"{name} {shape} where {expected[name]} was recorded"
        for name, shape in found.items()
        if shape != expected[name]
    )
    return f"the installed AITER looks like {releases} and sizes otherwise, for this GPU: {differ}"


def _scratch(heads: MLAHeadPlan, case: Case, spec: MLASpec | MLAKernelSpec, partials: int) -> Iterator[BufferSpec]:
    """What `mla_decode_fwd` allocates in persistent mode."""
    queries, width = case.queries_per_sequence, heads.kernel_heads // heads.fold
    rows = partials * queries
    yield BufferSpec(name="partial_output", shape=(rows, 1, width, spec.kv_lora_rank), dtype="fp32")
    yield BufferSpec(name="partial_lse", shape=(rows, 1, width, 1), dtype="fp32")
    if heads.fold > 1 and queries > 1:
        tokens = case.batch * queries
        yield BufferSpec(name="folded_query", shape=(tokens, heads.kernel_heads, spec.latent_width), dtype=case.q)
        yield BufferSpec(name="unfolded_output", shape=(tokens, heads.kernel_heads, spec.kv_lora_rank), dtype="bf16")
