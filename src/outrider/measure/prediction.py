"""What a run should have taken, from costs measured apart from it.

A step's time is modelled as a target pass over the drafted positions and one more, what such a pass
takes on top behind one of another width, the drafter's steps, and the time outside the models.
Summed over the rounds that a run really had, this is the paper's expected improvement (Leviathan et
al. 2023, Theorem 3.8) with its two simplifications undone: for drafts of gamma tokens and long
outputs the predicted speed-up tends to

    (1 + S_1 + ... + S_gamma) / (v(gamma + 1) + gamma * c + outside)

with the counted survival S_i of i drafted tokens instead of a power of alpha, and the measured cost
v(n) of a target pass over n positions instead of a free verification. Drafts of varying length,
outputs that end, and batches whose requests end one by one are covered by the same sum.

What comes from where. How much is drafted and accepted is counted in the very rounds whose time is
predicted; v, c and the time outside the models are measured before, in other passes. So agreement
says nothing about acceptance. It says that the time is explained by tokens per round and the cost
curve, that is, that nothing costs time which the formula does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.costs import Costs, measure_costs
from outrider.models import Model
from outrider.pass_width import PassWidth
from outrider.requests import Result, Round

__all__ = [
    "BatchCosts",
    "Step",
    "curve_positions",
    "measure_batch_costs",
    "modelled_ms",
    "outside_ms_per_row",
    "steps_of",
]

_WIDEST_PASS = 96
"""Most rows of a pass over several sequences: curves are straight before, and passes slow."""

_READING = 10**6
"""A width that no round keeps: the first pass of a request reads its prompt too."""


@dataclass(frozen=True)
class Step:
    """One pass of the loop over all requests that were in it.

    Attributes:
        drafted: tokens drafted for each request.
        draft_ms, target_ms: in the drafter, in the target's pass.
        total_ms: until the last request was settled.
        model_steps: passes of the drafting model, over all requests that still drafted.
    """

    drafted: tuple[int, ...]
    draft_ms: float
    target_ms: float
    total_ms: float
    model_steps: int = 0

    @property
    def num_rows(self) -> int:
        """Positions that were verified, the target's own included."""
        return sum(self.drafted) + len(self.drafted)


