"""How each kind of quantised linear says what it does to its activations: one short reading per kind.

A reading takes the object that the table of `linear_quant` knows (a linear, its quantisation method, its weight) and the
linear itself. It answers with an ActivationQuant, with None (activations stay as they are), or with the reason why
neither would be true. Attribute names are those of transformers 5.23, compressed-tensors 0.20, torchao 0.18, vLLM
0.33, SGLang 0.5.23 and ROCm/ATOM 0027562b. Nothing here imports an engine or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

from .activation_quant import ActivationQuant, ActivationQuantError
from .errors import FOREIGN, shown
from .sources import Path
from .spec_fields import made

Answer: TypeAlias = ActivationQuant | str | None
"""What is known of a linear's activations: the quantisation, none, or the reason why ActivationQuant cannot say it."""

PER_TOKEN = ActivationQuant()
STATIC = ActivationQuant(fixed="static")
NVFP4 = ActivationQuant(fixed="nvfp4", swizzled=True)
PADS = "pads the rows of its quantised activations"
PER_TENSOR = "quantises activations with one scale for all tokens"
IN_KERNEL = "quantises activations inside its matrix product"
BY_KERNEL = "multiplies by a kernel that decides itself whether it quantises activations"
SWIZZLED = "quantises activations to an MX format with exponents laid out for its kernel"


_NOTHING: Mapping[str, Any] = {}


def at(obj: Any, path: str) -> Any:
    """The value at the end of a dotted path.

    Raises:
        UnreadableError: the path leads nowhere.
    """
    return _parsed(path).read(obj)


@lru_cache(maxsize=512)
def _parsed(path: str) -> Path:
    return Path(tuple(path.split(".")))


def several(obj: Any, *paths: str) -> tuple[Any, ...]:
    """The values at the ends of two or more dotted paths, all of which the object should have.

    Raises:
        UnreadableError: a path leads nowhere.
    """
    try:
        found: tuple[Any, ...] = _getter(*paths)(obj)
        return found
    except FOREIGN:  # of which `at` has words
        return tuple([at(obj, path) for path in paths])


_getter = lru_cache(maxsize=64)(attrgetter)


def maybe(obj: Any, name: str) -> Any:
    """An attribute that not every release or state of the object has; None where it is missing."""
    try:
        return getattr(obj, name)
    except AttributeError:
        return None


def stored(obj: Any, name: str) -> Any:
    """What an object itself holds under a name, or None: torch's own lookup takes far longer to say that there is nothing."""
    try:
        held = vars(obj)
    except TypeError:  # a text, a tensor's dtype: it holds nothing
        return None
    if name in held:
        return held[name]
    parameters = held.get("_parameters", ())
    return parameters[name] if name in parameters else held.get("_modules", _NOTHING).get(name)


HOLDERS = ("quantization_scheme", "scheme", "quant_method", "weight")
"""What of a linear is looked up after the linear itself: the first that a table knows answers."""


Holders: TypeAlias = tuple[list[Any], tuple[type, ...]]
"""A linear and what it holds under each of `HOLDERS`, None where there is nothing; and the class of each."""


def holders_of(linear: Any) -> Holders:
    """The linear, what it holds, and the classes of these.

    Raises:
        Exception: whatever the linear's own code raises.
    """
    found = [linear]
    try:
        held = vars(linear)
    except TypeError:
        held = _NOTHING
    parameters, modules = held.get("_parameters", _NOTHING), held.get("_modules", _NOTHING)
    for name in HOLDERS:
        if name in held:
            found.append(held[name])
        else:
            found.append(parameters[name] if name in parameters else modules.get(name))
    return found, tuple([each.__class__ for each in found])


def grouped(
    size: Any, *, column_major: bool = False, use_ue8m0: bool = False, tma_aligned: bool = False, inside: bool = False
) -> Answer:
    """One scale per `size` columns, if a fusion can describe that."""
    values = {
        "group_size": size,
        "column_major": bool(column_major),
        "use_ue8m0": bool(use_ue8m0),
        "tma_aligned": bool(column_major and tma_aligned),
        "inside": inside,
    }
    try:
        return made(ActivationQuant, values)
    except ActivationQuantError:
        return f"quantises activations in groups of {shown(size)} columns"


