"""vLLM's models of which no published config is at hand, on the meta device: from the default config of their class, and what vLLM asks for besides.

    model = build_default("HYV4ForCausalLM", quantization_config=BLOCK)

Those are written for one GPU family. What they import of kernels is a stand-in while they are built, and no kernel is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from attrs import evolve, frozen
from torch import nn

from vllm_host import config_on_cpu, import_model, published_config, vllm_parallel, without_gpu  # isort: skip  (before vllm)
from vllm.config import CompilationMode, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.triton_utils import tl
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends import fa_utils
from vllm_started import PlainExperts


@frozen
class Recipe:
    """How to build one."""

    config: str
    "`module:Class` of its config."
    model_class: str
    more: Mapping[str, Any] = {}
    "What vLLM asks for, and the default config does not say, or what vLLM refuses of it."
    hopper: bool = False
    "Whether it asks for the GPU that it is built for."
    kernels: Mapping[str, str] = {}
    "Module -> what of it would load one."
    fp8: bool = True
    "Whether vLLM takes it quantised so."
    plain: tuple[str, ...] = ()
    "Linears that vLLM refuses quantised, as far as a layer has them."

    def quantised(self, how: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """The key of a config that says it."""
        ignored = [f"model.layers.{index}.{name}" for index in range(layers) for name in self.plain]
        return {"quantization_config": {**how, "ignored_layers": ignored}} if self.fp8 else {}


@frozen
class Like:
    """A model whose text has the config of another: one that sees or hears too, or a draft for that one."""

    of: str
    "The architecture of the other, in `DEFAULTS`, or the folder of its published config."
    model_class: str
    whole: str = ""
    "`model_type` of the config around the text's; empty: it has that one config, or is a draft."
    around: Mapping[str, Any] | str = {}
    "Further keys of that config; or `module:Class` of its default one."
    text: Mapping[str, Any] = {}
    "Further keys of the text's."
    kernels: Mapping[str, str] = {}
    "As of a recipe."
    draft: bool = False


_MODELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DEFAULTS = {name: Recipe(**table) for name, table in _MODELS["defaults"].items()}
"""By the architecture."""
LIKE = {name: Like(**table) for name, table in _MODELS["like"].items()}
"""By the architecture: what is built besides `DEFAULTS`."""


class Speculative(SpeculativeConfig):
    """Of vLLM's config for speculation what is asked for while a draft is built; the rest is None."""

    def __init__(self, **said: Any) -> None:
        vars(self).update(said)

    def __getattr__(self, _: str) -> None:
        return None


class _StandIn(ModuleType):
    """A module with whatever is asked of it."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not there, or that load kernels of a GPU."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        found = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


class _Anything:
    def __getattr__(self, _: str) -> _Anything:
        return self


def _nothing(*_: Any, **__: Any) -> bool:
    return True


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Stand-ins for what these models import of kernels. What is not vLLM's is gone afterwards."""
    flash = _StandIn("flash")
    flash.__dict__.update(is_fa_version_supported=_nothing, fa_version_unsupported_reason=lambda *_: None)
    names = {
        "vllm.vllm_flash_attn": flash,
        "vllm.vllm_flash_attn.flash_attn_interface": flash,
        "vllm.third_party.deep_gemm": _StandIn("deep_gemm"),
        "vllm.third_party.deep_gemm.utils": _StandIn("utils"),
    }
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    sys.meta_path.append(finder := _StandIns())
    try:
        with contextlib.ExitStack() as stack:
            for name in ("flash_attn_varlen_func", "get_scheduler_metadata", "reshape_and_cache_flash", "compile_flash_attn_varlen_func_from_specs"):  # fmt: skip
                stack.enter_context(mock.patch.object(fa_utils, name, _nothing, create=True))
            stack.enter_context(mock.patch.object(tl, "extra", _Anything(), create=True))
            yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


@contextlib.contextmanager
def on(recipe: Recipe) -> Iterator[None]:
    """What a model asks of the device while it is built."""
    with contextlib.ExitStack() as stack:
        if recipe.hopper:
            answer = mock.Mock(return_value=DeviceCapability(9, 0))
            stack.enter_context(mock.patch.object(type(current_platform), "get_device_capability", answer))
            stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", return_value=0))
        for name, what in recipe.kernels.items():
            stack.enter_context(mock.patch.object(importlib.import_module(name), what, _nothing))
        yield


