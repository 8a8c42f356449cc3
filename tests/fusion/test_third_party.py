"""A fusion from another package: the package of docs/adding-a-fusion.md is installed by pip, and everything knows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from layerfuse.fusion import FUSIONS
from layerfuse.fusion.catalog import built_in, clash
from layerfuse.fusion.catalog import canonical as canonical_names
from layerfuse.fusion.declare import Kernel, OpError
from layerfuse.fusion.formats import FORMATS
from layerfuse.fusion.kernel_source import why_absent

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "docs"))
from doc_blocks import blocks_of  # noqa: E402
from helpers import outside_package, run_copy, run_python  # noqa: E402

NAME, TIMES = "example_silu_mul", "example_add_rms_norm_times"
PAGE = blocks_of((ROOT / "docs" / "adding-a-fusion.md").read_text())
OP_BY_OP = """
import json, os, sys, torch
torch.set_num_threads(1)
import torch._inductor.compile_fx as inductor
inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
said = {}
"""


def said_by(code: str, *paths: Path) -> dict[str, Any]:
    """What code puts into `said`, in a process that finds these packages and compiles without generated code."""
    done = run_copy(f"{OP_BY_OP}{code}\nprint('SAID ' + json.dumps(said))", *paths, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.rpartition("SAID ")[2])
    return said


def pip_install(source: Path, target: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
            *("--disable-pip-version-check", "--target", str(target), str(source)),
        ],
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's package, written as an author would and installed into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "template", tmp_path_factory.mktemp("site")
    template = [sys.executable, str(ROOT / "docs" / "template.py"), str(source)]
    done = subprocess.run(template, check=True, capture_output=True, text=True)
    assert {str(Path(line).relative_to(source)): Path(line).read_text() for line in done.stdout.splitlines()} == {
        block.title: block.code for block in PAGE if block.title
    }
    again = subprocess.run(template, check=False, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (1, f"{source}: File exists\n")
    pip_install(source, target)
    return target


EVERYTHING = """
exec({page!r})
said |= {{"plan": fusion.plan(specs, gfx950).concerns({name!r}), "report": str(fused.report)}}
said["key"] = fusion.Pipeline(fusion.plan([("", spec)], gfx950)).uuid()
with torch.no_grad():
    audit = fused.audit(x)
    fused(torch.randn(2, 4, 64))  # compiled again, for any sizes
    said["any sizes"] = fused.report.of({name!r}).matched
said["audit"] = [audit.fusions[{name!r}].profiled, audit.fusions[{name!r}].counted]

class Loses(MLP):
    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

class NoProduct(MLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) + self.up_proj(x))

for kind, path in ((Loses, ""), (NoProduct, "elsewhere")):
    torch._dynamo.reset()
    lost = fusion.compile(kind(), specs=[(path, spec)])
    with torch.no_grad():
        lost(x)
    said[kind.__name__] = str(lost.report)

from layerfuse.engines.vllm.releases import engine_of
sm90 = fusion.Target.named("sm90")
vllm = engine_of(("DeepseekV3ForCausalLM",), target=sm90, ranks=8, release="0.33.0")
inside = fusion.plan(specs, sm90, fusion.FusionConfig.parse("+{name},+add_rms_norm"), vllm)
of = [inside.expected({name!r}), inside.not_applicable({name!r}), inside.expected("add_rms_norm")]
said["in vLLM"] = [[each.site for each in decisions] for decisions in of], of[1][0].reason
from layerfuse import bench, doctor
said["doctor"] = {{found.name: found.detail for found in doctor.diagnose().findings if found.name.startswith("fusions of layerfuse-example")}}
said["bench"] = bench.markdown(bench.run({name!r}, model="deepseek-v3", tokens=[1], quick=True, peers=["layerfuse", "eager"]))
said["op"] = ops.example_silu_mul.__doc__
with torch.no_grad():
    audit = scaled.audit(*rows)
