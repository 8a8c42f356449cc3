"""The architectures that vLLM runs uncompiled on NVIDIA's GPUs: where fused ops stand in them, and what their own code fuses.

Real classes on the meta device, with fp8 linears in blocks and the ops put in as at a start. What is not read is named from vLLM's source. Run
by `make test-engines`; `UPDATE_DOCS=1` writes the page, and a new release shows there what its models do in another way.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import attrs
import pytest

pytest.importorskip("vllm_layers")
from vllm_layers import build_model, fp8_kernel  # isort: skip  (before vllm)
from vllm_defaults import DEFAULTS, LIKE, build_default, build_like, kernels  # isort: skip  (before vllm)
import by_hand
import torch
import vllm
from test_vllm_specs import BLOCK
from vllm_host import import_model
from whole_models import norms_that_feed_nothing

from layerfuse import registry
from layerfuse.adapters import FinalNormSpec, GatedMLPSpec, GatedNormSpec, GQASpec, MLASpec, NormSpec, ResidualSpec
from layerfuse.adapters.errors import SpecError
from layerfuse.adapters.specs import Parallel
from layerfuse.engines.compiled_module import CompiledModule
from layerfuse.engines.standing import Standing
from layerfuse.engines.vllm import native_fusions, register
from layerfuse.engines.vllm.native_fusions import Place, uncompiled
from layerfuse.engines.vllm.seams import SEAMS
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.catalog import FUSIONS
from layerfuse.fusion.formats import FORMATS
from layerfuse.fusion.live_plan import module_index_of
from layerfuse.fusion.planning import Plan
from layerfuse.fusion.sites import OWN_PLACE, ROLES
from layerfuse.testing.compare import linears_of, misfit

PAGE = Path(__file__).parents[2] / "docs" / "vllm-uncompiled.md"
RELEASE = importlib.metadata.version("vllm")
VLLM = Path(vllm.__file__).parent
LISTED = by_hand.listed(VLLM)
FILES = by_hand.files_of(VLLM)
BUILT = {
    "DeepseekV32ForCausalLM": "deepseek-v3.2",
    "GlmMoeDsaForCausalLM": "glm-5",
    "KimiK3ForConditionalGeneration": "kimi-k3",
    "KimiLinearForCausalLM": "kimi-linear",
}
"""Those with an entry of models.toml -> the model of `MODELS`. Those of `DEFAULTS` and `LIKE` are built too."""
NOT_DESCRIBED = {"Glm5NextMTPModel", "HYV4MTPModel"}
"""Drafts whose decoder layers have no hyper-connections, unlike their models': no spec says both of one class."""
READ = [name for name in LISTED if name in {*BUILT, *DEFAULTS, *LIKE} - NOT_DESCRIBED]
BY_THEMSELVES = {"BeamForCausalLM", "DeepseekV4ForCausalLM", "InklingForCausalLM", "MuseSpark1xForCausalLM"}
"""Of these the kernels of the model's do all that a fusion could."""

pytestmark = pytest.mark.skipif(not LISTED, reason="this vLLM names no architecture that it does not compile")


@functools.cache
def standing_in(architecture: str) -> Standing:
    """The ops of every seam, put into a model."""
    with fp8_kernel("triton:TritonFp8BlockScaledMMKernel"):
        if architecture in BUILT:
            model = build_model(BUILT[architecture], quantization_config=BLOCK)
        elif architecture in LIKE:
            model = build_like(architecture, quant=BLOCK)
        else:
            model, _ = build_default(architecture, quant=BLOCK)
    like, published = LIKE.get(architecture), {model: name for name, model in BUILT.items()}
    # A draft is loaded with the config of the model that it drafts for.
    names = (
        [published.get(like.of, like.of), type(model).__name__] if like is not None and like.draft else [architecture]
    )
    engine = uncompiled(
        "vLLM does not compile this model",
        names,
        Place(vendor="nvidia", arch="sm90"),
        [seam.fusion for seam in SEAMS],
    )
    asked = FusionConfig.parse(",".join(dict.fromkeys(seam.fusion for seam in SEAMS)), origin="the tests")
    planned = plan(registry.specs_in(model), Target.named("sm90"), asked, engine)
    compiled = CompiledModule(
        name="", model="", path="", plan=planned, around=module_index_of(model), config=None, device=torch.device("meta"), strict=False
    )  # fmt: skip
    standing = Standing(compiled=compiled, model=model, seams=SEAMS)
    standing.put_in()
    return standing


