"""Specs of inner kernel layers: what they do not know is an error that names the layer to ask, and never a value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest
from specs_at_hand import KERNELS, OUTER, mla_kernel

from layerfuse.adapters.errors import InnerLayerError
from layerfuse.adapters.specs import KernelSpec

# No layer around a kernel knows the final norm, which is the model's, the MLP, which stands beside it, or mixers whose kernels have no spec.
AROUND = [make for kind, make in OUTER.items() if kind not in ("final", "gated_mlp", "mamba2", "other")]
OUTER_NAMES = sorted({a.name for make in AROUND for a in attrs.fields(type(make()))})


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_what_only_the_outer_layer_knows_is_an_error_that_names_it(make: Any) -> None:
    spec = make()
    for name in (*OUTER_NAMES, "split_sizes", "gated_norm_shape", "qk_head_dim"):
        if any(name in vars(cls) for cls in type(spec).__mro__):
            assert getattr(spec, name) is not None or name == "sliding_window"
            continue
        with pytest.raises(InnerLayerError) as caught:
            getattr(spec, name)
        assert str(caught.value) == (
            f"{type(spec).__name__} describes an inner kernel layer, which does not know its {name}; "
            "ask the layer model.layers.3.self_attn."
        )
        # A guard written by others takes it for absent, and not for None.
        assert not hasattr(spec, name)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", ["num_haeds", "q_a_layernorm", "__len__", "_hidden"])
def test_a_name_that_no_spec_has_is_a_plain_attribute_error(make: Any, name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(make(), name)
    assert not isinstance(caught.value, InnerLayerError)
    assert caught.value.name == name


def test_an_inner_layer_error_survives_pickling() -> None:
    with pytest.raises(InnerLayerError) as caught:
        _ = mla_kernel().kv_norm
    back = pickle.loads(pickle.dumps(caught.value))
    assert (str(back), back.field) == (str(caught.value), "kv_norm")


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_copying_does_not_ask_the_outer_layer(make: Any) -> None:
    # copy and pickle look for methods that are not there: __getattr__ must say so plainly, before any field is set.
    spec = make()
    assert isinstance(spec, KernelSpec)
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == attrs.evolve(spec) == spec


def test_the_kernel_keeps_what_it_is_handed() -> None:
    spec = mla_kernel(qk_rope_head_dim=0)
    assert (spec.num_local_heads, spec.latent_width) == (16, 512)
