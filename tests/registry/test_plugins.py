"""Plugins: a tiny real package is installed and found by its entry points; clashing and broken ones are told apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_python

PLUGIN = ROOT / "tests" / "plugin"

LAYER = """
from types import SimpleNamespace as Some
cls = type("Mixer", (Some,), {"__module__": "tinylib.layers"})
norm = Some(weight=Some(shape=(16,)), eps=1e-6)
layer = cls(heads={"all": 4, "mine": 2}, latent=16, nope=8, value=8, latent_norm=norm, scale=0.5, width=64, index=1)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
            *("--disable-pip-version-check", "--target", str(target), str(source)),
        ],
        check=True,
        capture_output=True,
    )
    return target


def write_plugin(site: Path, name: str, group: str, value: str, code: str, **files: str) -> None:
    """A package and its metadata as an installer would have left them."""
    (site / f"{name}.py").write_text(code)
    for file, text in files.items():
        (site / file.replace("_toml", ".toml")).write_text(text)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


def run(code: str, *sites: Path, warnings: str = "default") -> list[str]:
    done = run_python(code, *sites, PYTHONWARNINGS=warnings)
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *[line for line in done.stderr.splitlines() if "Warning" in line]]


def test_an_installed_plugin_brings_its_adapter_and_its_model(installed: Path) -> None:
    said = run(
        "from layerfuse import registry\n" + LAYER + "spec = registry.spec_for(layer)\n"
        "print(spec.num_heads, spec.num_local_heads, spec.parallel.size, spec.split_sizes)\n"
        "print(registry.adapter_for(layer).name, 'tiny' in registry.adapters())\n"
        "print(registry.layer_classes()['tinylib:FastMixer'])\n"
        "print(len(registry.model('tiny-mixer').specs(2)))\n",
        installed,
    )
    assert said == ["4 2 2 (16, 0)", "tiny True", "tiny-mixer", "5"]


def test_a_plugin_is_imported_only_when_something_unknown_is_asked_for(installed: Path) -> None:
    said = run(
        "import sys\n"
        "from layerfuse import registry\n"
        "from layerfuse.adapters import MissingAttributeError\n"
        "known = type('MLAAttention', (), {'__module__': 'vllm.x'})()\n"
        "try:\n    registry.spec_for(known)\nexcept MissingAttributeError:\n    print('layerfuse_tiny' in sys.modules)\n"
        + LAYER
        + "registry.spec_for(layer)\nprint('layerfuse_tiny.adapter' in sys.modules)\n",
        installed,
    )
    assert said == ["False", "True"]


def test_listing_what_is_installed_imports_nothing(installed: Path) -> None:
    said = run(
        "import sys\n"
        "from layerfuse.registry.plugins import installed\n"
        "print(sorted((p.group, p.value) for p in installed() if p.name == 'tiny'))\n"
        "print('layerfuse_tiny' in sys.modules)\n",
        installed,
    )
    assert said == [
        "[('layerfuse.adapters', 'layerfuse_tiny.adapter:TINY'), ('layerfuse.models', 'layerfuse_tiny')]",
        "False",
    ]


CLASH = """
from layerfuse.adapters import Adapter
from layerfuse.adapters.vocabulary import TRANSFORMERS_MLA
ADAPTER = Adapter("theirs", {"vllm:MLAAttention": TRANSFORMERS_MLA})
"""


def test_a_plugin_may_not_replace_what_is_built_in(tmp_path: Path) -> None:
    write_plugin(tmp_path, "clashing", "layerfuse.adapters", "clashing:ADAPTER", CLASH)
    said = run(
        "from layerfuse import registry\n"
        "for _ in range(2):\n"
        "    try:\n        registry.models()\n"
        "    except registry.ConflictError as error:\n        print(error)\n"
        "known = type('MLAAttention', (), {'__module__': 'vllm.x'})()\n"
        "try:\n    registry.spec_for(known)\n"
        "except AttributeError as error:\n        print(error.adapter)\n",
        tmp_path,
    )
    clash = (
        "the layer class vllm:MLAAttention is declared differently by the adapter deepseek_v3 (layerfuse itself) and by "
        "the adapter theirs (the plugin clashing of clashing (clashing:ADAPTER)); rename or remove one of them"
    )
    # Said every time, and an engine that needs only what is built in goes on working.
    assert said == [clash, clash, "deepseek_v3"]