said["own step"] = [audit.fusions[{times!r}].profiled, audit.fusions[{times!r}].counted]
said["elsewhere"] = [len(fusion.plan(specs, gfx950, fusion.FusionConfig.parse(how)).expected({times!r})) for how in ("", "all", {times!r})]
"""


def test_it_is_known_everywhere(site: Path) -> None:
    page = "".join(block.code for block in PAGE if block.language == "python" and not block.title)
    said = said_by(EVERYTHING.format(page=page, name=NAME, times=TIMES), site)
    assert said["plan"] and said["key"].startswith("layerfuse-")
    assert f"{NAME}: 1 expected, 1 matched" in said["report"]
    assert said["any sizes"] == ["activation"] and said["audit"] == [1, 1]
    assert "neither of which is silu of a gate" in said["Loses"]
    assert "its chain is in none of the 1 compiled graph" in said["NoProduct"]
    (dense, experts, stream), why = said["in vLLM"]
    assert dense == [f"layers.{layer}.dense:activation" for layer in range(3)]
    assert len(experts) == 58 and "moe_forward_shared" in why, "no graph shows a mixture's shared experts"
    assert sum(site.endswith(":post_attention") for site in stream) == 61, "the norm in front of them is in the graph"
    each_gives = {"example": NAME, "example_times": TIMES, "layer_norm": "add_layer_norm"}
    assert said["doctor"] == {
        f"fusions of layerfuse-example ({point})": f"known: {name}" for point, name in each_gives.items()
    }
    assert said["own step"] == [1, 1]
    assert said["elsewhere"] == [0, 0, 1], "it is expected of no model that does not name it"
    assert NAME in said["bench"] and "layerfuse (reference)" in said["bench"] and "`silu(gate) * up`" in said["op"]


def test_the_template_is_declared_without_torch(site: Path) -> None:
    """A plan with it takes no time for that, and has all of it where there is none."""
    code = "from layerfuse.fusion import FUSIONS, formats; print([f.name for f in FUSIONS.values() if f.entry_point], 'int8' in formats.FORMATS)"
    done = run_python(f"import sys; sys.modules['torch'] = None; {code}", site)
    assert done.stdout == f"{[NAME, TIMES, 'add_layer_norm']} True\n", done.stderr


def test_the_template_keeps_its_contracts(site: Path, tmp_path: Path) -> None:
    """By the test file that the page shows."""
    (test,) = (block for block in PAGE if block.title == "test_layerfuse_example.py")
    (tmp_path / test.title).write_text(test.code)
    done = run_copy(
        f"import pytest; pytest.main(['-q', '-p', 'no:randomly', '-p', 'no:cacheprovider', '-o', 'addopts=', {str(tmp_path)!r}])",
        site,
    )
    assert re.search(r"^20 passed", done.stdout, re.MULTILINE), done.stdout[-3000:] + done.stderr


STEP = """
x = torch.randn(2, 4, 64)
with torch.inference_mode():
    torch.compile(torch.nn.RMSNorm(64))(x)
torch._dynamo.reset()
for site in SITES:  # a process each, behind what torch imports and sets up when it first compiles
    if os.fork():
        os.wait()
    else:
        sys.path.insert(0, site)
        break
else:
    sys.exit()
from layerfuse import FinalNormSpec, NormSpec, Parallel, fusion
norm = NormSpec(width=64, epsilon=1e-6, weight_offset=0.0)
final = FinalNormSpec(hidden_size=64, layer_index=1, parallel=Parallel(size=1, rank=0), final_norm=norm)
config = fusion.FusionConfig(switches={"example_add_rms_norm_times": True})
plan = fusion.plan([("", final)], fusion.Target.named("cpu"), config)
said = {"key": fusion.Pipeline(plan).uuid(), "plan": [str(each) for each in plan.decisions if each.fusion == "example_add_rms_norm_times"]}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(64, eps=1e-6)

    def forward(self, x, residual):
        return self.norm(x + residual) * 0.25

fused = fusion.compile(Model(), specs=[("", final)], config=config)
with torch.inference_mode():
    fused(*x)
said["report"] = str(fused.report)
print("SAID " + json.dumps(said), flush=True)
os._exit(0)  # to take all of torch down takes longer
"""
CHANGED = {
    "as it is": ("times a number", "times a number"),
    "another bind": ("bound.nodes.append(product)", "bound.nodes += [product]"),
    "bind raises": ("(product,) = readers", "(product,) = readers[5]"),
    "no result": ('bound.outs["scaled"] = product', "pass"),
    "its own input": ('bound.outs["scaled"] = product', 'bound.outs["scaled"] = bound.result'),
    "another shape": ('bound.outs["scaled"] = product', 'bound.outs["scaled"] = bound.use.norms[0].weight'),
    "why_not raises": ("    def why_not(self, at):\n        return None", "    def why_not(self, at):\n        return at.nothing"),
}  # fmt: skip


def test_what_a_step_does_is_in_the_key_and_what_it_raises_stops_nobody(site: Path, tmp_path: Path) -> None:
    for name, (before, after) in CHANGED.items():
        shutil.copytree(site, tmp_path / name)
        file = tmp_path / name / "layerfuse_example_times.py"
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
    beside = ("NUMBER = 1", "NUMBER = 2")
    for number in beside:  # a package, in which the step's file imports another
        shutil.copytree(site, tmp_path / number)
        folder = tmp_path / number / "layerfuse_example_times"
        folder.mkdir()
        folder.with_suffix(".py").rename(folder / "__init__.py")
        (folder / "beside.py").write_text(number)
    cases = (*CHANGED, *beside)
    sites = [str(tmp_path / name) for name in cases]
    done = run_copy(f"{OP_BY_OP}SITES = {sites!r}\n{STEP}", CUDA_VISIBLE_DEVICES="")
    lines = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(lines) == len(cases), done.stderr[-3000:]
    said = dict(zip(cases, map(json.loads, lines), strict=True))
    assert len({each["key"] for each in said.values()}) == len(cases)
    for name in ("as it is", "another bind", *beside):
        assert f"{TIMES}: 1 expected, 1 matched" in said[name]["report"]
    for name, part in (("bind raises", "report"), ("why_not raises", "plan")):
        assert "of layerfuse-example raised" in str(said[name][part])
        assert "add_rms_norm: 1 expected, 1 matched" in said["why_not raises"]["report"]
    for name, why in {
        "bind raises": "Times of layerfuse-example raised",
        "no result": "Times of layerfuse-example does not say what scaled takes the place of",
        "its own input": "Times of layerfuse-example does not say what scaled takes the place of",
        "another shape": "scaled is torch.float32 (4, 64), and",
    }.items():
        assert "0 matched, 1 refused" in said[name]["report"] and why in said[name]["report"]


LAYER_NORM = """
import transformers
from layerfuse import fusion
from layerfuse_layer_norm import specs_of
ids = torch.arange(8).reshape(1, 8)
torch.manual_seed(0)
config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config).eval()
for block in (*model.transformer.h, model.transformer):  # weights and biases that count
    for norm in block.children():
        if isinstance(norm, torch.nn.LayerNorm):
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
fused = fusion.compile(model, specs=specs_of(model), strict=True)
with torch.no_grad():
    wanted, got = (each(ids, use_cache=False).logits for each in (model, fused))
    audit = fused.audit(ids, use_cache=False)
