"""A result for people: tables, for a terminal and in Markdown, sentences on who was missing or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from ..adapters.arguments import expect
from ..adapters.errors import counted
from ..fusion.formats import FORMATS, FP8
from .against import AGAINST, best_unfused, ratio
from .result import COPY, NOT_ASKED_FOR, Result, Row

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from .cases import Case


@frozen(kw_only=True)
class Table:
    """A title, a head and rows of text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(result: Result) -> list[Table]:
    """Microseconds; the peers relative to ours, and ours to the copy; the host's time. Those without a figure are left out."""
    relative = [] if result.ours is None else [_ratios(result, result.ours)]
    if result.ours is not None and result.case.ranks > 1:
        relative.append(_against(result, result.ours))
    found = [_times(result), *(table for table in relative if any(any(cells) for _, *cells in table.rows))]
    if result.host:
        found.append(
            Table(
                title=f"Microseconds of the host per call, {counted(result.host_tokens, 'token')}, no graph",
                head=tuple(host.peer for host in result.host),
                rows=(tuple(f"{host.us:.1f}" for host in result.host),),
            )
        )
    return found


def _columns(result: Result) -> list[str]:
    """The copy first, then ours as chosen, then the others."""
    order = [name for name in (COPY, result.ours) if name in result.present]
    return [*order, *(name for name in result.present if name not in order)]


def _times(result: Result) -> Table:
    names = _columns(result)
    return Table(
        title="Microseconds per call",
        head=("tokens", "sets", *names),
        rows=tuple((str(row.tokens), str(row.sets), *(_cell(row, name) for name in names)) for row in result.rows),
    )


def _cell(row: Row, name: str) -> str:
    found = row.of(name)
    if found is None or found.us is None:
        return "" if found is None else found.verdict
    return f"{found.us:.2f}" if found.us < 1000 else f"{found.us:.0f}"


def _ratios(result: Result, ours: str) -> Table:
    others = [name for name in _columns(result) if name not in (ours, COPY)]
    return Table(
        title=f"Their time divided by that of {ours}; {ours} divided by the copy",
        head=("tokens", *others, "ours / copy"),
        rows=tuple(
            (
                str(row.tokens),
                *(_ratio(row.us(name), row.us(ours)) for name in others),
                _ratio(row.us(ours), row.us(COPY)),
            )
            for row in result.rows
        ),
    )


def _against(result: Result, ours: str) -> Table:
    rows = []
    for row in result.rows:
        best, ratios = best_unfused(row), [ratio(row, ours, against) for against in AGAINST]
        cells = ["" if found is None else f"{found:.2f}" for found in ratios]
        rows.append((str(row.tokens), *cells, "" if best is None else best[0]))
    return Table(
        title=f"The time of {ours} divided by that of",
        head=("tokens", *AGAINST, "the best unfused is"),
        rows=tuple(rows),
    )


def _ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.2f}"


def heading(result: Result) -> str:
    """What was measured on what, in a sentence or two."""
    case, where = result.case, result.environment
    widths = " and ".join(map(str, case.widths.values()))
    shape = f"width{'s' if len(case.widths) > 1 else ''} {widths}"
    if case.heads is not None:
        more = case.activation if case.turned is None else f"{case.kv_heads} of the key, {case.turned} columns turned"
        shape = f"{case.heads} heads of {widths}, {more}"
    if case.row_width is not None:
        shape += f" of rows of {case.row_width}"
    if case.padded_width is not None:
        shape += f" padded to {case.padded_width}"
    if case.ranks > 1:
        shape += f", over {case.ranks} ranks"
    weights = "" if case.weight_dtype == case.dtype else f" with {case.weight_dtype} weights"
    quant = f", to {_quantised(case)}" if case.quant is not None else ""
    versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("triton",) if where["packages"].get(name))
    return (
        f"{case.op} of {case.name}: {shape}, {case.dtype}{weights}{quant}. {where['device']}, torch {where['torch']}{', ' if versions else ''}{versions}, "
        f"{result.date[:10]}."
    )


def _said_of_right_ones(result: Result) -> Iterator[str]:
    tokens: dict[tuple[str, str], list[int]] = {}
    for row in result.rows:
        for one in row.measured:
            if one.verdict == "ok" and one.message:
                tokens.setdefault((one.peer, one.message), []).append(row.tokens)
    for (peer, message), several in tokens.items():
        yield f"{peer} at {_listed(several)}: {message}"


def _listed(tokens: list[int]) -> str:
    return f"{', '.join(map(str, tokens))} {'token' if tokens == [1] else 'tokens'}"


def _quantised(case: Case) -> str:
    if case.quant == "static":
        return f"{case.fp8} by a given scale"
    if case.quant not in [FORMATS[word].scheme for word in FP8]:
        return case.quant or ""
    scale = "per token" if case.group_size is None else f"per {case.group_size} columns"
    order = ", TMA-aligned" if case.tma_aligned else ", column-major" if case.column_major else ""
    return f"{case.fp8} with one {'power-of-two ' if case.ue8m0 else ''}scale {scale}{order}"


def remarks(result: Result) -> Iterator[str]:
    """Who was missing and why, who was wrong, and how to read the figures."""
    for peer in result.peers:
        if not peer.present and peer.why_not != NOT_ASKED_FOR:
            yield f"{peer.name} is missing: {peer.why_not}"
    for row in result.rows:
        for one in row.measured:
            if one.verdict != "ok":
                yield f"{one.peer} {one.verdict} at {counted(row.tokens, 'token')}: {one.message}"
    yield from _said_of_right_ones(result)
    small = [row.tokens for row in result.rows if row.caches is not None and row.caches < 1]
    if small:
        yield f"all sets together fit the last-level cache at {_listed(small)}"


def markdown(result: Result) -> str:
    """The tables and remarks as a Markdown document."""
    expect("result", result, Result, "what bench.run gives")
    lines = [
        f"# {result.case.op}, {result.case.name}",
        "",
        heading(result),
        "",
        f"{result.method[0].upper()}{result.method[1:]}.",
    ]
    for table in tables(result):
        lines += ["", f"## {table.title}", "", _line(table.head), _line(["---:"] * len(table.head))]
        lines += [_line(row) for row in table.rows]
    lines += ["", "## Remarks", "", *(f"- {remark}" for remark in remarks(result))]
    lines += [
        f"- {peer.name}: {peer.about}{f' ({peer.version})' if peer.version else ''}"
        for peer in result.peers
        if peer.present
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rich_table(table: Table) -> RichTable:
    """For a terminal, without its title."""
    from rich import box
    from rich.table import Table as RichTable

    rich = RichTable(box=box.SIMPLE_HEAD, show_edge=False)
    for name in table.head:
        rich.add_column(name, justify="right")
    for row in table.rows:
        rich.add_row(*row)
    return rich
