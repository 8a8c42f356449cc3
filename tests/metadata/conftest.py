"""Stand-ins of AITER's releases, as the tests of the bindings make them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "aiter"))

from fixtures import aiter_of, one_thread

__all__ = ["aiter_of", "one_thread"]
