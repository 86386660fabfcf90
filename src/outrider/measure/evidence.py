"""What a report of the paper's quantities rests on: what was run, and what was read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.measure.figures import FIGURE_2_GAMMAS, Measured
from outrider.measure.recording import Recording
from outrider.measure.records import BenchRecord, Measurement
from outrider.text import Tokenizer
from outrider.theory import walltime_improvement

__all__ = [
    "Evidence",
    "PairRow",
    "best_gamma_points",
    "fastest",
    "own_costs",
    "pair_rows",
    "speed_points",
    "tokens_points",
]

LEAST_GAMMAS = 3
"""A best gamma is worth showing from this many measured draft lengths on."""

_SHADES = "in the colour of their gamma, grey for an adaptive one"
_BENCH_DOTS = f"Dots: rows of the bench, one request at a time, {_SHADES}."
_RUN_DOTS = (
    "Dots: the few rounds of Figures 1 and 5 alone; `outrider bench` measures enough to compare."
)
_NO_DOTS = "Nothing was accepted or rejected in this run, so there are no dots."


@dataclass(frozen=True)
class Evidence:
    """What was run or read.

    Attributes:
        recordings: one request at several draft lengths, the longest first, plain decoding last.
        tokenizer: of the target; None shows ids.
        runs_model: whether the drafter is a model.
        prompt: what was decoded, in words.
        measurement: a measurement file's contents, if there is one.
        bench: a bench file's rows, if there is one.
        facts: how this was made, names and values.
    """

    recordings: tuple[Recording, ...]
    tokenizer: Tokenizer | None
    runs_model: bool
    prompt: str
    measurement: Measurement | None = None
    bench: tuple[BenchRecord, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def plain(self) -> Recording | None:
        """The recording without drafts."""
        return next((item for item in self.recordings if item.gamma == 0), None)

    def speedup(self, recording: Recording) -> float | None:
        """Plain time over the recording's time, per token after the prompt."""
        plain = None if self.plain is None else self.plain.ms_per_token
        own = recording.ms_per_token
        return plain / own if plain is not None and own else None


@dataclass(frozen=True)
class PairRow:
    """A bench row beside what formulas expect of it.

    Attributes:
        row: what was measured.
        alpha: accepted / examined in the rounds that were timed.
        c: of its drafter, if it was measured.
        expected: Theorem 3.8; None where alpha, c or a fixed gamma is missing.
    """

    row: BenchRecord
    alpha: float | None
    c: float | None
    expected: float | None


def pair_rows(evidence: Evidence) -> list[PairRow]:
    """The bench's rows of single requests with drafts."""
    rows = []
    for row in evidence.bench:
        if row.batch != 1 or row.gamma == 0:
            continue
        alpha = row.alpha_hat
        c = None if evidence.measurement is None else evidence.measurement.cost_of(row.drafter)
        expected = None
        if alpha is not None and c is not None and row.gamma is not None:
            expected = walltime_improvement(alpha, row.gamma, c)
        rows.append(PairRow(row, alpha, c, expected))
    return rows


def fastest(rows: Iterable[PairRow]) -> dict[tuple[str, float, str, str], list[PairRow]]:
    """The rows of each task, temperature, drafter and rule, the fastest first."""
    groups: dict[tuple[str, float, str, str], list[PairRow]] = {}
    for item in rows:
        row = item.row
        groups.setdefault((row.task, row.temperature, row.drafter, row.rule), []).append(item)
    for group in groups.values():
        group.sort(key=lambda item: -item.row.speedup)
    return groups


# Points on the curves, and what they are in words


def tokens_points(evidence: Evidence) -> tuple[list[Measured], str]:
    """Tokens per target pass (Figure 2): from the bench, the measured survival, or the runs."""
    bench = [
        Measured(item.alpha, item.row.tokens_per_call, item.row.gamma)
        for item in pair_rows(evidence)
        if item.alpha is not None and item.row.tokens_per_call is not None
    ]
    if bench:
        return bench, _BENCH_DOTS
    records = () if evidence.measurement is None else evidence.measurement.alpha
    survival = [
        Measured(record.alpha, 1.0 + sum(record.survival[:gamma]), gamma)
        for record in records
        for gamma in FIGURE_2_GAMMAS
        if gamma <= len(record.survival)
    ]
    if survival:
        return survival, (
            "Dots: the measured survival of drafts, summed up to the gamma of their colour."
        )
    runs = []
    for item in evidence.recordings:
        stats = item.result.stats
        if stats.alpha_hat is not None and stats.tokens_per_call is not None:
            runs.append(Measured(stats.alpha_hat, stats.tokens_per_call, item.gamma))
    return runs, _RUN_DOTS if runs else _NO_DOTS


def speed_points(evidence: Evidence) -> tuple[list[Measured], str]:
    """Speed-ups (Figure 4): from the bench, or the runs."""
    points = [
        Measured(item.alpha, item.row.speedup, item.row.gamma)
        for item in pair_rows(evidence)
        if item.alpha is not None
    ]
    if points:
        return points, _BENCH_DOTS
    for recording in evidence.recordings:
        alpha, speedup = recording.result.stats.alpha_hat, evidence.speedup(recording)
        if alpha is not None and speedup is not None:
            points.append(Measured(alpha, speedup, recording.gamma))
    return points, _RUN_DOTS if points else _NO_DOTS


def best_gamma_points(evidence: Evidence) -> list[Measured]:
    """The fastest draft length of each kind of request that was measured with several."""
    points = []
    for group in fastest(pair_rows(evidence)).values():
        fixed = [item for item in group if item.row.gamma is not None]
        if len({item.row.gamma for item in fixed}) >= LEAST_GAMMAS and fixed[0].alpha is not None:
            points.append(Measured(fixed[0].alpha, float(fixed[0].row.gamma or 0)))
    return points


def own_costs(evidence: Evidence) -> list[float]:
    """The measured c of the drafters, the largest first."""
    measurement = evidence.measurement
    if measurement is None:
        return []
    costs = set(measurement.costs.values())
    if not costs and measurement.c is not None:
        costs = {measurement.c}
    return sorted(costs, reverse=True)
