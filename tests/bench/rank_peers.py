"""What the ranks of a benchmark are told to do in tests: peers that go wrong on the second one, and questions to each."""

import os
from datetime import timedelta

import torch.distributed as dist

from layerfuse.bench import Peer, RefusedError, register, sums
from layerfuse.bench.choosing import Options, make_case
from layerfuse.bench.inputs import make
from layerfuse.bench.peers import over_sets
from layerfuse.bench.rank_group import rank_group
from layerfuse.bench.reducers import parts_of
from layerfuse.fusion import ops
from layerfuse.registry import default


def _ours(work, change=lambda *results: results):
    return over_sets(lambda *rows: change(*ops.all_reduce_add_rms_norm(*work.arguments(rows))), work)


def _on_second(change):
    return change if rank_group().rank == 1 else lambda *results: results


def _raises(work, setting):
    if rank_group().rank == 1:
        raise ZeroDivisionError("no good")
    return _ours(work)


def _refuses(work, setting):
    if work.tokens > 1:
        raise RefusedError("one token at most")
    return _ours(work)


def _dies(work, setting):
    if rank_group().rank == 1:
        os._exit(3)
    return _ours(work)


def _sum_of(factor):
    def build(work, setting):
        def reduced(part):
            total = part.clone()
            dist.all_reduce(total)
            return (total * factor,)

        return [lambda part=part: reduced(part) for part in parts_of(work)]

    return build


def _nudged(normed, total):
    normed.view(dtype=normed.dtype)[0, 0] *= 1 + 2**-7
    return normed, total


BUILDS = {
    "wrong": lambda work, _: _ours(work, _on_second(lambda normed, total: (normed * 1.05, total))),
    "raises": _raises,
    "refuses": _refuses,
    "dies": _dies,
    "layerfuse (nudged)": lambda work, _: _ours(work, _on_second(_nudged)),
    "sum": _sum_of(1.0),
    "sum off": _sum_of(1.03),
}


def add_peers():
    for name, build in BUILDS.items():
        check = sums.check_sum if name.startswith("sum") else None
        register(Peer(name=name, about="a test's", why_not=lambda _: None, build=build, check=check))


def first_row():
    """This rank's part and its residual, of the first set."""
    case = make_case("all_reduce_add_rms_norm", registry=default, widths=[64], ranks=2, options=Options())
    x, residual = make(case, 3, rank_group()._token.device, 2).sets[0]
    return x.tolist(), residual.tolist()


def slowest():
    return rank_group().slowest({"a": [1.0 + rank_group().rank, 5.0 - rank_group().rank]})


def together():
    return rank_group().together(lambda: 1 // (1 - rank_group().rank))


def waits_for_the_second(seconds):
    if rank_group().rank == 0:
        rank_group().gather("here", timedelta(seconds=seconds))


def sleeps(seconds):
    import time

    if rank_group().rank == 1:
        time.sleep(seconds)
    return rank_group().rank


def variables():
    return [os.environ[name] for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE")]
