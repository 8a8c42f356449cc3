"""The steps of a chain: one file for each, with all that it is, from a plan's words to what it is in a graph."""

from .add import Add
from .all_reduce import AllReduce
from .gated_norm import GATES, GatedNorm
from .linear import Experts, Linear
from .norm import Norm
from .pad import Pad
from .quant import Quant
from .rope import HeadNorm, Rope
from .silu_mul import SiluMul
from .step import MIDDLE, SINKS, SOURCES, STAGES, At, FusionError, Kind, Legality, Source, Step, format_of, main_step

__all__ = [
    "GATES",
    "MIDDLE",
    "SINKS",
    "SOURCES",
    "STAGES",
    "Add",
    "AllReduce",
    "At",
    "Experts",
    "FusionError",
    "GatedNorm",
    "HeadNorm",
    "Kind",
    "Legality",
    "Linear",
    "Norm",
    "Pad",
    "Quant",
    "Rope",
    "SiluMul",
    "Source",
    "Step",
    "format_of",
    "main_step",
]
