"""The decoders that most models are made of, as vLLM builds them: every value against the config, every norm against what forward does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from layerfuse import registry
from layerfuse.adapters import FinalNormSpec, GatedMLPSpec, GQASpec, ResidualSpec
from layerfuse.adapters.specs import Parallel

vllm_layers = pytest.importorskip("vllm_layers")
import vllm_host  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

FILES = "vllm.model_executor.models"
DECODERS = json.loads((Path(__file__).parent / "vllm_decoders.json").read_text(encoding="utf-8"))
SIZES = DECODERS.pop("*")
MODELS: dict[tuple[str, str], tuple[str, dict[str, Any], float]] = {
    (name, each["file"]): (each["model_type"], each["config"], each["norms_add"]) for name, each in DECODERS.items()
}
"""(architecture, file) -> model_type, further keys, what the norms of the stream add to their weight."""


@contextlib.contextmanager
def built(architecture: str, file: str, folder: Path, tp: int, rank: int):
    """The model on the meta device, and the keys of its config; the parallel state lasts as long as the block."""
    model_type, more, _ = MODELS[architecture, file]
    values = {**CONFIG_MAPPING[model_type](**{**SIZES, **more}).to_dict(), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(vllm_host, "CHECKPOINTS", folder.parent))
        stack.enter_context(vllm_host.without_gpu())
        model_class = vllm_host.import_model(f"{FILES}.{file}:{architecture}")
        ModelRegistry.register_model(architecture, model_class)
        config = vllm_host.vllm_config(folder.name, tp=tp, rank=rank, overrides={})
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(vllm_host.vllm_parallel(tp, rank))
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        with torch.device("meta"):
            model = initialize_model(config, model_class=model_class)
        yield model, values


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (4, 3)])
@pytest.mark.parametrize("name", MODELS, ids=lambda name: name[0])
def test_every_value_is_the_configs(name: tuple[str, str], tp: int, rank: int, tmp_path: Path) -> None:
    with built(*name, tmp_path, tp, rank) as (model, config):
        read = registry.specs_in(model)
        assert registry.unknown_in(model) == []
    of = {kind: [spec for _, spec in read if type(spec) is kind] for kind in (GQASpec, GatedMLPSpec, ResidualSpec)}
    layers, offset = config["num_hidden_layers"], MODELS[name][2]
    assert {spec.parallel for _, spec in read} == {Parallel(size=tp, rank=rank)}
    assert {spec.hidden_size for _, spec in read} == {config["hidden_size"]}

    kinds = config.get("layer_types") or ["full_attention"] * layers
    windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    width = config.get("head_dim") or config["hidden_size"] // heads[0]
    scale = config.get("attention_multiplier") or config.get("query_pre_attn_scalar", width) ** -0.5
    assert [spec.layer_index for spec in of[GQASpec]] == list(range(layers))
    assert [spec.sliding_window for spec in of[GQASpec]] == windows
    for spec in of[GQASpec]:
        assert (spec.num_heads, spec.num_kv_heads) == heads
        assert (spec.num_local_heads, spec.num_local_kv_heads) == (heads[0] // tp, max(1, heads[1] // tp))
        assert (spec.head_dim, spec.v_head_dim, spec.has_sinks) == (width, width, False)
        assert spec.softmax_scale == pytest.approx(scale)

    widths = {config[key] for key in config if key.endswith("intermediate_size") and isinstance(config[key], int)}
    shared = config.get("n_shared_experts") or config.get("moe_num_shared_experts") or 1
    widths |= {config["moe_intermediate_size"] * shared} if "moe_intermediate_size" in config else set()
    gate = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    said = config.get("hidden_activation") or config.get("hidden_act")
    for mlp in of[GatedMLPSpec]:
        assert mlp.intermediate_size in widths
        assert mlp.local_intermediate_size * tp == mlp.intermediate_size
        assert mlp.activation == gate[said]

    assert [spec.layer_index for spec in of[ResidualSpec]] == list(range(layers))
    _, final = read[-1]
    assert isinstance(final, FinalNormSpec)
    stream = [norm for spec in of[ResidualSpec] for norm in (*spec.input_norms, *spec.post_attention_norms)]
    for norm in (*stream, final.final_norm):
        assert (norm.width, norm.weight_offset) == (config["hidden_size"], offset)
        assert norm.epsilon == config["rms_norm_eps"]
    assert all(norm.consumers for norm in (spec.input_norm for spec in of[ResidualSpec]))


class Block(torch.nn.Module):
    """Stands in for an attention or an MLP: gives something new, and remembers it."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self.given = given

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.given.append(torch.empty(1, 256))
        return self.given[-1]


class Norm(torch.nn.Module):
    """Stands in for a norm: says whether it reads the stream, and whether what it adds there is what a block gave."""

    def __init__(self, name: str, given: list[Any], reads: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.name, self.given, self.reads = name, given, reads

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        of_a_block = any(x is one for one in self.given)
        if residual is not None:
            self.reads.append((self.name, of_a_block))
            return torch.empty_like(x), residual + x
        if not of_a_block:
            self.reads.append((self.name, False))
        return torch.empty_like(x)


@pytest.mark.parametrize("name", MODELS, ids=lambda name: name[0])
def test_the_norms_on_the_stream_are_those_that_forward_calls_with_it(name: tuple[str, str], tmp_path: Path) -> None:
    with built(*name, tmp_path, 1, 0) as (model, _):
        path, spec = registry.specs_in(model, of=ResidualSpec)[1]
        layer = model.get_submodule(path)
    given: list[Any] = []
    reads: list[tuple[str, bool]] = []
    for child, module in list(layer.named_children()):
        stand_in = Norm(child, given, reads) if "norm" in type(module).__name__.lower() else Block(given)
        setattr(layer, child, stand_in)
    stream = torch.empty(1, 256)
    wanted = layer.forward.__code__.co_varnames[: layer.forward.__code__.co_argcount]
    values = {"positions": torch.arange(1), "hidden_states": stream, "residual": torch.empty(1, 256)}
    layer(**{key: value for key, value in values.items() if key in wanted})

    assert [norm for norm, _ in reads] == [norm.module for norm in (*spec.input_norms, *spec.post_attention_norms)]
    assert spec.added_as_given == reads[-1][1]


@pytest.mark.parametrize(
    "draft",
    [
        "llama_eagle:LlamaDecoderLayer",
        "llama_eagle3:LlamaDecoderLayer",
        "mistral_eagle:EagleMistralDecoderLayer",
        "qwen3_eagle3:Qwen3Eagle3DecoderLayer",
    ],
)
def test_the_layer_of_a_draft_is_not_read_by_its_base(draft: str) -> None:
    """Its first norm is another one, or none: what the base's facts say is not true of it."""
    cls = vllm_host.import_model(f"{FILES}.{draft}")
    assert registry.default.readers_for(cls.__mro__[1])
    assert registry.default.readers_for(cls) == ()


def test_every_declared_class_is_vllms() -> None:
    keys = [key for key in registry.adapters()["decoders"].layers if key.startswith("vllm")]
    assert len(keys) > 50
    for key in keys:
        assert registry.default.readers_for(vllm_host.import_model(key))
