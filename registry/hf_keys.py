"""By which keys a Hugging Face config says the sizes of a kind of layer: to read one, and to write one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Keys: TypeAlias = Mapping[str, tuple[str, ...]]
"""Field of a kind -> the keys that say it, the first of which is read."""

MLA_KEYS: Keys = {
    "num_heads": ("num_attention_heads", "num_key_value_heads"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
GQA_KEYS: Keys = {
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}
GDN_KEYS: Keys = {
    "num_k_heads": ("linear_num_key_heads",),
    "num_v_heads": ("linear_num_value_heads",),
    "head_k_dim": ("linear_key_head_dim",),
    "head_v_dim": ("linear_value_head_dim",),
    "conv_kernel_size": ("linear_conv_kernel_dim",),
}
KDA_KEYS: Keys = {
    "num_k_heads": ("linear_num_heads",),
    "head_k_dim": ("linear_head_dim",),
    "conv_kernel_size": ("linear_conv_kernel_dim",),
}

MAMBA2_KEYS: Keys = {
    "num_heads": ("mamba_n_heads",),
    "head_dim": ("mamba_d_head",),
    "ssm_state_size": ("mamba_d_state",),
    "num_groups": ("mamba_n_groups",),
    "conv_kernel_size": ("mamba_d_conv",),
}
NEMOTRON_H_MAMBA2_KEYS: Keys = {
    "num_heads": ("mamba_num_heads",),
    "head_dim": ("mamba_head_dim",),
    "ssm_state_size": ("ssm_state_size",),
    "num_groups": ("n_groups",),
    "conv_kernel_size": ("conv_kernel",),
}
