"""Which `aiter` is installed: every sentence that can be said, and that nothing is imported to say it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from check_tools import installed
from standin import RELEASES, TOO_OLD, make_checkout, make_standin, make_unrelated, shared_standin

from layerfuse.fusion import FUSIONS, backends
from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends import choose, survey
from layerfuse.fusion.backends.aiter import Absent, AiterUnavailableError, Bound, Build, Refused, backend
from layerfuse.fusion.backends.aiter.backend import Aiter
from layerfuse.fusion.backends.aiter.releases import PROBES, ReleaseRange, release_range
from layerfuse.fusion.ops.library import case_type, declared

BF16 = torch.bfloat16


def absent() -> Absent:
    found = amd.find_build()
    assert isinstance(found, Absent), found
    assert "aiter" not in sys.modules
    return found


def build() -> Build:
    found = amd.find_build()
    assert isinstance(found, Build), found
    assert "aiter" not in sys.modules
    return found


# ---- every "no" is a sentence


def standin(folder: Path, *gone: str) -> Path:
    """A release without some of its folders."""
    make_standin(folder / "a", "v0.1.20")
    for name in gone:
        (folder / "a" / name).rename(folder / "gone")
    return folder / "a"


def both(folder: Path) -> Path:
    (make_unrelated(folder / "b") / "aiter-0.13.20191203.dist-info").rename(
        standin(folder) / "aiter-0.13.20191203.dist-info"
    )
    return folder / "a"


def of_file(name: str) -> Callable[[Path], Path]:
    """Something else of that name, in a file; or a folder, which is no package."""

    def made(folder: Path) -> Path:
        file = folder / "a" / name
        file.parent.mkdir(parents=True)
        file.write_text("raise SystemExit('imported')\n") if file.suffix else file.mkdir()
        return folder / "a"

    return made


NO: dict[str, tuple[Callable[[Path], Path], bool, str]] = {
    "nothing": (lambda folder: folder, False, "not installed"),
    "the asyncio helper": (
        lambda folder: make_unrelated(folder / "a"), True,
        "this is PyPI's `aiter` 0.13.20191203, an unrelated asyncio helper, not AMD's AITER; pip uninstall aiter",
    ),
    "both in one folder": (both, True, "are both installed, into one folder; uninstall both"),
    "metadata alone": (lambda f: standin(f, "aiter"), True, "amd-aiter 0.1.20 is installed, but `aiter` cannot be found"),
    "overwritten by the helper": (
        lambda f: standin(f, "aiter/ops"), True, "amd-aiter 0.1.20 is installed, but `aiter` has no folder `ops`; install it again",
    ),
    "another module": (of_file("aiter.py"), True, "which is not AMD's AITER: it has no folder `ops`"),
    "another package": (of_file("aiter/__init__.py"), True, "which is not AMD's AITER: it has no folder `ops`"),
    "a folder that is no package": (of_file("aiter/notes"), False, "not installed"),
    "a release that no supported engine pins any more": (
        lambda _: shared_standin(TOO_OLD), True,
        "this AITER is older than v0.1.16.post3, the oldest that an engine layerfuse supports pins (vLLM 0.26)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO)
def test_every_no_is_a_sentence(name, tmp_path):
    make, broken, says = NO[name]
    with installed(make(tmp_path)):
        found = absent()
        assert found.broken is broken and says in found.reason
        assert amd.bind("add_rms_norm") == Refused(name="add_rms_norm", reason=found.reason)
        assert amd.installed_releases() is None


def test_a_module_without_a_spec(monkeypatch):
    with installed():
        module = type(sys)("aiter")
        module.__spec__ = None
        monkeypatch.setitem(sys.modules, "aiter", module)
        amd.forget()
        found = amd.find_build()
        assert isinstance(found, Absent)
        assert found.reason.startswith("`aiter` cannot be looked for")


# ---- what is there


def test_a_wheel():
    with installed(shared_standin("v0.1.20")):
        assert build().origin == "AMD's amd-aiter 0.1.20, install build"


def test_a_source_checkout(tmp_path):
    with installed(make_checkout(tmp_path / "a", "v0.1.18")):
        assert build().origin == "a source checkout"
        assert build().version is None
        assert amd.installed_releases() == ReleaseRange("v0.1.17-longctx", "v0.1.19")


def test_looking_runs_nothing_of_it(tmp_path):
    folder = make_standin(tmp_path / "a", "v0.1.20")
    for file in folder.rglob("*.py"):
        file.write_text("raise SystemExit('imported')\n" + file.read_text().replace("from __future__", "# "))
    with installed(folder):
        build()
        assert len(amd.probe_all()) == len(amd.BINDINGS)
        assert "aiter" not in sys.modules


def test_it_is_looked_for_once():
    with installed(shared_standin("v0.1.20")):
        assert amd.find_build() is amd.find_build()
        assert amd.probe("add_rms_norm") is amd.probe("add_rms_norm")


# ---- Triton-only mode


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ((), "AITER_TRITON_ONLY=1 is set"),
        (("aiter/jit",), "this installation has no C++ parts (there is no folder `jit`)"),
    ],
)
def test_triton_only_by_the_environment_or_without_c_parts(gone, why, monkeypatch, tmp_path):
    if not gone:
        monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    with installed(standin(tmp_path, *gone)):
        assert amd.probe("add_rms_norm") == Refused(name="add_rms_norm", reason=f"Triton-only: {why}")
        assert not isinstance(amd.probe("add_rms_norm.triton"), Refused)


def test_what_triton_only_mode_cannot_import_is_a_reason_too(monkeypatch):
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    with installed(shared_standin("v0.1.20")):
        found = amd.bind("silu_mul_group_quant.triton")
        assert isinstance(found, Refused)
        assert re.match(
            r"importing aiter\.ops\.triton\.activation raised (Attribute|Import|ModuleNotFound)Error: ", found.reason
        )


# ---- imports that fail

FAULTS = {"rocm": "RuntimeError", "gfx": "KeyError", "library": "OSError", "module": "ImportError"}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_import_that_fails_is_a_reason(fault, tmp_path):
    with installed(make_standin(tmp_path / "a", "v0.1.20", fault=fault)):
        found = amd.bind("add_rms_norm")
        assert isinstance(found, Refused)
        assert found.reason.startswith(f"importing aiter.ops.rmsnorm raised {FAULTS[fault]}: ")
        assert amd.bind("add_rms_norm") is found, "asked once"


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("raise SystemExit(3)", "importing aiter.ops.rmsnorm raised SystemExit"),
        ("del rmsnorm2d_fwd_with_add", "AITER swallowed an error"),
        ("rmsnorm2d_fwd_with_add = 3", "is a int"),
        ("def rmsnorm2d_fwd_with_add(:", "has no such function"),
        ("def rmsnorm2d_fwd_with_add(*args, **kwargs):\n    return args", "has an unknown signature: (*args, **kwargs)"),
    ],
)  # fmt: skip
def test_a_function_that_is_not_there_once_imported(last, words, tmp_path):
    folder = standin(tmp_path)
    file = folder / "aiter" / "ops" / "rmsnorm.py"
    file.write_text(f"{file.read_text()}\n\n{last}\n")
    init = folder / "aiter" / "__init__.py"
    init.write_text(init.read_text().replace("from .ops.rmsnorm import *", ""))
    with installed(folder):
        found = amd.bind("add_rms_norm")
        assert isinstance(found, Refused)
        assert words in found.reason


def test_another_aiter_that_was_imported_before(tmp_path):
    with installed(make_standin(tmp_path / "a", "v0.1.20"), make_standin(tmp_path / "b", "v0.1.20")):
        amd.find_build()
        sys.path[:2] = sys.path[1::-1]
        __import__("aiter.ops.rmsnorm")
        found = amd.bind("add_rms_norm")
        assert isinstance(found, Refused)
        assert "was imported from" in found.reason


# ---- releases


def test_the_probes_tell_these_generations_apart():
    ranges = {release: release_range(shared_standin(release) / "aiter") for release in RELEASES}
    assert all(release in found and not found.contradictory for release, found in ranges.items())
    assert {str(found) for found in ranges.values()} == {
        *("up to v0.1.16.post6", "v0.1.17-rc0 to v0.1.17", "v0.1.17-longctx to v0.1.19"),
        *("v0.1.19.post1 to v0.1.19.post2", "v0.1.20 or later"),
    }
    assert {probe.since for probe in PROBES} <= set(RELEASES)


def test_a_later_release_whose_triton_modules_have_moved_is_no_contradiction(tmp_path):
    """v0.1.21 moved some of them: their functions are refused, and the rest stays bound."""
    folder = make_standin(tmp_path / "a", "v0.1.20")
    (folder / "aiter" / "ops" / "triton" / "quant").rename(tmp_path / "moved")
    with installed(folder):
        assert str(amd.installed_releases()) == "v0.1.20 or later"
        assert isinstance(amd.probe("rms_norm_mxfp8_quant.triton"), Refused)
        assert isinstance(amd.bind("rms_norm_mxfp8_quant"), Bound)


def test_files_of_two_releases_are_none_of_either(tmp_path):
    folder = make_standin(tmp_path / "a", "v0.1.17")
    newer = make_standin(tmp_path / "b", "v0.1.20")
    (newer / "aiter" / "mla.py").replace(folder / "aiter" / "mla.py")
    found = release_range(folder / "aiter")
    assert found.contradictory
    assert str(found) == "no release known here"
    assert list(found) == list(RELEASES), "every restriction is kept"


# ---- the backend


def aiter_of(op: str) -> Aiter:
    return Aiter(op=declared(op))


OPS = ("mla_dual_rms_norm", "mla_dual_rms_norm_per_token_quant", "mla_dual_rms_norm_group_quant", "add_rms_norm")


def test_aiter_is_a_backend_of_the_ops_and_not_for_this_machine():
    for op in OPS:
        (reason,) = [why for name, why in survey(op, "cpu") if name == "aiter"]
        assert reason == "AITER's kernels run on AMD GPUs, not on cpu"
        (reason,) = [why for name, why in survey(op, "cuda") if name == "aiter"]
        assert reason == "AITER's kernels run on AMD GPUs, and this torch is not built for ROCm"
        assert choose(op, "cpu").name == "reference"


NORMED = case_type(declared("rms_norm_group_quant"))(
    BF16, 7168, BF16, 0.0, torch.float8_e4m3fn, 128, column_major=False, tma_aligned=False, use_ue8m0=False
)
LATENTS = case_type(declared("mla_dual_rms_norm"))(BF16, 1536, 512, BF16, BF16, 0.0, 0.0)


@pytest.fixture
def on_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")


@pytest.mark.usefixtures("on_rocm")
def test_the_backend_answers_without_importing_and_binds_for_a_case():
    with installed(shared_standin("v0.1.17")):
        for op, runs in (("gated_rms_norm_per_token_quant", False), ("rms_norm_group_quant", True)):
            found, reason = aiter_of(op).runs_on("cuda")
            assert found is runs, reason
        assert "aiter" not in sys.modules
    with installed(shared_standin("v0.1.18")):
        assert aiter_of("mla_dual_rms_norm").refuses(LATENTS) is None
        assert "aiter" in sys.modules
        floats = LATENTS._replace(dtype=torch.float32, q_weight_dtype=torch.float32, kv_weight_dtype=torch.float32)
        said = aiter_of("mla_dual_rms_norm").refuses(floats)
        assert said is not None
        assert said.startswith("its kernel takes float16 and bfloat16 only")
        assert "another dtype" in str(
            aiter_of("mla_dual_rms_norm").refuses(LATENTS._replace(q_weight_dtype=torch.float32))
        )
        assert "weight offset" in str(aiter_of("mla_dual_rms_norm").refuses(LATENTS._replace(kv_weight_offset=1.0)))
        call = aiter_of("mla_dual_rms_norm").load()
        x = torch.randn(3, 64).bfloat16()
        ones = torch.ones(64).bfloat16()
        assert call(x, x, ones, ones, 1e-5, 1e-5, 0.0, 0.0)[0].shape == (3, 64)


@pytest.mark.usefixtures("on_rocm")
@pytest.mark.parametrize(
    ("case", "binding"),
    [
        (NORMED, "rms_norm_group_quant"),
        (NORMED._replace(width=5120), "rms_norm_group_quant.latents"),
        (NORMED._replace(weight_offset=1.0), "rms_norm_group_quant.latents"),
        (NORMED._replace(width=16384), "rms_norm_group_quant.triton"),
        (NORMED._replace(weight_dtype=torch.float32), "rms_norm_group_quant.triton"),
    ],
)
def test_the_first_binding_that_takes_a_case_serves_it(case, binding):
    with installed(shared_standin("v0.1.16.post6")):
        assert aiter_of("rms_norm_group_quant").refuses(case) is None
        assert aiter_of("rms_norm_group_quant").load_for(case) is amd.bound(binding).call


@pytest.mark.usefixtures("on_rocm")
def test_an_op_is_given_a_function_for_each_case(monkeypatch):
    for table in ("_chosen", "_loaded", "_broken"):
        monkeypatch.setattr(backends, table, {})
    case = case_type(FUSIONS["add_rms_norm"].op)
    with installed(shared_standin("v0.1.16.post6")):
        monkeypatch.setenv("LAYERFUSE_BACKEND", "aiter")
        for weight_dtype, binding in ((BF16, "add_rms_norm"), (torch.float32, "add_rms_norm.triton")):
            chosen = choose("add_rms_norm", "cuda", case(BF16, 7168, weight_dtype, 0.0))
            assert chosen.name == "aiter"
            assert chosen.function is amd.bound(binding).call


@pytest.mark.usefixtures("on_rocm")
def test_where_no_binding_takes_a_case_each_says_why():
    with installed(shared_standin("v0.1.16.post6")):
        said = aiter_of("rms_norm_group_quant").refuses(NORMED._replace(width=16384, weight_offset=1.0))
        assert said is not None
        hip, latents, triton = said.split("; rms_norm_group_quant.")
        assert hip.startswith("rows of more than 8192 columns")
        assert latents.startswith("latents: rows of more than 8192 columns")
        assert triton.startswith("triton: a weight offset: the function knows none")
        assert "power-of-two" in str(aiter_of("rms_norm_group_quant").refuses(NORMED._replace(use_ue8m0=True)))
        assert "padded columns" in str(aiter_of("rms_norm_group_quant").refuses(NORMED._replace(tma_aligned=True)))
    with installed(shared_standin(TOO_OLD)):
        said = aiter_of("rms_norm_group_quant").refuses(NORMED)
        assert said is not None
        assert said.count("this AITER is older than") == 3
        with pytest.raises(AiterUnavailableError, match="aiter, rms_norm_group_quant: this AITER is older than"):
            aiter_of("rms_norm_group_quant").load()


@pytest.mark.usefixtures("on_rocm")
def test_an_op_that_aiter_has_nothing_for():
    assert aiter_of("gated_rms_norm").runs_on("cuda") == (False, "AITER has no function for it that is known here")


def test_the_dtypes_of_weights_are_asked_about_where_a_case_has_them():
    assert backend.call_of(LATENTS).weight_dtype == BF16
    assert backend.call_of(LATENTS._replace(kv_weight_dtype=torch.float32)).weight_dtype == torch.float32


def test_importing_the_ops_looks_at_nothing_and_loads_no_table_of_aiters():
    code = (
        "import sys, layerfuse.fusion.ops, layerfuse.fusion.metadata, layerfuse.fusion.collectives\n"
        "mine = 'layerfuse.fusion.backends.aiter'\n"
        "from layerfuse.fusion.backends import aiter as amd\n"
        "if amd.find_build.cache_info().misses or 'aiter' in sys.modules: sys.exit('looked for')\n"
        "amd.find_build()\n"
        "tables = [f'{mine}.{name}' for name in ('functions', 'table', 'restrictions', 'calls') if f'{mine}.{name}' in sys.modules]\n"
        "sys.exit(', '.join(tables) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
