"""The options of layerfuse inside vLLM, which need no vLLM to be read."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from helpers import ROOT, run_python

from layerfuse.adapters.errors import ArgumentError
from layerfuse.engines import defaults
from layerfuse.engines.options import Options, OptionsError, misnamed, options_in
from layerfuse.engines.vllm.plugin import _nothing_on
from layerfuse.fusion import FusionConfig, FusionConfigError
from layerfuse.fusion.backends import BackendError
from layerfuse.fusion.policy import Policy, shipped

AT_OPTIONS = """
from types import SimpleNamespace
from layerfuse.engines.vllm import plugin, register
register()
for _ in range(2):
    plugin._at_options(lambda vllm_config: None, SimpleNamespace(additional_config={given}))
"""


@pytest.mark.parametrize(
    ("given", "times"),
    [({"layer_fuse": {}, "other": 1}, 1), ({"layerfuse": {}, "layerfuze": {}}, 0), ({"ascend": {}}, 0)],
)
def test_what_nothing_reads_is_named_once(given: dict[str, Any], times: int) -> None:
    said = run_python(AT_OPTIONS.format(given=given), LAYERFUSE_FUSION="none")
    key = "additional_config has 'layer_fuse', which layerfuse does not read; did you mean 'layerfuse'?"
    assert said.stderr.count("additional_config has") == said.stderr.count(key) == times
    assert said.stderr.count("LAYERFUSE_FUSION is set, and no variable is called that; did you mean") == 1


@pytest.mark.parametrize(
    ("given", "fusions"), [({}, "none"), ({"layerfuse": {"fusions": "none"}}, "all"), ({"layerfuse": False}, "all")]
)
@pytest.mark.parametrize(("name", "said"), [("SHADOW", "expected how many"), ("BACKEND", "no op has a backend called")])
def test_a_variable_that_is_wrong_stops_nothing_where_no_fusion_is_wanted(
    given: dict[str, Any], fusions: str, name: str, said: str
) -> None:
    done = run_python(AT_OPTIONS.format(given=given), LAYERFUSE_FUSIONS=fusions, **{f"LAYERFUSE_{name}": "two"})
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count(
            f"layerfuse: all fusions are switched off, so that this stops nothing: LAYERFUSE_{name}=two: {said}"
        )
        == 1
    )


@pytest.mark.parametrize("name", ["layerfuse_", "layer-fuse", "layer_fuse", "LayerFuse", "layerfuze", "layerfusion"])
def test_keys_that_may_be_meant_for_the_options_are_named(name: str) -> None:
    (line,) = misnamed({name: {}, "other": 1})
    assert line.startswith(f"additional_config has {name!r}, ") and line.endswith("; did you mean 'layerfuse'?")


@pytest.mark.parametrize(
    "name",
    [
        "layers",
        "layer",
        "layer_name",
        "layerwise",
        "num_layers",
        "fuse",
        "enable_fuse",
        "layerwise_fuse",
        "fused",
        "",
        3,
    ],
)
def test_keys_of_others_are_not(name: Any) -> None:
    assert not [*misnamed({name: {}})]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LAYERFUSE_FUSIONS", "LAYERFUSE_BACKEND"):
        monkeypatch.delenv(variable, raising=False)


def config(given: Any) -> FusionConfig:
    return options_in({"layerfuse": given}).config()


def test_a_measurement_that_is_entered_turns_planning_on_where_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    first, already = shipped().measurement[0], defaults.on_by_default("vllm")
    more = attrs.evolve(first, fusions=("add_rms_norm_static_quant",), arch="sm100", ranks=2)
    none = attrs.evolve(more, arch="gfx950", decode={"1": (1.0, 0.9, 1.1)})
    entered = Policy(measurement=(*shipped().measurement, more, none))
    monkeypatch.setattr(defaults, "shipped", lambda: entered)
    assert defaults.on_by_default("vllm") == {**already, "add_rms_norm_static_quant": ("sm100",)}
    assert "add_rms_norm_static_quant" not in defaults.on_by_default("vllm", "gfx950")
    given = vllm_config(quantised=True, ranks=2)
    for arch, nothing in (("sm100", False), ("gfx950", True)):
        monkeypatch.setattr("layerfuse.engines.vllm.defaults.arch_here", lambda arch=arch: arch)
        assert _nothing_on(Options(), given) is nothing
    assert _nothing_on(Options(fusions="all"), given) is False


def test_a_gpu_or_a_release_that_no_measurement_names_is_said() -> None:
    assert defaults.measured_elsewhere("vllm", "sm90", "NVIDIA H200", "0.26.0") is None
    assert defaults.measured_elsewhere("vllm", "sm90", "NVIDIA H100 80GB HBM3", "0.33.0") is None
    assert defaults.measured_elsewhere("vllm", "gfx950", "AMD Instinct MI355X", "0.26.0") is None  # nothing is on there
    assert defaults.measured_elsewhere("vllm", "sm90", "NVIDIA H200", "0.33.2+cu130") is None
    for device, release in (("NVIDIA H100 80GB HBM3", "0.26.0"), ("NVIDIA H800", "0.33.0")):
        said = defaults.measured_elsewhere("vllm", "sm90", device, release)
        assert said == (
            "what is on by default here is what was measured faster with vLLM 0.33.0 on NVIDIA H100 80GB HBM3 and vLLM 0.33.0 on NVIDIA H200 and "
            "vLLM 0.26.0 on NVIDIA H200; "
            f"vLLM {release} on {device} was not measured"
        )


def vllm_config(quantised: bool = False, ranks: int = 1, state: bool = False, mla: bool = False) -> Any:
    return SimpleNamespace(
        quant_config=object() if quantised else None,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(has_inner_state=state, use_mla=mla),
    )


@pytest.mark.parametrize(
    ("given", "nothing"),
    [
        (vllm_config(), True),
        (vllm_config(quantised=True), False),
        (vllm_config(ranks=2), False),
        (vllm_config(state=True), False),
        (vllm_config(mla=True), False),
        (SimpleNamespace(**{**vars(vllm_config()), "model_config": None}), False),
    ],
    ids=["plain", "quantised", "two ranks", "delta nets", "latents", "a config that does not say it"],
)
def test_on_hopper_a_model_in_which_nothing_can_be_found_is_not_planned(
    given: Any, nothing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To plan takes several times the 50 ms that a start with nothing to do may."""
    monkeypatch.setattr("layerfuse.engines.vllm.defaults.arch_here", lambda: "sm90")
    assert _nothing_on(Options(), given) is nothing


