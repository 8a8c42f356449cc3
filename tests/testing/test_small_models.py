"""Small copies of models whose code ties the heads to the hidden size."""

import attrs
import pytest

from layerfuse import registry
from layerfuse.testing import small_entry, small_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("model_type", ["bitnet", "helium", "olmoe"])
def test_heads_fill_the_hidden_size_where_the_code_takes_one_for_the_other(model_type):
    entry = attrs.evolve(registry.model("llama-3.1-8b"), name="mine", model_type=model_type, hf_id=None)
    asked = {"layers": 1, "hidden_size": 64, "heads": 2}
    (kind,) = small_entry(entry, **asked).layers.values()
    assert kind.num_heads * kind.head_dim == 64

    answer = small_model(entry, **asked)(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert answer.logits.shape[:2] == (1, 3)


def test_others_keep_the_width_of_their_heads():
    (kind,) = small_entry(registry.model("llama-3.1-8b"), hidden_size=64, heads=2).layers.values()
    assert kind.head_dim == 128
