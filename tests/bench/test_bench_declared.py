"""A fusion that is only declared is measured like those of the house."""

import ast
import graphlib
import os
import sys

import attrs
import pytest
import torch
from bench_support import ALL, ANOTHER, OURS, widths_for
from helpers import ROOT

from layerfuse import bench
from layerfuse.bench import arithmetic, check, inputs, plain_torch
from layerfuse.bench.baselines import all_peers
from layerfuse.bench.peers import Setting
from layerfuse.bench.thirdparty import why_not_imported
from layerfuse.bench.vllm_peer import VLLM_OPS
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.chain import FusionError, Norm


@pytest.mark.parametrize("options", [{}, {"dtype": "fp16"}, {"ue8m0": True}, {"group_size": 32, "column_major": True}])
def test_a_fusion_of_another_package_gets_inputs_peers_and_checks(tiny, another, options):
    another()
    result = tiny(ANOTHER.name, widths=(256,), **options)
    assert result.present == (OURS, "eager", "copy")
    for row in result.rows:
        assert {one.peer: (one.verdict, one.message) for one in row.measured} == dict.fromkeys(
            result.present, ("ok", "")
        )
    assert bench.markdown(result).startswith(f"# {ANOTHER.name}, hidden_size256")


def test_its_wrong_results_get_no_time(tiny, another, peer):
    another()
    peer(lambda low, factors, stream: (low, factors, stream * 1.01))
    found = tiny(ANOTHER.name, names=["broken"], tokens=[5]).rows[0].of("broken")
    assert (found.verdict, found.us) == ("wrong", None)
    assert "a sum is off by" in found.message


def test_its_widths_and_offsets_are_those_of_a_models_site(case, another):
    another()
    made = case(ANOTHER.name, model="qwen3-next-80b-a3b")
    assert (made.widths, made.weight_offsets) == ({"hidden_size": 2048}, {"shift": 1.0})


def test_compilers_are_given_its_plain_form_where_it_has_one(case, another):
    calls = []

    def plain(*given):
        calls.append(len(given))
        return ANOTHER.op.reference(*given)

    fusion = another(op=attrs.evolve(ANOTHER.op, name="another_packages_plain", plain=plain), name="another_plain")
    work = inputs.make(case("another_plain", widths=(128,)), 2, torch.device("cpu"), sets=1)
    given = work.arguments(work.sets[0])
    results = arithmetic.fusable(fusion.forms[0], given)(
        *(tensor for tensor in given if isinstance(tensor, torch.Tensor))
    )
    assert calls == [9]
    assert len(results) == 3


def test_an_op_with_one_result_is_measured(tiny, another):
    from layerfuse.fusion.ops.norm import normalise

    op = attrs.evolve(
        FUSIONS["add_rms_norm"].op,
        name="another_packages_norm",
        args=tuple(each for each in FUSIONS["add_rms_norm"].op.args if each.name != "residual"),
        results=FUSIONS["add_rms_norm"].op.results[:1],
        reference=normalise,
    )
    another(name="another_norm", op=op, chain=(Norm(weight_offset="weight_offset"),), level=1)
    names = (OURS, "eager", "inductor", "copy")
    row = tiny("another_norm", names=names, widths=(256,), tokens=[5]).rows[0]
    assert {one.peer: one.verdict for one in row.measured} == dict.fromkeys(names, "ok")


def test_a_result_that_no_step_gives_is_refused_before_anything_is_measured(another):
    op = attrs.evolve(
        ANOTHER.op,
        name="another_packages_more",
        results=(*ANOTHER.op.results, attrs.evolve(ANOTHER.op.results[-1], name="more")),
    )
    with pytest.raises(FusionError, match=r"another_more: no step gives more, which another_packages_more returns"):
        another(name="another_more", op=op)


@pytest.mark.parametrize("fusion", ALL)
def test_everybody_says_for_every_fusion_what_is_called_or_why_not(case, fusion):
    setting = Setting(case=case(fusion, widths=widths_for(fusion)), device="cpu")
    peers = all_peers(setting)
    names = [peer.name for peer in peers]
    assert len(set(names)) == len(names)
    assert names[0].startswith("layerfuse (") and names[-1] == "copy"
    assert {"eager", "inductor", "inductor combo_kernels", "inductor max-autotune", "aiter triton"} < set(names)
    assert {"fla", "flashinfer", "vllm"} < set(names)
    for peer in peers:
        said = peer.why_not(setting)
        assert said is None or said[-1] != "."
        assert peer.about