said["close"] = float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5
said["ran"] = [len(fused.report.of("add_layer_norm").matched), audit.fusions["add_layer_norm"].profiled]
plan = fusion.plan(specs_of(model), fusion.Target.named("cpu"))
said["plan"] = [str(d) for d in plan.at("transformer:final") if d.fusion in ("add_rms_norm", "add_layer_norm")]
"""


def test_a_package_brings_a_kind_of_norm_and_its_step(site: Path) -> None:
    said = said_by(LAYER_NORM, site)
    assert said["close"] and said["ran"] == [4, 4]
    assert said["plan"] == [
        "transformer:final: add_rms_norm: not applicable: the norm is no RMSNorm: ExampleLayerNormSpec",
        "transformer:final: add_layer_norm: expected: the residual add and layer_norm(64, epsilon 1e-05) are one launch on cpu",
    ]


def test_verify_counts_what_a_package_brings(site: Path) -> None:
    code = """
from layerfuse import registry, verify
verify.TOLERANCES = {"float32": 1e-5}
found = verify.verify(registry.model("deepseek-v3"), device="cpu")
said = [found.problems, found.fusions]
"""
    problems, fusions = said_by(code, site)
    assert problems == []
    assert fusions[NAME]["matched"] == ["model.layers.0.mlp:activation", "model.layers.1.mlp:activation"]
    assert fusions[NAME]["executed"] == 2
    assert fusions["add_layer_norm"]["not_applicable"]["model:final"] == "the norm is no LayerNorm"


ROLE = """
from role_package import KVLatentSpec
from layerfuse import NormSpec, Parallel, fusion

class Attention(torch.nn.Module):
    def __init__(self, epsilon):
        super().__init__()
        self.kv_a_layernorm = torch.nn.RMSNorm(32, eps=epsilon)
        self.kv_b_proj = torch.nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.kv_b_proj(self.kv_a_layernorm(x))

norm = NormSpec(width=32, epsilon=1e-6, weight_offset=0.0, module="kv_a_layernorm")
spec = KVLatentSpec(hidden_size=64, layer_index=0, parallel=Parallel(size=1, rank=0), kv_norm=norm)
x = torch.randn(3, 32)
with torch.no_grad():
    for epsilon in (1e-6, 1e-5):
        torch._dynamo.reset()
        fused = fusion.compile(Attention(epsilon), specs=[("", spec)], strict=True)
        try:
            torch.testing.assert_close(fused(x), fused.original(x))
            found = fused.audit(x).fusions["kv_latent_norm"]
            said["ran"] = [fused.report.of("kv_latent_norm").matched, found.profiled, found.counted]
        except fusion.FusionMissedError as error:
            said["strict"] = str(error)
config = fusion.FusionConfig(level=2, quant={"kv_latent": fusion.ActivationQuant()})
said["plan"] = [str(each) for each in fusion.plan([("attn", spec)], fusion.Target.named("h100"), config).decisions]
"""
ROLE_PACKAGE = """
from layerfuse import NormSpec
from layerfuse.fusion.chain import quantised
from layerfuse.fusion.sites import OwnSites, Role, Site

KV_LATENT = Role("kv_latent", 1, "the norm of a key/value latent alone")

@attrs.frozen(kw_only=True)
class KVLatentSpec(OwnSites):
    kv_norm: NormSpec

    def sites(self, layer):
        return (Site(layer=layer, role=KV_LATENT.name, norms=(self.kv_norm,), spec=self),)

