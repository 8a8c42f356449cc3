"""Linears as graphs without modules have them: of a plan with one linear that takes the fusion, which is not the graph's."""

from __future__ import annotations

from torch.fx import Graph

from layerfuse.adapters.activation_quant import ActivationQuant
from layerfuse.adapters.linear_specs import linear_spec, weight_spec
from layerfuse.adapters.specs import WHOLE, GatedMLPSpec
from layerfuse.fusion import Engine, FusionConfig, Plan, Target, plan
from layerfuse.fusion.catalog.few_token_linear import BLOCKS, PLAIN, ROWS
from layerfuse.fusion.rewrite import Pipeline

HELD = {
    PLAIN: (weight_spec("bfloat16", "plain", None), None),
    BLOCKS: (weight_spec("float8_e4m3fn", "block", (128, 128)), ActivationQuant(group_size=128)),
    ROWS: (weight_spec("float8_e4m3fn", "channel", None), ActivationQuant()),
}


def plan_of(fusion: str, **changes: object) -> Plan:
    """An MLP whose down projection takes a fusion, where it is switched on."""
    weight, quant = HELD[fusion]
    down = linear_spec("down_proj", ("down_proj",), (384, 384, 256, 256, (256,), "replicated"), weight, quant, False)
    mlp = GatedMLPSpec(
        hidden_size=256, layer_index=0, parallel=WHOLE, intermediate_size=384, local_intermediate_size=384,
        activation="silu", swiglu_limit=None, quant=quant, consumers=(down,),
    )  # fmt: skip
    target, config = Target(arch="cpu", vendor="cpu", fp8="e4m3fn"), FusionConfig(switches={fusion: True})
    return plan([("mlp", mlp)], target, config, Engine(**({"name": "vllm", "linears": {}} | changes)))


def everywhere(fusion: str, graph: Graph) -> tuple[str, ...]:
    """Let a fusion stand at every product of a graph of vLLM's that it takes; the ops that stand there then."""
    from layerfuse.engines.vllm.passes import readers

    record = Pipeline(plan_of(fusion)).rewrite(graph, readers())
    assert not record.uses, "no module is around"
    return record.others