@dataclass(frozen=True)
class BatchCosts:
    """Costs of passes over one request and over a whole batch; between them, linear.

    Attributes:
        alone: of one request.
        batch: of `size` requests side by side, positions counted per request.
        size: requests in the batch.
    """

    alone: Costs
    batch: Costs
    size: int

    def target_ms(
        self, num_requests: NDArray[np.float64], positions: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Milliseconds of passes over that many requests, with so many positions each on average.

        Args:
            num_requests: [n], each from 1 to `size`.
            positions: [n], each at least 1.
        """
        grid = np.arange(1, int(np.ceil(positions.max())) + 2)
        alone, batch = (
            np.interp(positions, grid, [costs.target(float(n)) for n in grid])
            for costs in (self.alone, self.batch)
        )
        return self._between(num_requests, alone, batch)

    def drafter_ms(
        self, num_requests: NDArray[np.float64], num_steps: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Milliseconds of drafts in so many drafter steps [n] for so many requests [n]."""
        alone, batch = (
            num_steps * costs.drafter_ms + (num_steps > 0.0) * costs.drafter_begins_ms
            for costs in (self.alone, self.batch)
        )
        return self._between(num_requests, alone, batch)

    def change_ms(self, num_requests: NDArray[np.float64]) -> NDArray[np.float64]:
        """What a pass over that many requests [n] takes on top behind one of another width."""
        return self._between(num_requests, self.alone.change_ms, self.batch.change_ms)

    def _between(
        self,
        num_requests: NDArray[np.float64],
        alone: float | NDArray[np.float64],
        batch: float | NDArray[np.float64],
    ) -> NDArray[np.float64]:
        share = (num_requests - 1.0) / max(1, self.size - 1)
        mixed: NDArray[np.float64] = alone + share * (batch - alone)
        return mixed


def curve_positions(positions: Sequence[int], num_sequences: int) -> list[int]:
    """Those of `positions` that a prediction needs for each of so many sequences side by side."""
    return [
        n for n in positions if n <= 2 or num_sequences == 1 or n * num_sequences <= _WIDEST_PASS
    ]


def measure_batch_costs(
    target: Model,
    drafter: Model | None,
    size: int,
    *,
    alone: Costs | None = None,
    context: int = 64,
    repeats: int = 5,
) -> BatchCosts:
    """Time passes over one request and over `size` of them.

    Args:
        target: the model whose passes are verified with.
        drafter: a drafting model; None for a drafter without one.
        size: requests in the batch.
        alone: the costs of one request, if they were measured before with the same context.
        context: tokens cached before the positions.
        repeats: turns that count; see `measure_costs`.
    """
    if alone is None:
        alone = measure_costs(target, drafter, context=context, repeats=repeats)
    if size == 1:
        return BatchCosts(alone, alone, 1)
    batch = measure_costs(
        target,
        drafter,
        positions=curve_positions(alone.positions, size),
        context=context,
        repeats=repeats,
        num_sequences=size,
    )
    return BatchCosts(alone, batch, size)


def steps_of(results: Sequence[Result], *, first: int = 0) -> list[Step]:
    """The steps that requests of one engine shared, one after another.

    Rounds of one step carry the very same times of drafter and target.

    Args:
        results: of requests that were run side by side.
        first: rounds of each request to leave out; 1 leaves out those that read the prompts.
    """
    shared: dict[tuple[float, float], list[Round]] = {}
    for result in results:
        for item in result.trace[first:]:
            shared.setdefault((item.times.draft_s, item.times.target_s), []).append(item)
    in_time = sorted(shared.items(), key=lambda item: item[1][0].times.start_s)
    return [
        Step(
            drafted=tuple(len(item.drafted) for item in rounds),
            draft_ms=1e3 * draft_s,
            target_ms=1e3 * target_s,
            total_ms=1e3 * max(item.times.end_s - item.times.start_s for item in rounds),
            model_steps=max(item.steps for item in rounds),
        )
        for (draft_s, target_s), rounds in in_time
    ]


def outside_ms_per_row(steps: Sequence[Step], costs: BatchCosts) -> float:
    """Milliseconds outside the models' passes for every verified position of `steps`, at least 0.

    Sampling, verification, bookkeeping; and of the drafter, what its own passes do not take. Most
    of it is work on rows of V probabilities, of which a round has as many as positions.
    """
    num_requests = np.array([len(step.drafted) for step in steps], dtype=np.float64)
    model_steps = np.array([step.model_steps for step in steps], dtype=np.float64)
    passes_ms = float(np.sum(costs.drafter_ms(num_requests, model_steps)))
    outside = sum(step.total_ms - step.target_ms for step in steps) - passes_ms
    return max(0.0, outside / sum(step.num_rows for step in steps))


def modelled_ms(
    steps: Sequence[Step],
    costs: BatchCosts,
    outside_ms: float,
    *,
    engine_costs: Costs | None = None,
) -> float:
    """Milliseconds that the steps of one run should take, the reading of prompts left out.

    One request, drafted [3, 3, 0]: target passes over 4, 4 and 1 positions, one change of width,
    6 drafter steps, and 9 times `outside_ms`; three passes over 4 where the engine keeps them wide.

    Args:
        steps: what was drafted for whom, one after another; their times are not used.
        costs: of passes.
        outside_ms: outside the models, per verified position.
        engine_costs: those that the engine chose the widths of its passes by; None: it had none.
    """
    if not steps:
        return 0.0
    num_requests = np.array([len(step.drafted) for step in steps], dtype=np.float64)
    rows = np.array([step.num_rows for step in steps], dtype=np.float64)
    model_steps = np.array([step.model_steps for step in steps], dtype=np.float64)
    chosen = PassWidth(engine_costs or Costs())
    chosen.now(_READING)
    widths = np.array([n + chosen.padding(int(n)) for n in rows], dtype=np.float64)
    target_ms = costs.target_ms(num_requests, widths / num_requests)
    drafter_ms = costs.drafter_ms(num_requests, model_steps)
    changes = np.diff(widths, prepend=widths[0]) != 0.0
    change_ms = changes * costs.change_ms(num_requests)
    return float(np.sum(target_ms + change_ms + drafter_ms + rows * outside_ms))