FUSION = [
    Fusion(name="kv_latent_norm", doc="mine", level=1, roles=(KV_LATENT,), chain=(Norm,)),
    *quantised(name="kv_latent_norm_{}_quant", doc="mine, in {}", formats=["token"], roles=[KV_LATENT], chain=(Norm,)),
]
"""


def test_a_package_brings_a_kind_of_layer_and_its_role(tmp_path: Path) -> None:
    """A single latent norm, which is at no role of the library."""
    write_package(tmp_path, "role_package", ROLE_PACKAGE)
    said = said_by(ROLE, tmp_path)
    assert said["ran"] == [["kv_latent"], 1, 1]
    assert "kv_latent_norm was expected" in said["strict"]
    assert said["plan"] == [
        "attn:kv_latent: kv_latent_norm: fallback: kv_latent_norm_per_token_quant is tried first at the same operations; this stands where it is missed",
        "attn:kv_latent: kv_latent_norm_per_token_quant: expected: rms_norm(32, epsilon 1e-06) is one launch on sm90, in e4m3fn with one scale per token",
    ]


def test_a_role_is_known_where_only_its_entry_point_says_it(tmp_path: Path) -> None:
    """The package's specs are imported without its fusions."""
    write_package(tmp_path, "role_package", ROLE_PACKAGE)
    code = """
import attrs
from layerfuse import Parallel, fusion
from layerfuse.adapters.specs import NormSpec
from layerfuse.fusion.sites import OwnSites, Site
@attrs.frozen(kw_only=True)
class Spec(OwnSites):
    def sites(self, layer):
        norm = NormSpec(width=32, epsilon=1e-6, weight_offset=0.0, module="norm")
        return (Site(layer=layer, role="kv_latent", norms=(norm,), spec=self),)
spec = Spec(hidden_size=64, layer_index=0, parallel=Parallel(size=1, rank=0))
print(*fusion.plan([("attn", spec)], fusion.Target.named("cpu")).sites)
"""
    done = run_python(code, tmp_path)
    assert done.stdout == "attn:kv_latent\n", done.stderr[-2000:]


def test_the_command_line_knows_it(site: Path) -> None:
    code = "from layerfuse.cli import main; main()"
    done = run_python(
        f"import sys; sys.argv = ['layerfuse', 'plan', 'deepseek-v3']; {code}",
        site,
    )
    assert re.search(rf"^{NAME} +61 +61 ", done.stdout, re.MULTILINE), done.stdout + done.stderr


FORMAT = """
import attrs
from layerfuse import bench, doctor, fusion, registry
from stream_support import Stream, rows, stream_spec
from generate import format_table
NAME = "add_rms_norm_int8_quant"
said["fusions"] = [name for name, each in fusion.FUSIONS.items() if "int8" in name]
from layerfuse.fusion import ops
said["doc"], said["schema"] = ops.add_rms_norm_int8_quant.__doc__, str(torch.ops.layerfuse.add_rms_norm_int8_quant.default._schema)
quant = fusion.ActivationQuant.parse("int8")
config = fusion.FusionConfig(level=2, quant=quant)
sm90 = fusion.Target.named("sm90")
entry = registry.model("deepseek-v3")
said["planned"] = len(fusion.plan(entry.specs(), sm90, config).expected(NAME))
published = attrs.evolve(entry.quant["fp8"], weight="int8", scheme="channel", block=None, activation="int8")
w8a8 = attrs.evolve(entry, quant={"int8": published})
planned = fusion.plan(w8a8.specs(published=True), sm90, fusion.FusionConfig(level=2))
said["published"] = [len(planned.expected(name)) for name in (NAME, "add_rms_norm_per_token_quant")]

x, residual = rows()
def and_itself(quantise):
    return lambda normed: (*quantise(normed), normed)

module = Stream(torch.ops.layerfuse.quantise_int8)
kept = Stream(and_itself(torch.ops.layerfuse.quantise_int8))
lost = Stream(torch.ops.layerfuse.quantise_mxfp8)
with torch.no_grad():
    eager = module(x, residual)
    fused = fusion.compile(module, specs=[("", stream_spec())], config=config)
    values, scales, total = fused(x, residual)
    audit = fused.audit(x, residual)
    said["report"] = [fused.report.of(NAME).matched, audit.fusions[NAME].profiled, audit.fusions[NAME].counted]
    said["dtypes"] = [str(values.dtype), str(scales.dtype), list(scales.shape)]
    said["close"] = float((values.float() * scales - eager[0].float() * eager[1]).abs().max() / scales.max())
    torch._dynamo.reset()
    both = fusion.compile(kept, specs=[("", stream_spec())], config=config)
    both(x, residual)
    said["with norm"] = [use.form for graph in both.report.records for use in graph.uses if use.form]
    torch._dynamo.reset()
    missed = fusion.compile(lost, specs=[("", stream_spec())], config=config)
    missed(x, residual)
    said["lost"] = missed.report.of(NAME).missed["input"]

result = bench.run(NAME, model="deepseek-v3", tokens=[3], quick=True, peers=["layerfuse", "eager"])
said["bench"] = [(one.peer, one.verdict, one.message) for row in result.rows for one in row.measured]
said["markdown"] = bench.markdown(result)
said["doctor"] = [found.detail for found in doctor.diagnose().findings if found.name.startswith("formats of ")]
said["table"] = [line for line in format_table() if "int8" in line]
"""


