"""`qk_norm_rope`: the op against float64, and where it is put in graphs, and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import engine_ops  # noqa: F401  (the ops of engines)
import pytest
import torch
from fusion_support import TOLERANCE, LlamaNorm, gqa_spec, trace
from helpers import in_turn
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.adapters.specs import GQASpec, NormSpec, RopeSpec
from layerfuse.fusion import FusionConfig, Target, ops, plan
from layerfuse.fusion.match.angles import _repeats

FUSION = "qk_norm_rope"
HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 16, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}

# ---- the op ----------------------------------------------------------------------------------------------------------


def inputs(
    tokens: int,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    width: int = WIDTH,
    *,
    turned: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    gap: int = 8,
) -> dict[str, Any]:
    """Views of one projection's rows, cos beside sin in one table, positions in any order."""
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width + gap, device=DEVICE).to(dtype)
    half = (width if turned is None else turned) // 2
    angles = torch.rand(32, half, device=DEVICE) * 6.3
    cos, sin = torch.cat([angles.cos(), angles.sin()], -1).to(dtype).split(half, -1)
    return {
        "q": qkv[:, : heads * width].unflatten(-1, (heads, width)),
        "k": qkv[:, heads * width : (heads + kv_heads) * width].unflatten(-1, (kv_heads, width)),
        "q_weight": (torch.rand(width, device=DEVICE) + 0.5).to(dtype),
        "k_weight": torch.rand(width, device=DEVICE) - 0.5,
        "q_epsilon": 1e-6,
        "k_epsilon": 1e-5,
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, 32, (tokens,), device=DEVICE),
        "q_weight_offset": 0.0,
        "k_weight_offset": 1.0,
        "pairs": "halves",
    }


