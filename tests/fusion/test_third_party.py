"""A fusion from another package: the package of docs/adding-a-fusion.md is installed by pip, and everything knows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from layerfuse.fusion import FUSIONS, FusionError
from layerfuse.fusion.catalog import add
from layerfuse.fusion.chain import Add, Fusion, Norm, Quant
from layerfuse.fusion.sites import LATENTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "docs"))
from doc_blocks import blocks_of  # noqa: E402
from helpers import run_python  # noqa: E402

NAME = "example_silu_mul"
PAGE = blocks_of((ROOT / "docs" / "adding-a-fusion.md").read_text())


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
    """The page's package, installed into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for block in PAGE:
        if block.title:
            (source / block.title).write_text(block.code)
    pip_install(source, target)
    return target


EVERYTHING = """
import json, torch
torch.set_num_threads(1)
import torch._inductor.compile_fx as inductor
inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
exec({page!r})
said = {{"plan": fusion.plan(specs, gfx950).concerns({name!r}), "report": str(fused.report)}}
said["key"] = fusion.Pipeline(fusion.plan(specs, gfx950)).uuid()
said["matched"] = fused.report.of({name!r}).matched
with torch.no_grad():
    audit = fused.audit(x)
said["audit"] = [audit.fusions[{name!r}].profiled, audit.fusions[{name!r}].counted]

class Loses(MLP):
    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

torch._dynamo.reset()
strict = fusion.compile(Loses(), specs=[("", spec)], strict=True)
try:
    with torch.no_grad():
        strict(x)
except fusion.FusionMissedError as error:
    said["strict"] = str(error)
from layerfuse import doctor
said["doctor"] = [line for line in doctor.diagnose().enables if {name!r} in line]
from layerfuse import bench
result = bench.run({name!r}, model="deepseek-v3", tokens=[1], quick=True, peers=["layerfuse", "eager"])
said["bench"] = bench.markdown(result)
said["op"] = ops.example_silu_mul.__doc__
print("SAID " + json.dumps(said))
"""


def test_it_is_known_everywhere(site: Path) -> None:
    page = "".join(block.code for block in PAGE if block.language == "python" and not block.title)
    done = run_python(EVERYTHING.format(page=page, name=NAME), site, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.rpartition("SAID ")[2])
    assert said["plan"]
    assert said["key"].startswith("layerfuse-")
    assert f"{NAME}: 1 expected, 1 matched" in said["report"]
    assert said["matched"] == ["activation"]
    assert said["audit"] == [1, 1]
    assert f"{NAME} was expected" in said["strict"] and "neither of which is silu of a gate" in said["strict"]
    assert len(said["doctor"]) == 1 and said["doctor"][0].endswith(
        "yes, by the backend `reference` (of layerfuse-example)"
    )
    assert NAME in said["bench"] and "layerfuse (reference)" in said["bench"]
    assert "`silu(gate) * up`" in said["op"]


def test_the_command_line_knows_it(site: Path) -> None:
    code = "from layerfuse.cli import main; main()"
    done = run_python(
        f"import sys; sys.argv = ['layerfuse', 'plan', 'deepseek-v3']; {code}",
        site,
    )
    assert f"activation: {NAME}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise OSError('no such library')", "importing raised OSError: no such library"),
        ("raise SystemExit(3)", "importing raised SystemExit: 3"),
        (
            "class Odd(list):\n    def __iter__(self):\n        raise SystemExit(3)\nFUSION = Odd()",
            "entry point 'mine' of broken: reading it raised SystemExit: 3",
        ),
        ("FUSION = 3", "expected a Fusion or a list of them, got 3"),
        (
            "from layerfuse.fusion.catalog.add_rms_norm import FUSION",
            "two fusions are called 'add_rms_norm': one of layerfuse, one of broken",
        ),
    ],
)
def test_a_package_that_cannot_be_used(code: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(code)
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[layerfuse.fusions]\nmine = broken:FUSION\n")
    done = run_python("from layerfuse.fusion import FUSIONS; list(FUSIONS)", tmp_path)
    assert done.returncode and says in done.stderr, done.stderr


def test_a_clash_of_ops_names_both_owners() -> None:
    import attrs

    other = attrs.evolve(FUSIONS["add_rms_norm"], name="mine", owner="their-package")
    known = dict(FUSIONS)
    add(known, other)  # the same op under another name is fine
    with pytest.raises(FusionError, match=r"add_rms_norm \(layerfuse\) and that of other \(their-package\)"):
        add(dict(FUSIONS), attrs.evolve(other, name="other", op=attrs.evolve(other.op)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"roles": ("inputs",)}, "no role is called 'inputs'; known: input, post_attention"),
        ({"roles": ()}, "it stands at no role"),
        ({"roles": (LATENTS,)}, "the role latents has no Add"),
        ({"chain": (Add, Norm(x="y"))}, "Norm fills y, which add_rms_norm does not take"),
        ({"chain": (Add(out="sum"), Norm)}, "Add gives sum, which add_rms_norm does not return"),
        ({"chain": (Add, Norm, Quant(per="token"))}, "Quant fills dtype, use_ue8m0, which add_rms_norm does not take"),
        ({"level": 3}, "level must be 1 or 2, got 3"),
        ({"name": "My Fusion"}, "a fusion's name is lower-case letters"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_remedy(changes: dict[str, object], says: str) -> None:
    import attrs

    with pytest.raises(FusionError, match=says):
        attrs.evolve(FUSIONS["add_rms_norm"], **changes)
    assert isinstance(FUSIONS["add_rms_norm"], Fusion)