def test_a_format_is_one_object(site: Path) -> None:
    """int8 of the page: chains, ops, plans, graphs, reports, bench, doctor and docs have it, and no file of the library names it."""
    said = said_by(FORMAT, site, HERE, ROOT / "docs")
    forms = [f"{chain}_int8_quant{kept}" for chain in ("add_rms_norm", "rms_norm") for kept in ("", "_with_norm")]
    assert said["fusions"] == forms[::2]
    assert said["schema"].endswith("float epsilon, float weight_offset) -> (Tensor, Tensor, Tensor)")
    assert "quantised (int8 with one scale per token)" in said["doc"] and "values: in int8" in said["doc"]
    assert said["planned"] > 100 and said["published"] == [said["planned"], 0]
    assert said["report"] == [["input"], 1, 1]
    assert said["dtypes"] == ["torch.int8", "torch.float32", [5, 1]] and said["close"] <= 1.5
    assert said["with norm"] == [forms[1]]
    assert "the graph quantises to mxfp8, the plan says int8" in said["lost"]
    assert [verdict for _, verdict, _ in said["bench"]] == ["ok"] * len(said["bench"]) != [], said["bench"]
    assert "to int8" in said["markdown"]
    assert said["doctor"] == ["known: int8"]
    assert len(said["table"]) == 1


WRONG_FORMATS = {
    "absent": ("INT8 = attrs.evolve(mine, reference='formats_absent:quantize')", "formats_absent has no 'quantize'; did you mean 'quantise' or 'Quantised'? Fix"),
    "dtype": ("INT8 = attrs.evolve(mine, results=(Quantised(name='', of='', dtype='int4'),))", "the first result of mine is Quantised, of a dtype among "),
    "fp8": ("INT8 = attrs.evolve(mine, options=('dtype',))", "mine has a scheme or options of plain fp8; its own may be scale, global_scale, swizzled"),
    "named": ("INT8 = attrs.evolve(mine, word='per_row', scheme='per_row')", "ActivationQuant.fixed: expected None or a format's name"),
    "number": ("INT8 = 3", "expected a Format, got 3"),
    "raises": ("raise OSError('no such library')", "reading it raised OSError: no such library"),
    "taken": ("INT8 = attrs.evolve(mine, word='mxfp8', scheme='mxfp8')", "layerfuse has a format called 'mxfp8' already"),
    "three": ("INT8 = attrs.evolve(mine, results=(*mine.results, mine.results[-1]))", "the second result of mine is Scales, Exponents or SmallScales"),
}  # fmt: skip


def test_a_format_that_cannot_be_used_is_named_and_refused_alone(tmp_path: Path) -> None:
    before = """
import attrs
from layerfuse.fusion.declare import Quantised, Scales
from layerfuse.fusion.formats import Format
values, scales = Quantised(name="", of="", dtype="int8"), Scales(name="", of="")
mine = Format(word="mine", says="mine", results=(values, scales), reference=f"{__name__}:quantise")
def quantise(values): ...
"""
    for name, (code, _) in {**WRONG_FORMATS, "usable": ("INT8 = mine", "")}.items():
        (tmp_path / f"formats_{name}.py").write_text(f"{before}{code}\n")
    info = tmp_path / "formats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: formats\nVersion: 1.0\n")
    points = [f"{name} = formats_{name}:INT8\n" for name in (*WRONG_FORMATS, "usable")]
    (info / "entry_points.txt").write_text("[layerfuse.formats]\n" + "".join(points))
    code = """
import json, sys
from layerfuse.fusion.formats import FORMATS
print(json.dumps([list(FORMATS), {name: why for (name, _), why in FORMATS.refused.items()}, "torch" in sys.modules]))
"""
    done = run_python(code, tmp_path)
    known, refused, has_torch = json.loads(done.stdout)
    assert known == [*FORMATS, "mine"]
    assert refused.keys() == WRONG_FORMATS.keys() and not has_torch
    for name, (_, why) in WRONG_FORMATS.items():
        assert refused[name].startswith(f"entry point {name!r} of formats: ") and why in refused[name], refused[name]
        assert f"RuntimeWarning: {refused[name]}" in done.stderr


