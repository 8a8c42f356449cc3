"""What a measurement was taken on, for the record: device, driver, packages, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._version import commit_of

PACKAGES = ("torch", "triton", "transformers", "amd-aiter", "flash-linear-attention", "flashinfer-python", "vllm")
CPU = torch.device("cpu")


def environment(device: torch.device = CPU) -> dict[str, Any]:
    """Plain data; None where something cannot be known. Of the CPU it asks no GPU anything."""
    return {
        "device": device_name(device),
        **(_gpu(device) if device.type == "cuda" else {"cores": os.cpu_count(), "threads": torch.get_num_threads()}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "load": os.getloadavg()[0],
        "packages": {name: version_of(name) for name in PACKAGES},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "layerfuse": __version__,
        "commit": commit_of(Path(__file__).parents[1]),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def device_name(device: torch.device) -> str:
    """As the maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        **_smi(device),
    }


def _smi(device: torch.device) -> dict[str, str | None]:
    """Driver and clocks, by nvidia-smi where there is one."""
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.limit")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    said = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id=GPU-{uuid}")
    values = [None] * len(fields) if said is None else [value.strip() for value in said.split(",")]
    return dict(zip((field.replace(".", "_") for field in fields), values, strict=False))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def version_of(package: str) -> str | None:
    """That is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
