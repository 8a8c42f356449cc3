"""Entries held to checkpoints: small ones, written by transformers and safetensors, whole, cut and mutated."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from layerfuse.cli import main
from layerfuse.cli.models import find_model
from layerfuse.registry import default
from layerfuse.registry.safetensors import INDEX, Tensor, WeightsError, read_header, read_headers
from layerfuse.registry.weights import Weighed, weigh
from layerfuse.testing import small_model

MODELS = {
    "deepseek_v3": "deepseek-v3",
    "llama": "llama-3.1-8b",
    "qwen3": "qwen3-8b",
    "gpt_oss": "gpt-oss-20b",
    "kimi_linear": "kimi-linear-48b-a3b",
    "longcat_flash": "longcat-flash",
    "mixtral": "mixtral-8x7b",
    "ernie4_5_moe": "ernie-4.5-21b-a3b",
    "phi3": "phi-4",
    "olmo2": "olmo-2-7b",
    "qwen3_next": "qwen3-next-80b-a3b",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def checkpoint(kind: str, **how: Any) -> Path:
        key = f"{kind}{how}"
        if key not in made:
            made[key] = folder = tmp_path_factory.mktemp(kind) / f"small-{kind}".replace("_", "-")
            model: Any = small_model(default.model(MODELS[kind]), hidden_size=256, dtype=torch.bfloat16)
            model.save_pretrained(folder, **how)
        return made[key]

    return checkpoint


@cache
def _entry(folder: Path) -> Any:
    return find_model(str(folder))


def _weighed(folder: Path, tensors: dict[str, Tensor] | None = None) -> Weighed:
    return weigh(_entry(folder), tensors or read_headers(folder), default.adapters().values())


@pytest.mark.parametrize("kind", MODELS)
def test_what_transformers_writes_is_as_its_config_says(kind: str, checkpoint: Callable[..., Path]) -> None:
    found = _weighed(checkpoint(kind))
    assert found.problems == []
    assert found.held >= 4 * 6 + 1


def test_many_shards_are_one_checkpoint(checkpoint: Callable[..., Path]) -> None:
    whole, cut = checkpoint("llama"), checkpoint("llama", max_shard_size="500KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    assert read_headers(cut) == read_headers(whole)
    next(iter(cut.glob("*.safetensors"))).rename(cut / "gone")
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        read_headers(cut)


@pytest.mark.parametrize("kind", MODELS)
def test_each_tensor_of_a_linear_or_a_norm_that_is_lost_or_grows_is_told(
    kind: str, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint(kind)
    tensors = read_headers(folder)
    aside = (
        "embed_tokens",
        "lm_head",
        "gate.",
        "router",
        "expert_gate",
        "conv1d",
        "_bias",
        ".bias",
        "A_log",
        "dt_bias",
    )
    aside = (*aside, "sinks", "k_norm", "self_attn.q_norm", "correction")
    # A merged tensor that is lost leaves no trace where another is there, and rows of LongCat's zero experts are nobody's.
    merged = (".experts.gate_up_proj", ".experts.down_proj")
    zero = (".experts.2.", ".experts.3.") if kind == "longcat_flash" else ()
    inside = ("layernorm",) if kind == "olmo2" else ()  # of what a block gives: no spec has those
    unsaid = (*aside, *merged, *zero, *inside)
    for name in (name for name in tensors if not any(each in name for each in unsaid)):
        without = {other: tensor for other, tensor in tensors.items() if other != name}
        assert _weighed(folder, without).problems, name
        wider = Tensor(tensors[name].dtype, (tensors[name].shape[0] + 8, *tensors[name].shape[1:]))
        assert _weighed(folder, {**tensors, name: wider}).problems, name


def test_what_the_entry_does_not_name_is_left_over(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3")
    tensors = read_headers(folder)
    more = {"model.layers.2.self_attn.r_proj.weight": Tensor("BF16", (8, 256))}
    (problem,) = _weighed(folder, tensors | more).problems
    assert problem == "model.layers.2.self_attn.r_proj: is not named by the entry: weight BF16 [8, 256]"
    more = {"model.layers.4.self_attn.q_proj.weight": Tensor("BF16", (128, 256))}
    assert _weighed(folder, tensors | more).problems == ["model.layers.4: is one more than the 4 declared layers"]


def _quantised(folder: Path, target: Path, quant: dict[str, Any], change: Callable[[str, Any], dict[str, Any]]) -> Path:
    """The same checkpoint with what `change` makes of the weights of attention, MLPs and experts."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quant}))
    tensors: dict[str, Any] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        is_linear = name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")) or "with_mqa" in name
        tensors |= change(name.removesuffix(".weight"), weight) if is_linear else {name: weight}
    save_file(tensors, target / "model.safetensors")
    return target