DECLARES = """
import attrs
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.catalog.add_rms_norm import FUSIONS as BUILT_IN
from layerfuse.fusion.chain import Add, Fusion, Norm
from layerfuse.fusion.declare import Kernel
from layerfuse.fusion.sites import FINAL

def mine(name, *kernels, **words):
    made = Fusion(name=name, doc="mine", level=1, roles=(FINAL,), chain=(Add, Norm))
    return attrs.evolve(made, backends=kernels, **words)
"""
BROKEN = {
    "raises": ("raise OSError('no such library')", "reading it raised OSError: no such library"),
    "exits": ("raise SystemExit(3)", "reading it raised SystemExit: 3"),
    "breaks": ("class Odd(list):\n    def __iter__(self):\n        raise SystemExit(3)\nFUSION = Odd()", "reading it raised SystemExit: 3"),
    "number": ("FUSION = 3", "expected a Fusion or a list of them, got 3"),
    "takes_a_name": ("FUSION = BUILT_IN[0]", "two fusions are called 'add_rms_norm': one of layerfuse, one of takes-a-name"),
    "takes_an_op": ("FUSION = mine('mine', op=mine('add_rms_norm').op)", "two ops are called 'add_rms_norm': that of add_rms_norm (layerfuse) and that of mine (takes-an-op)"),
    "takes_a_canonical_op": ("FUSION = mine('rms_norm')", "two ops are called 'rms_norm': one of layerfuse, one of takes-a-canonical-op"),
    "takes_an_mla_op": ("FUSION = mine('mla_query_rope')", "two ops are called 'mla_query_rope': one of layerfuse"),
    "adds_a_kernel": ("FUSION = attrs.evolve(BUILT_IN[0], name='faster', backends=(Kernel(backend='cuda', function='a:b'),))", "a kernel of faster: there is no module a, which a:b names"),
    "adds_its_kernel": ("def f(*args): ...\nFUSION = attrs.evolve(BUILT_IN[0], name='faster', backends=(Kernel(backend='cuda', function='adds_its_kernel:f'),))", "faster (adds-its-kernel) has other kernels for the op of add_rms_norm (layerfuse), which has its own"),
    "names_the_reference": ("FUSION = mine('r', Kernel(backend='reference', function='a:b'))", "OpError: kernel of backend 'reference': every op has its own reference"),
    "mistypes": ("FUSION = mine('m', Kernel(backend='tritn', function='a:b'))", "OpError: kernel of backend 'tritn': no backend is called that; did you mean 'triton'? (known: triton, aiter, symm_mem"),
    "twice": ("k = Kernel(backend='cuda', function='twice:mine')\nFUSION = mine('t', k, k)", "FusionError: backends: two kernels of backend 'cuda'; an op has one of each"),
    "no_kernel": ("FUSION = mine('n', 'triton')", "FusionError: backends: expected kernels"),
    "lacks_a_function": ("def kernel(x):\n    return x\nFUSION = mine('l', Kernel(backend='cuda', function='lacks_a_function:kernl'))", "a kernel of l: lacks_a_function has no 'kernl'; did you mean 'kernel'"),
    "lacks_a_rule": ("def kernel(*x):\n    return x\nFUSION = mine('l', Kernel(backend='cuda', function='lacks_a_rule:kernel', refuses='lacks_a_rule:rule'))", "a kernel of l: lacks_a_rule has no 'rule'"),
    "pads_too": ("def kernel(x, residual, weight, epsilon, offset):\n    return x\nFUSION = mine('p', Kernel(backend='cuda', function='pads_too:kernel'), pads=True)", "a kernel of p: pads_too:kernel takes (x, residual, weight, epsilon, offset), and (x, residual, weight, epsilon, weight_offset, padded_width) is passed to it"),
    "takes_others": ("def kernel(x, weight):\n    return x\nFUSION = mine('o', Kernel(backend='cuda', function='takes_others:kernel'))", "a kernel of o: takes_others:kernel takes (x, weight), and (x, residual, weight, epsilon, weight_offset) is passed to it"),
    "torch_says_no": ("FUSION = mine('n', op=attrs.evolve(mine('no').op, name='größe'))", "its ops cannot be registered: "),
    "first_of_two": ("FUSION = [mine('alone'), mine('both')]", "two fusions are called 'both': one of second-of-two, one of first-of-two"),
    "second_of_two": ("FUSION = mine('both')", "two fusions are called 'both': one of first-of-two, one of second-of-two"),
}  # fmt: skip
"""Module -> its code behind `DECLARES`, and what is said of it."""

GOOD = """
def kernel(x, residual, weight, epsilon, weight_offset):
    return x, residual
FUSION = mine('good', Kernel(backend='cuda', function='good:kernel'))
"""


def write_package(site: Path, module: str, code: str) -> None:
    (site / f"{module}.py").write_text(DECLARES + code)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[layerfuse.fusions]\nmine = {module}:FUSION\n")


