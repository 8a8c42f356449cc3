"""What is measured, as data: the op, its widths and epsilons, its dtypes and options, and the bytes it must move.

Widths and epsilons are those of a declared model, or given by hand. Nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from ..adapters.errors import did_you_mean, shown
from ..adapters.specs import MLASpec
from .errors import BenchError, UnknownOpError

if TYPE_CHECKING:
    from ..registry.lookup import Registry

OPS = {
    "mla_dual_rms_norm": None,
    "mla_dual_rms_norm_group_quant": "group",
    "mla_dual_rms_norm_per_token_quant": "per_token",
}
"""The ops that can be measured, and how each quantises the query latent."""

ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of a dtype."""

FP8 = ("e4m3fn", "e4m3fnuz")
GROUP_SIZES = (32, 64, 128)
GROUP_SIZE = 128

TOKENS = {
    ("cuda", False): (1, 8, 64, 256, 1024, 4096, 16384, 65536),
    ("cuda", True): (1, 64, 1024, 16384),
    ("cpu", False): (1, 16, 256, 1024),
    ("cpu", True): (1, 64),
}
"""From the device and whether to be quick: how many tokens, unless told otherwise."""

MOST_TOKENS = 1 << 20
EPSILON = 1e-6
"""Of both norms, where widths are given instead of a model."""


@frozen(kw_only=True)
class Case:
    """One op with one set of widths, dtypes and options; only the number of tokens is open."""

    op: str
    name: str
    "The model, or the widths."
    q_width: int
    kv_width: int
    rope_width: int
    "Columns of a projection's row that follow the two latents and are not touched."
    q_epsilon: float
    kv_epsilon: float
    dtype: str
    "bf16, fp16 or fp32."
    fp8: str | None
    "e4m3fn or e4m3fnuz; None where nothing is quantised."
    group_size: int | None
    "Columns per scale; None for one scale per token, or where nothing is quantised."
    ue8m0: bool

    @property
    def quant(self) -> str | None:
        """group, per_token or None."""
        return OPS[self.op]

    @property
    def row_width(self) -> int:
        """Columns of a row of the projection that the latents are views of."""
        return self.q_width + self.kv_width + self.rope_width

    @property
    def groups(self) -> int:
        """Scales per token."""
        if self.quant is None:
            return 0
        return 1 if self.group_size is None else -(-self.q_width // self.group_size)

    def bytes_read(self, tokens: int) -> int:
        """Both latents of every token and both weights, each once."""
        return (tokens + 1) * (self.q_width + self.kv_width) * ITEM_SIZES[self.dtype]

    def bytes_written(self, tokens: int) -> int:
        """Both results of every token, and the scales, each once."""
        size = ITEM_SIZES[self.dtype]
        q_bytes = self.q_width * (size if self.quant is None else 1)
        return tokens * (q_bytes + self.groups * 4 + self.kv_width * size)

    def bytes_moved(self, tokens: int) -> int:
        """What the op must read and write."""
        return self.bytes_read(tokens) + self.bytes_written(tokens)


def make_case(
    op: str,
    *,
    registry: Registry,
    model: str,
    widths: Sequence[int] | None,
    dtype: str,
    fp8: str | None,
    detected_fp8: str,
    group_size: int | None,
    ue8m0: bool,
) -> Case:
    """The case that was asked for. `fp8` and `group_size` are None where nothing was said about them.

    Raises:
        UnknownOpError: no such op.
        UnknownModelError: no such model.
        BenchError: a dtype, widths or option that cannot be measured, or a model without the op's two norms.
    """
    if op not in OPS:
        raise UnknownOpError(op, OPS)
    _one_of("dtype", dtype, ITEM_SIZES)
    quant = OPS[op]
    if quant is None and (fp8 is not None or ue8m0):
        raise BenchError(f"{op} quantises nothing, so it has no {'ue8m0 scales' if ue8m0 else 'fp8 format'} to choose")
    if quant != "group" and group_size is not None:
        raise BenchError(f"{op} has no groups; mla_dual_rms_norm_group_quant has")
    fp8 = detected_fp8 if fp8 is None else fp8
    group_size = GROUP_SIZE if group_size is None else group_size
    _one_of("fp8", fp8, FP8)
    if group_size not in GROUP_SIZES:
        raise BenchError(f"the group size must be one of {', '.join(map(str, GROUP_SIZES))}, got {shown(group_size)}")
    name, q_width, kv_width, rope_width, q_epsilon, kv_epsilon = (
        _of_model(registry, model) if widths is None else _of_widths(widths)
    )
    return Case(
        op=op,
        name=name,
        q_width=q_width,
        kv_width=kv_width,
        rope_width=rope_width,
        q_epsilon=q_epsilon,
        kv_epsilon=kv_epsilon,
        dtype=dtype,
        fp8=fp8 if quant is not None else None,
        group_size=group_size if quant == "group" else None,
        ue8m0=ue8m0,
    )


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise BenchError(f"{what} must be one of {', '.join(known)}, got {shown(value)}{did_you_mean(value, known)}")


def _of_widths(widths: Sequence[int]) -> tuple[str, int, int, int, float, float]:
    if len(widths) != 3 or min(widths[:2]) < 1 or widths[2] < 0:
        raise BenchError(
            "widths are three numbers, those of the query latent, the key/value latent and what follows them in a row "
            f"(0 for nothing), as 1536,512,64; got {','.join(map(str, widths))}"
        )
    q_width, kv_width, rope_width = widths
    return f"q{q_width}-kv{kv_width}-rope{rope_width}", q_width, kv_width, rope_width, EPSILON, EPSILON


def _of_model(registry: Registry, model: str) -> tuple[str, int, int, int, float, float]:
    entry = registry.model(model)
    layers = [spec for _, spec in entry.specs() if isinstance(spec, MLASpec)]
    shapes = Counter(
        (spec.q_lora_rank, spec.kv_lora_rank, spec.qk_rope_head_dim, spec.q_norm.epsilon, spec.kv_norm.epsilon)
        for spec in layers
        if spec.q_lora_rank is not None and spec.q_norm is not None
    )
    if not shapes:
        what = "no MLA layer" if not layers else "MLA layers without a query latent (q_lora_rank is none)"
        raise BenchError(
            f"{entry.name} has {what}, so it has no two latent norms; take a model that has, as deepseek-v3, or give "
            "--widths Q,KV,ROPE"
        )
    (q_width, kv_width, rope_width, q_epsilon, kv_epsilon), _ = shapes.most_common(1)[0]
    return entry.name, q_width, kv_width, rope_width, q_epsilon, kv_epsilon


def check_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """The numbers of tokens, each once and in order.

    Raises:
        BenchError: none, or one that is out of range.
    """
    wrong = [count for count in tokens if not 1 <= count <= MOST_TOKENS]
    if wrong or not tokens:
        raise BenchError(f"tokens are numbers from 1 to {MOST_TOKENS}, got {', '.join(map(str, wrong)) or 'none'}")
    return tuple(sorted(set(tokens)))
