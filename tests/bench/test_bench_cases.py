import pytest
import torch

from layerfuse import bench
from layerfuse.bench import inputs, peers


def test_a_model_says_its_widths_and_epsilons(case):
    v3 = case()
    assert (v3.q_width, v3.kv_width, v3.rope_width, v3.row_width) == (1536, 512, 64, 2112)
    assert (v3.q_epsilon, v3.kv_epsilon, v3.name) == (1e-6, 1e-6, "deepseek-v3")
    assert case(model="moonshotai/Kimi-K2.5").name == "kimi-k2.5"


def test_the_bytes_are_those_that_must_be_read_and_written_once(case):
    # 3 tokens of 1536 + 512 columns, and as many weights once, read; the columns of 3 tokens written.
    plain = case(dtype="bf16")
    assert plain.bytes_read(3) == 3 * 2048 * 2 + 2048 * 2
    assert plain.bytes_written(3) == 3 * 2048 * 2
    group = case("mla_dual_rms_norm_group_quant", dtype="fp32")
    assert group.bytes_read(3) == 4 * 2048 * 4
    assert group.bytes_written(3) == 3 * (1536 + 12 * 4 + 512 * 4)
    assert case("mla_dual_rms_norm_per_token_quant").bytes_written(1) == 1536 + 4 + 512 * 2
    short = case("mla_dual_rms_norm_group_quant", widths=(100, 8, 0), group_size=64)
    assert short.bytes_written(1) == 100 + 2 * 4 + 8 * 2


@pytest.mark.parametrize("op", bench.OPS)
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_the_copy_moves_those_bytes_to_half_a_percent_of_a_round_number(case, op, tokens):
    made = case(op, widths=(96, 32, 8))
    work = inputs.make(made, tokens, torch.device("cpu"), sets=2)
    calls = peers.COPY.build(work, peers.Setting(case=made, device="cpu"))
    assert len(calls) == 2
    to, source = calls[0]()
    assert to.data_ptr() != source.data_ptr()
    assert to.is_contiguous()
    assert to.nbytes == source.nbytes
    assert to.nbytes % 16 == 0
    too_few = made.bytes_moved(tokens) - 2 * to.nbytes
    assert 0 <= too_few <= max(2 * 16, 0.005 * made.bytes_moved(tokens))
    # And what must be moved is what tensors of the real shapes hold.
    q, kv = work.sets[0]
    peer = peers.EAGER.build(work, peers.Setting(case=made, device="cpu"))
    touched = (q.numel() + kv.numel()) * 2 + work.q_weight.nbytes + work.kv_weight.nbytes
    assert made.bytes_moved(tokens) == touched + sum(result.nbytes for result in peer[0]())


def test_inputs_are_views_of_one_projection_all_different_and_never_zero(case):
    work = inputs.make(case(widths=(96, 32, 8)), 5, torch.device("cpu"), sets=3)
    for q, kv in work.sets:
        assert (q.shape, kv.shape) == ((5, 96), (5, 32))
        assert q.stride() == kv.stride() == (136, 1)
        assert kv.data_ptr() - q.data_ptr() == 96 * 2
        assert bool(q.any()) and bool(kv.any())
    assert len({float(q.float().sum()) for q, _ in work.sets}) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "deepseek-v2-lite"}, "deepseek-v2-lite has MLA layers without a query latent"),
        ({"model": "gpt-oss-20b"}, "gpt-oss-20b has no MLA layer"),
        ({"widths": (1, 2)}, "widths are three numbers"),
        ({"widths": (0, 2, 3)}, "widths are three numbers"),
        ({"dtype": "bf61"}, "dtype must be one of bf16, fp16, fp32, got 'bf61'; did you mean 'bf16'"),
        ({"ue8m0": True}, "mla_dual_rms_norm quantises nothing, so it has no ue8m0 scales"),
        ({"fp8": "e4m3fn"}, "mla_dual_rms_norm quantises nothing, so it has no fp8 format"),
        ({"group_size": 64}, "mla_dual_rms_norm has no groups"),
        ({"op": "mla_dual_rms_norm_per_token_quant", "group_size": 64}, "has no groups"),
        ({"op": "mla_dual_rms_norm_group_quant", "group_size": 48}, "must be one of 32, 64, 128, got 48"),
        ({"op": "mla_dual_rms_norm_group_quant", "fp8": "e5m2"}, "fp8 must be one of e4m3fn, e4m3fnuz, got 'e5m2'"),
    ],
)
def test_a_case_that_cannot_be_says_why(case, given, said):
    with pytest.raises(bench.BenchError, match=r"^[a-z]") as error:
        case(**given)
    assert said in str(error.value)


def test_an_unknown_op_or_peer_is_answered_with_the_closest(tiny):
    with pytest.raises(bench.UnknownOpError, match="did you mean 'mla_dual_rms_norm'"):
        tiny("mla_dual_rmsnorm")
    with pytest.raises(bench.UnknownPeerError, match="did you mean 'eager'"):
        tiny(names=["eagr"])


@pytest.mark.parametrize("tokens", [[], [0], [1, -3], [1 << 30]])
def test_tokens_out_of_range_are_refused(tiny, tokens):
    with pytest.raises(bench.BenchError, match=r"tokens are numbers from 1 to 1048576"):
        tiny(tokens=tokens)
