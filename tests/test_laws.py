"""The laws of the house, held to the source itself. The checks that search are first shown what they must find."""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import attrs
import pytest
from helpers import ROOT, THOROUGH_ALONE, in_turn, run_python, thorough_alone
from hypothesis import given
from hypothesis import strategies as st

from layerfuse.adapters.specs import (
    FAMILIES,
    ExpertsSpec,
    GatedNormSpec,
    LayerNormSpec,
    LinearSpec,
    NormSpec,
    Parallel,
    WeightSpec,
)

FLOORS = ("adapters", "registry", "fusion", "engines", "testing", "bench", "cli")
"""From the ground up: a door opens downward only."""

CHECKED = sorted(
    path
    for folder in (*FLOORS, ".")
    for path in (ROOT / folder).glob("*.py" if folder == "." else "**/*.py")
    if not {"__pycache__", "scripts"} & {*path.parts}
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files_in(*places: str) -> list[Path]:
    return [path for path in CHECKED if path.relative_to(ROOT).parts[0] in places]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# ---- what a user is told


def said_to_users(path: Path) -> Iterator[str]:
    """The texts of a file but for its docstrings; those of a command are its help."""
    nodes = [*ast.walk(parsed(path))]
    docs = (
        set() if path == ROOT / "cli" / "app.py" else {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    )
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_no_message_leads_to_a_page_that_the_wheel_does_not_hold() -> None:
    assert any("layerfuse contract glm-4.7-flash" in text for text in said_to_users(ROOT / "cli" / "app.py"))
    told = {(name_of(path), text) for path in CHECKED for text in said_to_users(path) if "docs/" in text}
    assert not told


# ---- law 1: no getattr, hasattr or __dict__ on a layer outside adapters/

ALLOWED = {
    # file -> how many looks by name, and at what if not at a layer
    "_lazy.py": (3, "the modules of this package, which are imported when first used"),
    "fusion/backends/aiter/all_reduce.py": (1, "the op without its all-reduce, when a function is bound"),
    "fusion/backends/aiter/communicators.py": (2, "AITER's communicator, whose attributes differ between releases"),
    "fusion/backends/aiter/binding.py": (4, "modules of AITER's and of this package, when a function is bound"),
    "fusion/compiler.py": (6, "itself, and the model that it stands for, whose attributes it passes on unread"),
    "fusion/dynamo_floats.py": (1, "a module of torch's, for the kind of config that it has"),
    "fusion/kernel_source.py": (1, "the module that a declared function is in"),
    "fusion/held.py": (4, "the parameters and children of a module, by the names that the model gives them"),
    "fusion/match/calls.py": (2, "the ops of whichever library is loaded"),
    "fusion/ops/library.py": (1, "the ops that it has registered"),
    "fusion/ops/quantisation.py": (1, "torch, for its dtypes"),
    "fusion/uncompiled.py": (2, "functions, for the marks that torch.compiler.disable and decorators leave on them"),
    "registry/entry_points.py": (
        2,
        "an installed package, for the folder of its metadata, and Python's finders of packages",
    ),
    "registry/files.py": (4, "errors, a hint's name, and a parsed table whose kind has no yarn"),
    "registry/inspect.py": (3, "declared entries, by the names of their own fields"),
    "registry/kinds.py": (1, "a parsed table of epsilons, by its own field's name"),
    "registry/lookup.py": (1, "the class of what is asked about, to tell a model from a layer in an error"),
    "registry/schema.py": (1, "the classes that the schema is made from"),
    "registry/values.py": (1, "the numbers of an entry's tables, by the fields of their classes"),
}


def looks_by_name(tree: ast.AST) -> Iterator[int]:
    """Lines that ask an object for something by its name, or for all it holds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr", "vars", "setattr", "delattr"):
                yield node.lineno
        elif (
            isinstance(node, ast.Attribute) and node.attr in ("__dict__", "__getattribute__", "_modules", "_parameters")
        ) or (isinstance(node, ast.Attribute) and node.attr == "attrgetter"):
            yield node.lineno


def test_the_check_of_law_1_finds_what_it_looks_for() -> None:
    broken = "x = getattr(layer, 'num_heads', 1)\nif hasattr(layer, 'a'): pass\nlayer.__dict__['a']\nvars(layer)\n"
    assert sorted(looks_by_name(ast.parse(broken))) == [1, 2, 3, 4]
    assert list(looks_by_name(ast.parse("spec.num_heads + layer.weight.shape[0]"))) == []


def test_law_1_only_adapters_read_layers() -> None:
    looks = {name_of(path): sorted(looks_by_name(parsed(path))) for path in files_in("registry", "fusion", "_lazy.py")}
    allowed = {name: number for name, (number, _) in ALLOWED.items()}
    assert {name: lines for name, lines in looks.items() if len(lines) != allowed.get(name, 0)} == {}
    assert allowed.keys() <= looks.keys(), "a file that may look is no longer there"


# ---- law 2: no upward import; no torch below fusion/


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, as an absolute name, type checking included."""
    package = ["layerfuse", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    return FLOORS.index(parts[1]) if parts[0] == "layerfuse" and len(parts) > 1 and parts[1] in FLOORS else None


def test_law_2_doors_open_downward_only() -> None:
    upward = {
        f"{name_of(path)}:{line} imports {module}"
        for path in files_in(*FLOORS)
        for line, module in imports(path)
        if (floor := floor_of(module)) is not None and floor > FLOORS.index(path.relative_to(ROOT).parts[0])
    }
    assert upward == set()


ENGINES = ("torch", "transformers", "vllm", "sglang", "aiter", "triton", "numpy")


def test_law_2_nothing_below_fusion_names_torch_or_an_engine() -> None:
    found = {
        f"{name_of(path)}:{line} imports {module}"
        for path in files_in("adapters", "registry")
        for line, module in imports(path)
        if module.split(".")[0] in ENGINES
    }
    assert found == set()


LIGHT = {
    "registry": "from layerfuse import registry; registry.models(); registry.layer_classes()",
    "specs": "from layerfuse import registry; registry.model('kimi-k2.5').specs(8)",
    "the face": "import layerfuse; layerfuse.MLASpec; layerfuse.registry; layerfuse.tensor_parallel",
    "plan": "from layerfuse import fusion, registry\n"
    "print(fusion.plan(registry.model('deepseek-v3').specs(8), fusion.Target.named('gfx950')))",
    "attention metadata": "from layerfuse import registry\nfrom layerfuse.fusion import Target, metadata\n"
    "spec = next(s for _, s in registry.model('kimi-k2.5').specs(8) if type(s).__name__ == 'MLASpec')\n"
    "metadata.plan_metadata(spec, Target.named('gfx950'), batch=256)",
    "the gate of AITER's all-reduce": "import layerfuse.fusion.backends.aiter.stages",
}


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT)
def test_law_2_specs_and_plans_come_without_torch_and_without_an_engine(code: str) -> None:
    done = run_python(f"{code}\nimport sys\nprint('LOADED', *[m for m in {ENGINES!r} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "LOADED"


def test_law_2_importing_the_registry_loads_nothing_else_of_ours_and_nothing_foreign() -> None:
    done = run_python(
        "import sys; before = set(sys.modules); import layerfuse.registry\n"
        "print(*sorted(m for m in set(sys.modules) - before if m.partition('.')[0] not in sys.stdlib_module_names))"
    )
    assert done.stdout.split() == ["layerfuse", "layerfuse._lazy", "layerfuse.registry"]


def modules() -> dict[str, Path]:
    """Every file by the name that it is imported by."""
    names = {path: ".".join(["layerfuse", *path.relative_to(ROOT).with_suffix("").parts]) for path in CHECKED}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def reached(tree: ast.AST, package: list[str], known: Collection[str]) -> set[str]:
    """The known modules that code imports, also when it is called; not those that it names for type checkers alone."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return set()
    if isinstance(tree, ast.ImportFrom) and tree.level:
        module = ".".join([*package[: len(package) - tree.level + 1], *([tree.module] if tree.module else [])])
        names = {f"{module}.{alias.name}" for alias in tree.names}
        return {name if name in known else module for name in names}
    return {name for node in ast.iter_child_nodes(tree) for name in reached(node, package, known)}


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Modules that import each other in turn, from one back to itself; empty where there are none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next(filter(None, (search(other, [*path, name]) for other in sorted(graph.get(name, ())))), [])
        done.add(name)
        return found

    return next(filter(None, (search(name, []) for name in graph)), [])


def test_the_check_of_circles_finds_what_it_looks_for() -> None:
    code = "from . import b\nif TYPE_CHECKING:\n    from .c import C\ndef f():\n    from ..d import D\n"
    known = {"layerfuse.p.b", "layerfuse.p.c", "layerfuse.d"}
    assert reached(ast.parse(code), ["layerfuse", "p"], known) == {"layerfuse.p.b", "layerfuse.d"}
    assert circle({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}) == ["b", "d", "b"]
    assert circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_law_2_nothing_is_imported_in_a_circle_inside_of_a_floor_either() -> None:
    known = modules()
    graph = {}
    for name, path in known.items():
        package = ["layerfuse", *path.relative_to(ROOT).parts[:-1]]
        graph[name] = reached(parsed(path), package, known) - {name}
    assert circle(graph) == []


@pytest.mark.parametrize(("room", "above"), [("match", ("rewrite", "backends")), ("backends", ("match", "rewrite"))])
def test_law_2_what_finds_what_runs_and_what_rewrites_do_not_import_in_turn(room: str, above: tuple[str, ...]) -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {module}"
        for path in files_in("fusion")
        if path.relative_to(ROOT).parts[1] == room
        for line, module in imports(path)
        if module.startswith(tuple(f"layerfuse.fusion.{other}" for other in above))
    }
    assert wrong == set()


# ---- law 3: no default for geometry, no `or` chain that takes 0 or None for missing


def test_law_3_no_field_of_a_spec_has_a_default() -> None:
    defaults = {
        f"{spec.__name__}.{attribute.name}"
        for spec in (
            *FAMILIES.values(),
            Parallel,
            NormSpec,
            GatedNormSpec,
            LayerNormSpec,
            LinearSpec,
            ExpertsSpec,
            WeightSpec,
        )
        for attribute in attrs.fields(spec)
        if attribute.default is not attrs.NOTHING
    }
    # An ordinary norm adds nothing to its weight, an ordinary MLP has no factors, an ordinary attention projects keys and values, and an ordinary layer adds what its blocks give, one behind the other, with norms in front; where it was read and what reads it are no geometry. None says that
    # nothing was read, or that nothing says it.
    assert defaults == {
        *(f"{mlp}.{field}" for mlp in ("GatedMLPSpec", "MLPSpec") for field in ("quant", "unquantised", "consumers")),
        *("GatedMLPSpec.gate_multiplier", "GatedMLPSpec.down_multiplier"),
        "MLASpec.rope",
        "GQASpec.shares_kv",
        "GQASpec.values_are_keys",
        *(f"GQASpec.{field}" for field in ("q_norm", "k_norm", "rope")),
        "ResidualSpec.parallel_residual",
        "ResidualSpec.post_norms",
        "ExpertsSpec.beside_mlp",
        "ResidualSpec.mlp_ranks",
        "ResidualSpec.added_as_given",
        "ResidualSpec.no_sum",
        "FinalNormSpec.no_sum",
        "ResidualSpec.starts_stream",
        "ResidualSpec.experts",
        "ResidualSpec.undeclared",
        "ResidualSpec.handed_over",
        "ResidualSpec.gives",
    } | {
        f"{n}.{field}"
        for n in ("NormSpec", "GatedNormSpec", "LayerNormSpec")
        for field in ("weight_offset", "module", "quant", "unquantised", "consumers", "producers")
    }


def defaults_in(tree: ast.AST) -> Iterator[int]:
    """getattr with a default, dict.get of geometry, and `a.x or b.y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if len(node.args) + len(node.keywords) > 2:
                yield node.lineno
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and all(map(_is_a_value, node.values)):
            yield node.lineno


def _is_a_value(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute | ast.Constant | ast.Subscript)


def test_the_check_of_law_3_finds_what_it_looks_for() -> None:
    assert list(defaults_in(ast.parse("a = getattr(layer, 'n', 1)\nb = layer.head_dim or config.head_dim"))) == [1, 2]
    assert list(defaults_in(ast.parse("a = getattr(layer, 'n')\nb = x is None or y > 2"))) == []


def test_law_3_adapters_have_no_defaults_and_no_or_chains() -> None:
    assert {f"{name_of(path)}:{line}" for path in files_in("adapters") for line in defaults_in(parsed(path))} == set()


def test_law_3_no_declared_fact_ends_in_a_constant_for_a_count() -> None:
    """A constant after a path is a default in disguise."""
    from layerfuse import registry
    from layerfuse.adapters.base import fields_of
    from layerfuse.adapters.sources import Const

    counts, disguised = {"count", "optional_count", "width_or_zero", "index", "window", "positive"}, set()
    for key, owner in registry.layer_classes().items():
        for facts in registry.adapters()[owner].layers[key]:
            kinds = fields_of(facts.spec)
            for name, places in facts.parsed.items():
                if kinds.get(name) in counts and len(places) > 1 and any(isinstance(place, Const) for place in places):
                    disguised.add((key, name))
    assert disguised == set()


# ---- a step, a format and a backend say themselves what others need to know of them


STEPS = {"Add", "AllReduce", "GatedNorm", "Norm", "Pad", "Quant", "SiluMul"}


def asks_which(tree: ast.AST, backends: Collection[str]) -> Iterator[int]:
    """Lines that ask which step something is, or which backend."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            found = STEPS & {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Compare):
            found = {*backends} & {each.value for each in node.comparators if isinstance(each, ast.Constant)}
        else:
            continue
        if found:
            yield node.lineno


def test_nobody_asks_which_step_or_which_backend_something_is() -> None:
    from layerfuse.fusion.declare import BACKENDS, REFERENCE

    backends = {*BACKENDS, REFERENCE}
    broken = "isinstance(step, Norm | GatedNorm)\nif name == 'triton': pass\n"
    assert list(asks_which(ast.parse(broken), backends)) == [1, 2]
    asked = {
        f"{name_of(path)}:{line}"
        for path in files_in("fusion", "bench", "cli", "doctor.py", "verify.py")
        for line in asks_which(parsed(path), backends)
        if path.parent.name != "steps" and "aiter" not in path.parts
    }
    assert asked == set()


# ---- the house


def test_every_file_says_what_it_is() -> None:
    paths = [*CHECKED, *(ROOT / "bench" / "scripts").glob("*.py")]
    assert [name_of(path) for path in paths if path.read_text().strip() and not ast.get_docstring(parsed(path))] == []


def test_the_floors_are_all_there_is() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests", "docs"} == set(FLOORS)


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by their base name, and stops at the second of one name."""
    names = [path.name for path in (ROOT / "tests").glob("**/test_*.py")]
    assert sorted(names) == sorted(set(names))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_the_default_cases_of_a_product_are_as_few_as_hold_every_value(lengths: list[int]) -> None:
    default = [case.values for case in in_turn(*map(range, lengths)) if not case.marks]
    assert len(default) == max(lengths)
    assert [set(column) for column in zip(*default, strict=True)] == [set(range(length)) for length in lengths]


@pytest.mark.parametrize("lengths", [(2, 4), (4, 2), (2, 2, 4), (3, 6), (2, 2, 3)])
def test_the_values_of_a_product_do_not_go_in_step(lengths: tuple[int, ...]) -> None:
    """An axis that repeats would else meet the same values of the others over and over."""
    default = [case.values for case in in_turn(*map(range, lengths)) if not case.marks]
    for (one, first), (other, second) in itertools.combinations(enumerate(lengths), 2):
        common = math.gcd(first, second)
        pairs = {(case[one] % common, case[other] % common) for case in default}
        assert len(pairs) > common or common == 1, (one, other)


def test_no_test_is_for_thorough_runs_alone(request: pytest.FixtureRequest) -> None:
    """One case of several may be: what it finds, another finds too. It sees what is collected beside it."""
    items = [
        pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for name in ("test_both[1]", "test_both[2]", "test_thorough[1]", "test_thorough[2]", "test_default")
    ]
    for item in items[1:4]:
        item.add_marker("thorough")
    assert thorough_alone(items) == [request.node.parent.nodeid + "::test_thorough"]
    assert request.config.stash[THOROUGH_ALONE] == []


def test_pytest_has_nothing_to_look_through_at_its_end() -> None:
    """Else it takes so long after the whole suite that execnet interrupts its own worker."""
    code = f"import gc, sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import conftest; conftest.pytest_unconfigure(); print(len(gc.get_objects()))"
    done = run_python(code)
    assert (int(done.stdout) < 100, done.stderr) == (True, "")
