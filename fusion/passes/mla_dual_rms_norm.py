"""The MLA dual norm: an MLA layer's query-latent and key/value-latent norms become one `layerfuse::mla_dual_rms_norm`.

It also takes the pairs that a quantised fusion was expected to take and left.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .norm_sites import NormSite
from .pairs import LatentPairPass, call_fused, erase_unused


class MLADualRMSNormPass(LatentPairPass):
    """Replaces two norms by one op."""

    fusion: ClassVar[str] = "mla_dual_rms_norm"

    def fuse(self, q: NormSite, kv: NormSite) -> str | None:
        """Replace both norms. None when done, else why not."""
        results = call_fused(torch.ops.layerfuse.mla_dual_rms_norm.default, q, kv, ())
        if isinstance(results, str):
            return results
        for site, result in zip((q, kv), results, strict=True):
            result.meta = dict(site.out.meta)
            site.out.replace_all_uses_with(result)
        erase_unused((*q.nodes, *kv.nodes))
        return None
