"""Ranks as processes that call fused all-reduces over shared memory of the host, for test_symm_mem_kernel.

The kernel runs in Triton's interpreter, which reads and writes at addresses: those of the buffers as each process maps them. It copies
words of 16 bits byte by byte, so that one may arrive in halves, as on no GPU; here they are copied whole (`WholeWords`). Everything else is as on GPUs: the functions of the ops, real process groups (gloo), and ranks that wait for one another.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import attrs
import torch
import torch.distributed as dist
from attrs import frozen
from family_support import REDUCED, Options, arguments
from helpers import quick_interpreter

from layerfuse.fusion.chain import Form
from layerfuse.fusion.compose import op_of

WIDTH, MOST, TOKENS = 96, 5, 13
"""Columns; rows of a launch; tokens of a call, beyond which gloo sums."""
WIDE = 8200
"""Wider than a chunk."""
NAMES = sorted(name for name in REDUCED if name.startswith("all_reduce_"))


@frozen
class Case:
    """One call."""

    name: str
    rows: int
    options: Options
    second: bool = False
    "Whether the second of two groups makes it."
    width: int = WIDTH

    @property
    def local(self) -> Form:
        """The form without its all-reduce."""
        form = REDUCED[self.name]
        chain = form.chain[1:]
        return Form(chain=chain, op=op_of(self.name.removeprefix("all_reduce_"), chain))


def cases() -> list[Case]:
    """Every form in turn, with changing numbers of rows, dtypes and groups, and beyond what a workspace has."""
    random, found = Random(0), []
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for turn in range(3):
        for place, name in enumerate(NAMES):
            options = Options(
                dtype=dtypes[(turn + place) % 3],
                offset=float(turn == 1),
                weight_dtype=torch.float32 if turn == 2 else None,
                group_size=(64, 32, 128)[turn],
                column_major=turn == 1,
                use_ue8m0=turn == 2,
            )
            found.append(Case(name, random.choice([1, 2, 3, MOST]), options, random.random() < 0.3))
    found += [
        Case("all_reduce_add_rms_norm", rows, Options(dtype=torch.float32)) for rows in (0, MOST + 1, 1, MOST, 40)
    ]
    wide = Case("all_reduce_add_rms_norm_per_token_quant", 1, Options(), width=WIDE)
    found.append(wide)
    cut = Options(dtype=torch.float16, group_size=32)
    # In three launches, every kind of result.
    kinds = ("group_quant_with_norm", "pad", "per_token_quant", "static_quant")
    found += [Case(f"all_reduce_add_rms_norm_{kind}", TOKENS, cut) for kind in kinds]
    found += [
        Case(name, 2 * MOST, attrs.evolve(cut, column_major=True, dtype=torch.float32))
        for name in NAMES
        if "group" in name
    ]
    return found


def parts(number: int, case: Case, world_size: int) -> list[list[Any]]:
    """The local form's arguments on each rank. Ranks differ in x alone."""
    every = [
        arguments(case.local, (case.rows,), case.width, case.options, seed=100 * number + r) for r in range(world_size)
    ]
    if case.rows:
        words = [given[0].view(torch.int32 if case.options.dtype == torch.float32 else torch.int16) for given in every]
        words[0][0, 3] = -1  # the NaN that means empty
        every[1][0][0, 4] = float("-inf")
        for given in every:
            given[0][0, 5] = given[1][0, 5] = -0.0
    return [[given[0], *every[0][1:]] for given in every]


def summed(given: list[list[Any]]) -> list[Any]:
    """The local form's arguments with the sum over ranks, in their order and in float32, as x."""
    total = torch.zeros(given[0][0].shape, device=given[0][0].device)
    for each in given:
        total += each[0].float()
    return [total, *given[0][1:]]


def normed(right: list[Any], stored: torch.Tensor, shots: int) -> list[Any]:
    """Of the arguments with the sum, those of which the norm is right: in two shots it reads the stream as it was stored."""
    return right if shots == 1 else [stored.float(), torch.zeros_like(right[1]), *right[2:]]


