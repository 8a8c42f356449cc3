"""bench/scripts/vllm_forced.py in vLLM's real sampler: requests that name their tokens get them, and log probabilities of the model's own."""

from pathlib import Path

import pytest

pytest.importorskip("vllm_host")  # before vllm: it chooses the platform
import torch

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


def test_named_tokens_are_drawn(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from vllm import SamplingParams
    from vllm.v1.sample import logits_processor
    from vllm.v1.sample.logits_processor import BatchUpdate

    (forced,) = logits_processor._load_custom_logitsprocs(["vllm_forced:Forced"])
    processor = forced(None, torch.device("cpu"), False)
    assert not processor.is_argmax_invariant()
    drawn = [[], [], []]
    tokens = [[3, 4], None, [5]]
    wanted = [SamplingParams(temperature=0, extra_args=each and {"tokens": each}) for each in tokens]
    added = [(i, params, [1, 2], drawn[i]) for i, params in enumerate(wanted)]
    processor.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    for expected in ([3, 0, 5], [4, 0, 0]):
        logits = torch.zeros(3, 9)
        logits[:, 0] = 30.0
        found = processor.apply(logits).argmax(-1).tolist()
        assert found == expected
        for row, token in zip(drawn, found, strict=True):
            row.append(token)
