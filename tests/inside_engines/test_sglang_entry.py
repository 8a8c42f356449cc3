"""SGLang's entry point of the wheel, as a process without SGLang sees it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import outside_package, run_python

LOADED = """
import sys, torch
from types import SimpleNamespace
from layerfuse.engines.sglang import plugin, register
register()
arguments, config = SimpleNamespace(tp_size=8), SimpleNamespace(quantization=None)
runner = SimpleNamespace(model=torch.nn.Linear(2, 2), server_args=arguments, model_config=config)
plugin._at_load(lambda runner: None, runner)
print([name for name in sys.modules if name.startswith(("layerfuse.fusion.catalog", "layerfuse.fusion.ops"))])
"""
CALLED = """
import json, sys
from layerfuse.engines.sglang import register
register(); register()
print(json.dumps([name for name in sys.modules if name in ("torch", "sglang", "layerfuse.engines.sglang.plugin")]))
"""


def test_the_wheel_names_it() -> None:
    (found,) = [
        each for each in importlib.metadata.entry_points(group="sglang.srt.plugins") if each.name == "layerfuse"
    ]
    assert found.load().__module__ == "layerfuse.engines.sglang"


def test_where_fusions_are_switched_off_it_imports_nothing() -> None:
    environment = {**os.environ, "LAYERFUSE_FUSIONS": " none "}
    said = subprocess.run([sys.executable, "-c", CALLED], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == []


@pytest.mark.parametrize("asked", [None, "", "add_rms_norm"])
def test_else_it_waits_for_sglang_without_importing_it(asked: str | None) -> None:
    """What is on by default is asked when a model is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "LAYERFUSE_FUSIONS"}
    environment |= {} if asked is None else {"LAYERFUSE_FUSIONS": asked}
    said = subprocess.run([sys.executable, "-c", CALLED], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == ["layerfuse.engines.sglang.plugin"]
    assert not said.stderr


def test_a_variable_that_nothing_reads_is_named_once() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERFUSE_")}
    environment["LAYERFUSE_FUSION"] = "none"
    twice = f"{LOADED}\nplugin._at_load(lambda runner: None, runner)"
    said = subprocess.run([sys.executable, "-c", twice], env=environment, capture_output=True, text=True, check=True)
    assert said.stderr.count("LAYERFUSE_FUSION is set, and no variable is called that; did you mean") == 1


def test_where_nothing_is_on_what_plans_is_not_imported() -> None:
    """It takes longer than a start with nothing to do may."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERFUSE_")}
    said = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_beside_a_package_with_fusions_a_model_on_a_cpu_is_told_where_defaults_come_from(tmp_path: Path) -> None:
    """Without a GPU that has a name, and of a model that has no parameters."""
    code = LOADED.replace("Linear(2, 2)", "Identity()").partition("plugin._at_load")[0]
    code += "print(plugin._nothing_on(runner), plugin._say_where_defaults_come_from(runner))"
    said = run_python(code, outside_package(tmp_path, 1.0), LAYERFUSE_FUSIONS="")
    assert (said.stdout, said.stderr) == ("False None\n", "")
