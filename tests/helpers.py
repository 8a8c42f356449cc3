"""Real transformers models of the declared entries, products of cases, and the environment for Python subprocesses."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from layerfuse import registry

ROOT = Path(__file__).resolve().parent.parent


def fresh_model(name: str) -> Any:
    """The real transformers model of a declared entry, whole, on the meta device."""
    pytest.importorskip("transformers")
    from layerfuse.testing.models import full_model, why_not

    entry = registry.model(name)
    reason = why_not(entry)
    if reason is not None:
        pytest.skip(reason)
    return full_model(entry)


real_model = functools.cache(fresh_model)
"""The same, built once: leave it as it is."""


def fresh_layer(name: str, path: str = "model.layers.3.self_attn") -> Any:
    """One layer of a model of its own, for a test that changes it."""
    return fresh_model(name).get_submodule(path)


def fp8_model(name: str, *kept: str, **config: Any) -> Any:
    """A model of its own whose linears are replaced by transformers' own function, but those and experts, whose class takes no bias."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    kept = ("lm_head", "mlp.experts", *kept)
    return finegrained.replace_with_fp8_linear(fresh_model(name), [*kept], FineGrainedFP8Config(**config), True)


@functools.cache
def twin_of(name: str) -> str | None:
    """An earlier entry of the same classes with the same kinds of layers: code runs no other way for it, with other numbers."""

    def shape(entry: Any) -> Any:
        kinds = {(kind, each.family, getattr(each, "stream_norms", None)) for kind, each in entry.layers.items()}
        return entry.model_type, kinds, bool(entry.mlps)

    own = shape(registry.model(name))
    first = next(other for other, entry in registry.models().items() if shape(entry) == own)
    return None if first == name else first


