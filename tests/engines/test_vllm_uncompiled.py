"""The architectures that vLLM runs uncompiled on NVIDIA's GPUs: where fused ops stand in them, and what their own code fuses.

Real classes on the meta device, with fp8 linears in blocks and the ops put in as at a start. What is not read is named from vLLM's source. Run
by `make test-engines`; `UPDATE_DOCS=1` writes the page, and a new release shows there what its models do in another way.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm_layers")
from vllm_layers import build_model, fp8_kernel  # isort: skip  (before vllm)
import torch
import vllm
from test_vllm_specs import BLOCK
from vllm.config import vllm as config
from vllm.model_executor.models.registry import _VLLM_MODELS

from layerfuse import registry
from layerfuse.engines.compiled_module import CompiledModule
from layerfuse.engines.standing import Standing
from layerfuse.engines.vllm import register
from layerfuse.engines.vllm.native_fusions import Place, uncompiled
from layerfuse.engines.vllm.seams import SEAMS
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.catalog import FUSIONS
from layerfuse.fusion.formats import FORMATS
from layerfuse.fusion.live_plan import module_index_of
from layerfuse.fusion.planning import Plan
from layerfuse.fusion.sites import ROLES

PAGE = Path(__file__).parents[2] / "docs" / "vllm-uncompiled.md"
RELEASE = importlib.metadata.version("vllm")
LISTED = sorted(getattr(config, "DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES", ()))
BUILT = {
    "DeepseekV32ForCausalLM": "deepseek-v3.2",
    "GlmMoeDsaForCausalLM": "glm-5",
    "KimiK3ForConditionalGeneration": "kimi-k3",
    "KimiLinearForCausalLM": "kimi-linear",
}
"""Those with an entry of models.toml -> the model of `MODELS`."""

pytestmark = pytest.mark.skipif(not LISTED, reason="this vLLM names no architecture that it does not compile")


def standing_in(architecture: str) -> Standing:
    """The ops of every seam, put into a model."""
    with fp8_kernel("triton:TritonFp8BlockScaledMMKernel"):
        model = build_model(BUILT[architecture], quantization_config=BLOCK)
    engine = uncompiled("", [architecture], Place(vendor="nvidia", arch="sm90"), [seam.fusion for seam in SEAMS])
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
    return min(reasons, key=lambda why: ("vLLM" not in why, "residual" in why))


def sources_of(architecture: str) -> list[ast.Module]:
    """The files of vLLM that define an architecture, but for AMD's and Intel's."""
    file, _ = _VLLM_MODELS[architecture]
    root = Path(vllm.__file__).parent
    place = root.joinpath(*file.split(".")[1:]) if file.startswith("vllm.") else root / "model_executor/models" / file
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [ast.parse(each.read_text()) for each in files if not {"amd", "xpu", "third_party"} & {*each.parts}]


def by_hand(trees: list[ast.Module]) -> list[str]:
    """The functions that fuse something and are called there, by their names."""
    called = {
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and "self" not in {each.id for each in ast.walk(node.func) if isinstance(each, ast.Name)}
    }
    return sorted(name for name in called if name.startswith(("fused_", "maybe_fused")) and "_moe_" not in name)


def unread(architecture: str, trees: list[ast.Module]) -> str:
    """Why nothing is planned in an architecture that was not built."""
    layers = [
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Layer", "Block")) and "Decoder" in node.name
    ]
    known = {key.partition(":")[2] for key in registry.layer_classes() if key.startswith("vllm:")}
    new = sorted(set(layers) - known)
    if new:
        return f"no adapter reads {', '.join(f'`{name}`' for name in new)}"
    return "its layers are read; it was not built here" if layers else "built on the classes of another architecture"


def page() -> str:
    """The page of the docs."""
    placed, others = [], []
    for architecture in LISTED:
        trees = sources_of(architecture) if architecture in _VLLM_MODELS else []
        hand = ", ".join(f"`{name}`" for name in by_hand(trees)) or "-"
        if architecture in BUILT:
            placed += [f"| `{architecture}` | {row} |" for row in rows_of(architecture)]
        why = "in the table above" if architecture in BUILT else unread(architecture, trees)
        others.append(f"| `{architecture}` | {why} | {hand} |")
    rows, names = "\n".join(placed), "\n".join(others)
    return f"""# Models that vLLM does not compile

vLLM {RELEASE} runs {len(LISTED)} architectures in breakable CUDA graphs on NVIDIA's GPUs by default, and compiles none of them. Fused ops that are asked for by
name [stand in its own layers](vllm.md#models-that-vllm-does-not-compile). These are vLLM's own classes at their published sizes on the meta device,
with fp8 linears in blocks, on one rank, and every fusion asked for that has a place: how many sites there are of each kind, at how many the plan expects
a fusion, what stands there, and the reason for all others. `make test-engines` puts the ops in again and compares this page.

| architecture | site | sites | expected | stands there | why not |
|---|---|---|---|---|---|
{rows}

Where no adapter reads the layers nothing is planned. What the code of all of them fuses by hand are the functions that it calls:

| architecture | read | calls |
|---|---|---|
{names}
"""


@pytest.mark.skipif(
    RELEASE.split("+")[0] not in (PAGE.read_text() if PAGE.exists() else RELEASE), reason="the page is of another vLLM"
)
def test_every_site_stands_or_has_its_reason() -> None:
    register()
    found = page()
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(found)
    assert PAGE.read_text() == found


@pytest.mark.parametrize("architecture", [name for name in LISTED if name in BUILT])
def test_what_the_plan_expects_stands(architecture: str) -> None:
    register()
    standing = standing_in(architecture)
    expected = {decision.site for decision in standing.compiled.plan.expected()}
    assert expected
    assert expected == set(standing.stands), "a site without an op, and without a fallback"
    assert not standing.missed
