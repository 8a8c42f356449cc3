"""The fused ops, registered with torch.library when this package is imported: `torch.ops.layerfuse.*`."""

from ..backends import triton
from .mla_dual_rms_norm import mla_dual_rms_norm
from .mla_dual_rms_norm_quant import mla_dual_rms_norm_group_quant, mla_dual_rms_norm_per_token_quant
from .rms_norm import rms_norm

# The ops register their references; what is added later is preferred where it runs.
triton.add()

__all__ = ["mla_dual_rms_norm", "mla_dual_rms_norm_group_quant", "mla_dual_rms_norm_per_token_quant", "rms_norm"]
