"""Print, as JSON, what every vLLM layer of ``vllm_layers`` says about itself at each tensor-parallel size.

    python dump_vllm.py > vllm.json            # everything
    python dump_vllm.py kimi deepseek-v3/mla   # layers whose name contains one of these words

Compare the output of two releases to see which names and meanings changed.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from layer_facts import class_name, facts, mro
from vllm_layers import LAYERS, MODELS, build_model


def main(words: list[str]) -> None:
    wanted = {name: layer for name, layer in LAYERS.items() if not words or any(word in name for word in words)}
    dumped = []
    for model_name in dict.fromkeys(layer.model for layer in wanted.values()):
        for tp in MODELS[model_name].tp_sizes:
            rank = tp * 5 // 8  # not the first rank, and not the last
            model = build_model(model_name, tp=tp, rank=rank)
            for name, layer in wanted.items():
                if layer.model != model_name:
                    continue
                decoder = model.get_submodule(layer.decoder)
                norms = {child: facts(module) for child, module in decoder.named_children() if "norm" in child}
                dumped.append(
                    {
                        "layer": name,
                        "path": layer.path,
                        "tp": tp,
                        "rank": rank,
                        "facts": facts(model.get_submodule(layer.path)),
                        "decoder": {
                            "class": class_name(type(decoder)),
                            "mro": mro(type(decoder)),
                            "values": facts(decoder)["values"],
                            "norms": norms,
                        },
                    }
                )
    json.dump({"vllm": version("vllm"), "torch": version("torch"), "layers": dumped}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