def test_a_plugin_that_cannot_be_imported_is_a_warning_and_the_rest_works(tmp_path: Path, installed: Path) -> None:
    write_plugin(tmp_path, "broken", "layerfuse.adapters", "broken:ADAPTER", "import no_such_library")
    said = run(
        "from layerfuse import registry\nprint(len(registry.models()) > 10, 'tiny' in registry.adapters())\n",
        tmp_path,
        installed,
    )
    assert said[0] == "True True"
    assert said[1].endswith(
        "RuntimeWarning: the plugin broken of broken (broken:ADAPTER) cannot be imported: ModuleNotFoundError: "
        "No module named 'no_such_library'"
    )
    assert len(said) == 2


@pytest.mark.parametrize(
    ("code", "said_of_it"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        (
            "class Odd(Exception):\n    def __str__(self):\n        raise self\nraise Odd",
            "Odd: (its text cannot be read)",
        ),
        ("raise ValueError('x' * 10**6)", "ValueError: " + 197 * "x" + "..."),
    ],
)
def test_a_plugin_that_ends_python_or_breaks_its_own_error_is_named_and_passed_over(
    code: str, said_of_it: str, tmp_path: Path, installed: Path
) -> None:
    write_plugin(tmp_path, "rough", "layerfuse.adapters", "rough:ADAPTER", code)
    said = run("from layerfuse import registry\nprint('tiny' in registry.adapters())", tmp_path, installed)
    assert said[0] == "True"
    assert said[1].endswith(f"the plugin rough of rough (rough:ADAPTER) cannot be imported: {said_of_it}")


@pytest.mark.parametrize(
    ("group", "code", "error"),
    [
        (
            "layerfuse.adapters",
            "THING = 7",
            "the plugin odd of odd (odd:THING): expected an Adapter or a list of them, got 7",
        ),
        (
            "layerfuse.models",
            "THING = 7",
            "the plugin odd of odd (odd:THING): expected a path or a package with a models.toml",
        ),
        (
            "layerfuse.models",
            "THING = '/no/such/models.toml'",
            "the plugin odd of odd (odd:THING) cannot be read: /no/such/models.toml: cannot be read: No such file or directory",
        ),
        (
            "layerfuse.adapters",
            "from layerfuse.adapters import DEEPSEEK_V3, Adapter\n"
            "facts = DEEPSEEK_V3.layers['transformers:DeepseekV3Attention']\n"
            "THING = Adapter('odd', {'transformers:PreTrainedModel': facts})",
            "(odd:THING) cannot be imported: FactsError: 'transformers:PreTrainedModel' is a base of layers or models of every kind",
        ),
    ],
)
def test_a_plugin_that_is_something_else_is_named_and_left_out(
    group: str, code: str, error: str, tmp_path: Path, installed: Path
) -> None:
    write_plugin(tmp_path, "odd", group, "odd:THING", code)
    said = run("from layerfuse import registry\nprint('tiny' in registry.adapters())\n", tmp_path, installed)
    assert said[0] == "True"
    assert len(said) == 2 and error in said[1]


def test_several_adapters_in_a_list(tmp_path: Path) -> None:
    code = "from layerfuse.adapters import Adapter\nTHING = [Adapter('one', {}), Adapter('two', {})]"
    write_plugin(tmp_path, "both", "layerfuse.adapters", "both:THING", code)
    assert run("from layerfuse import registry\nprint({'one', 'two'} <= set(registry.adapters()))", tmp_path) == [
        "True"
    ]