@pytest.mark.parametrize("given", [None, {}, {"other": 1}, "no table at all"])
def test_without_options_the_default_holds(given: Any) -> None:
    assert options_in(given) == Options()
    assert options_in(given).says_nothing


def test_fusions_are_said_as_in_the_environment_or_as_a_list() -> None:
    assert config({"fusions": "all"}).level == 2
    assert config({"fusions": "-add_rms_norm"}).switches == (("add_rms_norm", False),)
    assert dict(config({"fusions": ["add_rms_norm"]}).switches)["add_rms_norm"]
    assert config({"fusions": []}).level == config(False).level == 0
    assert config({"level": 2, "strict": True}).strict


def test_the_options_count_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "none")
    assert config({}).level == 0
    assert config({"fusions": "all"}).level == 2
    assert not options_in({}).says_nothing


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(OptionsError) as raised:
        options_in({"layerfuse": {"fusion": "all", "strict": "yes", "level": True}})
    assert str(raised.value).splitlines() == [
        "additional_config['layerfuse']: no option is called 'fusion'; did you mean 'fusions'? "
        "Known: fusions, level, strict, eager, report, few_token_linears, host_bound, shadow; "
        "additional_config['layerfuse']: strict: expected true or false, got 'yes'; "
        "additional_config['layerfuse']: level: expected 0, 1 or 2, got True"
    ]


