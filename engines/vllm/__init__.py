"""layerfuse inside vLLM: the entry point of `vllm.general_plugins`, and nothing that takes time to import.

vLLM calls `register` in every process, before it has a config. The hooks are set as vLLM's modules are imported.
"""

from __future__ import annotations


def register() -> None:
    """Stand at vLLM's hooks. Calling it again changes nothing; it never raises."""
    from . import plugin

    plugin.register()


__all__ = ["register"]