def test_a_plugin_that_claims_a_base_of_models_is_named_where_they_are_read(tmp_path: Path) -> None:
    """Not every base is known by its name: what fails then says whose it is."""
    code = (
        "from layerfuse.adapters import DEEPSEEK_V3, Adapter\n"
        "facts = DEEPSEEK_V3.layers['transformers:DeepseekV3Attention']\n"
        "THING = Adapter('greedy', {'engine:BaseModel': facts})"
    )
    write_plugin(tmp_path, "greedy", "layerfuse.adapters", "greedy:THING", code)
    said = run(
        "from layerfuse import registry\n"
        "base = type('BaseModel', (), {'__module__': 'engine', 'named_modules': lambda self: [('', self), ('model', self)]})\n"
        "for ask in (registry.specs_in, registry.spec_for):\n"
        "    try:\n        ask(type('Some', (base,), {})())\n"
        "    except Exception as error:\n        print(str(error).splitlines()[0])\n",
        tmp_path,
    )
    says = "a engine:BaseModel layer, declared by the plugin greedy of greedy (greedy:THING), does not say its hidden_size (adapter greedy). Tried:"
    assert said == [says, says]


def test_a_path_may_be_an_entry_points_object(tmp_path: Path) -> None:
    text = (PLUGIN / "layerfuse_tiny" / "models.toml").read_text()
    text = text[: text.index("[models.tiny-mixer.layer_classes]")].replace('"tiny"', '"deepseek_v3"')
    code = "from pathlib import Path\nFILE = Path(__file__).parent / 'theirs.toml'"
    write_plugin(tmp_path, "paths", "layerfuse.models", "paths:FILE", code, theirs_toml=text)
    said = run("from layerfuse import registry\nprint(registry.model('tiny-mixer').source)", tmp_path)
    assert said == ["made up for the tests of entry points"]


TWO = """
from layerfuse.adapters import Adapter, const
from layerfuse.adapters.vocabulary import TRANSFORMERS_MLA
ADAPTER = [
    Adapter("{name}_own", {{"tinylib:{name}Mixer": TRANSFORMERS_MLA}}),
    Adapter("{name}", {{"tinylib:SharedMixer": TRANSFORMERS_MLA.but(v_head_dim=const({width}))}}),
]
"""