def is_fp8(dtype: Any) -> bool:
    """Whether a torch dtype is one of the eight-bit floats with a sign (not the exponents of `float8_e8m0fnu`)."""
    name = str(dtype)
    return name.startswith("torch.float8") and "e8m0" not in name


# ---- transformers ----------------------------------------------------------------------------------------------------


def finegrained_fp8(linear: Any, _: Any) -> Answer:
    """transformers/integrations/finegrained_fp8.py, `FP8Linear`; kernels-community/finegrained-fp8, matmul.py.

    Without a block size the kernel takes one scale per token, else one per `block_size[1]` columns.
    """
    weight = at(linear, "weight")
    if weight.element_size() > 1:
        return None  # a dequantised checkpoint: `forward` is that of a plain linear
    if at(linear, "activation_scheme") != "dynamic":
        return STATIC
    if not is_fp8(weight.dtype):
        return f"holds {weight.dtype} weights, whose activations are quantised by the format of the weights"
    if "e8m0" in str(at(linear, "weight_scale_inv").dtype):
        return "holds scales that are powers of two, and the kernel chosen at run time decides whether its activations' are"
    block = at(linear, "block_size")
    return PER_TOKEN if block is None else grouped(block[1])


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def compressed_tensors(scheme: Any, linear: Any) -> Answer:
    """compressed_tensors/quantization/quant_args.py, `QuantizationArgs`; lifecycle/forward.py, `quantized_forward`.

    The library rounds activations to fp8 and multiplies in the model's dtype; the scales are the same.
    """
    args = at(scheme, "input_activations")
    if args is None or maybe(linear, "quantization_enabled") is False:
        return None
    kind, bits = at(args, "type"), at(args, "num_bits")
    if (kind, bits) != ("float", 8):
        return f"quantises activations to {kind} of {bits} bits"
    if at(args, "symmetric") is not True:
        return "quantises activations with a zero point"
    strategy, dynamic = at(args, "strategy"), at(args, "dynamic")
    if dynamic is not True:
        if dynamic is False and strategy == "tensor":
            return STATIC
        return (
            f"quantises activations with scales that are not of the whole tensor ({shown(strategy)}, {shown(dynamic)})"
        )
    if maybe(args, "scale_dtype") is not None:
        return f"stores the scales of its activations as {args.scale_dtype}"
    if strategy == "token":
        return PER_TOKEN
    return grouped(at(args, "group_size")) if strategy == "group" else PER_TENSOR


# ---- torchao ---------------------------------------------------------------------------------------------------------


def float8_tensor(weight: Any, _: Any) -> Answer:
    """torchao/quantization/quantize_/workflows/float8/float8_tensor.py, `Float8Tensor`: None is weight-only."""
    kwargs = at(weight, "act_quant_kwargs")
    if kwargs is None:
        return None
    if maybe(kwargs, "hp_value_lb") is not None or maybe(kwargs, "hp_value_ub") is not None:
        return "bounds the values of its activations before it quantises them"
    return _granularity(at(kwargs, "granularity"), at(kwargs, "float8_dtype"))


def int8_tensor(weight: Any, _: Any) -> Answer:
    """torchao/quantization/quantize_/workflows/int8/int8_tensor.py, `Int8Tensor`: None is weight-only."""
    return None if at(weight, "act_quant_kwargs") is None else "quantises activations to int8"


def linear_activation_quantized(weight: Any, _: Any) -> Answer:
    """torchao/quantization/linear_activation_quantized_tensor.py, before `Float8Tensor` (torchao 0.13)."""
    kwargs = maybe(weight, "quant_kwargs")
    if not isinstance(kwargs, Mapping) or "activation_granularity" not in kwargs:
        return "quantises activations by a function that does not say how"
    return _granularity(kwargs["activation_granularity"], kwargs.get("activation_dtype"))


def _granularity(granularity: Any, dtype: Any) -> Answer:
    if not is_fp8(dtype):
        return f"quantises activations to {dtype}"
    kind = type(granularity).__name__
    if kind == "PerRow" and maybe(granularity, "dim") in (None, -1):
        return PER_TOKEN
    if kind == "PerBlock" and len(granularity.block_size) == 2 and granularity.block_size[0] == 1:
        return grouped(granularity.block_size[1])
    return PER_TENSOR if kind == "PerTensor" else f"quantises activations by {shown(granularity)}"


