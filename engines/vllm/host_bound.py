"""Steps of more tokens than vLLM captures in CUDA graphs, which wait for the host: there its own graph runs, in which nothing of layerfuse's stands.

An op costs the host more than a kernel of Inductor's, which matters where the GPU has less to do than the host. Of 7168 tokens a rank of DeepSeek-V3
was 1.05 times as fast with layerfuse's ops beside a fast host, and 0.87 times beside a slow one (docs/vllm-measured.md). So vLLM compiles these numbers
of tokens for themselves (`compile_ranges_endpoints`), and layerfuse's pass leaves that range out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...fusion.planning import Plan


def tokens_of(config: Any, up_to: int | None) -> range:
    """The numbers of tokens of such steps: more than vLLM captures. None where it captures nothing, which then is no reason to fuse less.

    Args:
        config: vLLM's.
        up_to: the most of them; None: all.
    """
    endpoints = getattr(config.compilation_config, "compile_ranges_endpoints", None)
    if not endpoints:
        return range(0)
    most = max(endpoints)
    return _beyond(config, most if up_to is None else min(up_to, most))


def tokens_uncompiled(config: Any, up_to: int | None) -> range:
    """The same of a model that vLLM does not compile: it calls its own modules there."""
    return _beyond(config, sys.maxsize - 1 if up_to is None else up_to)


def _beyond(config: Any, most: int) -> range:
    compilation = config.compilation_config
    captured = compilation.max_cudagraph_capture_size
    if not captured:
        return range(0)
    if compilation.cudagraph_mode.name == "FULL_DECODE_ONLY":  # mixed steps are in none, whatever their size
        captured = min(captured, config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens))
    return range(captured + 1, most + 1)


def set_apart(compilation: Any, tokens: range) -> None:
    """Let vLLM compile graphs for these numbers of tokens alone."""
    if tokens:
        ends = {*compilation.compile_ranges_endpoints, tokens.start - 1, tokens.stop - 1}
        compilation.compile_ranges_endpoints = sorted(ends)


def note(plan: Plan) -> str | None:
    """In which steps nothing of a plan for vLLM stands, as a sentence; None where nothing is planned, or nothing captured."""
    if plan.engine is None or not plan.engine.captures or not plan.expected():
        return None
    what = "runs vLLM's own graph" if plan.engine.compiled else "calls vLLM's own modules"
    return f"A step of more tokens than vLLM captures in CUDA graphs waits for the host. It {what}, in which nothing here is fused."


def holds(tokens: range, compile_range: Any) -> bool:
    """Whether all of one of vLLM's ranges is among these numbers of tokens."""
    return compile_range.start in tokens and compile_range.end in tokens