def test_third_parties_have_what_they_offer_and_say_what_they_have_not(case):
    def reasons(fusion, **given):
        setting = Setting(case=case(fusion, **given), device="cpu")
        return {peer.name: peer.why_not(setting) for peer in all_peers(setting)}

    quant = reasons("mla_dual_rms_norm_group_quant")
    assert quant["fla"] == "flash-linear-attention has no kernel for mla_dual_rms_norm_group_quant"
    assert "no kernel" not in reasons("gated_rms_norm")["fla"]
    shifted = reasons("add_rms_norm", model="qwen3-next-80b-a3b")
    assert shifted["vllm"] == "vllm is not measured with zero-centred weights"
    turned = reasons("mla_dual_rms_norm_group_quant", tma_aligned=True)
    assert turned["aiter triton"] == "AITER's Triton library is not measured with TMA-aligned scales"
    assert "not measured" not in reasons("rms_norm_group_quant", tma_aligned=True)["vllm"]
    short = reasons("add_rms_norm_group_quant", widths=(5001,))
    assert short["vllm"] == "vLLM's kernels want whole groups, and 5001 columns are none of 128"


@pytest.mark.parametrize("more", ["", "raise RuntimeError('built for another torch')"])
def test_importing_a_third_party_leaves_inductor_its_threads(monkeypatch, tmp_path, more):
    monkeypatch.delitem(sys.modules, "one_thread", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    # As vllm/env_override.py does.
    (tmp_path / "one_thread.py").write_text(
        f"import torch\ntorch._inductor.config.compile_threads = 1\nimport os\nos.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'\n{more}\n"
    )
    with torch._inductor.config.patch(compile_threads=5):
        said = why_not_imported(attrs.evolve(VLLM_OPS, module="one_thread"))
        assert torch._inductor.config.compile_threads == 5
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ
    assert said == ("one_thread cannot be imported: RuntimeError: built for another torch" if more else None)


# ---- Inductor


@pytest.mark.parametrize("fusion", ALL)
def test_what_compilers_are_given_is_right_by_itself(case, fusion):
    """Without a compiler: the plain arithmetic against float64."""
    for options in ({}, {"dtype": "fp16"}, {"weight_dtype": "fp32"}):
        work = inputs.make(case(fusion, widths=widths_for(fusion), **options), 33, torch.device("cpu"), sets=1)
        given = work.arguments(work.sets[0])
        plain = arithmetic.fusable(work.case.form, given)
        results = plain(*(each for each in given if isinstance(each, torch.Tensor)))
        results = (results,) if isinstance(results, torch.Tensor) else results
        verdict = check.check(work, check.expected(work, 0), results)
        assert verdict.ok, verdict.message


def test_inductor_is_right_on_a_cpu(tiny):
    row = tiny("add_rms_norm", names=["inductor"], tokens=[5]).rows[0]
    assert (row.of("inductor").verdict, row.of("inductor").message) == ("ok", "")


def test_combined_kernels_are_said_to_be_for_gpus(tiny):
    result = tiny(names=[OURS, "inductor combo_kernels"], tokens=[1])
    (combo,) = [peer for peer in result.peers if peer.name == "inductor combo_kernels"]
    assert combo.why_not == "Inductor combines kernels on GPUs only: on cpu this would be `inductor` once more"


def test_combined_kernels_are_asked_for_and_right(case, monkeypatch):
    """Their builder, whose kernels Inductor would combine on a GPU, run here."""
    asked = []
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: asked.append(k["options"]) or compiler(*a, **k))
    work = inputs.make(case(widths=(256, 128, 16)), 5, torch.device("cpu"), sets=1)
    with torch.inference_mode():
        (call,) = plain_torch.COMBO_KERNELS.build(work, Setting(case=work.case, device="cpu"))
        verdict = check.check(work, check.expected(work, 0), call())
    assert asked == [{"combo_kernels": True}]
    assert verdict.ok, verdict.message


# ---- in place


def in_place(work, _setting):
    ((weight, epsilon),) = [(work.weights["weight"], work.case.epsilons["epsilon"])]

    def call(x, residual):
        residual.add_(x)
        x.copy_(torch.nn.functional.rms_norm(residual, x.shape[-1:], weight, epsilon))
        return x, residual

    return [bench.InPlace(call, rows) for rows in work.sets]


def test_a_peer_that_writes_over_its_inputs_is_checked_on_fresh_ones(tiny, peer):
    peer(build=in_place, name="in place")
    result = tiny("add_rms_norm", names=[OURS, "in place"])
    for row in result.rows:
        assert {one.peer: (one.verdict, one.message) for one in row.measured} == dict.fromkeys(
            (OURS, "in place"), ("ok", "")
        )


def test_what_is_in_place_leaves_the_inputs_of_others_alone(case):
    work = inputs.make(case("add_rms_norm", widths=(64,)), 3, torch.device("cpu"), sets=1)
    before = [row.clone() for row in work.sets[0]]
    (call,) = in_place(work, None)
    first = [result.clone() for result in call()]
    call()
    assert all(map(torch.equal, before, work.sets[0]))
    call.restore()
    assert all(map(torch.equal, first, call()))


# ---- the package


def imports_of(path):
    """The modules of this package that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from ([node.module] if node.module else [alias.name for alias in node.names])


def test_its_modules_do_not_import_one_another_in_circles():
    files = {path.stem: path for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__"}
    graph = {name: {found for found in imports_of(path) if found in files} for name, path in files.items()}
    assert "check" in graph["runs"] and "cases" in graph["choosing"]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises on a circle