# ---- vLLM ------------------------------------------------------------------------------------------------------------


def quant_fp8(kernel: Any, _: Any) -> Answer:
    """vllm/model_executor/layers/quantization/input_quant_fp8.py, `QuantFP8`, which the kernel applies to its input.

    Every kernel of kernels/linear/scaled_mm builds its own, with the layout of scales that its product takes.
    """
    if maybe(kernel, "apply_input_quant") is False:
        return IN_KERNEL
    op = at(kernel, "quant_fp8")
    rows, columns, static = several(op, "group_shape.row", "group_shape.col", "static")
    if static:
        return STATIC if (rows, columns) == (-1, -1) else f"has static scales for blocks of {rows} by {columns}"
    if (rows, columns) == (1, -1):
        return PER_TOKEN  # `use_ue8m0` is on the op, and only its group form looks at it
    if rows != 1:
        return PER_TENSOR
    # Of the op's forms only that for CUDA aligns columns; in plain torch they are laid out, and not aligned.
    cuda = maybe(maybe(op, "_forward_method"), "__name__") == "forward_cuda"
    column_major, use_ue8m0 = several(op, "column_major_scales", "use_ue8m0")
    aligned = cuda and bool(maybe(op, "tma_aligned_scales"))
    return grouped(columns, column_major=column_major, use_ue8m0=use_ue8m0, tma_aligned=aligned)


def flashinfer_or_deep_gemm(kernel: Any, _: Any) -> Answer:
    """vllm/model_executor/kernels/linear/scaled_mm/flashinfer.py: one op asks FlashInfer below 32 tokens and DeepGEMM above, and quantises.

    Both read scales as DeepGEMM's quantisation lays them out. Where that rounds them to powers of two (VLLM_USE_DEEP_GEMM_E8M0, which is
    vLLM's default), FlashInfer's alone does not: taken out, one quantisation serves both ways, and it is DeepGEMM's.
    """
    columns, use_ue8m0 = several(kernel, "weight_group_shape.col", "fallback.use_deep_gemm_e8m0")
    return grouped(columns, column_major=True, use_ue8m0=use_ue8m0, tma_aligned=True, inside=True)


def rocm_mxfp8(_: Any, linear: Any) -> Answer:
    """vllm/model_executor/kernels/linear/mxfp8/rocm_native.py: weights that its product cannot take are 16 bits wide."""
    return None if at(linear, "weight").element_size() > 1 else ActivationQuant(fixed="mxfp8")


def nvfp4(_: Any, linear: Any) -> Answer:
    """vllm/model_executor/kernels/linear/nvfp4: `scaled_fp4_quant` in front of the product, which has scales in tiles.

    Where the width is no multiple of 32 the weight is padded, and activations with it.
    """
    return PADS if at(linear, "input_size_per_partition") % 32 else NVFP4


def marlin(kernel: Any, _: Any) -> Answer:
    """vllm/model_executor/kernels/linear/scaled_mm/marlin.py: weight-only unless VLLM_MARLIN_INPUT_DTYPE is set."""
    return None if maybe(kernel, "marlin_input_dtype") is None else IN_KERNEL


def vllm_fp8_experts(method: Any, _: Any) -> Answer:
    """vllm/model_executor/layers/fused_moe/oracle/fp8.py, `Fp8MoeBackend`: few multiply fp8 weights with activations as they are."""
    return (
        None if at(method, "fp8_backend.name") in ("MARLIN", "BATCHED_MARLIN", "CPU", "XPU", "EMULATION") else IN_KERNEL
    )


# ---- SGLang ----------------------------------------------------------------------------------------------------------

_ROW_MAJOR: dict[str, bool] = {}
_TMA_ALIGNED = {"column_major": True, "tma_aligned": True}
_SGLANG_BLOCK: dict[str, dict[str, bool] | str] = {
    "triton_w8a8_block_fp8_linear": _ROW_MAJOR,
    "torch_w8a8_block_fp8_linear": _ROW_MAJOR,
    "deepgemm_w8a8_block_fp8_linear_with_fallback": _TMA_ALIGNED,
    "aiter_w8a8_block_fp8_linear": _ROW_MAJOR,
    "cutlass_w8a8_block_fp8_linear_with_fallback": PADS,
    "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback": "lays out the scales as the GPU's FlashInfer kernel takes them",
    "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback": IN_KERNEL + " below 32 tokens, and before it above that",
}
"""sglang/srt/layers/quantization/fp8_utils.py: each block product, and the layout of the scales that it makes."""


