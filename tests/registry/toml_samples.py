"""A small valid models.toml, and files that are wrong in one way each."""

from __future__ import annotations

GOOD = """
[models.mine]
adapter = "deepseek_v3"
source = "made up for a test"
num_hidden_layers = 4
hidden_size = 64
rms_norm_eps = 1e-6

[models.mine.layers.mla]
family = "mla"
num_heads = 8
q_lora_rank = 32
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
at = [0, 2]
yarn = { factor = 40.0, mscale_all_dim = 1.0 }

[models.mine.layers.delta]
family = "gated_delta_net"
at = "rest"
num_k_heads = 2
num_v_heads = 4
head_k_dim = 8
head_v_dim = 8
conv_kernel_size = 4
output_norm = { activation = "silu", norm_before_gate = true, group_size = "none" }
"""


def but(old: str, new: str) -> str:
    """The same with one difference."""
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def also(line: str, table: str = "[models.mine]") -> str:
    """The same with one line more in a table."""
    return but(table, f"{table}\n{line}")


MLA = "[models.mine.layers.mla]"
EXPERTS = "experts = { num_experts = 8, experts_per_token = 2, intermediate_size = 16 }"
DENSE = '\nmlps.dense = { intermediate_size = 16, activation = "silu" }'

BAD: dict[str, tuple[str, str]] = {
    # name -> (file, what one of the problems must say)
    "unknown key": (also("hiden_size = 64"), "unknown key 'hiden_size'; did you mean 'hidden_size'?"),
    "missing key": (but("hidden_size = 64\n", ""), "required key 'hidden_size' is missing @ $.models.mine"),
    "unknown top table": ("[model.x]\na = 1\n" + GOOD, "unknown table 'model'; did you mean 'models'?"),
    "text for a count": (but("num_heads = 8", 'num_heads = "8"'), "expected a whole number, got '8'"),
    "flag for a count": (but("num_heads = 8", "num_heads = true"), "expected a whole number, got True"),
    "float for a count": (but("num_heads = 8", "num_heads = 8.5"), "expected a whole number, got 8.5"),
    "zero heads": (but("num_heads = 8", "num_heads = 0"), "num_heads: expected at least 1, got 0 @ $.models.mine"),
    "negative width": (but("kv_lora_rank = 16", "kv_lora_rank = -16"), "expected at least 1, got -16"),
    "10^18 heads": (but("num_heads = 8", "num_heads = 1_000_000_000_000_000_000"), "expected at most 2147483647"),
    "beyond 64 bits": (
        but("num_heads = 8", f"num_heads = 0x1{'0' * 40}"),
        "expected a whole number of at most 64 bits",
    ),
    "date for a count": (but("num_heads = 8", "num_heads = 2026-08-22"), "expected a whole number, got datetime.date"),
    "list for a count": (but("num_heads = 8", "num_heads = [8]"), "expected a whole number, got [8]"),
    "word for a width": (
        but("q_lora_rank = 32", 'q_lora_rank = "off"'),
        "expected a whole number or 'none', got 'off'",
    ),
    "infinite epsilon": (
        but("rms_norm_eps = 1e-6", "rms_norm_eps = inf"),
        "rms_norm_eps: expected a finite number, got inf @ $.models.mine",
    ),
    "epsilon of nan": (
        but("rms_norm_eps = 1e-6", "rms_norm_eps = nan"),
        "rms_norm_eps: expected a finite number, got nan",
    ),
    "text for an epsilon": (but("rms_norm_eps = 1e-6", 'rms_norm_eps = "1e-6"'), "expected a number, got '1e-6'"),
    "odd rope": (but("qk_rope_head_dim = 4", "qk_rope_head_dim = 5"), "rotary embedding turns pairs"),
    "unknown family": (but('family = "mla"', 'family = "mlaa"'), "got 'mlaa'; did you mean 'mla' or 'mamba2'?"),
    "no family": (
        but('family = "mla"\n', ""),
        "family: expected one of mla, gated_delta_net, gqa, mamba2, other, mlp, got None",
    ),
    "unknown activation": (
        but('activation = "silu"', 'activation = "swish"'),
        "expected 'silu' or 'sigmoid', got 'swish'",
    ),
    "number for a flag": (but("norm_before_gate = true", "norm_before_gate = 1"), "expected true or false, got 1"),
    "shrinking yarn": (but("factor = 40.0", "factor = 0.5"), "yarn: expected a factor of at least 1"),
    "layer out of range": (but("at = [0, 2]", "at = [0, 4]"), "layer 4 does not exist among 4 (counted from 0)"),
    "layer before the first": (but("at = [0, 2]", "at = [-1]"), "layer -1 does not exist among 4"),
    "layer claimed twice": (but("at = [0, 2]", "at = [0, 0]"), "layer 0 already belongs to mla"),
    "no layer for a kind": (but("at = [0, 2]", "at = []"), "layers.mla.at: claims no layer"),
    "unclaimed layers": (but('at = "rest"', "at = [1]"), "layers: no kind claims layer 3"),
    "two rests": (but("at = [0, 2]", 'at = "rest"'), 'only one kind can be at "rest", got mla, delta'),
    "nothing left for rest": (but("at = [0, 2]", 'at = "all"'), 'no layer is left for "rest"'),
    "unknown place": (but("at = [0, 2]", 'at = "odd"'), 'expected "all", "rest", a list of layers or {start, step}'),
    "step of zero": (but("at = [0, 2]", "at = { step = 0 }"), "expected a step of at least 1"),
    "negative start": (but("at = [0, 2]", "at = { step = 2, start = -2 }"), "a start of at least 0"),
    "10^9 layers": (but("num_hidden_layers = 4", "num_hidden_layers = 1_000_000_000"), "expected 1 to 1000"),
    "no experts": (also(EXPERTS.replace("8", "0")), "experts.num_experts: expected at least 1, got 0 @"),
    "more experts per token": (
        also(EXPERTS.replace("8", "1")),
        "experts_per_token: expected at most num_experts 1, got 2",
    ),
    "experts nowhere": (also(EXPERTS + DENSE), 'experts.at: no layer is left for "rest" @'),
    "experts beyond the last layer": (also(EXPERTS.replace("}", ", at = [4] }")), "experts.at: layer 4 does not exist"),
    "shared experts alone": (
        also(EXPERTS.replace("}", ", at = [0] }") + DENSE.replace("dense", "shared_experts")),
        "experts.at: layer 1, which has shared experts, is not among them",
    ),
    "no layers": (
        but("num_hidden_layers = 4", "num_hidden_layers = 0"),
        "num_hidden_layers: expected 1 to 1000, got 0",
    ),
    "many attentions": (also("attentions_per_layer = 9"), "attentions_per_layer: expected 1 to 8, got 9"),
    "a name of its own": (also('name = "other"'), "the table's own name is the model's name; remove this key"),
    "upper-case name": (GOOD.replace("models.mine", 'models."Mine"'), "a model's name is lower-case without blanks"),
    "list of models": ("[[models]]\nadapter = 'x'\n", "expected tables [models.<name>], got"),
    "number for a model": ("[models]\nmine = 3\n", "expected a table, got 3 @ $.models.mine"),
    "engine epsilon below zero": (
        also("engines.vllm = { latent_norm_eps = -1e-6 }"),
        "engines.vllm.latent_norm_eps: expected more than 0, got -1e-06 @",
    ),
    "engine epsilon of nan that nothing uses": (
        but("q_lora_rank = 32", "q_lora_rank = 32\nlatent_norm_eps = 1e-6")
        + "[models.mine.engines.vllm]\noutput_norm_eps = nan\n",
        "engines.vllm.output_norm_eps: expected a finite number, got nan @",
    ),
    "latent width of zero": (
        but("q_lora_rank = 32", "q_lora_rank = 0"),
        "layers.mla.q_lora_rank: expected at least 1, got 0 @",
    ),
    "latent epsilon of zero": (
        but("kv_lora_rank = 16", "kv_lora_rank = 16\nlatent_norm_eps = 0.0"),
        "layers.mla.latent_norm_eps: expected more than 0, got 0.0 @",
    ),
    "hidden size of zero": (but("hidden_size = 64", "hidden_size = 0"), "hidden_size: expected at least 1, got 0 @"),
    "head width of zero": (
        but("head_v_dim = 8", "head_v_dim = 0"),
        "layers.delta.head_v_dim: expected at least 1, got 0 @",
    ),
    "unknown engine word": (also("engines.vllm = { eps = 1e-6 }"), "unknown key 'eps'"),
    "a number for the layers": (GOOD[: GOOD.index(MLA)] + "layers = 7\n", "layers"),
}
"""Every one is refused; with what it must at least say."""

