"""What is expected of every binding in every release, written down from the record of AITER's sources by hand.

Nothing here is computed by the code that is tested.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Works:
    """It binds, follows the convention known since this release, and gives the right numbers."""

    since: str


@frozen
class No:
    """It is refused; the reason has these words."""

    words: str


ABSENT = No("has no such function")
LAST = "v0.1.20.post1"

EXPECTED: dict[str, tuple[tuple[str, str, Works | No], ...]] = {
    "mla_dual_rms_norm": (
        ("v0.1.5", "v0.1.11.post1", ABSENT),
        ("v0.1.12", "v0.1.13.post1", Works("v0.1.12")),
        ("v0.1.14-rc0", LAST, Works("v0.1.14-rc0")),
    ),
    "mla_dual_rms_norm_per_token_quant": (
        ("v0.1.5", "v0.1.13.post1", ABSENT),
        ("v0.1.14-rc0", LAST, Works("v0.1.14-rc0")),
    ),
    "mla_dual_rms_norm_group_quant": (
        ("v0.1.5", "v0.1.11.post1", ABSENT),
        ("v0.1.12", "v0.1.12.post2", Works("v0.1.12")),
        ("v0.1.13.dev0", "v0.1.13.post1", Works("v0.1.13.dev0")),
        ("v0.1.14-rc0", LAST, Works("v0.1.14-rc0")),
    ),
    "rms_norm": (("v0.1.5", LAST, Works("v0.1.5")),),
    "add_rms_norm": (
        ("v0.1.5", "v0.1.16.post6", Works("v0.1.5")),
        ("v0.1.17-rc0", LAST, Works("v0.1.17-rc0")),
    ),
    "rms_norm_quant": (
        ("v0.1.5", "v0.1.10", ABSENT),
        ("v0.1.10.post1", "v0.1.16.post6", Works("v0.1.10.post1")),
        ("v0.1.17-rc0", LAST, Works("v0.1.17-rc0")),
    ),
    "add_rms_norm_quant": (
        ("v0.1.5", "v0.1.10", ABSENT),
        ("v0.1.10.post1", "v0.1.16.post6", Works("v0.1.10.post1")),
        ("v0.1.17-rc0", LAST, Works("v0.1.17-rc0")),
    ),
    "gated_rms_norm_group_quant": (
        ("v0.1.5", "v0.1.12", ABSENT),
        ("v0.1.12.post1", LAST, Works("v0.1.12.post1")),
    ),
    "gated_rms_norm_per_token_quant": (
        ("v0.1.5", "v0.1.17", ABSENT),
        ("v0.1.17-longctx", LAST, Works("v0.1.17-longctx")),
    ),
    "triton_gated_rms_norm_quant": (
        ("v0.1.5", "v0.1.13-rc1", ABSENT),
        ("v0.1.13-rc2", LAST, Works("v0.1.13-rc2")),
    ),
    "triton_rms_norm": (
        ("v0.1.5", "v0.1.9.post1", Works("v0.1.5")),
        ("v0.1.10", LAST, Works("v0.1.10")),
    ),
    "triton_rms_norm_group_quant": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.9.post1", Works("v0.1.6.post2")),
        ("v0.1.10", "v0.1.19", Works("v0.1.10")),
        ("v0.1.19.post1", LAST, Works("v0.1.19.post1")),
    ),
    "triton_add_rms_norm_pad": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.9.post1", Works("v0.1.6.post2")),
        ("v0.1.10", LAST, Works("v0.1.10")),
    ),
    "triton_act_mul_group_quant": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", LAST, Works("v0.1.6.post2")),
    ),
    "mla_metadata_info": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.7.post4", Works("v0.1.6.post2")),
        ("v0.1.7.post5", "v0.1.15.post3", Works("v0.1.7.post5")),
        ("v0.1.16", LAST, Works("v0.1.16")),
    ),
    "mla_metadata": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.7.post5", No("disagree about the order of work_indptr and work_info")),
        ("v0.1.8", "v0.1.10.post1", Works("v0.1.8")),
        ("v0.1.10.post2", "v0.1.16.post6", Works("v0.1.10.post2")),
        ("v0.1.17-rc0", "v0.1.17", Works("v0.1.17-rc0")),
        ("v0.1.17-longctx", LAST, Works("v0.1.17-longctx")),
    ),
    "ps_metadata_info": (
        ("v0.1.5", "v0.1.10", ABSENT),
        ("v0.1.10.post1", LAST, Works("v0.1.10.post1")),
    ),
    "mla_decode": (
        ("v0.1.5", "v0.1.6.post1", Works("v0.1.5")),
        ("v0.1.6.post2", "v0.1.7.post4", Works("v0.1.6.post2")),
        ("v0.1.7.post5", "v0.1.8", Works("v0.1.7.post5")),
        ("v0.1.9", "v0.1.10.post1", Works("v0.1.9")),
        ("v0.1.10.post2", "v0.1.16.post6", Works("v0.1.10.post2")),
        ("v0.1.17-rc0", "v0.1.19.post2", Works("v0.1.17-rc0")),
        ("v0.1.20", LAST, Works("v0.1.20")),
    ),
    "all_reduce_rms_norm": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.7.post1", No("it takes no residual")),
        ("v0.1.7.post2", "v0.1.11.post1", No("epsilon for an integer")),
        ("v0.1.12", "v0.1.15.post3", Works("v0.1.10.post2")),
        ("v0.1.16", "v0.1.16.post6", Works("v0.1.16")),
        ("v0.1.17-rc0", LAST, Works("v0.1.17-rc0")),
    ),
    "all_reduce_rms_norm_group_quant": (
        ("v0.1.5", "v0.1.13.post1", ABSENT),
        ("v0.1.14-rc0", "v0.1.16.post6", Works("v0.1.14-rc0")),
        ("v0.1.17-rc0", "v0.1.17", Works("v0.1.17-rc0")),
        ("v0.1.17-longctx", "v0.1.19.post1", Works("v0.1.14-rc0")),
        ("v0.1.19.post2", LAST, Works("v0.1.17-rc0")),
    ),
    "qr_handles": (
        ("v0.1.5", "v0.1.5.post1", ABSENT),
        ("v0.1.5.post2", "v0.1.19", Works("v0.1.5.post2")),
        ("v0.1.19.post1", LAST, Works("v0.1.19.post1")),
    ),
    "qr_all_reduce_rms_norm": (
        ("v0.1.5", "v0.1.17", ABSENT),
        ("v0.1.17-longctx", LAST, Works("v0.1.17-longctx")),
    ),
}
"""Binding -> (first release, last release, what is expected), without gaps from v0.1.5 to v0.1.20.post1."""

REPRESENTATIVE = (
    *("v0.1.5", "v0.1.7.post5", "v0.1.10.post1", "v0.1.12", "v0.1.13.post1", "v0.1.15.post3"),
    *("v0.1.16.post6", "v0.1.17", "v0.1.17-longctx", "v0.1.19.post1", "v0.1.20.post1"),
)
"""At least one release of every generation."""
