"""Print, as JSON, what every vLLM layer of ``vllm_layers`` says about itself at each tensor-parallel size.

python dump_vllm.py > vllm.json            # everything
python dump_vllm.py kimi deepseek-v3/mla   # layers whose name contains one of these words
"""

from __future__ import annotations

import sys

from vllm_layers import LAYERS, MODELS, build_model  # isort: skip  (before what imports torch)
from layer_facts import dump

if __name__ == "__main__":
    dump("vllm", LAYERS, MODELS, build_model, sys.argv[1:])
