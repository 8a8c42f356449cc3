import pytest
import torch
from bench_support import ALL, widths_for
from helpers import in_turn

from layerfuse import bench
from layerfuse.bench import inputs, plain_torch
from layerfuse.bench.peers import Setting
from layerfuse.bench.thirdparty import halves_joined
from layerfuse.fusion.declare import Index, Rows, StaticScale, Table, Weight


def test_a_model_says_widths_epsilons_and_what_its_rows_are_views_of(case):
    v3 = case()
    assert (v3.widths, v3.row_width) == ({"q_width": 1536, "kv_width": 512}, 2112)
    assert (v3.epsilons, v3.name) == ({"q_epsilon": 1e-6, "kv_epsilon": 1e-6}, "deepseek-v3")
    assert case(model="moonshotai/Kimi-K2.5").name == "kimi-k2.5"


def test_the_residual_stream_has_tensors_of_its_own_at_the_first_site_that_adds(case):
    oss = case("add_rms_norm", model="gpt-oss-20b")
    assert (oss.widths, oss.row_width) == ({"width": 2880}, None)
    assert (oss.epsilons, oss.weight_offsets) == ({"epsilon": 1e-5}, {"weight_offset": 0.0})
    assert case("add_rms_norm", model="deepseek-v2-lite").widths == {"width": 2048}


def test_zero_centred_weights_are_taken_with_their_offset(case):
    gemma = case("add_rms_norm", model="qwen3-next-80b-a3b")
    assert gemma.weight_offsets == {"weight_offset": 1.0}
    work = inputs.make(gemma, 3, torch.device("cpu"), sets=1)
    assert abs(float(work.weights["weight"].float().mean())) < 0.1
    assert work.arguments(work.sets[0])[3:] == (1e-6, 1.0)


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
    # Both inputs, one weight; both results.
    add = case("add_rms_norm", widths=(7168,))
    assert (add.bytes_read(2), add.bytes_written(2)) == (5 * 7168 * 2, 4 * 7168 * 2)


@pytest.mark.parametrize(("fusion", "tokens"), in_turn(ALL, [1, 7, 100]))
def test_the_copy_moves_those_bytes_to_half_a_percent_of_a_round_number(case, fusion, tokens):
    made = case(fusion, widths=widths_for(fusion))
    setting = Setting(case=made, device="cpu")
    work = inputs.make(made, tokens, torch.device("cpu"), sets=2)
    calls = plain_torch.COPY.build(work, setting)
    assert len(calls) == 2
    to, source = calls[0]()
    assert to.data_ptr() != source.data_ptr()
    assert to.is_contiguous()
    assert to.nbytes == source.nbytes
    assert to.nbytes % 16 == 0
    too_few = made.bytes_moved(tokens) - 2 * to.nbytes
    assert 0 <= too_few <= max(2 * 16, 0.005 * made.bytes_moved(tokens))
    # And what must be moved is what tensors of the real shapes hold.
    kinds = made.form.op.args
    given = [
        tensor[:tokens] if isinstance(argument, Table) else tensor  # a token's row of a table of thousands
        for argument, tensor in zip(kinds, work.arguments(work.sets[0]), strict=True)
        if isinstance(tensor, torch.Tensor)
    ]
    tensors = (Rows, Weight, StaticScale, Table, Index)
    assert len(given) == len([argument for argument in kinds if isinstance(argument, tensors)])
    results = plain_torch.EAGER_TORCH.build(work, setting)[0]()
    assert made.bytes_moved(tokens) == sum(tensor.numel() * tensor.itemsize for tensor in (*given, *results))


def test_latents_are_views_of_one_projection_all_different_and_never_zero(case):
    work = inputs.make(case(widths=(96, 32, 8)), 5, torch.device("cpu"), sets=3)
    for q, kv in work.sets:
        assert (q.shape, kv.shape) == ((5, 96), (5, 32))
        assert q.stride() == kv.stride() == (136, 1)
        assert kv.data_ptr() - q.data_ptr() == 96 * 2
        assert bool(q.any()) and bool(kv.any())
    assert len({float(q.float().sum()) for q, _ in work.sets}) == 3


