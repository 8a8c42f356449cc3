"""What level-2 fusions do to a model's logits, beside what quantisation does to them at all.

Small models of transformers' classes on the CPU. Every linear has float8 weights, the same in all three models, and
quantises its activations, but for the first: (a) float64, activations as they are; (b) quantised, as transformers runs it,
which rounds each norm before it is quantised; (c) the same with fusions. Differences are relative to the logits of (a).
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from layerfuse import fusion, registry
from layerfuse.fusion import ActivationQuant, FusionConfig, Target
from layerfuse.fusion.sites import ROLES
from layerfuse.testing import small_model
from layerfuse.verify import one_of_each

FP8, LARGEST = torch.float8_e4m3fn, 448.0
CPU = Target(arch="cpu", vendor="cpu", fp8="e4m3fn")
HIDDEN, INTERMEDIATE = 256, 384
TOKENS = torch.arange(24).view(2, 12)


class Float8Linear(nn.Module):
    """In place of nn.Linear: float8 weights, and activations that are quantised and multiplied as what they stand for."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        # Powers of two, so that every dtype holds what the weights stand for exactly.
        scale = torch.exp2(torch.ceil(torch.log2(weight.abs().amax(1, keepdim=True) / LARGEST)))
        self.register_buffer("weight", ((weight / scale).to(FP8).float() * scale).to(linear.weight.dtype))
        self.out_features, self.in_features = linear.weight.shape
        self.quant: ActivationQuant | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return nn.functional.linear(x if self.quant is None else self._quantised(x).to(x.dtype), self.weight)

    def _quantised(self, x: Tensor) -> Tensor:
        assert self.quant is not None
        if self.quant.fixed == "static":
            return (x / self.scale).clamp(-LARGEST, LARGEST).to(FP8).float() * self.scale
        columns = self.quant.group_size or self.in_features
        wide = x.unflatten(-1, (-1, columns)).float()
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
        if self.quant.use_ue8m0:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        values = (wide / scale).clamp(-LARGEST, LARGEST).to(FP8).flatten(-2)
        return (values.unflatten(-1, (-1, columns)).float() * scale).flatten(-2)


def declared(name: str, dtype: torch.dtype) -> nn.Module:
    """A declared model with one layer of each kind at least, and dense MLPs, which are narrower than a group else."""
    few = one_of_each(registry.model(name))
    model: Any = small_model(few, layers=few.num_hidden_layers, hidden_size=HIDDEN, dtype=dtype)
    config = copy.deepcopy(model.config)
    config.intermediate_size = INTERMEDIATE
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp = type(layer.mlp)(config).to(dtype).requires_grad_(False)
    fusion.keep_recurrences(model)
    return model


MODELS = {"deepseek-v3": "deepseek-v3", "qwen3-next": "qwen3-next-80b-a3b", "llama": "llama-3.1-8b"}


def quantise(model: nn.Module, quant: ActivationQuant) -> None:
    """Replace every linear. Static scales are calibrated on the tokens; linears that read one tensor share one."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Float8Linear(child))
    linears = [each for each in model.modules() if isinstance(each, Float8Linear)]
    if quant.fixed == "static":
        known: dict[int, tuple[Tensor, Tensor]] = {}

        def calibrate(linear: nn.Module, given: tuple[Tensor, ...]) -> None:
            (x,) = given
            # The tensor is held too, so that no other takes its place in memory.
            linear.scale = known.setdefault(id(x), (x.abs().max().float() / LARGEST, x))[0]

        hooks = [each.register_forward_pre_hook(calibrate) for each in linears]
        logits_of(model)
        for hook in hooks:
            hook.remove()
    for each in linears:
        each.quant = quant


def exact(model: nn.Module) -> nn.Module:
    """The model in float64 with the same weights and activations as they are."""
    model = copy.deepcopy(model).double()
    for each in model.modules():
        if isinstance(each, Float8Linear):
            each.quant = None
    return model


def logits_of(model: Any) -> Tensor:
    """Of the tokens, in float64."""
    with torch.no_grad():
        result: Tensor = model(input_ids=TOKENS, use_cache=False).logits.double()
    return result


def measured(name: str, dtype: torch.dtype, scheme: str) -> dict[str, Any]:
    """One model in one dtype with one quantisation; every expected fusion ran, or this raises FusionMissedError."""
    torch._dynamo.reset()
    quant = ActivationQuant.parse(scheme)
    model = declared(MODELS[name], dtype)
    quantise(model, quant)
    fused = fusion.compile(
        model,
        target=CPU,
        config=FusionConfig(level=2, quant=dict.fromkeys(ROLES, quant)),
        strict=True,
        fullgraph=True,
    )
    a, b, c = logits_of(exact(model)), logits_of(model), logits_of(fused)
    ran = Counter[str]()
    for (_, fusion_name), count in fused.report.executed.items():
        ran[fusion_name] += count
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "quant": scheme,
        "expected": len(fused.plan.expected()),
        "executed": dict(ran),
        **{
            f"{pair}_{what}": float(reduce((one - other).abs()) / reduce(a.abs()))
            for pair, one, other in (("ab", a, b), ("ac", a, c), ("bc", b, c))
            for what, reduce in (("max", torch.max), ("mean", torch.mean))
        },
    }