def sglang_fp8(method: Any, linear: Any) -> Answer:
    """sglang/srt/layers/quantization/fp8.py, `Fp8LinearMethod.apply`."""
    if at(method, "use_marlin"):
        return None
    if at(method, "use_mxfp8") or maybe(method, "block_fp8_as_mxfp8"):
        return "quantises activations to MXFP8"
    if at(method, "block_quant"):
        return _sglang_block(method, linear, "weight_scale_inv")
    return _sglang_whole(method, linear)


def sglang_w8a8_fp8(method: Any, linear: Any) -> Answer:
    """sglang/srt/layers/quantization/w8a8_fp8.py, `W8A8Fp8LinearMethod.apply`: never a static scale."""
    return _sglang_dynamic(method, linear)


def sglang_compressed_tensors(scheme: Any, linear: Any) -> Answer:
    """sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py, `apply_weights`."""
    if at(scheme, "is_static_input_scheme"):
        return STATIC
    return PER_TOKEN if at(scheme, "weight_block_size") is None else _sglang_block(scheme, linear, "weight_scale")


def sglang_nvfp4(method: Any, linear: Any) -> Answer:
    """sglang/srt/layers/quantization/modelopt_quant.py, `ModelOptFp4LinearMethod.apply`; only Marlin gives the linear a workspace."""
    if at(method, "quant_mode") != "w4a4" or maybe(linear, "workspace") is not None:
        return None
    return "multiplies activations by a number per column first" if at(method, "quant_config.is_awq") else NVFP4


def _sglang_block(method: Any, linear: Any, scale: str) -> Answer:
    product = at(method, "w8a8_block_fp8_linear")
    name = maybe(maybe(product, "func") or product, "__name__")
    bound = maybe(product, "keywords") or {}
    layout = _SGLANG_BLOCK.get(str(name), f"multiplies by {name}, whose quantisation is not known")
    if isinstance(layout, str):
        return layout
    power_of_two = bool(bound.get("act_scale_ue8m0"))
    if layout is _TMA_ALIGNED and power_of_two:
        return "lays out scales that are powers of two by the GPU it runs on"
    if maybe(maybe(linear, scale), "format_ue8m0") or "int32" in str(maybe(maybe(linear, scale), "dtype")):
        return "packs four scales that are powers of two into one whole number"
    if maybe(linear, "aiter_bpreshuffled"):
        return "lays out the scales by the number of tokens"
    return grouped(at(method, "weight_block_size")[1], use_ue8m0=power_of_two, **layout)


def _sglang_whole(method: Any, linear: Any) -> Answer:
    return STATIC if maybe(linear, "input_scale") is not None else _sglang_dynamic(method, linear)


def _sglang_dynamic(method: Any, linear: Any) -> Answer:
    """fp8_utils.py, `apply_fp8_linear`: per tensor only on ROCm, where the weight has one scale and nobody forbids it."""
    scale = at(linear, "weight_scale")
    several = scale is not None and scale.numel() > 1
    if at(method, "cutlass_fp8_supported") or maybe(method, "use_per_token_if_dynamic") or several:
        return PER_TOKEN
    return "quantises activations per token on CUDA and per tensor on ROCm, and does not say which it runs on"


# ---- ATOM ------------------------------------------------------------------------------------------------------------


def atom(linear: Any, _: Any) -> Answer:
    """atom/model_ops/linear.py, `LinearBase.forward`; the names are those of AITER's `QuantType`."""
    kind, dtype = at(linear, "quant_type.name"), at(linear, "params_dtype")
    if kind == "No":
        return None
    if not is_fp8(dtype):
        return f"quantises activations to {dtype}"
    if maybe(linear, "input_scale") is not None:
        return STATIC
    if kind == "per_Token":
        return PER_TOKEN
    if kind == "per_1x128":
        return grouped(128, column_major=True)
    return PER_TENSOR if kind == "per_Tensor" else f"quantises activations by {kind}"
