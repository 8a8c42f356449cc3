"""layerfuse inside SGLang: the entry point of `sglang.srt.plugins`.

SGLang calls `register` in every process, before it loads a model. Where `LAYERFUSE_FUSIONS` says `none`, nothing is imported and nothing
of SGLang's is touched.
"""

from __future__ import annotations

import os

ASKED = "LAYERFUSE_FUSIONS"


def register() -> None:
    """Stand at SGLang's hook, unless fusions are switched off. Calling it again changes nothing; it never raises."""
    if os.environ.get(ASKED, "").strip() == "none":
        return
    from . import plugin

    plugin.register()


__all__ = ["register"]