def rows_of(architecture: str) -> Iterator[str]:
    """Each role of an architecture: how many sites, how many of them the plan expects, what stands there, and the reasons of the others."""
    standing = standing_in(architecture)
    planned = standing.compiled.plan
    expected = {decision.site for decision in planned.expected()}
    for role in ROLES:
        if role in OWN_PLACE:
            continue  # whose places are behind the chains of the others, or in no class of this page
        sites = [name for name, site in planned.site.items() if site.role == role]
        if not sites:
            continue
        there = Counter(standing.stands[site] for site in sites if site in standing.stands)
        why = Counter(_why(planned, site) for site in sites if site not in standing.stands)
        what = ", ".join(f"`{fusion}` {count}" for fusion, count in sorted(there.items())) or "-"
        reasons = "; ".join(f"{count}: {reason}" for reason, count in sorted(why.items())) or "-"
        yield f"{role} | {len(sites)} | {len(expected.intersection(sites))} | {what} | {reasons}"


def _why(planned: Plan, site: str) -> str:
    """Why nothing stands at a site: what is said of its own chains, vLLM's reasons before ours."""
    reasons = [
        decision.reason
        for decision in planned.at(site)
        if not decision.fusion.startswith("all_reduce") and FUSIONS[decision.fusion].format in (None, FORMATS["group"])
    ]
    return min(reasons, key=lambda why: ("vLLM" not in why, "no residual" in why))


