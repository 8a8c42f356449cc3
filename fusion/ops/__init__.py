"""The fused ops, registered with torch.library when this package is imported: `torch.ops.layerfuse.*`."""

from .mla_dual_rms_norm import mla_dual_rms_norm
from .rms_norm import rms_norm

__all__ = ["mla_dual_rms_norm", "rms_norm"]