@pytest.mark.parametrize("wrong", [True, -1, 1.0, "3"])
def test_calls_to_be_compared_are_a_number(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionsError, match="shadow: expected how many calls are compared at each site, or 0, got "):
        options_in({"layerfuse": {"shadow": wrong}})
    monkeypatch.setenv("LAYERFUSE_SHADOW", "2")
    assert [options_in({"layerfuse": given}).compared for given in ({}, {"shadow": 3}, {"shadow": 0})] == [2, 3, 0]
    monkeypatch.setenv("LAYERFUSE_SHADOW", "some")
    with pytest.raises(ArgumentError, match="LAYERFUSE_SHADOW=some: expected how many calls"):
        options_in({})
    assert options_in({"layerfuse": False}).off


def test_a_fusion_or_level_that_does_not_exist_is_an_error_at_once() -> None:
    with pytest.raises(FusionConfigError, match="did you mean 'add_rms_norm'"):
        options_in({"layerfuse": {"fusions": "add_rms_nrom"}})
    with pytest.raises(FusionConfigError, match="expected one of 0, 1, 2, got 3"):
        options_in({"layerfuse": {"level": 3}})
    with pytest.raises(OptionsError, match="expected a table of options or false, got 'all'"):
        options_in({"layerfuse": "all"})


