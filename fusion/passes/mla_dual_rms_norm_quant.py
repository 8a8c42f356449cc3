"""The quantised MLA dual norms: both latent norms and the query's fp8 quantisation become one op.

The pair is found as for `mla_dual_rms_norm`; then everything that reads the normed query must be the quantisation that
the plan's config declares. What is left alone is taken by the plain dual norm, which runs after.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..activation_quant import ActivationQuant
from .motion import mutation_between
from .norm_sites import NormSite, value
from .pairs import LatentPairPass, call_fused, erase_unused
from .patterns import find_op
from .quant_results import Results
from .quant_scales import NotTaken
from .quant_sites import QuantSite, find_quant_sites


class LatentPairQuantPass(LatentPairPass):
    """What both schemes share: the quantisation is found, and held to what the plan says."""

    def fuse(self, q: NormSite, kv: NormSite) -> str | None:
        """Replace both norms and the quantisation. None when done, else why not."""
        quant = self.plan.config.quant
        try:
            if quant is None:
                raise NotTaken("the plan declares no quantisation")
            return self._fuse(q, kv, quant)
        except NotTaken as reason:
            return str(reason)

    def _fuse(self, q: NormSite, kv: NormSite, quant: ActivationQuant) -> str | None:
        like = value(q.out)
        if like.dtype == torch.float64:
            raise NotTaken("the normed query is torch.float64; quantisation starts from float32, bfloat16 or float16")
        sites = find_quant_sites(q.out)
        results = [Results(site, like) for site in sites]
        for site, result in zip(sites, results, strict=True):
            reason = self._differs(site, result, like.shape[-1], quant)
            if reason is not None:
                return reason
        nodes = sorted({node for site in sites for node in site.nodes})
        writer = mutation_between(q.out, nodes[-1])
        if writer is not None:
            return f"{writer} writes in place between the norm and its quantisation"
        groups = () if quant.group_size is None else (quant.group_size, quant.column_major)
        options = (sites[0].dtype, *groups, quant.use_ue8m0)
        fused = call_fused(find_op(f"layerfuse::{self.fusion}"), q, kv, options)
        if isinstance(fused, str):
            return fused
        values, scales, keys = fused
        unread = [node for result in results for node in result.replace(values, scales)]
        keys.meta = dict(kv.out.meta)
        kv.out.replace_all_uses_with(keys)
        erase_unused((*unread, *nodes, *q.nodes, *kv.nodes))
        return None

    def _differs(self, site: QuantSite, result: Results, width: int, quant: ActivationQuant) -> str | None:
        """How a site differs from what the plan says, or None."""
        if site.columns != (width if quant.group_size is None else quant.group_size):
            graph = "with one scale per token" if site.columns == width else f"groups of {site.columns}"
            return f"the graph quantises {graph}, the plan says {quant.group_size or 'one scale per token'}"
        if str(site.dtype) != f"torch.float8_{self.plan.target.fp8}":
            return f"the graph quantises to {site.dtype}, and {self.plan.target} takes {self.plan.target.fp8}"
        if site.use_ue8m0 != quant.use_ue8m0:
            graph, planned = ("powers of two" if each else "not rounded" for each in (site.use_ue8m0, quant.use_ue8m0))
            return f"the graph's scales are {graph}, the plan's {planned}"
        if result.column_major != quant.column_major and not result.in_either_layout:
            graph, planned = ("column" if each else "row" for each in (result.column_major, quant.column_major))
            return f"the graph has the scales {graph} by {graph}, the plan {planned} by {planned}"
        return None


class MLADualRMSNormPerTokenQuantPass(LatentPairQuantPass):
    """One scale per token."""

    fusion: ClassVar[str] = "mla_dual_rms_norm_per_token_quant"


class MLADualRMSNormGroupQuantPass(LatentPairQuantPass):
    """One scale per group of columns."""

    fusion: ClassVar[str] = "mla_dual_rms_norm_group_quant"
