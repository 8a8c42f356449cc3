"""The stand-ins as packages: what fails in `import aiter`, what else is called so, and made-up releases."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

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

ERRORS: dict[Fault, type[Exception]] = {
    "rocm": RuntimeError,
    "gfx": KeyError,
    "library": OSError,
    "module": ImportError,
}


@pytest.mark.parametrize("fault", list(ERRORS))
def test_a_failure_is_let_out(tmp_path: Path, fault: Fault) -> None:
    make_standin(tmp_path, "v0.1.20", fault=fault)
    with pytest.raises(ERRORS[fault]), imported(tmp_path):
        pass


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.20.post1"])
def test_triton_only_mode_has_no_dtypes_and_no_quantising_ops(
    tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    with imported(make_standin(tmp_path, release, fault="rocm")) as package:
        assert not hasattr(package, "dtypes") and not hasattr(package, "rms_norm")
        assert importlib.import_module("aiter.ops.triton").quant is None
        with pytest.raises(AttributeError, match="dtypes"):
            importlib.import_module("aiter.ops.triton.quant.fused_fp8_quant")
        pad = importlib.import_module("aiter.ops.triton.normalization.fused_add_rmsnorm_pad").fused_add_rmsnorm_pad
        assert pad(torch.ones(2, 4), torch.ones(4), 0.0).shape == (2, 4)


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
        make_standin(tmp_path / "other", "v0.1.20", without=["aiter.ops.rmsnorm:nothing"])


def test_nothing_of_an_import_is_left_behind() -> None:
    path, finders = list(sys.path), list(sys.meta_path)
    with imported(shared_standin("v0.1.20")):
        importlib.import_module("aiter.mla")
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]


def test_without_a_folder_none_is_installed() -> None:
    """The folder of these tests has the name of the package, which must not make it one."""
    with on_path():
        spec = importlib.util.find_spec("aiter")
        assert spec is None or "tests" not in str(spec.submodule_search_locations)


# ---- made-up releases

QK = "aiter.ops.fused_qk_norm_rope_cache_quant:_fused_qk_rmsnorm"
HIP = "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add"
X, W = torch.randn(3, 8, dtype=torch.float32).bfloat16(), torch.rand(8).bfloat16()
EXPECTED = torch.nn.functional.rms_norm(X.float(), (8,), W.float(), 1e-5).bfloat16()


def close(found: torch.Tensor) -> bool:
    return torch.allclose(found.float(), EXPECTED.float(), rtol=1e-2)


def dual(name: str = "_fused_qk_rmsnorm") -> Any:
    return vars(importlib.import_module(QK.split(":")[0]))[name]


def test_a_renamed_function(tmp_path: Path) -> None:
    with imported(make_standin(tmp_path, "v0.1.20", mutate=Mutation("rename", QK, name="dual_v2"))):
        with pytest.raises(KeyError):
            dual()
        assert close(dual("dual_v2")(None, X, W, 1e-5, None, X, W, 1e-5)[0])


def test_a_renamed_parameter(tmp_path: Path) -> None:
    change = Mutation("rename_parameter", QK, "k_eps", name="eps")
    with imported(make_standin(tmp_path, "v0.1.20", mutate=change)):
        assert close(dual()(None, X, W, 1e-5, None, X, W, eps=1e-5)[1])
        with pytest.raises(TypeError, match="k_eps"):
            dual()(None, X, W, 1e-5, None, X, W, k_eps=1e-5)


def test_swapped_parameters(tmp_path: Path) -> None:
    with imported(make_standin(tmp_path, "v0.1.20", mutate=Mutation("swap", QK, "q", "q_weight"))):
        assert close(dual()(None, W, X, 1e-5, None, X, W, 1e-5)[0])


def test_an_inserted_parameter(tmp_path: Path) -> None:
    change = Mutation("insert", QK, "k_out", name="workspace")
    with imported(make_standin(tmp_path, "v0.1.20", mutate=change)):
        function = dual()
        assert list(inspect.signature(function).parameters)[4] == "workspace"
        q, _ = function(None, X, W, 1e-5, torch.empty(1), None, X, W, 1e-5)
        assert close(q)
        with pytest.raises(TypeError, match="k_eps"):
            function(None, X, W, 1e-5, None, X, W, 1e-5)


def test_a_dropped_parameter(tmp_path: Path) -> None:
    with imported(make_standin(tmp_path, "v0.1.20", mutate=Mutation("drop", HIP, "gemma_norm"))) as package:
        out, zeros = torch.empty_like(X), torch.zeros_like(X)
        package.rmsnorm2d_fwd_with_add(out, X, zeros, zeros.clone(), W, 1e-5, 0)
        assert close(out)
        with pytest.raises(TypeError, match="gemma_norm"):
            package.rmsnorm2d_fwd_with_add(out, X, zeros, zeros.clone(), W, 1e-5, gemma_norm=False)


def test_a_mutation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parameter 'gamma'"):
        make_standin(tmp_path / "a", "v0.1.20", mutate=Mutation("drop", HIP, "gamma"))
    with pytest.raises(ValueError, match="required after one with a default"):
        make_standin(tmp_path / "b", "v0.1.20", mutate=Mutation("swap", HIP, "out", "gemma_norm"))
    with pytest.raises(ValueError, match="needs a name"):
        make_standin(tmp_path / "c", "v0.1.20", mutate=Mutation("rename", HIP))
    with pytest.raises(KeyError, match="defines no"):
        make_standin(tmp_path / "d", "v0.1.17", mutate=Mutation("drop", "aiter.ops.rmsnorm:nothing", "q"))


def test_misuse_is_an_assertion() -> None:
    assert issubclass(StandInMisuse, AssertionError)
