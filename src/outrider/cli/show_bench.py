"""The rows of `outrider bench` as a table for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from outrider.cli import terminal
from outrider.cli.terminal import number

if TYPE_CHECKING:
    from outrider.measure.grid import Row, Setting

__all__ = ["print_rows"]

_CONDITIONS: dict[str, Callable[[Row], str]] = {
    "temperature": lambda row: f"{row.temperature:g}",
    "drafter": lambda row: row.drafter,
    "gamma": lambda row: "adaptive" if row.gamma is None else str(row.gamma),
    "rule": lambda row: row.rule,
    "batch": lambda row: str(row.batch),
}
_STYLES = {"+": "green", "-": "red", "": ""}
_NEAR = 0.1


def print_rows(rows: Sequence[Row]) -> None:
    """A table for every temperature and setting, and what it amounts to."""
    shared = [
        f"{name} {shown}"
        for name, show in _CONDITIONS.items()
        for shown in {show(row) for row in rows}
        if len({show(row) for row in rows}) == 1
    ]
    if shared:
        terminal.out.print("all rows: " + ", ".join(shared), style="dim")
    many_batches = len({row.batch for row in rows}) > 1
    for members in _grouped(rows):
        terminal.out.print()
        terminal.out.print(_condition(rows, members), style="bold")
        terminal.out.print(_table(members, with_batch=many_batches))
    if many_batches:
        terminal.out.print()
        terminal.out.print(_batch_table(rows))
    terminal.out.print()
    for line in _summary(rows):
        terminal.out.print(line)
    if any(row.agrees is False for row in rows):
        terminal.out.print(
            "! a text differs from plain decoding's and must not: a near tie in low precision, or "
            "a fault",
            style="bold red",
        )


def _mark(row: Row) -> str:
    """Whether the whole interval lies on one side of 1."""
    if row.low > 1.0:
        return "+"
    return "-" if row.high < 1.0 else ""


def _table(rows: Sequence[Row], *, with_batch: bool) -> Table:
    """Rows of one temperature and setting; 80 characters wide at most."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("task", no_wrap=True, min_width=11)
    names = ["plain", "spec", "speed-up", "", "95 %", "predicted", "per call", "alpha_hat"]
    if with_batch:
        names.insert(0, "batch")
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        mark = _mark(row)
        table.add_row(
            row.task,
            *([str(row.batch)] if with_batch else []),
            _short(row.plain_ms_per_token),
            _short(row.ms_per_token),
            Text(f"{row.speedup:.2f}x", style=f"bold {_STYLES[mark]}"),
            Text("!", style="bold red") if row.agrees is False else Text(mark, style=_STYLES[mark]),
            f"{row.low:.2f}-{row.high:.2f}",
            f"{row.predicted_speedup:.2f}x",
            f"{row.tokens_per_call:.2f}",
            number(row.alpha_hat, ".2f"),
        )
    if len({row.task for row in rows}) > 1 and len({row.batch for row in rows}) == 1:
        mean = Text(f"{_mean([row.speedup for row in rows]):.2f}x", style="bold")
        predicted = f"{_mean([row.predicted_speedup for row in rows]):.2f}x"
        table.add_row("geom. mean", "", "", mean, "", "", predicted, "", "")
    return table