ASK = """
from layerfuse import registry

def layer(name):
    return type(name, (), {"__module__": "tinylib.layers"})()

QUESTIONS = {
    "shared": lambda: registry.spec_for(layer("SharedMixer")),
    "first": lambda: registry.spec_for(layer("firstMixer")),
    "second": lambda: registry.adapter_for(layer("secondMixer")),
    "unknown": lambda: registry.spec_for(layer("NobodysMixer")),
    "model": lambda: registry.model("deepseek-v3"),
    "models": registry.models,
    "adapters": registry.adapters,
    "classes": registry.layer_classes,
}

def ask(name):
    try:
        return str(QUESTIONS[name]())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def two_that_clash(site: Path) -> str:
    for name, width in (("first", 64), ("second", 128)):
        write_plugin(site, name, "layerfuse.adapters", f"{name}:ADAPTER", TWO.format(name=name, width=width))
    return (
        "ConflictError: the layer class tinylib:SharedMixer is declared differently by the adapter first (the plugin first of "
        "first (first:ADAPTER)) and by the adapter second (the plugin second of second (second:ADAPTER)); rename or remove one of them"
    )


def test_two_plugins_that_clash_give_one_answer_whatever_was_asked_before(tmp_path: Path) -> None:
    clash = two_that_clash(tmp_path)
    said = run(ASK + "for name in [*QUESTIONS, *reversed(QUESTIONS)]:\n    print(ask(name))\n", tmp_path)
    assert said == [clash] * 16


def test_a_plugin_that_clashes_half_way_leaves_nothing_registered(tmp_path: Path) -> None:
    """Its first adapter clashes with nobody, and neither is known afterwards; nor is what came before it."""
    two_that_clash(tmp_path)
    said = run(
        ASK
        + "ask('models')\nprint(sorted(set(registry.default._tables.adapters) & {'first', 'second', 'first_own', 'second_own'}))\n",
        tmp_path,
    )
    assert said == ["[]"]


def test_what_a_plugin_registers_itself_when_it_is_imported_stays(tmp_path: Path, installed: Path) -> None:
    code = CLASH.replace("vllm:MLAAttention", "tinylib:OwnMixer")
    code += "from layerfuse import registry\nregistry.register_adapter(Adapter('itself', {'tinylib:ItselfMixer': TRANSFORMERS_MLA}))\n"
    write_plugin(tmp_path, "active", "layerfuse.adapters", "active:ADAPTER", code)
    said = run(
        "from layerfuse import registry\nprint({'itself', 'theirs', 'tiny'} <= set(registry.adapters()))\n",
        tmp_path,
        installed,
    )
    assert said == ["True"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "class Odd(list):\n    def __iter__(self):\n        raise SystemExit(3)\nTHING = Odd()",
            "reading it raised SystemExit: 3",
        ),
        (
            "class Odd(list):\n    def __iter__(self):\n        raise RuntimeError('odd')\nTHING = Odd()",
            "reading it raised RuntimeError: odd",
        ),
        (
            "class Odd:\n    @property\n    def __class__(self):\n        raise SystemExit(3)\nTHING = Odd()",
            "reading it raised SystemExit: 3",
        ),
        (
            "class Odd:\n    def __repr__(self):\n        raise SystemExit(3)\nTHING = Odd()",
            "expected an Adapter or a list of them, got Odd, too long or too broken to print",
        ),
    ],
)
def test_an_object_that_raises_or_ends_python_when_it_is_looked_at_is_named(
    code: str, error: str, tmp_path: Path
) -> None:
    write_plugin(tmp_path, "odd", "layerfuse.adapters", "odd:THING", code)
    said = run(ASK + "print(len(ask('models')) > 10)", tmp_path)
    assert said[0] == "True"
    assert said[1].endswith(f"the plugin odd of odd (odd:THING): {error}")


def test_a_plugin_whose_package_has_lost_its_metadata_is_named_all_the_same(tmp_path: Path) -> None:
    write_plugin(tmp_path, "torn", "layerfuse.adapters", "torn:ADAPTER", "import no_such_library")
    (tmp_path / "torn-1.0.dist-info" / "METADATA").unlink()
    said = run(ASK + "print(ask('model')[:10], ask('unknown').split(':')[0])", tmp_path)
    assert said[0] == "ModelEntry UnknownLayerError"
    assert "the plugin torn of a package without metadata (torn:ADAPTER) cannot be imported" in said[1]


MALFORMED = [b"[console_scripts]\nno equals sign\n", b"[layerfuse.adapters]\n\xff = x:Y\n"]


@pytest.mark.parametrize("entry_points", MALFORMED)
def test_a_package_with_broken_entry_points_is_named_and_hides_no_other(
    entry_points: bytes, tmp_path: Path, installed: Path
) -> None:
    write_plugin(tmp_path, "torn", "other.group", "torn:X", "X = 1")
    (tmp_path / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(entry_points)
    said = run(
        "from layerfuse import fusion, registry\nprint('tiny' in registry.adapters(), 'add_rms_norm' in fusion.FUSIONS)",
        tmp_path,
        installed,
    )
    assert said[0] == "True True"
    assert len(said) == 2  # where plugins of the registry are looked for; of fusions no package names an entry point
    where = tmp_path / "torn-1.0.dist-info"
    assert all(f"RuntimeWarning: the entry points of torn in {where} cannot be read" in line for line in said[1:])


def test_of_two_installations_of_a_package_the_one_that_python_imports_counts(tmp_path: Path, installed: Path) -> None:
    """Beside a broken package too, where packages are looked through one by one."""
    first, second = tmp_path / "first", tmp_path / "second"
    for site in (first, second):
        site.mkdir()
        write_plugin(site, "twice", "layerfuse.adapters", f"twice:{site.name.upper()}", "")
    write_plugin(first, "torn", "other.group", "torn:X", "X = 1")
    code = (
        "from layerfuse.registry.plugins import installed\nprint([p.value for p in installed() if p.name == 'twice'])"
    )
    assert run(code, first, second) == ["['twice:FIRST']"]
    (first / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(MALFORMED[0])
    assert run(code, first, second)[0] == "['twice:FIRST']"