def exact(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """In float64."""
    half = given["cos"].shape[1]
    first = torch.arange(half, device=DEVICE) * (2 if given["pairs"] == "interleaved" else 1)
    second = first + (1 if given["pairs"] == "interleaved" else half)
    results = []
    for name in ("q", "k"):
        x, weight = given[name].double(), given[f"{name}_weight"].double() + given[f"{name}_weight_offset"]
        x = x / (x.square().mean(-1, keepdim=True) + given[f"{name}_epsilon"]).sqrt() * weight
        flat, rows = x.reshape(-1, *x.shape[-2:]), given["positions"]
        rows = torch.arange(len(flat), device=DEVICE) % len(given["cos"]) if rows is None else rows.long()
        cos, sin = (given[table].double()[rows].unsqueeze(1) for table in ("cos", "sin"))
        turned = flat.clone()
        turned[..., first] = flat[..., first] * cos - flat[..., second] * sin
        turned[..., second] = flat[..., second] * cos + flat[..., first] * sin
        results.append(turned.view(x.shape))
    return tuple(results)


def assert_op(given: dict[str, Any]) -> None:
    got, wanted = getattr(ops, FUSION)(**given), exact(given)
    for x, one, other in zip((given["q"], given["k"]), got, wanted, strict=True):
        assert (one.dtype, one.shape, one.is_contiguous()) == (x.dtype, x.shape, True)
        # What is turned is a difference: its error is one of its head.
        slack = EPS[x.dtype] * (1 if other.numel() == 0 else other.abs().amax().item())
        torch.testing.assert_close(one.double(), other, rtol=EPS[x.dtype], atol=slack)


SHAPES = {
    "qwen3-4b's": (3, 32, 8, 128, 128),
    "a rank of four's": (9, 16, 2, 128, 128),
    "qwen3-next's": (5, 16, 2, 256, 64),
    "odd": (7, 5, 3, 40, 10),
    "odd width": (3, 2, 1, 33, 8),
    "one": (1, 1, 1, 2, 2),
    "many tokens": (1025, 1, 1, 16, 16),
    "none": (0, 4, 2, 16, 16),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_are_normed_and_turned(backend: str, shape: tuple[int, ...]) -> None:
    tokens, heads, kv_heads, width, turned = shape
    assert_op(inputs(tokens, heads, kv_heads, width, turned=turned))


@pytest.mark.parametrize(
    ("dtype", "pairs", "numbered"),
    in_turn(list(EPS), ["halves", "interleaved"], [True, False]),
)
def test_dtypes_pairs_and_tokens_without_positions(
    backend: str, dtype: torch.dtype, pairs: str, numbered: bool
) -> None:
    given = inputs(40, turned=8, dtype=dtype) | {"pairs": pairs}
    assert_op(given if numbered else {**given, "positions": None})


@pytest.mark.parametrize("leading", [(2, 3), ()], ids=str)
def test_any_leading_dimensions(backend: str, leading: tuple[int, ...]) -> None:
    given = inputs(6 if leading else 1, gap=3)
    assert_op(given | {name: given[name].reshape(*leading, *given[name].shape[1:]) for name in ("q", "k")})


def test_large_values_and_int32_positions(backend: str) -> None:
    given = inputs(4, dtype=torch.float32)
    given |= {"q": given["q"] * 1e15, "k": given["k"] * 0, "positions": given["positions"].int()}
    assert_op(given)


def test_tables_have_as_many_positions() -> None:
    given = inputs(3, turned=8)
    with pytest.raises(ValueError, match=f"sin must have as many positions as cos, {len(given['cos'])}; got"):
        getattr(ops, FUSION)(**given | {"sin": given["sin"][:-1]})


def test_positions_outside_the_tables(backend: str) -> None:
    """An error by the reference, NaN of the token's own columns that are turned by a kernel."""
    given = inputs(3, turned=8)
    given["positions"] = torch.tensor([1, 32, -1], device=DEVICE)
    if backend == "reference":
        if DEVICE == "cuda":
            pytest.skip("a failed assertion on the device ends the process")
        with pytest.raises(ValueError, match="position 32 lies outside the 32 rows"):
            getattr(ops, FUSION)(**given)
        return
    for got, right in zip(
        getattr(ops, FUSION)(**given), exact({**given, "positions": torch.tensor([1, 0, 0])}), strict=True
    ):
        assert got[1:, :, :8].isnan().all()
        assert torch.allclose(got[0].double(), right[0], rtol=2**-7, atol=2**-6)
        assert torch.allclose(got[1:, :, 8:].double(), right[1:, :, 8:], rtol=2**-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cos": torch.ones(32, 9)}, r"cos must be \(positions, at most 8\)"),
        ({"sin": torch.ones(32, 4)}, "sin must be as wide as cos, 8 columns"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions must have one number for each of the 3 tokens of q"),
        ({"k": torch.ones(4, 2, 16).bfloat16()}, r"k must have the leading dimensions of q \(3,\)"),
        ({"pairs": "none"}, "pairs must be one of halves, interleaved, got none"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.skipif(DEVICE == "cuda", reason="the changes are on the CPU")
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(ops, FUSION)(**{**inputs(3), **change})


# ---- in graphs -------------------------------------------------------------------------------------------------------


def spec(**changes: Any) -> GQASpec:
    norms = [NormSpec(width=WIDTH, epsilon=1e-6, module=name) for name in ("q_norm", "k_norm")]
    rope = RopeSpec(
        width=changes.pop("width", WIDTH), interleaved=changes.pop("interleaved", False), attention_scaling=1.0
    )
    return attrs.evolve(gqa_spec(), q_norm=norms[0], k_norm=norms[1], rope=rope, **changes)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers has it, with cos of both halves."""
    return x * cos + rotate_half(x) * sin


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As vLLM has it, with cos of one half."""
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Attention(nn.Module):
    """From a hidden state to query and key, in an engine's form."""

    def __init__(self, turn: Callable[..., Any]) -> None:
        super().__init__()
        self.q_norm, self.k_norm = LlamaNorm(WIDTH), LlamaNorm(WIDTH)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        angles = torch.arange(32)[:, None] * torch.rand(WIDTH // 2)
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], -1))
        self.turn = turn

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        q, k, _ = self.qkv(x).split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], -1)
        q, k = self.q_norm(q.unflatten(-1, (-1, WIDTH))), self.k_norm(k.unflatten(-1, (-1, WIDTH)))
        return self.turn(q, k, positions, self.table.to(x.dtype))


def looked_up(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    cos, sin = (each.unsqueeze(-2) for each in table[positions].chunk(2, -1))
    return halves(q, cos, sin), halves(k, cos, sin)


def heads_first(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    """Of values that are computed for each token, with heads in front of tokens."""
    angles = positions[:, None] * torch.linspace(0.1, 1, WIDTH // 2)
    twice = torch.cat([angles, angles], -1)
    cos, sin = twice.cos().to(q.dtype), twice.sin().to(q.dtype)
    return tuple(whole(x.transpose(-3, -2), cos, sin) for x in (q, k))


def partly(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    cos, sin = (each[..., :4].unsqueeze(-2) for each in table[positions].chunk(2, -1))
    return tuple(torch.cat([halves(x[..., :8], cos, sin), x[..., 8:]], -1) for x in (q, k))


def heads_first_partly(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    """As transformers has it: the result lies head by head."""
    cos, sin = (each[..., :4].unsqueeze(-3) for each in table[positions].chunk(2, -1))
    first = (x.transpose(-3, -2) for x in (q, k))
    return tuple(torch.cat([halves(x[..., :8], cos, sin), x[..., 8:]], -1) for x in first)


def one_op(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    q, k = q.flatten(-2), k.flatten(-2)
    torch.ops._C.rotary_embedding(positions, q, k, WIDTH, table, True)
    return q, k


def interleaved_op(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    q, k = q.flatten(-2), k.flatten(-2)
    torch.ops._C.rotary_embedding(positions, q, k, WIDTH, table, False)
    return q, k


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "looked up": (looked_up, {}),
    "heads first": (heads_first, {}),
    "partly": (partly, {"width": 8}),
    "heads first, partly": (heads_first_partly, {"width": 8}),
    "one op": (one_op, {}),
    "interleaved op": (interleaved_op, {"interleaved": True}),
}


def run(turn: Callable[..., Any], dtype: torch.dtype = torch.float32, **said: Any) -> Any:
    torch.manual_seed(0)
    model, x = Attention(turn).to(dtype), torch.randn(5, HIDDEN, dtype=dtype)
    positions = torch.tensor([3, 0, 31, 7, 7])
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):  # as vLLM sets it
        traced = trace(model, x, positions, specs=[("", spec(**said))])
    with torch.no_grad():
        eager = model(x, positions)
    for one, other in zip(traced.output, eager, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, **TOLERANCE[dtype])
    return traced


@pytest.mark.parametrize(("form", "dtype"), in_turn(list(FORMS), [torch.float32, torch.bfloat16]))
def test_the_norms_and_the_rope_become_one_op(form: str, dtype: torch.dtype) -> None:
    turn, said = FORMS[form]
    traced = run(turn, dtype, **said)
    assert traced.report.of(FUSION).matched == ("qk",)
    (text,) = traced.after
    assert text.count(f"layerfuse.{FUSION}") == 1
    assert "aten.rsqrt" not in text and "rotary_embedding" not in text


def written(turned: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Query and key, whose halves become what is given of both, cos and sin."""

    def turn(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
        cos, sin = (each.unsqueeze(-2) for each in table[positions].chunk(2, -1))
        return tuple(torch.cat(turned(*x.chunk(2, -1), cos, sin), -1) for x in (q, k))

    return turn


def _inside_read(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    cos, sin = (each.unsqueeze(-2) for each in table[positions].chunk(2, -1))
    one, other = k.chunk(2, -1)
    turned = one * cos
    return halves(q, cos, sin), torch.cat([turned - other * sin, other * cos + one * sin], -1), turned


def _turned_back(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    cos, sin = (each.unsqueeze(-2) for each in table[positions].chunk(2, -1))
    back = -sin
    return halves(q, cos, back), halves(k, cos, back)


def _other_positions(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    return looked_up(q, q, positions, table)[0], looked_up(k, k, positions, table.flip(0))[1]


def _each_half(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    """cos differs between the halves of a head."""
    cos, sin = table[positions].unsqueeze(-2), table[positions].flip(-1).unsqueeze(-2)
    return whole(q, cos, sin), whole(k, cos, sin)


def _each_head(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    cos, sin = table[positions].chunk(2, -1)
    several = [torch.stack([cos * (1 + i) for i in range(x.shape[-2])], -2) for x in (q, k)]
    return halves(q, several[0], sin.unsqueeze(-2)), halves(k, several[1], sin.unsqueeze(-2))


def _interleaved(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    cos, sin = (each.unsqueeze(-2) for each in table[positions].chunk(2, -1))
    pairs = ((x[..., ::2], x[..., 1::2]) for x in (q, k))
    return tuple(torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2) for a, b in pairs)


NO_PART = "is no part of a rope of"
REFUSED: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "the norm has other readers": (lambda q, *rest: (*looked_up(q, *rest), q * 2), NO_PART, {}),
    "an intermediate is a result": (_inside_read, NO_PART, {}),
    "sin is negated": (_turned_back, "cos is looked up by", {}),
    "it turns back": (written(lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin)), NO_PART, {}),
    "query and key are turned differently": (_other_positions, "are not turned by the same cos and sin", {}),
    "cos differs between halves": (_each_half, "nothing tells that both halves of", {}),
    "cos differs between heads": (_each_head, "has no angles of its own for each token", {}),
    "interleaved, written out": (_interleaved, NO_PART, {"interleaved": True}),
    "a head is added to itself": (lambda q, k, *rest: looked_up(q + q, k + k, *rest), NO_PART, {}),
    "cos is added twice": (written(lambda a, b, cos, sin: (a * cos + a * cos - b * sin, b * cos + b * cos + a * sin)), NO_PART, {}),
    "two cosines are added": (written(lambda a, b, cos, sin: (a * cos + a * cos.flip(0) - b * sin, b * cos + a * sin)), NO_PART, {}),
    "sin is subtracted twice": (written(lambda a, b, cos, sin: (a * cos - (b * sin + b * sin), b * cos + a * sin)), NO_PART, {}),
    "nothing is turned": (lambda q, k, *rest: (q * 1.5, k * 1.5), NO_PART, {}),
    "as many columns as the spec says not": (partly, "turns 8 columns, halves; the spec says of 16 columns, halves", {}),
    "in pairs that the spec says not": (interleaved_op, "turns 16 columns, interleaved; the spec says of 16 columns, halves", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_left_with_its_reason(name: str) -> None:
    turn, reason, said = REFUSED[name]
    traced = run(turn, **said)
    (use,) = traced.report.records[0].uses
    assert reason in use.missed[FUSION]
    assert f"layerfuse.{FUSION}" not in traced.after[0]


class _Swapped(Attention):
    """Norms over (2, 3) tokens, which are turned as (3, 2)."""

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        q, k, _ = self.qkv(x).split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], -1)
        q, k = self.q_norm(q.unflatten(-1, (-1, WIDTH))), self.k_norm(k.unflatten(-1, (-1, WIDTH)))
        return self.turn(q.transpose(0, 1), k.transpose(0, 1), positions, self.table)


@pytest.mark.parametrize("shape", [(2, 3), (2, 2), (1, 3)], ids=str)
def test_tokens_that_are_turned_in_another_order_than_they_are_normed(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = _Swapped(looked_up), torch.randn(*shape, HIDDEN)
    positions = torch.arange(x[..., 0].numel()).view(shape[::-1]) * 3
    traced = trace(model, x, positions, specs=[("", spec())])
    with torch.no_grad():
        torch.testing.assert_close(traced.output, model(x, positions), **TOLERANCE[torch.float32])
    if 1 in shape:
        assert traced.report.of(FUSION).matched == ("qk",)
    else:
        assert "lie in another order" in traced.report.records[0].uses[0].missed[FUSION]


# ---- in plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope": None}, "nothing says how the heads of this layer are turned"),
        ({"rope": RopeSpec(width=0, interleaved=False, attention_scaling=1.0)}, "the heads of this layer are not turned"),
        ({"shares_kv": True}, "it reads the keys of an earlier layer"),
    ],
    ids=["unsaid", "none", "another layer's keys"],
)  # fmt: skip
def test_a_layer_without_a_known_rope_is_left_alone(change: dict[str, Any], reason: str) -> None:
    made = plan([("", attrs.evolve(spec(), **change))], Target.named("sm90"))
    (decision,) = made.at("qk")
    assert decision.kind == "not_applicable"
    assert reason in decision.reason


def test_it_is_off_in_an_engine_unless_named() -> None:
    target = Target.named("sm90")
    (decision,) = plan([("", spec())], target, engine="vllm").at("qk")
    assert decision.kind == "refused"
    (decision,) = plan([("", spec())], target, FusionConfig(switches={FUSION: True}), engine="vllm").at("qk")
    assert decision.kind == "expected"


# ---- in transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_qwen3_of_transformers(batch: int) -> None:
    """By its own specs. Both rows of a batch have the positions of one."""
    transformers = pytest.importorskip("transformers")
    from layerfuse import registry

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()
    ids = torch.arange(6 * batch).view(batch, 6)
    specs = list(registry.specs_in(model))
    traced = trace(model, ids, specs=specs, kwargs={"use_cache": False})
    assert traced.report.of(FUSION).matched == tuple(f"model.layers.{i}.self_attn:qk" for i in range(2))
    assert traced.after[0].count(f"layerfuse.{FUSION}") == 2
    with torch.no_grad():
        torch.testing.assert_close(traced.output.logits, model(ids, use_cache=False).logits, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("twice", "same"),
    [
        (lambda x, y: torch.cat([x, x], -1).cos(), True),
        (lambda x, y: torch.cat([x, x], 1).neg(), True),
        (lambda x, y: x[:, None].expand(3, 2, 4).reshape(3, 8) * 0.5, True),
        (lambda x, y: torch.cat([x, y], -1), False),
        (lambda x, y: torch.cat([x[:, :3], x[:, :3]], -1), False),
        (lambda x, y: torch.cat([x, x, x[:, :0]], -1), False),
        (lambda x, y: torch.cat([torch.cat([x, x], -1)] * 2), False),
        (lambda x, y: x[:, None].expand(3, 4, 4).reshape(3, 16), False),
        (lambda x, y: y, False),
    ],
)
def test_columns_that_repeat_are_known(twice: Callable[..., Tensor], same: bool) -> None:
    """Before Inductor too, which expands what is put beside itself."""
    graph = make_fx(twice, tracing_mode="fake")(torch.rand(3, 4), torch.rand(3, 4)).graph
    (result,) = graph.find_nodes(op="output")[0].args
    assert _repeats(result, 4) is same
