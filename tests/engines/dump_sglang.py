"""Print, as JSON, what every SGLang layer of ``sglang_layers`` says about itself at each tensor-parallel size.

python dump_sglang.py > sglang.json            # everything
python dump_sglang.py kimi deepseek-v3/mla   # layers whose name contains one of these words
"""

from __future__ import annotations

import sys

from sglang_layers import LAYERS, MODELS, build_model  # isort: skip  (before what imports torch)
from layer_facts import dump

if __name__ == "__main__":
    dump("sglang", LAYERS, MODELS, build_model, sys.argv[1:])
