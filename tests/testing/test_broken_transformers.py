"""An installation of transformers that is broken: `inspect` goes on without it and says so, `contract` says why it cannot.

And one that an engine has written into, which builds the models that it built before.
"""

import json
from pathlib import Path

import pytest
from helpers import run_copy, run_python

CONFIG = {
    "model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip

BROKEN = {
    "RuntimeError: torch is too old": "raise RuntimeError('torch is too old')",
    "SystemExit: 3": "import sys\nsys.exit(3)",
    "has no attribute '__version__'": "class DeepseekV3Config: pass",
    "RuntimeError: Failed to import DeepseekV3Config": (
        "__version__ = '9'\ndef __getattr__(name):\n    raise RuntimeError('Failed to import ' + name)"
    ),
}
MAIN = "from layerfuse.cli import main\nmain({})"


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    package = tmp_path / "site" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN[request.param], encoding="utf-8")
    return request.param, tmp_path / "site"


def test_the_contract_says_what_is_wrong(broken: tuple[str, Path]) -> None:
    why, site = broken
    done = run_python(MAIN.format(["contract", "kimi-k2-instruct"]), site)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "layerfuse: kimi-k2-instruct was held to nothing: the installed transformers cannot be used: "
    )
    assert why in line
    assert "install it anew" in line


def test_inspect_goes_on_and_notes_it(broken: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = run_python(MAIN.format(["inspect", str(tmp_path)]), broken[1])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    (note,) = [line for line in done.stdout.splitlines() if "was not asked" in line]
    assert "the installed transformers cannot be used: " in note
    assert 'family = "gqa"' in done.stdout
    # What its code would have said is said to be open.
    for open_question in ("where the norms stand", "norm_weight_offset", "whether an MLP is gated"):
        assert f"# {open_question}" in done.stdout


VLLM_READ_A_CONFIG = """
import transformers
from layerfuse import registry
from layerfuse.testing import small_model

transformers.DeepseekV3Config.model_type = "deepseek_v32"
transformers.AutoConfig.register("deepseek_v32", transformers.DeepseekV3Config, exist_ok=True)
for name in ("deepseek-v3", "deepseek-v3.2"):
    model = small_model(registry.model(name), layers=1, hidden_size=64, heads=2)
    print(type(model).__name__, type(model.config).__name__)
"""


def test_a_config_class_that_vllm_has_renamed_builds_its_own_model() -> None:
    """vLLM reads DeepSeek-V3.2's config by DeepSeek-V3's class, and says so in that class for the rest of the process."""
    done = run_copy(VLLM_READ_A_CONFIG)
    assert done.stdout.splitlines() == [
        "DeepseekV3ForCausalLM DeepseekV3Config",
        "DeepseekV32ForCausalLM DeepseekV32Config",
    ], done.stderr
