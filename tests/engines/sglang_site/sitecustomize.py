"""On PYTHONPATH of a real SGLang engine without a GPU: what every process of it needs before it imports SGLang."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import fa3_on_cpu
from stand_ins import allow_missing_kernels, declare_torchvision_ops

held = declare_torchvision_ops()
allow_missing_kernels("sgl_kernel")
fa3_on_cpu.stand_in()