def unread(architecture: str, trees: list[ast.Module]) -> str:
    """What is known of an architecture that was not built, or not read."""
    if architecture in NOT_DESCRIBED:
        with pytest.raises(SpecError) as caught:
            registry.specs_in(build_like(architecture))
        return f"not read: {str(caught.value).rpartition(') ')[2].removeprefix('(ResidualSpec): ')}"
    alike = next((name for name in READ if FILES.get(name) == FILES[architecture]), None)
    layers = {
        node.name: {each.id for each in node.bases if isinstance(each, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Layer", "Block")) and "Decoder" in node.name
    }
    known = {key.partition(":")[2] for key in registry.layer_classes() if key.startswith("vllm")}
    new = sorted(name for name, bases in layers.items() if name not in known and bases.isdisjoint(known))
    if new and alike is None:
        return f"no adapter reads {', '.join(f'`{name}`' for name in new)}"
    return f"not built here; its layers are {'read' if alike is None else f'of the classes of `{alike}`'}"


def page() -> str:
    """The page of the docs."""
    placed, others = [], []
    for architecture in LISTED:
        trees = [tree for _, tree in by_hand.sources(VLLM, FILES[architecture])] if architecture in FILES else []
        hand = ", ".join(f"`{name}`" for name in by_hand.by_hand(trees)) or "-"
        if architecture in READ:
            rows, like = [*rows_of(architecture)], LIKE.get(architecture)
            same = like is not None and not like.draft and rows == [*rows_of(like.of)]
            placed += [] if same else [f"| `{architecture}` | {row} |" for row in rows]
            why = f"has the sites of `{like.of}`" if like is not None and same else "in the table above"
            for _, strange in registry.unknown_in(standing_in(architecture).model):
                why += f"; no adapter reads its `{strange.partition(' ')[0].rpartition(':')[2]}`"
        else:
            why = unread(architecture, trees)
        others.append(f"| `{architecture}` | {why} | {hand} |")
    table, names = "\n".join(placed), "\n".join(others)
    return f"""# Models that vLLM does not compile

vLLM {RELEASE} runs {len(LISTED)} architectures in breakable CUDA graphs on NVIDIA's GPUs by default, and compiles none of them. Fused ops that are asked for by
name [stand in its own layers](vllm.md#models-that-vllm-does-not-compile). These are vLLM's own classes on the meta device, at their published sizes or
at those of their default configs, with fp8 linears in blocks where vLLM takes them so, on one rank, and every fusion asked for that has a place: how many sites there are of each kind, at how many the plan expects
a fusion, what stands there, and the reason for all others. `make test-engines` puts the ops in again and compares this page.

| architecture | site | sites | expected | stands there | why not |
|---|---|---|---|---|---|
{table}

What the code of all of them fuses by hand are the functions that it calls. `python tests/engines/by_hand.py SITE-PACKAGES/vllm` shows for a
new release which of them are called no longer or as well, and which `forward` or such a function is other code:

| architecture | read | calls |
|---|---|---|
{names}
"""


of_the_page = pytest.mark.skipif(
    RELEASE.split("+")[0] not in PAGE.read_text() and not os.environ.get("UPDATE_DOCS"),
    reason="the page is of another vLLM",
)


@of_the_page
def test_every_site_stands_or_has_its_reason() -> None:
    register()
    found = page()
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(found)
    assert PAGE.read_text() == found


@pytest.mark.parametrize("architecture", READ)
def test_what_the_plan_expects_stands(architecture: str) -> None:
    register()
    standing = standing_in(architecture)
    expected = {decision.site for decision in standing.compiled.plan.expected()}
    of = LIKE[architecture].of if architecture in LIKE else architecture
    assert bool(expected) == (of not in BY_THEMSELVES), (architecture, expected)
    assert expected == set(standing.stands), "a site without an op, and without a fallback"
    assert not standing.missed


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("architecture", [name for name in LISTED if name in DEFAULTS])
def test_specs_are_what_the_config_says_and_what_the_weights_are(architecture: str, tp: int, rank: int) -> None:
    model, config = build_default(architecture, tp=tp, rank=rank)
    specs = registry.specs_in(model)
    assert registry.unknown_in(model) == []
    assert {spec.parallel for _, spec in specs} == {Parallel(size=tp, rank=rank)}
    assert {spec.hidden_size for _, spec in specs} == {config.hidden_size}
    layers = [spec for _, spec in specs if isinstance(spec, ResidualSpec)]
    mixers = [spec for _, spec in specs if not isinstance(spec, ResidualSpec | FinalNormSpec | GatedMLPSpec)]
    for several in (layers, mixers):
        assert [spec.layer_index for spec in several] == [*range(config.num_hidden_layers)]
    assert [spec.starts_stream for spec in layers] == [True, *[False] * (len(layers) - 1)]
    for path, spec in specs:
        around = model.get_submodule(path)
        for part in attrs.asdict(spec, recurse=False).values():
            for norm in part if isinstance(part, tuple) else (part,):
                if isinstance(norm, NormSpec) and not isinstance(norm, GatedNormSpec):
                    assert norm.epsilon == config.rms_norm_eps, path
                    assert tuple(around.get_submodule(norm.module).weight.shape) == (norm.width,)
        if isinstance(spec, MLASpec):
            for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                assert getattr(spec, name) == getattr(config, name), (path, name)
        if isinstance(spec, MLASpec | GQASpec):
            assert (spec.num_heads, spec.num_local_heads * tp) == (config.num_attention_heads,) * 2
        if isinstance(spec, GQASpec):
            groups = getattr(config, "num_attention_groups", None) or config.num_key_value_heads
            width = config.head_dim or config.hidden_size // config.num_attention_heads
            assert (spec.num_kv_heads, spec.head_dim) == (groups, width)
        for linear, side, width, local_width in linears_of(spec):
            assert misfit(linear, side, width, local_width, tp) is None, path
            weight = around.get_submodule(linear.path).weight
            assert (linear.local_out_features, linear.local_in_features) == tuple(weight.shape)


def test_every_class_that_is_declared_is_one_of_vllms() -> None:
    """A misspelt declaration would never be noticed otherwise."""
    with kernels():
        for recipe in DEFAULTS.values():  # whose own imports go in a circle
            import_model(recipe.model_class)
        for key, owner in registry.layer_classes().items():
            if owner == "vllm_uncompiled":
                assert isinstance(import_model(key), type)


def test_what_reads_a_norm_is_found() -> None:
    """Of those whose norms the model calls by themselves."""
    for architecture in ("AliceAIForCausalLM", "HYV4ForCausalLM", "MiniMaxM3SparseForCausalLM", "Step5ForCausalLM"):
        model, _ = build_default(architecture)
        assert norms_that_feed_nothing(model) <= {"HYV4MLAAttention.kv_a_layernorm"}, architecture


@of_the_page
def test_what_the_models_do_by_hand_is_as_recorded() -> None:
    found = by_hand.read(VLLM)
    if os.environ.get("UPDATE_DOCS"):
        by_hand.main(str(VLLM), "--write")
    assert by_hand.differences(json.loads(by_hand.RECORD.read_text()), found) == []


def test_what_another_release_does_is_shown(tmp_path: Path) -> None:
    model = f"{VLLM}/models/minimax_m3/nvidia/model.py"
    for file in (f"{VLLM}/config/vllm.py", f"{VLLM}/model_executor/models/registry.py", model):
        to = tmp_path / Path(file).relative_to(VLLM)
        to.parent.mkdir(parents=True)
        shutil.copy(file, to)
    used = tmp_path / "model_executor/layers/fused_allreduce_gemma_rms_norm.py"
    used.parent.mkdir()
    shutil.copy(VLLM / "model_executor/layers" / used.name, used)

    def known() -> by_hand.Read:
        trees = {"vllm.models.minimax_m3": tmp_path / "models/minimax_m3"}
        with mock.patch.object(by_hand, "listed", return_value=["MiniMaxM3SparseForCausalLM"]):
            assert all(each.exists() for each in trees.values())
            return by_hand.read(tmp_path)

    before, place = known(), tmp_path / Path(model).relative_to(VLLM)
    text = place.read_text()
    place.write_text(
        text.replace("hidden_states, residual, self.input_layernorm\n", "hidden_states, residual, self.other\n")
    )
    used.write_text(used.read_text().replace("if tp_size == 1:", "if tp_size < 2:"))
    m3 = "vllm.models.minimax_m3: "
    assert by_hand.differences(before, known()) == [
        f"{m3}model_executor/layers/{used.name}:fused_allreduce_gemma_rms_norm is other code",
        f"{m3}models/minimax_m3/nvidia/model.py:MiniMaxM3DecoderLayer.forward is other code",
    ]
    place.write_text(text.replace("fused_allreduce_gemma_rms_norm", "fused_reduce"))
    found = by_hand.differences(before, known())
    assert {f"{m3}fused_reduce is there now", f"{m3}fused_allreduce_gemma_rms_norm is gone"} <= {*found}


@functools.cache
def called_in(module: str) -> tuple[set[str], set[str]]:
    """The functions that the files of a module call, and the modules of models that they import from."""
    called, others = set[str](), set[str]()
    for _, tree in by_hand.sources(VLLM, module):
        called |= by_hand.calls(tree)
        others |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return called, {name for name in others if name.startswith(("vllm.models.", "vllm.model_executor.models."))}


def test_what_is_said_of_the_code_of_a_model_is_called_there() -> None:
    """Each function that a row of `CODE` names, in the files of each of its architectures or in those that these import."""
    for row in native_fusions.CODE:
        names = set(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+", row.by))
        for architecture in row.architectures:
            called, others = called_in(FILES[architecture])
            assert names and names <= called.union(*(called_in(other)[0] for other in others)), (architecture, row.by)
