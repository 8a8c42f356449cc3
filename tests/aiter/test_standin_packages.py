"""The stand-ins as packages: what fails in `import aiter`, what else is called so, and made-up releases."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
from standin import (
    Mutation,
    StandInMisuse,
    imported,
    make_checkout,
    make_standin,
    make_unrelated,
    on_path,
    shared_standin,
)
from standin.generate import Fault

SWALLOWING = ["v0.1.12", "v0.1.12.post2", "v0.1.13.dev0", "v0.1.13-rc2", "v0.1.14-rc0", "v0.1.14.post1"]
RAISING = ["v0.1.5", "v0.1.11.post1", "v0.1.13-rc3", "v0.1.13.post1", "v0.1.15-rc0", "v0.1.20.post1"]
ERRORS: dict[Fault, type[Exception]] = {
    "rocm": RuntimeError,
    "gfx": KeyError,
    "library": OSError,
    "module": ImportError,
}


@pytest.mark.parametrize("release", RAISING)
@pytest.mark.parametrize("fault", list(ERRORS))
def test_most_releases_let_a_failure_out(tmp_path: Path, release: str, fault: Fault) -> None:
    make_standin(tmp_path, release, fault=fault)
    with pytest.raises(ERRORS[fault]), imported(tmp_path):
        pass


@pytest.mark.parametrize("release", SWALLOWING)
@pytest.mark.parametrize("fault", list(ERRORS))
def test_some_releases_go_on_with_half_a_namespace(tmp_path: Path, release: str, fault: Fault) -> None:
    make_standin(tmp_path, release, fault=fault)
    if fault == "gfx" and release.startswith("v0.1.12"):
        with pytest.raises(KeyError), imported(tmp_path):
            pass
        return
    with imported(tmp_path) as package:
        assert not hasattr(package, "rms_norm")
        assert not hasattr(package, "fused_qk_rmsnorm")
        assert not hasattr(package, "mla")
        assert hasattr(package, "get_mla_metadata_v1") == (fault == "module")


@pytest.mark.parametrize("release", ["v0.1.16", "v0.1.20.post1"])
def test_triton_only_mode_has_no_dtypes_and_no_quantising_ops(
    tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    with imported(make_standin(tmp_path, release, fault="rocm")) as package:
        assert not hasattr(package, "dtypes") and not hasattr(package, "rms_norm")
        assert importlib.import_module("aiter.ops.triton").quant is None
        with pytest.raises(AttributeError, match="dtypes"):
            importlib.import_module("aiter.ops.triton.quant.fused_fp8_quant")
        norm = importlib.import_module("aiter.ops.triton.normalization.rmsnorm").rms_norm
        assert norm(torch.ones(2, 4), torch.ones(4), 0.0).shape == (2, 4)


def test_triton_only_mode_is_unknown_before_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    with imported(shared_standin("v0.1.15.post3")) as package:
        assert hasattr(package, "rms_norm")


@pytest.mark.parametrize(
    ("release", "arch", "expected"),
    [
        ("v0.1.5", "gfx942", torch.float8_e4m3fnuz),
        ("v0.1.5", "gfx950", torch.float8_e4m3fn),
        ("v0.1.10", "gfx1250", torch.uint8),
        ("v0.1.10.post1", "gfx1250", torch.float8_e4m3fn),
        ("v0.1.14.post1", "gfx1200", torch.uint8),
        ("v0.1.20", "gfx1100", torch.float8_e4m3fn),
        ("v0.1.20", "gfx906", torch.uint8),
    ],
)
def test_the_fp8_flavour_follows_the_architecture(release: str, arch: str, expected: torch.dtype) -> None:
    with imported(shared_standin(release, arch=arch)) as package:
        assert package.dtypes.fp8 == expected


def test_the_project_of_that_name_on_pypi(tmp_path: Path) -> None:
    with imported(make_unrelated(tmp_path)) as package:
        assert importlib.util.find_spec("aiter.ops") is None
        assert importlib.metadata.version("aiter") == "0.13.20191203"
        assert package.__version__ == "0.13.20191203"


def test_a_checkout_has_no_version_at_all(tmp_path: Path) -> None:
    with imported(make_checkout(tmp_path, "v0.1.18")) as package:
        assert importlib.util.find_spec("aiter._version") is None
        assert not (Path(str(package.__file__)).parent / "install_mode").exists()
        for name in ("aiter", "amd-aiter"):
            with pytest.raises(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version(name)


def test_a_build_may_lack_a_function(tmp_path: Path) -> None:
    lacking = ["aiter.ops.rmsnorm:rmsnorm", "aiter.ops.triton.quant.fused_fp8_quant:fused_rms_fp8_group_quant"]
    with imported(make_standin(tmp_path, "v0.1.20", without=lacking)) as package:
        assert not hasattr(package, "rmsnorm") and hasattr(package, "add_rmsnorm")
        quant = importlib.import_module("aiter.ops.triton.quant")
        assert not hasattr(quant, "fused_rms_fp8_group_quant")
        assert hasattr(quant, "fused_rms_gated_fp8_group_quant")
    with pytest.raises(KeyError, match="defines no"):
        make_standin(tmp_path / "other", "v0.1.5", without=lacking)


def test_nothing_of_an_import_is_left_behind() -> None:
    path, finders = list(sys.path), list(sys.meta_path)
    for release in ("v0.1.5", "v0.1.20"):
        with imported(shared_standin(release)):
            importlib.import_module("aiter.ops.triton.fused_add_rmsnorm_pad" if release == "v0.1.20" else "aiter.mla")
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]


def test_without_a_folder_none_is_installed() -> None:
    """The folder of these tests has the name of the package, which must not make it one."""
    with on_path():
        spec = importlib.util.find_spec("aiter")
        assert spec is None or "tests" not in str(spec.submodule_search_locations)


# ---- made-up releases

QK = "aiter.ops.fused_qk_norm_rope_cache_quant:_fused_qk_rmsnorm"
HIP = "aiter.ops.rmsnorm:rmsnorm"
X, W = torch.randn(3, 8, dtype=torch.float32).bfloat16(), torch.rand(8).bfloat16()
EXPECTED = torch.nn.functional.rms_norm(X.float(), (8,), W.float(), 1e-5).bfloat16()


def close(found: torch.Tensor) -> bool:
    return torch.allclose(found.float(), EXPECTED.float(), rtol=1e-2)


def test_a_renamed_function(tmp_path: Path) -> None:
    with imported(make_standin(tmp_path, "v0.1.20", mutate=Mutation("rename", HIP, name="rmsnorm_v2"))) as package:
        assert not hasattr(package, "rmsnorm")
        out = torch.empty_like(X)
        package.rmsnorm_v2(out, X, W, 1e-5)
        assert close(out)


def test_a_renamed_parameter(tmp_path: Path) -> None:
    change = Mutation("rename_parameter", HIP, "epsilon", name="eps")
    with imported(make_standin(tmp_path, "v0.1.20", mutate=change)) as package:
        out = torch.empty_like(X)
        package.rmsnorm(out, X, W, eps=1e-5)
        assert close(out)
        with pytest.raises(TypeError, match="epsilon"):
            package.rmsnorm(out, X, W, epsilon=1e-5)


def test_swapped_parameters(tmp_path: Path) -> None:
    with imported(make_standin(tmp_path, "v0.1.20", mutate=Mutation("swap", HIP, "out", "input"))) as package:
        out = torch.empty_like(X)
        package.rmsnorm(X, out, W, 1e-5)
        assert close(out)


def test_an_inserted_parameter(tmp_path: Path) -> None:
    change = Mutation("insert", QK, "k_out", name="workspace")
    with imported(make_standin(tmp_path, "v0.1.20", mutate=change)):
        function = importlib.import_module("aiter.ops.fused_qk_norm_rope_cache_quant")._fused_qk_rmsnorm
        assert list(inspect.signature(function).parameters)[4] == "workspace"
        q, _ = function(None, X, W, 1e-5, torch.empty(1), None, X, W, 1e-5)
        assert close(q)
        with pytest.raises(TypeError, match="k_eps"):
            function(None, X, W, 1e-5, None, X, W, 1e-5)


def test_a_dropped_parameter(tmp_path: Path) -> None:
    change = Mutation("drop", "aiter.ops.rmsnorm:rms_norm", "use_model_sensitive_rmsnorm")
    with imported(make_standin(tmp_path, "v0.1.20", mutate=change)) as package:
        assert close(package.rms_norm(X, W, 1e-5))
        with pytest.raises(TypeError, match="positional"):
            package.rms_norm(X, W, 1e-5, 0)


def test_a_mutation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parameter 'gamma'"):
        make_standin(tmp_path / "a", "v0.1.20", mutate=Mutation("drop", HIP, "gamma"))
    with pytest.raises(ValueError, match="required after one with a default"):
        make_standin(tmp_path / "b", "v0.1.20", mutate=Mutation("swap", HIP, "out", "gemma_norm"))
    with pytest.raises(ValueError, match="needs a name"):
        make_standin(tmp_path / "c", "v0.1.20", mutate=Mutation("rename", HIP))
    with pytest.raises(KeyError, match="defines no"):
        make_standin(tmp_path / "d", "v0.1.13", mutate=Mutation("drop", QK, "q"))


def test_misuse_is_an_assertion() -> None:
    assert issubclass(StandInMisuse, AssertionError)
