"""How a matcher says no."""

from __future__ import annotations


class Unmatched(Exception):  # noqa: N818 (not an error: a reason on its way to the report)
    """Why the nodes of a graph are not the step that was asked for, as a sentence."""
