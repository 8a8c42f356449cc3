"""Shared by all tests: how long hypothesis searches, and what `slow` means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("layerfuse", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("LAYERFUSE_HYPOTHESIS", "layerfuse"))


if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    # Read when Triton is first imported, which torch may do: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than ten seconds (deselect with -m 'not slow')")