def every_model() -> list[Any]:
    """Each declared entry, for a test of code, not of the entry's numbers: a twin is `thorough`."""
    return [
        pytest.param(name, id=name, marks=pytest.mark.thorough if twin_of(name) else []) for name in registry.models()
    ]


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """The product of some axes. In a default run each value of each axis stands beside others in turn; the rest is `thorough`.

    An axis that begins again does so one value later, so that it does not go in step with another; of two that are as long as each
    other, the second begins anew at another turn.
    """
    columns = [list(axis) for axis in axes]
    lengths = [len(column) for column in columns]
    later = [length + lengths[:axis].count(length) for axis, length in enumerate(lengths)]
    default = {
        tuple((turn + turn // after) % length for length, after in zip(lengths, later, strict=True))
        for turn in range(max(lengths))
    }
    return [
        pytest.param(
            *(column[place] for column, place in zip(columns, places, strict=True)),
            marks=[] if places in default else pytest.mark.thorough,
        )
        for places in itertools.product(*(range(len(column)) for column in columns))
    ]


THOROUGH_ALONE = pytest.StashKey[list[str]]()
"""The tests that `thorough_alone` found among all that were collected."""


def thorough_alone(items: Iterable[pytest.Item]) -> list[str]:
    """The tests that a default run leaves out whole: every case of them is `thorough`."""
    default: dict[str, bool] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        default[test] = default.get(test, False) or item.get_closest_marker("thorough") is None
    return [test for test, runs in default.items() if not runs]


def quick_interpreter() -> None:
    """Triton's interpreter without what it does over and over, which is most of its time: no result is another one.

    It patches its language anew for every device function that a program calls: what the launch has patched stays patched until it ends, so
    that once for each is enough. It works out whether integers overflow, and without a debug option, which it never has, asserts nothing of
    it. Types and shapes of blocks are made anew for every value.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set[frozenset[int]]()
    if patch.__module__ == __name__ or os.environ.get("TRITON_INTERPRET") != "1":
        return

    @functools.cache
    def languages(fn: Any) -> frozenset[int]:
        return frozenset(map(id, fn.__globals__.values())) & {id(interpreter.tl), id(core)}

    def once(fn: Any) -> Any:
        seen = languages(fn)
        if seen in done:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (done.clear(), restore())
        done.add(seen)
        return scope

    def remembered(function: Any, key: Any) -> Any:
        known: dict[Any, Any] = {}

        def at_hand(*args: Any) -> Any:
            made = key(*args)
            if made not in known:
                known[made] = function(*args)
            return known[made]

        return at_hand

    def filled(cls: Any, key: Any) -> Any:
        make = cls.__init__
        fields = remembered(lambda self, *args: (make(self, *args), dict(vars(self)))[1], key)
        return lambda self, *args: vars(self).update(fields(self, *args))

    tensor = filled(core.tensor, lambda _self, _handle, kind: kind.name)

    interpreter._patch_lang = once
    assert not interpreter.InterpreterOptions.debug
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype, lambda kind: kind.name)
    core.block_type.__init__ = filled(core.block_type, lambda _, kind, shape: (kind.name, tuple(map(int, shape))))
    core.tensor.__init__ = lambda self, handle, kind: (tensor(self, handle, kind), setattr(self, "handle", handle))[0]


def shown(page: str, says: str) -> list[str]:
    """The lines of the one log on a page that says something, without the path of the report: an engine's tests hold it to what is logged."""
    blocks = re.findall(r"^```text\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if says in block)
    return [line.strip() for line in block.splitlines() if "in full: " not in line]


def files_in(text: str) -> list[tuple[str, str, str]]:
    """Of each `> FILE [of NAME]` in a text its name, the other, and the lines that follow, up to `<`."""
    return re.findall(r"^> (\S+)(?: of (\S+))?\n(.*?)^<$", text, re.MULTILINE | re.DOTALL)


def run_python(code: str, *paths: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own, which finds this checkout as `layerfuse`; `paths` come first."""
    return _run_python(code, paths, variables, 120)


def _run_python(
    code: str, paths: Iterable[str | Path], variables: dict[str, str], seconds: int
) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join(entry for entry in (*map(str, paths), os.environ.get("PYTHONPATH"), *sys.path) if entry)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": found, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


# Ranks, pages and other code that wants a process of its own run in copies of one that has imported what is slow to import. Nothing of
# layerfuse: what it reads once, such as the installed plugins, each shall read for itself.
multiprocessing.set_forkserver_preload(
    [
        "torch._inductor.compile_fx",
        "torch._inductor.codegen.cpp",
        "torch._inductor.fx_passes.joint_graph",
        "torch.distributed.tensor.parallel",
        "torch.profiler",
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
        "rich.console",
        "pytest",
    ]
)


def run_copy(code: str, *paths: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """As `run_python`, for code that needs torch: nothing is imported again but layerfuse. What runs at exit does not.

    Where torch sees a GPU, it is `run_python`: a copy of a process that has counted the GPUs can neither use nor overlook them.
    """
    import torch

    if torch.cuda.is_available():
        return _run_python(code, paths, variables, 600)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_in_copy, args=(code, paths, {**os.environ, **variables}, Path(folder)))
        process.start()
        process.join(600)
        process.kill()
        process.join()
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(code, process.exitcode or 0, out, err)


def _in_copy(code: str, paths: Iterable[str | Path], environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
    sys.path[:0] = map(str, paths)
    for name in [name for name in sys.modules if name.partition(".")[0] == "layerfuse"]:
        del sys.modules[name]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


OUTSIDE = """
import torch
from layerfuse.fusion.chain import Add, Fusion, Norm
from layerfuse.fusion.declare import Kernel
from layerfuse.fusion.sites import FINAL, INPUT, POST_ATTENTION

def kernel(x, residual, weight, epsilon, weight_offset):
    total = x + residual
    wide = total.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * (weight.double() + weight_offset)
    return ({factor} * normed).to(x.dtype), total

FUSION = Fusion(
    name="outside_add_rms_norm", doc="an outside one", level=1, roles=(INPUT, POST_ATTENTION, FINAL), chain=(Add, Norm),
    backends=(Kernel(backend="outside", function="outside:kernel"),),
)
"""


def outside_package(folder: Path, factor: float) -> Path:
    """A package whose kernel multiplies what it should give by a factor."""
    (folder / "outside.py").write_text(OUTSIDE.format(factor=factor))
    info = folder / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[layerfuse.fusions]\nmine = outside:FUSION\n")
    return folder


def backend_at_hand(op: str, function: Any) -> Any:
    """A backend called `at_hand`, with this function for an op."""
    from layerfuse.fusion.backends import Backend
    from layerfuse.fusion.declare import Kernel
    from layerfuse.fusion.ops.library import declared

    cls = type("Other", (Backend,), {"load": lambda _: function})
    return cls(op=declared(op), kernel=Kernel(backend="at_hand", function="a:kernel"))