def _fp8(name: str, weight: Any) -> dict[str, Any]:
    scales = torch.ones([math.ceil(side / 128) for side in weight.shape])
    return {f"{name}.weight": weight.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scales}


def test_fp8_in_blocks_as_deepseek_publishes_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    folder = _quantised(checkpoint("deepseek_v3"), tmp_path / "fp8", said, _fp8)
    found = _weighed(folder)
    assert found.problems == []
    tensors = read_headers(folder)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        assert len(_weighed(folder, {**tensors, name: Tensor("F32", (7, 7))}).problems) == 1, name
    plain = {"model.layers.0.self_attn.o_proj.weight": Tensor("BF16", (256, 512))}
    (problem,) = _weighed(folder, tensors | plain).problems
    assert problem.startswith("model.layers.0.self_attn.o_proj: expected weight F8_E4M3 [256, 512], got ")
    unsaid = checkpoint("deepseek_v3")
    assert "not quantised" in _weighed(unsaid, tensors).problems[0]


def test_int4_in_groups_as_compressed_tensors_packs_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}

    def packed(name: str, weight: Any) -> dict[str, Any]:
        rows, columns = weight.shape
        return {
            f"{name}.weight_packed": torch.zeros(rows, math.ceil(columns / 8), dtype=torch.int32),
            f"{name}.weight_scale": torch.ones(rows, math.ceil(columns / 32), dtype=torch.bfloat16),
            f"{name}.weight_shape": torch.tensor([rows, columns]),
        }

    folder = _quantised(checkpoint("llama"), tmp_path / "int4", said | {"ignore": ["lm_head"]}, packed)
    assert _weighed(folder).problems == []
    tensors = read_headers(folder)
    name = "model.layers.1.mlp.up_proj.weight_packed"
    (problem,) = _weighed(folder, {**tensors, name: Tensor("I32", (64, 31))}).problems
    assert "expected weight_packed I32 [64, 32]" in problem


def _like(shapes: Callable[[str, int, int], dict[str, Any]]) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, weight: shapes(name, *weight.shape)


def _int8(name: str, rows: int, columns: int) -> dict[str, Any]:
    return {f"{name}.weight": torch.zeros(rows, columns, dtype=torch.int8), f"{name}.weight_scale": torch.ones(rows, 1)}


def _fp8_channels(name: str, rows: int, columns: int) -> dict[str, Any]:
    weight = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    return {f"{name}.weight": weight, f"{name}.weight_scale": torch.ones(rows, 1, dtype=torch.bfloat16)}


def _nvfp4(name: str, rows: int, columns: int) -> dict[str, Any]:
    return {
        f"{name}.weight_packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        f"{name}.weight_scale": torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn),
        f"{name}.weight_global_scale": torch.ones(1),
        f"{name}.input_global_scale": torch.ones(1),
    }