def _config(architecture: str) -> dict[str, Any]:
    """The default config of a model of `DEFAULTS`, or a published one."""
    if architecture not in DEFAULTS:
        return published_config(architecture)
    recipe = DEFAULTS[architecture]
    return {**_default(recipe.config), **recipe.more, "architectures": [architecture]}


def _default(config: str) -> dict[str, Any]:
    """What the default config of a class says, `module:Class`."""
    module, _, name = config.partition(":")
    return json.loads(getattr(importlib.import_module(module), name)().to_json_string(use_diff=False))


def write_config(architecture: str, folder: Path, quant: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Write the config.json of a model of `DEFAULTS`, with further keys."""
    whole = {**_config(architecture), **more}
    whole |= {} if quant is None else DEFAULTS[architecture].quantised(quant, whole.get("num_hidden_layers", 0))
    (folder / "config.json").write_text(json.dumps(whole))


def build_like(architecture: str, *, quant: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model of `LIKE`, quantised where vLLM takes that."""
    like = LIKE[architecture]
    recipe = DEFAULTS.get(like.of, Recipe("", ""))
    text = {**_config(like.of), **like.text}
    around = _default(like.around) | {"text_config": text} if isinstance(like.around, str) else like.around
    whole = (
        {"architectures": [architecture], "model_type": like.whole, "text_config": text, "dtype": "bfloat16"}
        if like.whole
        else text
    )
    whole |= {} if quant is None else recipe.quantised(quant, text.get("num_hidden_layers", 0))
    whole |= {"num_nextn_predict_layers": 1} if like.draft else {**around, "architectures": [architecture]}
    recipe = evolve(recipe, model_class=like.model_class, kernels={**recipe.kernels, **like.kernels})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(whole))
        name = whole["architectures"][0]
        return build_in(folder, name, recipe, draft=like.draft, text=like.of)[0]


def build_default(
    architecture: str, *, tp: int = 1, rank: int = 0, quant: Mapping[str, Any] | None = None, **more: Any
) -> tuple[nn.Module, Any]:
    """Build a model of `DEFAULTS` as one of several ranks, quantised where vLLM takes that: the model, and its text config.

    ``more`` are further keys of its config.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_config(architecture, Path(folder), quant, **more)
        return build_in(folder, architecture, DEFAULTS[architecture], tp=tp, rank=rank)


def build_in(
    folder: str, architecture: str, recipe: Recipe, *, tp: int = 1, rank: int = 0, draft: bool = False, text: str = ""
) -> tuple[nn.Module, Any]:
    """Build the model whose config lies in a folder as one of several ranks, or a draft for it: the model, and its text config.

    ``text``: the architecture that it has inside, which is then the one of `DEFAULTS` and not vLLM's for this platform.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_gpu())
        stack.enter_context(kernels())
        model_class = import_model(recipe.model_class)
        if not draft:
            ModelRegistry.register_model(architecture, model_class)
        if text in DEFAULTS:
            ModelRegistry.register_model(text, import_model(DEFAULTS[text].model_class))
        stack.enter_context(mock.patch.object(VllmConfig, "use_v2_model_runner", True))
        config = config_on_cpu(
            folder,
            tp=tp,
            rank=rank,
            whole_experts=True,
            model={"dtype": "bfloat16", "max_model_len": 512, "language_model_only": True},
            compilation={"mode": CompilationMode.NONE},
        )
        config.kernel_config.enable_jit_warmup = False
        if draft:
            SpeculativeConfig.hf_config_override(config.model_config.hf_config)
            speculative = Speculative(
                draft_model_config=config.model_config, draft_parallel_config=config.parallel_config,
                num_speculative_tokens=1, method="mtp",
            )  # fmt: skip
            stack.enter_context(mock.patch.dict(vars(config), speculative_config=speculative))
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(vllm_parallel(tp, rank))
        stack.enter_context(
            mock.patch.object(RoutedExperts, "_get_quant_method", lambda _, _p, _q, moe: PlainExperts(moe))
        )
        stack.enter_context(on(recipe))
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(torch.device("meta"))
        return initialize_model(config, model_class=model_class), config.model_config.hf_text_config
