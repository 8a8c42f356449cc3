"""benchmarks/mxfp4_experts.py without a GPU: its kernels in Triton's interpreter, and the assembly that takes codes apart."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
@pytest.mark.parametrize(
    ("experts", "tokens", "top_k"),
    [(8, 1, 4), (8, 2, 4), (8, 4, 4), (4, 23, 2)],
    ids=["1", "2", "all experts", "more pairs"],
)
@pytest.mark.usefixtures("scripts")
def test_kernels_agree_with_plain_torch(experts, tokens, top_k):
    import mxfp4_experts_launch
    from mxfp4_experts import Experts, _mxfp4
    from mxfp4_plain import plain_sum

    torch.manual_seed(tokens)
    layer = Experts(experts, 192, 160, 1.702, 7.0, biased=True, device="cpu", seed=tokens)
    x = torch.randn(tokens, 192).bfloat16()
    factors, ids = torch.randn(tokens, experts).bfloat16().topk(top_k)
    given = x, ids, factors.softmax(-1), *layer.given()
    right = plain_sum(*given).float()
    for launch in mxfp4_experts_launch.launches(tokens * top_k)[::2]:
        got = _mxfp4(*given, launch=launch).float()
        # The interpreter truncates where a GPU rounds to bfloat16.
        assert (got - right).norm() < 0.008 * right.norm(), launch


@pytest.mark.usefixtures("scripts")
def test_the_assembly_is_exact_for_all_codes_and_scales():
    from mxfp4_experts_kernel import _UNPACK
    from mxfp4_experts_launch import MOST_SCALE, packed
    from mxfp4_plain import dequantised

    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(9, 16, 16)
    codes = torch.stack([torch.roll(each, place, 1) for place, each in enumerate(codes)]).flatten(1).expand(16, 9, 256)
    codes = codes.reshape(16, -1)
    scales = (torch.arange(codes.shape[0] * codes.shape[1] // 16) % MOST_SCALE + 1).to(torch.uint8).view(16, -1)
    data, biased = packed(codes, scales)
    words = data.view(torch.int32).long() & 0xFFFFFFFF
    registers = {"$4": words, "$5": (biased.long() * 0x00800080)[..., None].expand_as(words)}
    lines = re.findall(r"(\w+)\.\w+ (\S+), (\S+), (\S+);", _UNPACK.value)
    assert len(lines) == 17
    for name, target, *sources in lines:
        left, right = (registers[each] if each in registers else int(each, 0) for each in sources)
        registers[target] = OPERATIONS[name](left, right)
    low, high = (
        torch.cat([registers[each] for each in several], -1).flatten(-2) for several in (("$0", "$1"), ("$2", "$3"))
    )
    got = torch.cat([low, high], -1)
    assert torch.equal(got.transpose(1, 2).reshape(16, -1), dequantised(codes, scales).double())


def _halves(word):
    """Two bfloat16 in a word, the lower first, wide."""
    halves = torch.stack([word >> place & 0xFFFF for place in (0, 16)], -1)
    return halves.to(torch.int32).to(torch.int16).view(torch.bfloat16).double()


OPERATIONS = {
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "shl": lambda left, right: left << right & 0xFFFFFFFF,
    "shr": lambda left, right: left >> right,
    "mul": lambda left, right: _halves(left) * _halves(right),
}