@pytest.fixture(scope="module")
def beside_broken_ones(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """What is said, and what works, where all of these are installed at once: the warnings, and answers of the library."""
    site = tmp_path_factory.mktemp("broken")
    for module, (code, _) in BROKEN.items():
        write_package(site, module, code)
    write_package(site, "good", GOOD)
    code = (
        "import json, sys, warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    from layerfuse.fusion import FUSIONS\n"
        "    known, torch = list(FUSIONS), 'torch' in sys.modules\n"
        "    from layerfuse.fusion import ops\n"
        "    from layerfuse import doctor\n"
        "    found = doctor.diagnose()\n"
        "said = [each for each in said if each.category is RuntimeWarning]\n"
        "texts, files = [str(each.message) for each in said], [each.filename for each in said]\n"
        "print(json.dumps([texts, {'files': files, 'known': known, 'torch': torch, 'now': list(FUSIONS), 'ops': list(ops.FUNCTIONS), 'doctor': found.to_dict()}]))"
    )
    done = run_python(code, site)
    assert done.returncode == 0, done.stderr[-3000:]
    texts, answers = json.loads(done.stdout)
    return texts, answers


@pytest.mark.parametrize("module", BROKEN)
def test_a_package_that_cannot_be_used_is_named_and_refused_alone(
    module: str, beside_broken_ones: tuple[list[str], dict[str, Any]]
) -> None:
    texts, answers = beside_broken_ones
    package, says = module.replace("_", "-"), BROKEN[module][1]
    (text,) = [text for text in texts if text.startswith(f"entry point 'mine' of {package}: ")]
    assert says in text
    found = answers["doctor"]["findings"][f"fusions of {package} (mine)"]
    assert found == {"state": "broken", "detail": text}
    assert all(file.endswith(".py") for file in answers["files"]), "and none is <frozen ...>"


def test_everything_else_works_beside_packages_that_cannot_be_used(
    beside_broken_ones: tuple[list[str], dict[str, Any]],
) -> None:
    texts, answers = beside_broken_ones
    assert len(texts) == len(BROKEN)
    assert answers["now"] == [*FUSIONS, "good"]
    # What only torch can tell is refused when ops are registered.
    assert answers["known"] == [*FUSIONS, *answers["known"][len(FUSIONS) :]] and not answers["torch"]
    assert set(answers["known"]) - set(answers["now"]) == {"n"}
    assert {"add_rms_norm", "mla_query_rope", "good"} <= set(answers["ops"]) and "alone" not in answers["ops"]
    assert answers["doctor"]["findings"]["fusions of good (mine)"] == {"state": "found", "detail": "known: good"}
    assert any(line.startswith("good (of good) on cpu: yes") for line in answers["doctor"]["enables"])


def test_a_name_that_is_not_there_any_more_is_said_with_the_packages_that_broke(tmp_path: Path) -> None:
    (outside_package(tmp_path, 1.0) / "outside.py").write_text("raise ImportError('half of an upgrade')")
    code = "from layerfuse.fusion import FusionConfig; FusionConfig.parse('outside_add_rms_norm')"
    said = run_python(code, tmp_path).stderr.splitlines()[-1]
    assert "no fusion is called 'outside_add_rms_norm'" in said
    assert "Not usable: entry point 'mine' of outside: " in said
    assert "half of an upgrade" in said


# ---- backends of other packages

BACKEND = """
from layerfuse.fusion.backends import Backend
from layerfuse.fusion.declare import Kernel

def kernel(x, residual, weight, epsilon, weight_offset):
    return x + 1, residual + 1

class Fast(Backend):
    kernels = {"add_rms_norm": Kernel(backend="fast", function="fast_package:kernel")}

    def runs_on(self, device):
        return device == "cpu", "it is for CPUs"

    def refuses(self, case):
        return None if case.width % 8 == 0 else f"{case.width} columns are no multiple of 8"

class Quick(Fast):
    kernels = {"add_rms_norm": Kernel(backend="quick", function="fast_package:kernl")}

class Few(Fast):
    kernels = dict.fromkeys(["add_rms_norm", "rms_norm"], Kernel(backend="few", function="fast_package:few"))

def few(x, residual): ...

class Typo(Fast):
    kernels = {"add_rms_nrm": Kernel(backend="typo", function="fast_package:kernel")}
"""
BACKENDS = {
    "fast = fast_package:Fast": None,
    "mine = fast_package:Backend": None,
    "typo = fast_package:Typo": None,
    "few = fast_package:Few": None,
    "triton = fast_package:Fast": "layerfuse has a backend called 'triton'",
    "tritn = fast_package:Fast": "no backend is called that; did you mean 'triton'?",
    "cublas = fast_package:kernel": "expected a class derived from Backend, got ",
    "renamed = fast_package:Fast": "kernels['add_rms_norm']: expected a Kernel of backend 'renamed', got Kernel(",
    "quick = fast_package:Quick": "its kernel of 'add_rms_norm': fast_package has no 'kernl'; did you mean 'kernel' or 'Kernel'? Fix",
    "absent = fast_package.nothing:Fast": "importing raised ModuleNotFoundError",
}
"""Entry point -> why it cannot be used."""
WITH_BACKENDS = """
import json, os, torch, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from layerfuse.fusion.backends import check_declared
    os.environ["LAYERFUSE_BACKEND"] = "fast"
    check_declared()
    os.environ["LAYERFUSE_BACKEND"] = "absent"
    try:
        check_declared()
    except LookupError as error:
        absent = str(error)
    del os.environ["LAYERFUSE_BACKEND"]
    from layerfuse import doctor
    from layerfuse.fusion import FUSIONS, backends, ops
ones = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
print(json.dumps({
    "said": [str(each.message) for each in said if "entry point" in str(each.message)],
    "absent": absent,
    "names": backends.names("add_rms_norm"),
    "survey": dict(backends.survey("add_rms_norm", "cuda")),
    "given": float(ops.add_rms_norm(*ones, 1e-6)[0].sum()),
    "refused": float(ops.add_rms_norm(*(each[..., :6].contiguous() for each in ones), 1e-6)[0].sum()),
    "doctor": doctor.diagnose().to_dict()["findings"],
    "on": next(iter(FUSIONS.refused.values()), None),
}))
"""


def test_a_package_brings_a_backend_with_kernels_for_ops_that_exist(tmp_path: Path) -> None:
    """It is asked behind the op's own kernels. What cannot be used is named and refused alone, with the fusions that need it."""
    broken = "FUSION = mine('on_broken', Kernel(backend='quick', function='fast_package:kernel'))"
    write_package(tmp_path, "fast_package", broken + BACKEND)
    points = tmp_path / "fast_package-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text() + "[layerfuse.backends]\n" + "\n".join(BACKENDS) + "\n")
    done = run_copy(WITH_BACKENDS, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["names"] == ["aiter", "triton", "fast", "reference"]
    assert "no op has a backend called 'absent'; did you mean 'fast'? Known: aiter, fast, " in found["absent"]
    assert found["survey"]["fast"] == "it is for CPUs"
    assert found["given"] == 32.0 and found["refused"] == pytest.approx(12.0)
    for point, says in BACKENDS.items():
        name = point.partition(" ")[0]
        finding = found["doctor"][f"backend {name} of fast-package"]
        if says is None:
            assert finding["state"] == ("broken" if name in ("typo", "few") else "found"), finding
            continue
        (text,) = [text for text in found["said"] if text.startswith(f"entry point {name!r} of fast-package: ")]
        assert says in text
        assert finding == {"state": "broken", "detail": text}
    assert found["doctor"]["backend fast of fast-package"]["detail"] == "kernels for add_rms_norm"
    takes = "fast_package:few takes (x, residual), and (x, residual, weight, epsilon, weight_offset) is passed to it"
    alone = "fast_package:few takes (x, residual), and (x, weight, epsilon, weight_offset) is passed to it"
    assert found["doctor"]["backend few of fast-package"]["detail"] == (
        f"it is left out of add_rms_norm: {takes}; it is left out of rms_norm: {alone}"
    )
    assert (
        "no op is called that; did you mean 'add_rms_norm'" in found["doctor"]["backend typo of fast-package"]["detail"]
    )
    assert "its ops cannot be registered: BackendError: entry point 'quick'" in found["on"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"backend": "Triton", "function": "a:b"}, "lower-case letters, digits and underscores; did you mean 'triton'?"),
        ({"backend": ""}, "a backend's name is"),
        ({"backend": None}, "a backend's name is"),
        ({"backend": "symm", "function": "a:b"}, "did you mean 'symm_mem'?"),
        ({"backend": "triton"}, "expected `function` or `made_by`, got neither"),
        ({"backend": "triton", "function": "a:b", "made_by": "a:c"}, "expected `function` or `made_by`, got both"),
        ({"backend": "aiter", "function": "a:b"}, "AITER's functions are in layerfuse's own table, got 'a:b'"),
        ({"backend": "triton", "function": "a.b"}, "expected `module:function`, got 'a.b'"),
        ({"backend": "triton", "function": "a:b", "refuses": "a:b.c"}, "expected `module:function`, got 'a:b.c'"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_refused_when_it_is_declared(words: dict[str, Any], says: str) -> None:
    with pytest.raises(OpError) as error:
        Kernel(**words)
    assert says in str(error.value)


def test_a_kernel_may_belong_to_a_backend_of_its_own() -> None:
    for backend in ("cuda", "cutlass", "triton_hopper", "my_triton", "tilelang"):
        assert Kernel(backend=backend, function="a:b").backend == backend


def test_the_names_of_canonical_ops_are_known_without_torch() -> None:
    from layerfuse.fusion.ops import canonical

    assert tuple(op.name for op in canonical.CANONICAL) == canonical_names()


@pytest.mark.parametrize(
    ("source", "absent"),
    [
        ("f = 1", False),
        ("def f(): ...", False),
        ("if True:\n    def f(): ...\nelse:\n    f = None", False),
        ("try:\n    from os import path as f\nexcept ImportError:\n    pass", False),
        ("from os.path import *", False),
        ("def __getattr__(name): ...", False),
        ("globals()['f'] = 1", False),
        ("def g():\n    def f(): ...", True),
        ("class G:\n    f = 1", True),
        ("f.x = 1", True),
        ("def f(:", True),
    ],
)
def test_whether_a_module_has_a_function_is_read_off_its_source(
    source: str, absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text(f"raise SystemExit\n{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (why_absent("never_imported:f") is not None) == absent
    assert why_absent("math:sqrt") is None  # it has no source


@pytest.mark.parametrize(
    ("takes", "fits"),
    [
        ("a, b", True),
        ("a, b=1, c=2", True),
        ("a, /, *rest", True),
        ("*, name=1, **more", False),
        ("a", False),
        ("a, b, c", False),
        ("a, b, *, name", False),
    ],
)
def test_whether_a_function_takes_what_is_passed_is_read_off_its_source(
    takes: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_called.py").write_text(f"def f({takes}): ...\n@g\ndef decorated({takes}): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = None if fits else f"never_called:f takes ({takes}), and (x, weight) is passed to it"
    assert why_absent("never_called:f", ["x", "weight"]) == said
    assert why_absent("never_called:decorated", ["x", "weight"]) is None


def test_no_two_fusions_of_the_library_clash() -> None:
    """Which nothing asks when they are read: their ops would all be composed for it."""
    known = list(built_in())
    assert not [said for fusion, other in combinations(known, 2) if (said := clash(fusion, other))]
    assert [fusion.name for fusion in known] == [
        name for name, fusion in FUSIONS.items() if fusion.owner == "layerfuse"
    ]


def test_a_clash_of_ops_names_both_owners() -> None:
    import attrs

    ours = FUSIONS["add_rms_norm"]
    other = attrs.evolve(ours, name="mine", owner="their-package")
    assert clash(other, ours) is None, "the same op under another name is fine"
    said = clash(attrs.evolve(other, name="other", op=attrs.evolve(other.op)), ours)
    assert said is not None and "add_rms_norm (layerfuse) and that of other (their-package)" in said
