"""An adapter for the layers of a library called `tinylib`."""

from layerfuse.adapters import Adapter, Facts, MLASpec, const

TINY = Adapter(
    "tiny",
    {
        # A name that does not look like attention: it is found all the same.
        "tinylib:Mixer": Facts(
            MLASpec,
            {
                "num_heads": "heads.all",
                "num_local_heads": "heads.mine",
                "q_lora_rank": const(None),
                "kv_lora_rank": "latent",
                "qk_nope_head_dim": "nope",
                "qk_rope_head_dim": const(0),
                "v_head_dim": "value",
                "q_norm": "no_such_norm",
                "kv_norm": "latent_norm",
                "softmax_scale": "scale",
                "hidden_size": "width",
                "layer_index": "index",
            },
        )
    },
)
