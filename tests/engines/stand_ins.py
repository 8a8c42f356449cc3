"""What stands in for a GPU and for the other ranks while an engine builds its layers.

Only answers are replaced: the layers' own Python, their configuration and their process-group coordinators are the
engine's.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


class Nothing:
    """A class, so that it can stand in an annotation, whose every instance is None."""

    def __new__(cls, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        return None


@contextlib.contextmanager
def no_streams() -> Iterator[None]:
    """Make CUDA streams and events None: a layer that is given no second stream runs on one."""
    with mock.patch.object(torch.cuda, "Stream", Nothing), mock.patch.object(torch.cuda, "Event", Nothing):
        yield


@contextlib.contextmanager
def fake_process_groups() -> Iterator[None]:
    """Make every new process group one of torch's "fake" backend, whose collectives return at once and move nothing.

    Engines pair each device group with a gloo group, which would wait for the other ranks to come up.
    """
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake", "pg_options": None})

    with mock.patch.object(dist, "new_group", new_fake_group):
        yield


def init_fake_world(size: int, rank: int) -> None:
    """Start torch.distributed as ``rank`` of ``size``, alone in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def declare_torchvision_ops() -> torch.library.Library | None:
    """Declare the operators that torchvision's Python needs to exist when it is imported.

    Its builds hold them for CUDA only, next to torch's CPU build they do not load, and no layer here calls them.  Keep
    what this returns: the declaration lives as long as it does.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class MissingKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets ``import name`` and ``from name import kernel`` succeed for a package of binary kernels that is not there.

    Every kernel can be imported, none can be called.  Submodules stay missing, because engines ask for some of them to
    find out what is there.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname == self.name else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = self._kernel  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass

    def _kernel(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(f"module {self.name!r} has no attribute {name!r}")

        def kernel(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{self.name}.{name} is a GPU kernel; it can be imported here, not called")

        return kernel


def allow_missing_kernels(name: str) -> None:
    """Install ``MissingKernels`` for ``name``, unless the real package is there."""
    if importlib.util.find_spec(name) is None:
        sys.meta_path.append(MissingKernels(name))
