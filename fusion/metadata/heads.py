"""How many heads the MLA decode kernel is given for a layer, decided once, from its spec.

Query padding, buffers, the metadata call and the output cut all take the one `MLAHeadPlan`, so that they cannot
disagree, as they did where each computed `max(16, n)` for itself (vllm-project/vllm pull requests 38615, 43543).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from attrs import asdict, field, frozen

from ...adapters.arguments import check_counts, check_flags, expect
from ...adapters.specs import MLAKernelSpec, MLASpec
from ..backends.aiter.releases import ReleaseRange, is_after
from ..target import Target
from .dtypes import Dtype, dtype_named
from .errors import HeadCountError, HeadsRefusedError
from .native import (
    FOLD,
    MOST_HEADS,
    cannot,
    is_native,
    releases_named,
)

if TYPE_CHECKING:
    from torch import Tensor

How = Literal["native", "repeat", "tile"]

LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim that AITER's MLA kernels are compiled for (`hsa/*/mla`)."""

ARCHITECTURES = ("gfx942", "gfx950")
"""The architectures that the table of native head counts covers."""

ROUND_ROBIN_SINCE = "v0.1.17-rc0"
"""The first release whose decode masks by global positions under decode context parallelism."""

ROUND_ROBIN_HEADS = (16, 32, 64, 128)
"""Counts that the round-robin mask is right for: ATOM, `mla_dcp_kernel_num_heads` in `atom/model_ops/attention_mla.py`."""