NOT_OF_ONE_VALUE = {
    # What contradicts something elsewhere in the file: no schema of single values can know it. A schema takes 8.0 for 8.
    *("odd rope", "layer out of range", "layer claimed twice", "no layer for a kind", "unclaimed layers", "two rests"),
    *("nothing left for rest", "experts nowhere", "experts beyond the last layer", "shared experts alone"),
    "more experts per token",
}

BAD_CLASSES: dict[str, tuple[str, str]] = {
    # the text of one layer class -> what the problem says when the entry is registered
    "no start": ("{ num_heads = 'n' }", 'expected like = "<a known class>" or family = "<a kind of layer>"'),
    "unknown like": (
        "{ like = 'vllm:MLAAttentoin' }",
        "like: no class 'vllm:MLAAttentoin' is known; the closest known are",
    ),
    "malformed like": ("{ like = 'MLAAttention' }", "'MLAAttention' is no layer class; expected \"package:ClassName\""),
    "like a number": ("{ like = 7 }", "7 is no layer class"),
    "unknown family": ("{ family = 'mlaa' }", "family: expected one of mla,"),
    "family of a list": ("{ family = ['mla'] }", "family: expected one of mla,"),
    "another family": ("{ like = 'vllm:MLAAttention', family = 'mla' }", "like: vllm:MLAAttention is not known as mla"),
    "unknown field": ("{ like = 'vllm:MLAAttention', num_head = 'n' }", "MLAKernelSpec has no field 'num_head'"),
    "a value for a place": (
        "{ like = 'vllm:MLAAttention', kv_lora_rank = 512 }",
        "kv_lora_rank: expected an attribute path",
    ),
    "huge number for a place": (
        f"{{ like = 'vllm:MLAAttention', kv_lora_rank = 0x{'f' * 5000} }}",
        "kv_lora_rank: expected",
    ),
    "dunder path": (
        "{ like = 'vllm:MLAAttention', kv_lora_rank = '__class__.__init__.__globals__' }",
        "dunder attribute",
    ),
    "call in a path": ("{ like = 'vllm:MLAAttention', kv_lora_rank = 'forward()' }", "is no attribute path"),
    "date for a constant": (
        "{ like = 'vllm:MLAAttention', kv_lora_rank = { const = 2026-08-22 } }",
        "a constant is a number",
    ),
    "left out": (
        "{ like = 'vllm:MLAAttention', without = ['kv_lora_rank'] }",
        "nothing says where to read kv_lora_rank",
    ),
    "left out by a text": (
        "{ like = 'vllm:MLAAttention', without = 'kv_lora_rank' }",
        "without: expected a list of field",
    ),
    "two kinds": (
        "{ like = 'sglang:Qwen3HybridAttentionDecoderLayer', head_dim = 'd' }",
        "is several kinds of layer; say which family the words are about",
    ),
    "no table": ("7", "expected a table of facts, or a list of them, got 7"),
    "empty list": ("[]", "expected a table of facts, or a list of them, got []"),
    "like itself": ("{ like = 'mylib:A' }", "like: goes in a circle"),
    "weight of a number": (
        "{ like = 'transformers:DeepseekV3Attention', tp_weight = 7 }",
        "tp_weight: expected the paths",
    ),
    "unhashable conversion": (
        "{ like = 'vllm:MLAAttention', outer = { path = 'a', as = ['x'] } }",
        "unknown conversion",
    ),
}


def with_class(words: str, key: str = "mylib:A") -> str:
    return f'{GOOD}\n[models.mine.layer_classes]\n"{key}" = {words}\n'
