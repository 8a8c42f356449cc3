"""AMD's AITER as installed, whichever release it is: found by its files, bound by the parameters of its functions.

AITER renames and reorders its functions from release to release. Nothing here trusts a version: `find_build` tells
which `aiter` is installed without importing it, `probe` reads what a function takes from its source, and `bind` gives
a callable with one convention of ours, or a sentence that says why not. Where AITER is not installed, no table of it is loaded.
"""

from ...._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
