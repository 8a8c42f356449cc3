"""What a measurement was taken on, written beside every result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, Python and package versions, and the commit, with whether the tree differs from it."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "packages": {name: _version(name) for name in ("torch", "transformers", "attrs", "cattrs", "triton")},
        "commit": (commit := _git("rev-parse", "HEAD")),
        "clean": commit is not None and _git("status", "--porcelain", "--untracked-files=no") == "",
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def too_few_gpus(least: int) -> str | None:
    """What to say where torch sees fewer GPUs than a benchmark needs, or None."""
    import torch

    found = torch.cuda.device_count()
    return None if found >= least else f"this needs {least} GPUs that torch can see, and there are {found}"


def save(name: str, results: dict[str, Any]) -> Path:
    """Write results and environment to `benchmarks/results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None