def _short(ms: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{ms:.0f}" if ms >= 100.0 else f"{ms:.3g}"


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one temperature and setting together; tasks below each other, then batches."""
    groups: dict[tuple[float, Setting], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.temperature, row.setting), []).append(row)
    tasks = list(dict.fromkeys(row.task for row in rows))
    return [
        sorted(members, key=lambda row: (tasks.index(row.task), row.batch))
        for _, members in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _batch_table(rows: Sequence[Row]) -> Table:
    """Speed-up against batch size, a line for each task and setting: where the gain ends."""
    batches = sorted({row.batch for row in rows})
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("speed-up by batch size")
    for batch in batches:
        table.add_column(str(batch), justify="right")
    for members in _grouped(rows):
        for task in dict.fromkeys(row.task for row in members):
            of_batch = {row.batch: row for row in members if row.task == task}
            shown = [
                Text(f"{of_batch[batch].speedup:.2f}x", style=_STYLES[_mark(of_batch[batch])])
                if batch in of_batch
                else Text("-")
                for batch in batches
            ]
            table.add_row(f"{task}, {_condition(rows, members)}", *shown)
    return table


def _condition(rows: Sequence[Row], members: Sequence[Row]) -> str:
    """What tells these rows of one setting from the others; the temperature always."""
    row = members[0]
    many = len({member.temperature for member in members}) > 1
    parts = ["all temperatures" if many else _temperature(row)]
    for name in ("drafter", "gamma", "rule"):
        show = _CONDITIONS[name]
        if len({show(other) for other in rows}) > 1:
            parts.append(show(row) if name != "gamma" else f"gamma {show(row)}")
    return ", ".join(parts)


def _temperature(row: Row) -> str:
    return f"temperature {row.temperature:g}"


def _summary(rows: Sequence[Row]) -> list[str]:
    lines = []
    for members in _grouped(rows):
        by_batch: dict[int, list[float]] = {}
        for row in sorted(members, key=lambda row: row.batch):
            by_batch.setdefault(row.batch, []).append(row.speedup)
        if len(by_batch) > 1:
            means = {batch: _mean(speedups) for batch, speedups in by_batch.items()}
            lines.append(f"{_condition(rows, members)}: {_where_the_gain_ends(means)}")
        lines += _adaptive_against_fixed(rows, members)
    if len({row.temperature for row in rows}) > 1:
        for setting in dict.fromkeys(row.setting for row in rows):
            lines += _adaptive_against_fixed(rows, [row for row in rows if row.setting == setting])
    near = sum(abs(row.predicted_speedup / row.speedup - 1.0) <= _NEAR for row in rows)
    return [
        *lines,
        f"predicted within 10 % of measured in {near} of {len(rows)} rows",
        "plain, spec: ms per emitted token, prompts included; per call: per target pass",
        "95 %: interval of the speed-up, + where all of it is above 1, - below 1",
    ]


def _adaptive_against_fixed(rows: Sequence[Row], members: Sequence[Row]) -> list[str]:
    """A line for every batch size at which these adaptive rows were run beside fixed lengths.

    Args:
        rows: all of the run.
        members: of one setting, at one temperature or at several.
    """
    temperatures = {row.temperature for row in members}
    condition = _condition(rows, members)
    setting = (members[0].drafter, members[0].rule)
    lines = []
    for batch in sorted({row.batch for row in members if row.gamma is None}):
        adaptive = {_work(row): row for row in members if row.batch == batch}
        fixed: dict[int, dict[tuple[float, str], Row]] = {}
        for row in rows:
            same = (row.drafter, row.rule, row.batch) == (*setting, batch)
            if row.gamma and same and row.temperature in temperatures:
                fixed.setdefault(row.gamma, {})[_work(row)] = row
        if not fixed:
            continue
        best = max(fixed, key=lambda gamma: _over_all(fixed[gamma].values()))
        ours, theirs = _over_all(adaptive.values()), _over_all(fixed[best].values())
        gains = {
            work: min(other[work].ms_per_token for other in fixed.values()) / row.ms_per_token - 1.0
            for work, row in adaptive.items()
        }
        worst = min(gains, key=gains.__getitem__)
        task = adaptive[worst].task
        which = f"{task}, {_temperature(adaptive[worst])}" if len(temperatures) > 1 else task
        of_batch = f", batch {batch}" if len({row.batch for row in rows}) > 1 else ""
        lines.append(
            f"{condition}{of_batch}: {ours:.2f}x over all, the best fixed gamma, "
            f"{best}, {theirs:.2f}x ({ours / theirs - 1.0:+.1%}); against the best of each task "
            f"{gains[worst]:+.1%} at worst ({which})"
        )
    return lines


def _work(row: Row) -> tuple[float, str]:
    """What rows of different draft lengths have in common: the same tokens, the same noise."""
    return row.temperature, row.task


def _over_all(rows: Collection[Row]) -> float:
    """Speed-up where every task counts with as many tokens."""
    return sum(row.plain_ms_per_token for row in rows) / sum(row.ms_per_token for row in rows)


def _where_the_gain_ends(means: dict[int, float]) -> str:
    """In words; `means` are the mean speed-ups of batch sizes in rising order."""
    gains = [batch for batch, mean in means.items() if mean > 1.0]
    ends = [batch for batch, mean in means.items() if mean <= 1.0 and batch > max(gains, default=0)]
    if not gains:
        return "no gain at any batch size"
    last = f"gain up to batch {gains[-1]} ({means[gains[-1]]:.2f}x)"
    return f"{last}, none from {ends[0]} on ({means[ends[0]]:.2f}x)" if ends else last


def _mean(speedups: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, speedups)) / len(speedups))