@frozen(kw_only=True)
class MLAHeadPlan:
    """The heads that a layer has, those that the kernel gets, and the way from one to the other and back."""

    num_heads: int
    "Query heads that reach the decode: those of this rank, times the decode-context-parallel degree if it is above 1."
    kernel_heads: int = field()
    "What the kernel, the metadata and every buffer are sized for."
    fold: int = 1
    "Groups of 16 heads into which the decode folds the query, in the releases that have no kernel of this width."
    reason: str
    "A sentence."

    @kernel_heads.validator
    def _holds_all(self, _: Any, value: int) -> None:
        if value < self.num_heads:
            raise ValueError(f"kernel_heads: {value} cannot hold num_heads {self.num_heads}")

    @property
    def how(self) -> How:
        """native: nothing is padded. repeat: each head kernel_heads / num_heads times, head by head. tile: all heads over and over, cut at kernel_heads."""
        if self.num_heads == self.kernel_heads:
            return "native"
        return "tile" if self.kernel_heads % self.num_heads else "repeat"

    @property
    def times(self) -> int:
        """How often each head is there, where they are repeated."""
        return self.kernel_heads // self.num_heads

    @property
    def waste(self) -> float:
        """Share of the kernel's heads whose result is thrown away, 0 to 1."""
        return 1 - self.num_heads / self.kernel_heads

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"how": self.how}

    def pad_query(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        """The query as the kernel takes it: (tokens, num_heads, dim) to (tokens, kernel_heads, dim).

        Native returns `q` itself, one repeated head a view of it, everything else a new tensor, or `out` where it is
        given: (tokens, kernel_heads, dim), at a fixed address for CUDA graphs. Any strides do.

        Raises:
            HeadCountError: `q` or `out` has other heads than were planned.
        """
        self._check("q", q, self.num_heads, 3)
        if out is None and self.how == "native":
            return q
        tokens, heads, dim = q.shape
        if out is None and self.how == "repeat":
            return q.unsqueeze(2).expand(tokens, heads, self.times, dim).reshape(tokens, self.kernel_heads, dim)
        padded = q.new_empty((tokens, self.kernel_heads, dim)) if out is None else out
        self._check("out", padded, self.kernel_heads, 3)
        if self.how == "repeat":
            padded.unflatten(1, (heads, self.times)).copy_(q.unsqueeze(2).expand(tokens, heads, self.times, dim))
            return padded
        padded[:, :heads].copy_(q)
        filled = heads
        while filled < self.kernel_heads:  # doubling: a multiple of the heads is there until the last, cut one
            more = min(filled, self.kernel_heads - filled)
            padded[:, filled : filled + more].copy_(padded[:, :more])
            filled += more
        return padded

    def cut_output(self, o: Tensor) -> Tensor:
        """The layer's own heads of the kernel's output: a view, (tokens, kernel_heads, dim) to (tokens, num_heads, dim).

        Raises:
            HeadCountError: `o` has other heads than were planned.
        """
        self._check("o", o, self.kernel_heads, 3)
        return self._cut(o)

    def cut_lse(self, lse: Tensor) -> Tensor:
        """The same for the log-sum-exp: a view, (tokens, kernel_heads) to (tokens, num_heads).

        Raises:
            HeadCountError: `lse` has other heads than were planned.
        """
        self._check("lse", lse, self.kernel_heads, 2)
        return self._cut(lse)

    def _cut(self, padded: Tensor) -> Tensor:
        if self.how == "native":
            return padded
        return padded[:, :: self.times] if self.how == "repeat" else padded[:, : self.num_heads]

    @staticmethod
    def _check(what: str, tensor: Tensor, heads: int, dims: int) -> None:
        if tensor.dim() != dims or tensor.shape[1] != heads:
            raise HeadCountError(what, heads, tuple(tensor.shape))

    def __str__(self) -> str:
        if self.how == "native":
            return f"{self.num_heads}"
        times = {2: "twice", 3: "three times"}.get(self.times, f"{self.times} times")
        how = f"repeated {times}" if self.how == "repeat" else "tiled and cut"
        return f"{self.num_heads} -> {self.kernel_heads}, {how}"


def check_layer(spec: object, target: object) -> None:
    """Refuse what is no MLA layer's spec, or no target.

    Raises:
        ArgumentError: with what to give.
    """
    expect("spec", spec, (MLASpec, MLAKernelSpec), "the spec of an MLA layer")
    expect("target", target, Target, "a Target (Target.named('gfx950') makes one from a name)")


def plan_heads(
    spec: MLASpec | MLAKernelSpec,
    target: Target,
    release: str | ReleaseRange | None = None,
    *,
    q_dtype: Any = "bf16",
    kv_dtype: Any = "bf16",
    max_query_length: int = 1,
    sparse: bool = False,
    dcp: int = 1,
) -> MLAHeadPlan:
    """The heads that AITER's persistent MLA decode is given for this layer.

    Args:
        spec: the layer on its rank.
        target: gfx942 or gfx950.
        release: of AITER, as `v0.1.18`; an interval, for a build that can be several; None: the newest known.
        q_dtype: bf16 or fp8, or a torch dtype, of the query.
        kv_dtype: the same of the cache.
        max_query_length: queries per sequence in one step: 1, or 1 + the tokens that are speculated.
        sparse: whether each query has its own list of keys (DeepSeek's sparse attention), so that it counts alone.
        dcp: decode context parallel degree, over which the heads of that many ranks are gathered.

    Raises:
        HeadsRefusedError: there is no kernel for it; the message says why.
        UnknownReleaseError: nothing is recorded of this release.
        ArgumentValueError: a number that cannot be.
        ArgumentError: an argument is of another type.
    """
    check_layer(spec, target)
    check_counts(max_query_length=max_query_length, dcp=dcp)
    check_flags(sparse=sparse)
    releases = releases_named(release)
    q, kv = dtype_named(q_dtype), dtype_named(kv_dtype)
    heads = spec.num_local_heads * dcp
    queries = 1 if sparse else max_query_length
    plans = []
    for each in releases:
        found = _refused(spec, target, q, kv) or _kernel_heads(heads, queries, target.arch, q, kv, each, dcp)
        if isinstance(found, str):
            raise HeadsRefusedError(f"layer {spec.layer_index}", each, found)
        plans.append(found)
    kernel_heads, why = max(plans, key=lambda plan: plan[0])
    for each in releases:  # a build that can be several releases gets what all of them take
        problem = cannot(kernel_heads, queries, target.arch, q, kv, each)
        if problem is not None:
            raise HeadsRefusedError(f"layer {spec.layer_index}", each, f"{kernel_heads} heads: {problem}")
    folds = any(not is_native(kernel_heads, queries, target.arch, q, kv, each) for each in releases)
    return MLAHeadPlan(
        num_heads=heads,
        kernel_heads=kernel_heads,
        fold=kernel_heads // FOLD if folds else 1,
        reason=why + (f", folded to {kernel_heads // FOLD} groups of {FOLD}" if folds else ""),
    )


def _refused(spec: MLASpec | MLAKernelSpec, target: Target, q: Dtype, kv: Dtype) -> str | None:
    """Why no head count would do, or None."""
    latent = (spec.kv_lora_rank, spec.qk_rope_head_dim)
    if target.arch not in ARCHITECTURES:
        return f"AITER's MLA kernels are for {' and '.join(ARCHITECTURES)}, and the target is {target}"
    if latent != LATENT:
        return "its MLA kernels take cache entries of {} + {}, this layer's are {} + {}".format(*LATENT, *latent)
    if (q, kv) == ("fp8", "bf16"):
        return "an fp8 query needs an fp8 cache: there is no kernel for a bf16 one"
    return None


def _kernel_heads(
    heads: int, queries: int, arch: str, q: Dtype, kv: Dtype, release: str, dcp: int
) -> tuple[int, str] | str:
    """The count for one release and why, in a clause; or why there is none."""
    if heads > MOST_HEADS:
        return f"{heads} query heads, and its MLA kernels take at most {MOST_HEADS}"
    if dcp > 1 and queries > 1 and is_after(ROUND_ROBIN_SINCE, release):
        return (
            f"several queries per sequence under decode context parallelism: their mask came with {ROUND_ROBIN_SINCE}"
        )
    counts = ROUND_ROBIN_HEADS if dcp > 1 else (*((24,) if heads == 24 else ()), *range(FOLD, MOST_HEADS + 1, FOLD))
    problems = {count: cannot(count, queries, arch, q, kv, release) for count in counts if count >= heads}
    count = next((count for count, problem in problems.items() if problem is None), None)
    if count is None:
        problem = next(problem for count, problem in problems.items() if count % FOLD == 0)
        return f"{heads} heads with {queries} queries per sequence: {problem}"
    if dcp > 1:
        return count, f"{heads} gathered heads, of 16, 32, 64 and 128 that the round-robin mask is right for"
    if count == heads:
        return count, f"{heads} heads are taken as they are"
    if count == FOLD:
        return count, f"{heads} heads are padded to {FOLD}, the fewest that every kernel takes"
    if count - heads < FOLD:
        return count, f"{heads} heads are padded to the next multiple of {FOLD}"
    passed = next(iter(problems.values()))
    return count, f"{heads} heads are padded to {count}: {passed}"
