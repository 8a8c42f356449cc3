"""Up to how many tokens a fused all-reduce pushes every row to every peer at once, as data: plans read it without torch.

Beyond that, NCCL's all-reduce with the fused add and norm behind it moves fewer bytes.
"""

from __future__ import annotations

MOST_TOKENS = 128
"""The most tokens of any launch. A program takes one token and waits for its peers', so all programs of a launch must be on
the GPU at once: 128 fit on every GPU with as many multiprocessors (H100 and H200 have 132, B200 has 148)."""

WORLD_SIZES = range(2, 9)
"""The group sizes that the kernel is for: the GPUs of one host."""

WIDEST_BYTES = 32768
"""Of a row: a program holds it in registers beside its peers' (16384 columns of 16 bits)."""

ONE_SHOT_BYTES = {2: 16 << 20, 4: 384 << 10, 8: 128 << 10}
"""World size -> the largest `tokens * hidden * itemsize` of a rank. Not measured here: SGLang 0.5.23's figures for pushes in one
shot on H200 in a CUDA graph (its CustomAllReduceV2). A size between two of them has the figure of the larger one."""


def one_shot_tokens(hidden: int, itemsize: int, world_size: int) -> int:
    """Up to how many tokens the kernel is taken: 0 where it never is.

    Args:
        hidden: columns of a row.
        itemsize: bytes of an element.
        world_size: ranks of the group.
    """
    if world_size not in WORLD_SIZES or hidden * itemsize > WIDEST_BYTES:
        return 0
    measured = min(size for size in ONE_SHOT_BYTES if size >= world_size)
    return min(ONE_SHOT_BYTES[measured] // (hidden * itemsize), MOST_TOKENS)