def layout(rank: int, world_size: int, row_bytes: int, item: int, shots: int) -> Any:
    """Of buffers for MOST rows. So few programs are resident that programs take tickets at times."""
    from layerfuse.fusion.backends.symm_mem.launch import Layout

    return Layout(rank, world_size, shots, MOST, -(-row_bytes // 16) * 16, item, 2)


def workspace(buffers: list[torch.Tensor], rank: int, row_bytes: int, item: int, shots: int) -> Any:
    """A rank's side of buffers in shared memory."""
    from layerfuse.fusion.backends.symm_mem.launch import Workspace

    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
    phases, ticket = torch.zeros(MOST, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    made = layout(rank, len(buffers), row_bytes, item, shots)
    return Workspace(made, TOKENS, addresses, phases, ticket, buffers, {})


def shared(world_size: int, row_bytes: int, item: int, shots: int) -> list[torch.Tensor]:
    """A buffer for each rank, all bits ones."""
    size = layout(0, world_size, row_bytes, item, shots).size
    return [torch.full((size,), 255, dtype=torch.uint8).share_memory_() for _ in range(world_size)]


class WholeWords:
    """The functions of Triton's interpreter, with 16-bit words of shared buffers read and written in one piece, as numpy does."""

    def __init__(self, functions: Any, buffers: list[torch.Tensor]) -> None:
        self._functions = functions
        self._areas = [
            (start, start + buffer.numel(), buffer.view(torch.int16).numpy())
            for buffer in buffers
            for start in [buffer.data_ptr()]
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def _words(self, addresses: Any) -> tuple[Any, Any] | None:
        """The area of these addresses and their places in it; None: not in a buffer."""
        first = int(addresses.flat[0])
        area = next((words for start, end, words in self._areas if start <= first < end), None)
        return None if area is None else (area, (addresses.astype("int64") - area.ctypes.data) // 2)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        found = self._words(addresses)
        if found is None or dtype.itemsize != 2:
            loaded = self._functions.load(addresses, mask, other, dtype)
        else:
            words, places = found
            loaded = other.astype(dtype)
            loaded[mask] = words[places[mask]].view(dtype)
        if found is not None and (loaded.view(f"i{dtype.itemsize}") == -1).any():
            time.sleep(0.002)  # something is empty: another rank may have the core meanwhile
        return loaded

    def store(self, addresses: Any, values: Any, mask: Any) -> None:
        found = self._words(addresses)
        if found is None or values.dtype.itemsize != 2:
            self._functions.store(addresses, values, mask)
        else:
            words, places = found
            words[places[mask]] = values[mask].view(words.dtype)


def without(function: Any, given: list[Any], group: str) -> tuple[Any, list[str]]:
    """A call of a group whose ranks have no symmetric memory, and what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = function(*given[:4], group, *given[4:])
    return result, [str(each.message) for each in said]


def rank_main(
    rank: int, world_size: int, folder: str, buffers: dict[tuple[int, int, bool], list[torch.Tensor]], shots: int
) -> None:
    """One rank: every case in turn, after a while that differs. What came out goes to a file."""
    from triton.runtime import interpreter

    from layerfuse.fusion.backends.symm_mem import workspaces
    from layerfuse.fusion.backends.symm_mem.functions import function_of
    from layerfuse.fusion.ops.groups import process_group

    every = [buffer for several in buffers.values() for buffer in several]
    interpreter._interpreter = WholeWords(interpreter._interpreter, every)
    quick_interpreter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    groups = [dist.group.WORLD.group_name, dist.new_group().group_name]
    functions, random, results = {name: function_of(REDUCED[name].op) for name in NAMES}, Random(rank), []
    sides = {}
    for (row_bytes, item, second), several in buffers.items():
        like = torch.empty(1, row_bytes // item, dtype=torch.float32 if item == 4 else torch.bfloat16)
        sides[row_bytes, item, second] = workspace(several, rank, row_bytes, item, shots)
        ready = workspaces._ready.setdefault(process_group(groups[second]), {})
        ready[workspaces._key(like)] = (sides[row_bytes, item, second],)
    for number, case in enumerate(cases()):
        given = parts(number, case, world_size)[rank]
        time.sleep(random.choice([0, 0, 0.002, 0.02, 0.1 * (number % world_size == rank)]))
        group = groups[case.second]
        results.append(functions[case.name](*given[:4], group, *given[4:]))
    first = cases()[0]
    name = "all_reduce_add_rms_norm"
    given = parts(0, attrs.evolve(first, name=name, options=Options(dtype=torch.float32)), world_size)[rank]
    lacking = dist.new_group().group_name
    tried = [without(functions[name], given, lacking) for _ in range(2)]
    empty = [bool((several[rank] == 255).all()) for several in buffers.values()]
    phases = {key: side.phases.tolist() for key, side in sides.items()}
    torch.save((results, tried, empty, workspaces.why_not(lacking), phases), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
