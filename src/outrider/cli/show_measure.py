"""What `outrider measure` found, as tables for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from outrider.cli import terminal

__all__ = ["print_alpha", "print_cost"]

Facts = Mapping[str, object]

_LENGTHS = (1, 2, 3, 5, 8, 12)


def print_alpha(rows: Sequence[Facts]) -> None:
    """The paper's Table 3 on this pair, survival, and what rules and rounds add to it."""
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    names = list(dict.fromkeys(str(row["drafter"]) for row in rows))
    shown = _shown(names)
    found = {(str(row["drafter"]), str(row["policy"])): row for row in rows}
    counts = {policy: _number(row, "num_tokens") for (_, policy), row in found.items()}
    told = ", ".join(f"{count:.0f} ({policy})" for policy, count in counts.items())
    terminal.out.print(f"alpha over tokens of the target's text: {told}", style="dim")
    table = _table("drafter", *policies)
    for name in names:
        table.add_row(shown[name], *(_alpha(found.get((name, policy))) for policy in policies))
    terminal.out.print(table)
    for policy in policies:
        terminal.out.print()
        terminal.out.print(f"{policy}: the first n drafted tokens are all accepted", style="bold")
        table = _table("drafter", *(f"n = {n}" for n in _LENGTHS), "block", "coupled")
        for name in names:
            row = found.get((name, policy))
            if row is not None:
                cells = (*_survival(row), _gain(row), f"{_number(row, 'match'):.2f}")
                table.add_row(shown[name], *cells)
        terminal.out.print(table)
        for name in names:
            _print_rounds(shown[name], found.get((name, policy)))
    terminal.out.print()
    terminal.out.print(
        "block: tokens per round, over those of rejection; coupled: alpha under shared noise",
        style="dim",
    )


def print_cost(cost: Facts) -> None:
    """c of every drafter, the curves, and what they amount to in a sentence."""
    table = _table("drafter", "c", "step", "outside", "c_hat")
    drafters = cost["drafters"]
    assert isinstance(drafters, dict)
    shown = _shown(drafters)
    for name, item in drafters.items():
        c_hat = item["c_hat"]
        table.add_row(
            shown[name],
            f"{item['c']:.3f}",
            f"{item['drafter_ms']:.3g} ms",
            f"{item['outside_ms']:.3g} ms",
            "-" if c_hat is None else f"{c_hat:.3f}",
        )
    terminal.out.print(table)
    terminal.out.print()
    curves = cost["contexts"]
    assert isinstance(curves, list)
    lengths = [n for n in (2, 3, 5, 6, 9, 17, 33) if any(str(n) in _curve(c) for c in curves)]
    table = _table("batch", "context", "one position", *(f"v({n})" for n in lengths))
    for item in curves:
        values = (_curve(item).get(str(n)) for n in lengths)
        table.add_row(
            str(item["batch"]),
            str(item["context"]),
            f"{item['target_ms']:.3g} ms",
            *("-" if value is None else f"{value:.2f}" for value in values),
        )
    terminal.out.print(table)
    terminal.out.print()
    terminal.out.print(_sentence(cost))


def _shown(names: Iterable[str]) -> dict[str, str]:
    """Names as they fit a table: paths without their folders, where that tells all of them apart.

    lookup+/home/me/mine -> lookup+mine
    """
    short = {name: re.sub(r"[^+:]*/(?=.)", "", name) for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


def _sentence(cost: Facts) -> str:
    text = (
        f"A target step takes {_number(cost, 'target_ms'):.3g} ms behind {cost['context']} tokens; "
        f"a step of {cost['drafter']} takes {_number(cost, 'drafter_ms'):.3g} ms: "
        f"c = {_number(cost, 'c'):.3f}."
    )
    curve = _curve(cost)
    longest = max(map(int, curve))
    if longest > 1:
        text += f" Verifying {longest - 1} drafted tokens costs {curve[str(longest)]:.2f} steps."
        change_ms = _number(cost, "change_ms")
        text += f" A pass of another width than the one before takes {change_ms:.2g} ms more."
    if cost["bandwidth_gbs"] is not None:
        text += (
            f" A step reads {_number(cost, 'bytes_read_per_token') / 1e6:.0f} MB, "
            f"{_number(cost, 'bandwidth_gbs'):.1f} GB/s."
        )
    return text


def _print_rounds(name: str, row: Facts | None) -> None:
    rounds = None if row is None else row.get("rounds")
    if row is None or not isinstance(rounds, dict):
        return
    shown = [
        f"{rule} {facts['tokens_per_call']['value']:.2f}"
        for rule, facts in rounds.items()
        if isinstance(facts, dict)
    ]
    text = f"{name}: tokens per round counted: {', '.join(shown)}"
    alpha_hat, alpha = rounds["rejection"]["alpha_hat"], row["alpha_drafted"]
    if isinstance(alpha_hat, dict) and isinstance(alpha, dict):
        agree = "agrees with" if rounds["agrees"] else "differs from"
        text += (
            f"; alpha_hat {alpha_hat['value']:.2f} ({alpha_hat['low']:.2f} to "
            f"{alpha_hat['high']:.2f}) {agree} alpha where it drafts, {alpha['value']:.2f} "
            f"({alpha['low']:.2f} to {alpha['high']:.2f})"
        )
    terminal.out.print(text)


def _alpha(row: Facts | None) -> str:
    if row is None:
        return "-"
    low, high = _number(row, "low"), _number(row, "high")
    return f"{_number(row, 'alpha'):.2f} ({low:.2f} to {high:.2f})"


def _survival(row: Facts) -> list[str]:
    survival = row["survival"]
    assert isinstance(survival, list)
    return [f"{survival[n - 1]:.2f}" if n <= len(survival) else "-" for n in _LENGTHS]


def _gain(row: Facts) -> str:
    return f"{_number(row, 'block_gain'):.2f}x"


def _curve(facts: object) -> dict[str, float]:
    assert isinstance(facts, Mapping)
    curve = facts["verify_cost"]
    assert isinstance(curve, dict)
    return curve


def _number(facts: Facts, name: str) -> float:
    value = facts[name]
    assert isinstance(value, (int, float)), (name, value)
    return float(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
