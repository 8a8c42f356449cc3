"""The fused ops, registered with torch.library when this package is imported: `torch.ops.layerfuse.*`."""

from ..backends.aiter import register as register_aiter
from ..backends.triton import register as register_triton
from .mla_dual_rms_norm import mla_dual_rms_norm
from .mla_dual_rms_norm_quant import mla_dual_rms_norm_group_quant, mla_dual_rms_norm_per_token_quant
from .quantise import quantise_group, quantise_per_token
from .rms_norm import rms_norm

# The ops have registered their references. What is added later is preferred where it runs.
register_triton()
register_aiter()

__all__ = [
    "mla_dual_rms_norm",
    "mla_dual_rms_norm_group_quant",
    "mla_dual_rms_norm_per_token_quant",
    "quantise_group",
    "quantise_per_token",
    "rms_norm",
]