def _gptq(name: str, rows: int, columns: int) -> dict[str, Any]:
    groups = math.ceil(columns / 32)
    return {
        f"{name}.qweight": torch.zeros(math.ceil(columns / 8), rows, dtype=torch.int32),
        f"{name}.qzeros": torch.zeros(groups, math.ceil(rows / 8), dtype=torch.int32),
        f"{name}.scales": torch.ones(groups, rows, dtype=torch.float16),
        f"{name}.g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def _awq(name: str, rows: int, columns: int) -> dict[str, Any]:
    groups = math.ceil(columns / 32)
    return {
        f"{name}.qweight": torch.zeros(columns, math.ceil(rows / 8), dtype=torch.int32),
        f"{name}.qzeros": torch.zeros(groups, math.ceil(rows / 8), dtype=torch.int32),
        f"{name}.scales": torch.ones(groups, rows, dtype=torch.float16),
    }


def _compressed(weights: dict[str, Any], reads: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": reads}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_EACH = {"num_bits": 8, "strategy": "channel"}
_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[str, int, int], dict[str, Any]]]] = {
    "fp8-channels": (_compressed({**_EACH, "type": "float"}, {**_TOKEN, "type": "float"}), _fp8_channels),
    "int8-channels": (_compressed({**_EACH, "type": "int"}, {**_TOKEN, "type": "int"}), _int8),
    "nvfp4": (_compressed(_FP4, {**_FP4, "dynamic": "local"}), _nvfp4),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, _gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, _awq),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_other_libraries_layouts(layout: str, kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    said, shapes = LAYOUTS[layout]
    folder = _quantised(checkpoint(kind), tmp_path / layout, said, _like(shapes))
    assert _weighed(folder).problems == []
    tensors = read_headers(folder)
    weights = ("_proj.weight", ".w2.weight", ".weight_packed", "weight_scale", "qweight", ".scales")
    for name in [name for name in tensors if "layers.1." in name and name.endswith(weights)]:
        wider = Tensor(tensors[name].dtype, (tensors[name].shape[0] + 8, *tensors[name].shape[1:]))
        assert len(_weighed(folder, {**tensors, name: wider}).problems) == 1, name


def test_mxfp4_as_gpt_oss_is_published(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = checkpoint("gpt_oss")
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        number, read, given = tensors.pop(name).shape  # transformers keeps these the other way round
        tensors[f"{name}_blocks"] = torch.zeros(number, given, read // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(number, given, read // 32, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    assert _weighed(folder).problems == []
    headers = read_headers(folder)
    for name in [name for name in headers if name.endswith(("_blocks", "_scales"))]:
        for shape in ((3, *headers[name].shape[1:]), (4, 8, *headers[name].shape[2:])):
            assert len(_weighed(folder, {**headers, name: Tensor("U8", shape)}).problems) == 1, name
        del (without := dict(headers))[name]
        assert len(_weighed(folder, without).problems) == 1, name
    assert "experts in float4_e2m1fn, MX groups" in "".join(_weighed(folder, read_headers(plain)).problems)
    assert "weights as they are" in _weighed(plain, headers).problems[0]


def test_experts_are_as_many_and_as_wide_as_declared(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("mixtral")
    entry, tensors = _entry(folder), read_headers(folder)

    def problems(**changes: int) -> list[str]:
        changed = attrs.evolve(entry, experts=attrs.evolve(entry.experts, **changes))
        return weigh(changed, tensors, default.adapters().values()).problems

    assert problems() == []
    assert problems(num_experts=3)[0] == "model.layers.0.experts: there are 4, and 3 are declared"
    few = problems(num_experts=6)[0]
    assert few.startswith("model.layers.0.experts: the ") and few.endswith(" of expert 4 and 1 more of 6 is not there")
    assert len(problems(intermediate_size=512)) == 4 * 4 * 3
    dense = {name: tensor for name, tensor in tensors.items() if "layers.2.block_sparse_moe" not in name}
    (problem,) = weigh(entry, dense, default.adapters().values()).problems
    assert problem == "model.layers.2.experts: of routed experts, none is there"


def test_the_command_says_it_and_exits_with_1_where_something_differs(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("qwen3")
    with pytest.raises(SystemExit) as right:
        main(["contract", str(folder), "--weights", str(folder)])
    assert right.value.code == 0
    assert "37 linears and norms as declared, 0 problems" in capsys.readouterr().out
    with pytest.raises(SystemExit) as wrong:
        main(["contract", "qwen3-8b", "--weights", str(folder), "--json"])
    assert wrong.value.code == 1
    said = json.loads(capsys.readouterr().out)
    assert "model.layers.35: no tensor of this layer is there" in said["problems"]


def _written(path: Path, header: bytes, data: int = 0, length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data))
    return path


_GOOD = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"{}", 0, 1 << 62, "more than the format allows"),
        (b"{}", 0, 999, "more than the 10 bytes of the file hold"),
        (b"[]", 0, None, "expected a JSON object"),
        (b"[" * 100_000, 0, None, "nested too deeply"),
        (b"\xff\xfe", 0, None, "not JSON"),
        (b'{"a":1,"a":2}', 0, None, "'a' stands there twice"),
        (b'{"a":1}', 0, None, "expected dtype, shape and data_offsets"),
        (b'{"__metadata__":{"a":1}}', 0, None, "expected an object of texts"),
        (json.dumps(_GOOD).encode(), 15, None, "its tensors take 16 bytes, and it holds 15"),
        (json.dumps(_GOOD | {"b": _GOOD["a"]}).encode(), 16, None, "'b' begins at 0"),
        (json.dumps(_GOOD).replace("F32", "F31").encode(), 16, None, "no dtype of the format"),
        (json.dumps(_GOOD).replace("[2, 2]", "[2, true]").encode(), 16, None, "expected whole numbers"),
        (json.dumps(_GOOD).replace("[2, 2]", "[2, 3]").encode(), 16, None, "does not take the bytes 0 to 16"),
    ],
)
def test_hostile_headers_get_a_clear_error(
    header: bytes, data: int, length: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        read_header(_written(tmp_path / "a.safetensors", header, data, length))


def test_an_index_names_files_of_its_own_folder(tmp_path: Path) -> None:
    for file in ("../a.safetensors", "/etc/passwd", "a\0.safetensors"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(WeightsError, match="no safetensors file of the same folder"):
            read_headers(tmp_path)
