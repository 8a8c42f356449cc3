"""Shared by all tests: the numbers they draw, how long hypothesis searches, and what `slow` means.

Their order is another one in each run (pytest-randomly prints its seed), their numbers are not: a test that depends on
what ran before it fails, and one that fails can be run again by itself.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, THOROUGH_ALONE, quick_interpreter, thorough_alone
from hypothesis import HealthCheck, settings

settings.register_profile(
    "layerfuse", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("LAYERFUSE_HYPOTHESIS", "layerfuse"))


HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
if not HAS_GPU:
    # Read when Triton is first imported, which torch may do: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Read when Inductor is first imported, by processes of tests too: which vectors the CPU has is known without a C++ compiler.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The same: with one thread it starts no pool of processes, which every process that compiles would start and few have a kernel for.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Read when torch is first imported: for the tiny tensors of tests, threads cost more than they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class _RootIsNoPackage:
    """The root's `__init__.py` is that of the package as it is installed: collected as one of tests, it stops those of a folder called layerfuse-main."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path.samefile(ROOT) else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_RootIsNoPackage())
    # What imports and compiles makes objects by the million: a tenth of its time would be looking for garbage among them.
    gc.set_threshold(10_000)
    config.addinivalue_line(
        "markers", "thorough: one more case of a product, whose kind a default run has too (`make test-all`, or -m '')"
    )
    config.addinivalue_line(
        "markers", "slow: takes more than ten seconds (deselect with -m 'not slow and not thorough')"
    )


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    if metafunc.config.option.markexpr == "not thorough":
        # Half of all cases: a test that is not made takes no time to be left out. Where all are thorough, `thorough_alone` sees them.
        kept = [call for call in metafunc._calls if all(mark.name != "thorough" for mark in call.marks)]
        metafunc._calls = kept or metafunc._calls


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[THOROUGH_ALONE] = thorough_alone(items)  # before -m leaves the thorough ones out


def pytest_collection_finish() -> None:
    # What has been imported stays: whoever collects garbage, as vLLM does twice for each model that it loads, need not look there.
    gc.freeze()


def pytest_unconfigure() -> None:
    # pytest now collects garbage twice, among all that the tests have made. Where that takes more than five seconds, execnet sends its
    # worker an interrupt, which is lost in whatever runs then.
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton's bindings complain of what is left of them at the end


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _prepare(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    # Another seed than that of the fixtures, so that a test's tensors are none of theirs over again.
    _prepare(1)


@pytest.fixture
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor runs its graphs op by op: the same graphs and calls without generated code, in a fraction of the time."""
    import torch

    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda gm, _inputs, **_: gm)


def _prepare(seed: int) -> None:
    random.seed(seed)
    # Not imported for this: most tests of the lower floors need neither.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch._inductor.config" in sys.modules:
        # Code without vectors takes a C++ compiler half as long. `layerfuse verify` does the same, so that both share its compiled headers.
        sys.modules["torch._inductor.config"].cpp.simdlen = 1
    if "torch._dynamo.guards" in sys.modules:
        # Each graph's guards are timed, for a debug line, behind a flush of all of the processor's caches: 20 ms.
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0
    if "triton.runtime.interpreter" in sys.modules:
        quick_interpreter()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # What seeds a device that is not in use yet is kept until it is, with the stack of who asked: without a GPU it would be all that was
        # ever asked for, and looking through the stacks takes longer than seeding.
        (torch if HAS_GPU else torch.default_generator).manual_seed(seed)
        # torch renders its structured traces, which takes longer than the tests, as long as their logger has a handler. pytest
        # from 9.2 on hands its own to every logger that does not propagate, before each part of a test.
        logging.getLogger("torch.__trace").handlers.clear()
