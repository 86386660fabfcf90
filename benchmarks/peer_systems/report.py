"""From single measurements to rows, a summary over all tasks, and a table in markdown.

A *measurement* is one generation. A *row* holds the medians over prompts and repeats of one system,
mode, task and temperature. Where a system was measured with several draft lengths, rows show the
one with the lowest median over all tasks at that temperature; `settings` lists them all.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, object]

ALL_TASKS = "all"
REFERENCES = {
    "vs_transformers_plain": ("transformers", "plain"),
    "vs_outrider_plain": ("outrider", "plain"),
}


@dataclass(frozen=True)
class Contender:
    """One way to generate: a system, its mode and, where it matters, its draft length."""

    system: str
    mode: str
    draft_length: int | None = None

    def __str__(self) -> str:
        length = "" if self.draft_length is None else f" {self.draft_length}"
        return f"{self.system} {self.mode}{length}"


@dataclass(frozen=True)
class Measurement:
    """One generation.

    Attributes:
        contender, task, prompt, temperature, repeat: what was run.
        ids: the generated tokens.
        wall_s: seconds of the whole call.
        first_s, num_first: seconds until the first tokens were known, and how many they were.
        details: the system's own counters.
        error: what went wrong; everything measured is then empty.
    """

    contender: Contender
    task: str
    prompt: str
    temperature: float
    repeat: int
    ids: tuple[int, ...] = ()
    wall_s: float = 0.0
    first_s: float | None = None
    num_first: int = 1
    details: dict[str, float | None] | None = None
    error: str | None = None

    @property
    def ms_per_token(self) -> float:
        """The whole call, prompt included, over the generated tokens."""
        return 1e3 * self.wall_s / len(self.ids)

    @property
    def decode_ms_per_token(self) -> float | None:
        """The time after the first tokens over the tokens after them."""
        if self.first_s is None or len(self.ids) <= self.num_first:
            return None
        return 1e3 * (self.wall_s - self.first_s) / (len(self.ids) - self.num_first)


def make_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """A row for every system, mode, task and temperature, best draft length only."""
    return _rows(measurements, _best_only(measurements), by_task=True)


def make_summary(measurements: Sequence[Measurement]) -> list[Row]:
    """A row for every system, mode and temperature over all tasks, best draft length only."""
    return _rows(measurements, _best_only(measurements), by_task=False)


def make_settings(measurements: Sequence[Measurement]) -> list[Row]:
    """A row over all tasks for every draft length that was tried."""
    return _rows(measurements, _succeeded(measurements), by_task=False)


def failures(measurements: Sequence[Measurement]) -> list[Row]:
    """What failed, how often, and the first reason given."""
    groups: dict[tuple[Contender, float], list[Measurement]] = defaultdict(list)
    for measured in measurements:
        groups[measured.contender, measured.temperature].append(measured)
    listed = []
    for (contender, temperature), group in groups.items():
        errors = [measured.error for measured in group if measured.error is not None]
        if errors:
            listed.append(
                _identity(contender)
                | {"temperature": temperature}
                | {"failed": len(errors), "tried": len(group), "reason": errors[0]}
            )
    return listed


def _succeeded(measurements: Iterable[Measurement]) -> list[Measurement]:
    return [measured for measured in measurements if measured.error is None and measured.ids]


def _best_only(measurements: Iterable[Measurement]) -> list[Measurement]:
    times: dict[tuple[str, str, float], dict[Contender, list[float]]] = defaultdict(dict)
    succeeded = _succeeded(measurements)
    for measured in succeeded:
        group = times[_slot(measured)]
        group.setdefault(measured.contender, []).append(measured.ms_per_token)
    best = {
        slot: min(group, key=lambda contender: statistics.median(group[contender]))
        for slot, group in times.items()
    }
    return [measured for measured in succeeded if best[_slot(measured)] == measured.contender]


def _slot(measured: Measurement) -> tuple[str, str, float]:
    return measured.contender.system, measured.contender.mode, measured.temperature


def _identity(contender: Contender) -> Row:
    return {
        "system": contender.system,
        "mode": contender.mode,
        "draft_length": contender.draft_length,
    }


def _rows(
    everything: Sequence[Measurement], kept: Sequence[Measurement], *, by_task: bool
) -> list[Row]:
    references = {
        name: {
            _place(measured): measured
            for measured in _succeeded(everything)
            if (measured.contender.system, measured.contender.mode) == reference
        }
        for name, reference in REFERENCES.items()
    }
    groups: dict[tuple[float, str, Contender], list[Measurement]] = defaultdict(list)
    for measured in kept:
        task = measured.task if by_task else ALL_TASKS
        groups[measured.temperature, task, measured.contender].append(measured)
    rows = []
    contenders = list(dict.fromkeys(one.contender for one in everything))
    tasks = list(dict.fromkeys(one.task for one in everything))

    def place_in_list(group: tuple[float, str, Contender]) -> tuple[float, int, int]:
        temperature, task, contender = group
        return temperature, tasks.index(task) if by_task else 0, contenders.index(contender)

    for temperature, task, contender in sorted(groups, key=place_in_list):
        group = groups[temperature, task, contender]
        row = _identity(contender) | {"task": task, "temperature": temperature}
        row |= _times(group)
        for name, reference in references.items():
            row[name] = _median_ratio(group, reference)
        if temperature == 0:
            row["same_ids_as_transformers"] = _share_of_same_ids(
                group, references["vs_transformers_plain"]
            )
        rows.append(row | _counters(group))
    return rows


def _place(measured: Measurement) -> tuple[str, float, int]:
    return measured.prompt, measured.temperature, measured.repeat


def _times(group: Sequence[Measurement]) -> Row:
    times = [measured.ms_per_token for measured in group]
    low, _, high = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    )
    decode = [value for one in group if (value := one.decode_ms_per_token) is not None]
    first = [1e3 * one.first_s for one in group if one.first_s is not None]
    return {
        "ms_per_token": round(statistics.median(times), 2),
        "quartiles": [round(low, 2), round(high, 2)],
        "decode_ms_per_token": round(statistics.median(decode), 2) if decode else None,
        "first_token_ms": round(statistics.median(first), 1) if first else None,
        "runs": len(group),
        "tokens_per_run": statistics.median(len(measured.ids) for measured in group),
    }


def _median_ratio(
    group: Sequence[Measurement], reference: Mapping[tuple[str, float, int], Measurement]
) -> float | None:
    """Time per token over that of the reference in the same turn; below 1 is faster."""
    ratios = [
        measured.ms_per_token / reference[_place(measured)].ms_per_token
        for measured in group
        if _place(measured) in reference
    ]
    return round(statistics.median(ratios), 3) if ratios else None


def _share_of_same_ids(
    group: Sequence[Measurement], reference: Mapping[tuple[str, float, int], Measurement]
) -> float | None:
    same = [
        measured.ids == reference[_place(measured)].ids
        for measured in group
        if _place(measured) in reference
    ]
    return round(sum(same) / len(same), 3) if same else None


def _counters(group: Sequence[Measurement]) -> Row:
    """Outrider's alpha_hat and tokens per call, from the sums over all runs."""
    totals: dict[str, float] = defaultdict(float)
    for measured in group:
        for name, value in (measured.details or {}).items():
            totals[name] += value or 0
    if not totals["target_passes"]:
        return {}
    examined = totals["examined"]
    return {
        "alpha_hat": round(totals["accepted"] / examined, 3) if examined else None,
        "tokens_per_call": round(totals["emitted"] / totals["target_passes"], 3),
    }