@pytest.mark.parametrize("line", ["+{0},-{0}", "-{0}, {0}", "add_rms_norm,+{0},-{0}"])
@pytest.mark.parametrize("name", ["mla_dual_rms_norm", "mla_decode"])
def test_what_is_both_on_and_off_is_an_error_at_once(line: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"={re.escape(line.format(name))}: '{name}' is both switched on and switched off$"
    with pytest.raises(FusionConfigError, match=rf"^additional_config\['layerfuse'\]: fusions{said}"):
        options_in({"layerfuse": {"fusions": line.format(name)}})
    monkeypatch.setenv("LAYERFUSE_FUSIONS", line.format(name))
    with pytest.raises(FusionConfigError, match=f"^LAYERFUSE_FUSIONS{said}"):
        options_in({})


@pytest.mark.parametrize("name", ["few_token_linear", "few_token_linear_row_quant"])
def test_linears_with_few_tokens_are_not_both_asked_for_and_switched_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"+add_rms_norm,-{name}"
    said = f"={re.escape(line)} switches {name} off, and few_token_linears switches it on: leave one of the two out$"
    with pytest.raises(FusionConfigError, match=rf"^additional_config\['layerfuse'\]: fusions{said}"):
        options_in({"layerfuse": {"fusions": line, "few_token_linears": True}})
    assert not dict(config({"fusions": line}).switches)[name]
    monkeypatch.setenv("LAYERFUSE_FUSIONS", line)
    with pytest.raises(FusionConfigError, match=f"^LAYERFUSE_FUSIONS{said}"):
        options_in({"layerfuse": {"few_token_linears": True}})


@pytest.mark.parametrize(
    "line", ["+nosuch,-nosuch", "+nosuch,+add_rms_norm,-add_rms_norm", "mla_decode,-nosuch,+nosuch"]
)
def test_that_a_name_does_not_exist_is_said_before_how_it_was_switched(line: str) -> None:
    with pytest.raises(FusionConfigError, match=r"no fusion is called 'nosuch'\. Known: .*, mla_decode\.$"):
        options_in({"layerfuse": {"fusions": line}})


@pytest.mark.parametrize("line", ["all,add_rms_norm", "none,add_rms_norm", "all,mla_decode,none"])
def test_what_is_wrong_with_known_names_has_nothing_to_do_with_others(line: str) -> None:
    with pytest.raises(FusionConfigError, match=r"stands alone, and .* are \d words$"):
        options_in({"layerfuse": {"fusions": line}})


@pytest.mark.parametrize(
    ("line", "beside", "alone"),
    [
        ("-mla_decode,add_rms_norm", "-mla_decode,+add_rms_norm", "add_rms_norm"),
        (
            "+add_rms_norm, rms_norm_group_quant",
            "+add_rms_norm,+rms_norm_group_quant",
            "add_rms_norm,rms_norm_group_quant",
        ),
        (
            "gated_rms_norm,mla_decode,-add_rms_norm",
            "+gated_rms_norm,+mla_decode,-add_rms_norm",
            "gated_rms_norm,mla_decode",
        ),
    ],
)
def test_names_with_a_sign_and_names_without_do_not_go_together(
    line: str, beside: str, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"={re.escape(line)}: names without a sign are all that is on, .* write '{re.escape(beside)}' to .*, or '{alone}' for nothing else$"
    for given in (line, line.split(",")):
        with pytest.raises(FusionConfigError, match=rf"^additional_config\['layerfuse'\]: fusions{said}"):
            options_in({"layerfuse": {"fusions": given}})
    monkeypatch.setenv("LAYERFUSE_FUSIONS", line)
    with pytest.raises(FusionConfigError, match=f"^LAYERFUSE_FUSIONS{said}"):
        options_in({})
    for good in (beside, alone):
        assert config({"fusions": good}).switches


@pytest.mark.parametrize("options", [{}, {"fusions": "all"}, {"strict": True}, {"level": 0}])
def test_a_backend_that_does_not_exist_is_an_error_at_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERFUSE_BACKEND", "trition")
    with pytest.raises(BackendError, match="no op has a backend called 'trition'; did you mean 'triton'"):
        options_in({"layerfuse": options})
    monkeypatch.setenv("LAYERFUSE_BACKEND", "nosuch")
    with pytest.raises(BackendError, match=r"Known: aiter, .*reference"):
        options_in({"layerfuse": options})
    for nothing in (False, {"fusions": "none"}):
        assert options_in({"layerfuse": nothing}).off


def test_what_layerfuse_writes_beside_the_options_is_no_option_of_a_user() -> None:
    assert options_in({"layerfuse": {"key": "abc", "strict": True}}) == Options(strict=True)


@pytest.mark.parametrize("other", [{}, {"level": 1}, {"strict": True}])
def test_the_variable_becomes_part_of_the_config_whatever_other_options_are_set(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """vLLM's hash and workers on other hosts see the config alone."""
    from layerfuse.engines.vllm import plugin

    monkeypatch.setenv("LAYERFUSE_FUSIONS", " add_rms_norm ")
    config = SimpleNamespace(additional_config={"layerfuse": other})
    plugin._at_options(lambda vllm_config: None, vllm_config=config)
    assert config.additional_config == {"layerfuse": {**other, "fusions": "add_rms_norm"}}


def test_registering_costs_nothing_that_a_start_would_notice() -> None:
    """Neither torch nor a plan is imported before vLLM has a model."""
    code = (
        "import sys, attrs, importlib.metadata, time\n"  # vLLM finds plugins by the latter
        "start = time.process_time()\n"
        "from layerfuse.engines.vllm import register; register()\n"
        "print(time.process_time() - start)\n"
        "print(*[m for m in ('torch', 'vllm', 'cattrs', 'layerfuse.fusion', 'layerfuse.registry') if m in sys.modules])"
    )
    # The best of three: the first may have to compile the source.
    runs = [run_python(code).stdout.splitlines() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.05
    assert {loaded for _, loaded in runs} == {""}


def test_the_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nlayerfuse = "layerfuse.engines.vllm:register"' in text


def test_a_package_with_broken_entry_points_leaves_what_is_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerfuse.engines.vllm.defaults.arch_here", lambda: "cpu")
    on = _nothing_on(Options(), vllm_config())
    info = tmp_path / "torn-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[layerfuse.fusions]\nno equals sign\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"a package without metadata in .*torn-1\.0\.dist-info cannot be read"):
        assert _nothing_on(Options(), vllm_config()) == on