def test_what_follows_the_latents_may_be_left_out(case):
    ((q, kv),) = inputs.make(case(widths=(96, 32)), 5, torch.device("cpu"), sets=1).sets
    assert q.stride() == kv.stride() == (128, 1)


def test_gate_and_up_are_the_halves_of_one_tensor(case):
    ((gate, up),) = inputs.make(case("silu_mul_group_quant", widths=(96,)), 5, torch.device("cpu"), sets=1).sets
    assert gate.stride() == up.stride() == (192, 1)
    both = halves_joined(gate, up)
    assert both.is_contiguous() and torch.equal(both, torch.cat([gate, up], -1))
    with pytest.raises(ValueError, match="no halves of one tensor"):
        halves_joined(up, gate)


def test_a_gated_norm_has_heads_gate_and_order_of_its_model(case):
    qwen = case("gated_rms_norm_group_quant")
    assert (qwen.name, qwen.heads, qwen.widths) == ("qwen3-next-80b-a3b", 32, {"width": 128})
    assert (qwen.activation, qwen.norm_before_gate) == ("silu", True)
    work = inputs.make(qwen, 3, torch.device("cpu"), sets=1)
    assert [row.shape for row in work.sets[0]] == [(3, 32, 128)] * 2
    # 3 tokens of 32 heads x 128 twice and one weight read; as many fp8 values, and a scale for each head, written.
    assert (qwen.bytes_read(3), qwen.bytes_written(3)) == ((2 * 3 * 4096 + 128) * 2, 3 * (4096 + 32 * 4))
    kimi = case("gated_rms_norm_group_quant", model="kimi-linear-48b-a3b")
    assert (kimi.activation, kimi.norm_before_gate) == ("sigmoid", True)


def test_a_padded_norm_is_as_wide_as_was_asked_for(case):
    padded = case("add_rms_norm_pad")
    assert (padded.name, padded.widths, padded.padded_width) == ("gpt-oss-20b", {"width": 2880}, 3072)
    assert padded.bytes_written(2) == 2 * (3072 + 2880) * 2
    assert case("add_rms_norm_pad", pad_to=4096).padded_width == 4096


def test_packed_values_and_exponents_are_bytes(case):
    mx = case("add_rms_norm_mxfp4_quant_with_norm", widths=(64,))
    assert mx.bytes_written(1) == 32 + 2 + 64 * 2 + 64 * 2
    nv = case("add_rms_norm_nvfp4_quant_with_norm", widths=(64,))
    assert nv.bytes_written(1) == 32 + 4 + 64 * 2 + 64 * 2 and nv.bytes_read(1) == mx.bytes_read(1) + 4


def test_other_rows_are_contiguous_tensors_of_their_own(case):
    ((x, residual),) = inputs.make(case("add_rms_norm", widths=(96,)), 5, torch.device("cpu"), sets=1).sets
    assert x.is_contiguous() and residual.is_contiguous()
    assert x.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
    assert not torch.equal(x, residual)


def test_an_unknown_fusion_or_peer_is_answered_with_the_closest(tiny):
    with pytest.raises(bench.UnknownFusionError, match="did you mean 'mla_dual_rms_norm'"):
        tiny("mla_dual_rmsnorm")
    with pytest.raises(bench.UnknownPeerError, match="did you mean 'eager'"):
        tiny(names=["eagr"])


@pytest.mark.parametrize("tokens", [[], [0], [1, -3], [1 << 30]])
def test_tokens_out_of_range_are_refused(tiny, tokens):
    with pytest.raises(bench.BenchError, match=r"tokens are numbers from 1 to 1048576"):
        tiny(tokens=tokens)