def markdown(results: Mapping[str, Any]) -> str:
    """The results as tables for people."""
    lines = [
        f"# {results['title']}",
        "",
        "Milliseconds per generated token of the whole call, prompt included: medians over prompts "
        "and repeats. The ratios compare runs of the same turn (same prompt, same number of "
        "tokens); below 1 is faster. Draft length: the best of those tried; `-` leaves it to the "
        "system.",
    ]
    for temperature in sorted({row["temperature"] for row in results["summary"]}):
        lines += ["", f"## Temperature {temperature:g}, all tasks", ""]
        lines += _table(
            {
                "system": "system",
                "mode": "mode",
                "draft length": "draft_length",
                "ms per token": "ms_per_token",
                "quartiles": "quartiles",
                "after the first": "decode_ms_per_token",
                "/ transformers plain": "vs_transformers_plain",
                "/ Outrider plain": "vs_outrider_plain",
                "same ids as transformers": "same_ids_as_transformers",
                "alpha_hat": "alpha_hat",
                "tokens per call": "tokens_per_call",
                "runs": "runs",
            },
            [row for row in results["summary"] if row["temperature"] == temperature],
        )
        rows = [row for row in results["rows"] if row["temperature"] == temperature]
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        by_contender: dict[tuple[str, str], Row] = defaultdict(dict)
        for row in rows:
            by_contender[row["system"], row["mode"]][row["task"]] = row["ms_per_token"]
        lines += ["", f"## Temperature {temperature:g}, by task", ""]
        lines += _table(
            {"system": "system", "mode": "mode"} | {task: task for task in tasks},
            [
                {"system": system, "mode": mode} | times
                for (system, mode), times in by_contender.items()
            ],
        )
    if results["notes"]:
        lines += ["", "## Notes", "", *(f"* {note}" for note in results["notes"])]
    lines += ["", "## Memory and bandwidth", ""]
    machine = results["machine"]
    lines.append(
        f"Read bandwidth {machine['read_gb_per_s']} GB/s (best of {machine['bandwidth_runs']}); "
        f"the target's weights are {machine['weight_bytes'] / 1e6:.0f} MB, one reading takes "
        f"{machine['weight_read_ms']} ms."
    )
    lines += ["", "Highest resident size of each process (it holds all the modes named):", ""]
    lines += _table({"process": "process", "MB": "peak_rss_mb"}, results["memory"])
    lines += ["", "## Provenance", "", "```json"]
    lines += [json.dumps(results["provenance"], indent=1), "```", ""]
    return "\n".join(lines)


def _table(columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [_cell(row.get(name)) for name in columns.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return str(value)
