"""Calls that AITER answers wrongly, fails on or does not know, and the releases of which that is true: by hand."""

from __future__ import annotations

import torch
from refusals_norms import BF16, FIRST, FNUZ, FP16, FP32, NORMS_REFUSED, NORMS_TAKEN, Case

QUERY = {"dtype": BF16, "width": 512, "kv_width": 512, "rope_width": 64, "num_heads": 16, "table_dtype": FP32}
TURNED, UNTURNED = QUERY | {"pairs": "interleaved"}, QUERY | {"pairs": "none", "table_dtype": BF16}

TAKEN = (
    *NORMS_TAKEN,
    Case("mla_query_concat", TURNED, releases=()),
    Case("mla_query_concat", TURNED | {"pairs": "halves", "dtype": FP32, "num_heads": 5}, releases=()),
    Case("mla_query_concat.cat", UNTURNED, releases=()),
    Case("mla_decode", {"dtype": BF16, "num_heads": 16, "has_plan": True}, releases=()),
    Case("mla_metadata_info", {"num_heads": 24}, releases=()),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "width": 7168, "world_size": 8}, releases=()),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "width": 2880, "world_size": 8}, releases=()),
    Case("all_reduce_add_rms_norm_pad", {"dtype": BF16, "width": 2880, "padded_width": 3072}, releases=()),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "width": 7168, "group_size": 128}, releases=()),
    Case("all_reduce_add_rms_norm_per_token_quant", {"dtype": FP16, "width": 5120, "world_size": 8}, releases=()),
)
"""What no release that has the function refuses."""

REFUSED = (
    *NORMS_REFUSED,
    Case("mla_query_concat", TURNED | {"dtype": torch.float64}, "float16"),
    Case("mla_query_concat", TURNED | {"kv_width": 192}, "power of two"),
    Case("mla_query_concat.cat", UNTURNED | {"rope_width": 96}, "power of two"),
    Case("mla_query_concat", TURNED | {"pairs": "interleaved_to_halves"}, "read as neighbours and written as halves"),
    Case("mla_query_concat", TURNED | {"pairs": "none"}, "or none at all"),
    Case("mla_query_concat", TURNED | {"table_dtype": BF16}, "rounds each product"),
    Case("mla_query_concat.cat", UNTURNED | {"pairs": "halves"}, "turns nothing"),
    Case("mla_decode", {"dtype": BF16, "num_heads": 12}, "head counts"),
    Case("mla_decode", {"dtype": FP16, "num_heads": 16}, "float16"),
    Case("mla_decode", {"dtype": BF16, "num_heads": 256, "has_plan": True}, "128"),
    Case("mla_decode", {"dtype": FNUZ, "num_heads": 16}, "another GPU"),
    Case("mla_metadata_info", {"num_heads": 12}, "no multiple of"),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "width": 7168, "world_size": 6}, "2, 4 and 8"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "width": 7168, "world_size": 1}, "2, 4 and 8"),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "width": 256}, "1 to 32 KiB", ((FIRST, "v0.1.19"),)),
    Case(
        *("all_reduce_add_rms_norm", {"dtype": BF16, "width": 2888, "world_size": 2}),
        *("divide among the ranks", ((FIRST, "v0.1.19"),)),
    ),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "width": 16392, "world_size": 2}, "1 to 32 KiB"),
    Case("all_reduce_add_rms_norm_pad", {"dtype": BF16, "width": 8200, "padded_width": 8200, "world_size": 4}, "KiB"),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "width": 7164}, "multiple of 16 bytes"),
    Case("all_reduce_add_rms_norm_pad", {"dtype": BF16, "width": 2880, "padded_width": 2882}, "multiple of 16 bytes"),
    Case(
        *("all_reduce_add_rms_norm", {"dtype": BF16, "width": 7168, "weight_offset": 1.0}),
        *("v0.1.17-rc0", ((FIRST, "v0.1.16.post6"),)),
    ),
    Case("all_reduce_add_rms_norm_per_token_quant", {"dtype": BF16, "weight_offset": 0.5}, "weight offset"),
    Case("all_reduce_add_rms_norm", {"dtype": torch.float64}, "float16"),
    Case("all_reduce_add_rms_norm", {"dtype": BF16, "weight_dtype": FP32}, "another dtype"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": FP32}, "float16 and bfloat16 only"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "width": 7168, "group_size": 1024}, "64 packs"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "width": 7424, "group_size": 512}, "do not divide"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "quant_dtype": FNUZ}, "another GPU"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "weight_offset": 1.0}, "knows none"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "width": 4608, "group_size": 96}, "power of two"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "width": 16384, "group_size": 128}, "16 KiB"),
    Case(
        *("all_reduce_add_rms_norm_per_token_quant", {"dtype": BF16, "width": 2880, "world_size": 8}),
        *("fills no warp", ((FIRST, "v0.1.19"),)),
    ),
    Case("all_reduce_add_rms_norm_per_token_quant_with_norm", {"dtype": BF16, "width": 8448}, "16 KiB"),
    Case("all_reduce_add_rms_norm_per_token_quant", {"dtype": BF16, "use_ue8m0": True}, "power-of-two scales"),
    Case("all_reduce_add_rms_norm_group_quant", {"dtype": BF16, "tma_aligned": True}, "padded columns"),
    Case(
        *(
            "all_reduce_add_rms_norm_group_quant",
            {"dtype": BF16, "width": 7168, "group_size": 128, "column_major": True},
        ),
        *("transpose_scale", ((FIRST, "v0.1.16.post6"), ("v0.1.17-longctx", "v0.1.19.post1"))),
    ),
)
"""What is refused in these releases, and in no others that have the function."""
