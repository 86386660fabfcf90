"""Speculative against plain decoding, run by turns on the same prompts, beside its prediction.

A cell is a task, a temperature and a batch size. In a cell every batch of prompts is decoded
plainly and with every setting (drafter, gamma, rule) in the same turn, so that a machine that gets
slower gets slower for all. Each side emits exactly as many tokens, reads its prompts anew, and is
timed from the first request's start to the last one's end, the reading of the prompts included.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product

import numpy as np
from numpy.typing import NDArray

from outrider.decoding import Engine
from outrider.errors import ContextOverflow
from outrider.measure.grid import Cell, Grid, Row, Setting
from outrider.measure.prediction import (
    BatchCosts,
    measure_batch_costs,
    modelled_ms,
    outside_ms_per_row,
    steps_of,
)
from outrider.measure.prompts import PromptItem
from outrider.pair import Pair
from outrider.requests import Request, Result
from outrider.text import Message

__all__ = ["Benchmark", "speedup_interval"]

_WARM_UP_TOKENS = 24
_CALIBRATION_LASTS = 20
"""For so many times as long as it took: a machine that others use gets slower and faster."""


@dataclass(frozen=True)
class _Run:
    seconds: float
    results: list[Result]


@dataclass(frozen=True)
class _Calibration:
    """Costs as they were timed.

    Attributes:
        costs: what passes cost.
        ended: when that was known, on the clock of `time.perf_counter`.
        seconds: how long it took.
    """

    costs: BatchCosts
    ended: float
    seconds: float

    @property
    def is_old(self) -> bool:
        return time.perf_counter() - self.ended > _CALIBRATION_LASTS * self.seconds


class Benchmark:
    """All cells of a grid over some prompts, ready to be measured one by one.

    Args:
        pairs: a pair for each drafter, by the drafter's name; all with the same target.
        items: the prompts.
        grid: what to run.

    Raises:
        UsageError: a setting that cannot be run, or a prompt that does not fit the context.
    """

    def __init__(self, pairs: Mapping[str, Pair], items: Sequence[PromptItem], grid: Grid) -> None:
        grid.check()
        self.grid = grid
        self._pairs = dict(pairs)
        self._plain = next(iter(self._pairs.values()))
        self._prompts: dict[str, list[list[int]]] = {}
        for task in dict.fromkeys(item.task for item in items):
            chosen = [item for item in items if item.task == task]
            self._prompts[task] = self._conversations(chosen)
        lengths = [len(ids) for prompts in self._prompts.values() for ids in prompts]
        room = self._plain.target.context_length - grid.num_tokens - 1
        self._context = max(1, min(int(statistics.median(lengths)) + grid.num_tokens // 2, room))
        self._costs: dict[tuple[str, int], _Calibration] = {}
        self._outside_ms: dict[tuple[Setting | None, float, int], float] = {}

    @property
    def settings(self) -> list[Setting]:
        """Every way of speculating."""
        grid = self.grid
        return [Setting(*item) for item in product(self._pairs, grid.gammas, grid.rules)]

    @property
    def cells(self) -> list[Cell]:
        """Every cell."""
        grid = self.grid
        return [Cell(*item) for item in product(self._prompts, grid.temperatures, grid.batches)]

    def num_runs(self, cell: Cell) -> int:
        """How many outputs or batches of outputs `measure` decodes."""
        return len(self._batches(cell)) * self.grid.repeats * (1 + len(self.settings))

    def measure(self, cell: Cell, progress: Callable[[], None] = lambda: None) -> list[Row]:
        """A row for every setting.

        Args:
            cell: one of `cells`.
            progress: called after each of `num_runs` runs.

        Raises:
            OutriderError: a request failed.
        """
        batches = self._batches(cell)
        sides: list[Setting | None] = [None, *self.settings]
        for side in sides:
            self._calibrate(cell, side, batches[0])
        runs: dict[Setting | None, list[list[_Run]]] = {
            side: [[] for _ in batches] for side in sides
        }
        for turn, (repeat, place) in enumerate(
            product(range(self.grid.repeats), range(len(batches)))
        ):
            first = turn % len(sides)  # who comes first, right after another prompt, changes
            for side in [*sides[first:], *sides[:first]]:
                seed = (repeat * len(batches) + place) * cell.batch
                run = self._run(side, batches[place], cell.temperature, self.grid.num_tokens, seed)
                runs[side][place].append(run)
                progress()
        return [self._row(cell, side, runs[None], runs[side]) for side in sides if side is not None]

    def _batches(self, cell: Cell) -> list[list[list[int]]]:
        """The prompts of a cell, dealt into batches; in a large batch some come more than once."""
        prompts = self._prompts[cell.task]
        wanted = min(self.grid.num_prompts, len(prompts))
        starts = range(0, wanted, cell.batch)
        return [
            [prompts[(start + i) % len(prompts)] for i in range(cell.batch)] for start in starts
        ]

    def _run(
        self,
        side: Setting | None,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        num_tokens: int,
        seed: int = 0,
    ) -> _Run:
        """Decode prompts side by side, plainly for None."""
        size = len(prompts)
        if side is None:
            # Plain text is the same for every draft length only under one kind of noise: `coupled`
            # has its own.
            pair, rule = self._plain, "coupled" if "coupled" in self.grid.rules else "block"
            gamma: int | None = 0
            # With costs: where a kernel likes a wider pass better, plain decoding has it too.
            engine = Engine(pair.target, max_batch=size, costs=pair.costs)
        else:
            pair, gamma, rule = self._pairs[side.drafter], side.gamma, side.rule
            engine = pair.engine(max_batch=size)
        policy = self.grid.policy(temperature)
        requests = [
            Request(
                prompt,
                policy,
                max_new_tokens=num_tokens,
                gamma=gamma,
                rule=rule,
                seed=seed + i,
                ignore_eos=True,
            )
            for i, prompt in enumerate(prompts)
        ]
        pair.forget()
        begun = time.perf_counter()
        results = engine.generate(requests)
        return _Run(time.perf_counter() - begun, results)

    def _calibrate(self, cell: Cell, side: Setting | None, prompts: list[list[int]]) -> None:
        """Warm up, and measure what the prediction needs, for as long as that holds."""
        drafter = next(iter(self._pairs)) if side is None else side.drafter
        known = self._costs.get((drafter, cell.batch))
        if known is None or known.is_old:
            begun = time.perf_counter()
            pair = self._pairs[drafter]
            costs = measure_batch_costs(
                pair.target, pair.drafting_model, cell.batch, context=self._context
            )
            ended = time.perf_counter()
            known = self._costs[drafter, cell.batch] = _Calibration(costs, ended, ended - begun)
        key = (side, cell.temperature, cell.batch)
        if key not in self._outside_ms:
            num_tokens = min(_WARM_UP_TOKENS, self.grid.num_tokens)
            # Twice: widths that come up for the first time are prepared for, which takes longer.
            for _ in range(2):
                run = self._run(side, prompts, cell.temperature, num_tokens)
            steps = steps_of(run.results, first=1) or steps_of(run.results)
            self._outside_ms[key] = outside_ms_per_row(steps, known.costs)

    def _row(
        self,
        cell: Cell,
        setting: Setting,
        plain: list[list[_Run]],
        speculative: list[list[_Run]],
    ) -> Row:
        times = [_ms_per_token(runs) for runs in (plain, speculative)]
        slow, fast = (float(np.median(each, axis=1).mean()) for each in times)
        low, high = speedup_interval(*times)
        stats = [result.stats for runs in speculative for run in runs for result in run.results]
        examined = sum(item.examined for item in stats)
        agrees = None
        if cell.temperature == 0.0 or setting.rule == "coupled":
            agrees = _all_ids(plain) == _all_ids(speculative)
        return Row(
            **asdict(cell),
            **asdict(setting),
            plain_ms_per_token=slow,
            ms_per_token=fast,
            speedup=slow / fast,
            low=low,
            high=high,
            alpha_hat=sum(item.accepted for item in stats) / examined if examined else None,
            tokens_per_call=sum(item.emitted for item in stats)
            / sum(item.target_passes for item in stats),
            predicted_speedup=self._predicted(cell, setting, plain, speculative),
            agrees=agrees,
        )

    def _predicted(
        self,
        cell: Cell,
        setting: Setting,
        plain: list[list[_Run]],
        speculative: list[list[_Run]],
    ) -> float:
        """The speed-up that the costs measured before promise for the rounds that were counted.

        What reading the prompts takes is counted in the plain runs, for both sides; a drafting
        model reads them too, in its share of that.
        """
        costs = self._costs[setting.drafter, cell.batch].costs
        outside = {
            side: self._outside_ms[side, cell.temperature, cell.batch] for side in (None, setting)
        }
        plain_ms = fast_ms = 0.0
        for slow, fast in zip(chain(*plain), chain(*speculative), strict=True):
            steps = steps_of(slow.results)
            reading_ms = _reading_ms(slow)
            rounds_ms = modelled_ms(steps, costs, outside[None], engine_costs=self._plain.costs)
            # One of the rounds is in the time that reading takes.
            first_ms = rounds_ms / len(steps)
            plain_ms += reading_ms + rounds_ms - first_ms
            fast_ms += reading_ms * (1.0 + costs.alone.drafter_reads) - first_ms
            fast_ms += modelled_ms(
                steps_of(fast.results),
                costs,
                outside[setting],
                engine_costs=self._pairs[setting.drafter].costs,
            )
        return plain_ms / fast_ms

    def _conversations(self, items: Sequence[PromptItem]) -> list[list[int]]:
        """As many prompts as are needed; later turns follow the target's own, plain answers."""
        wanted = max(self.grid.num_prompts, *self.grid.batches)
        chosen: list[PromptItem] = []
        while len(chosen) < len(items) and sum(len(item.turns) for item in chosen) < wanted:
            chosen.append(items[len(chosen)])
        histories: list[list[Message]] = [[] for _ in chosen]
        prompts: list[list[list[int]]] = [[] for _ in chosen]
        for turn in range(max(len(item.turns) for item in chosen)):
            talking = [i for i, item in enumerate(chosen) if turn < len(item.turns)]
            for i in talking:
                histories[i].append({"role": "user", "content": chosen[i].turns[turn]})
                prompts[i].append(self._encoded(histories[i], chosen[i]))
            asked = [i for i in talking if turn + 1 < len(chosen[i].turns)]
            if asked:
                answers = Engine(self._plain.target).generate(
                    [
                        Request(prompts[i][turn], max_new_tokens=self.grid.num_tokens, gamma=0)
                        for i in asked
                    ]
                )
                for i, answer in zip(asked, answers, strict=True):
                    histories[i].append({"role": "assistant", "content": answer.text})
        return [ids for conversation in prompts for ids in conversation]

    def _encoded(self, messages: list[Message], item: PromptItem) -> list[int]:
        target = self._plain.target
        if target.tokenizer is not None and not target.tokenizer.has_chat_template:
            text = "\n\n".join(message["content"] for message in messages)
            ids = self._plain.encode(text, raw=True)
        else:
            ids = self._plain.encode(messages)
        if len(ids) + self.grid.num_tokens > target.context_length:
            raise ContextOverflow(
                f"prompt {item.id} ({item.task}) has {len(ids)} tokens, and {self.grid.num_tokens} "
                f"more do not fit the {target.context_length} of {target.name}; ask for fewer "
                "tokens, or leave the prompt out"
            )
        return ids


def speedup_interval(
    plain: NDArray[np.float64],
    fast: NDArray[np.float64],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap of the speed-up: prompts are drawn again, then turns of each prompt.

    The speed-up is the sum over prompts of the median plain time over that of the median other
    time. Both sides of a turn are drawn together. Percentiles of few prompts lie too close together
    and are taken further out, by as much as Student's law and the lost degree of freedom ask for
    (the expanded percentile interval of Hesterberg 2015, arXiv 1411.5279); of two prompts, or of
    one in two turns, that is all that was drawn.

    Args:
        plain: [prompts, repeats], milliseconds per token.
        fast: [prompts, repeats], of the same turns.
        level: of the interval.
        resamples: how many.
        seed: of the drawing.

    Returns:
        Low and high.
    """
    num_prompts, repeats = plain.shape
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, num_prompts, (resamples, num_prompts))
    turns = generator.integers(0, repeats, (resamples, num_prompts, repeats))
    drawn = [
        np.median(times[prompts[..., None], turns], axis=2).sum(axis=1) for times in (plain, fast)
    ]
    tail = _expanded((1.0 - level) / 2.0, num_prompts if num_prompts > 1 else repeats)
    low, high = np.quantile(drawn[0] / drawn[1], [tail, 1.0 - tail])
    return float(low), float(high)


def _expanded(tail: float, num_units: int) -> float:
    """The share to leave out on each side where that many units are drawn from, at least 2."""
    freedom = num_units - 1
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(math.pi * freedom)
    # Student's quantile for `tail`, by its density from 0 to 100: beyond that all is left in.
    at = np.linspace(0.0, 100.0, 100_001)
    density = scale * (1.0 + at**2 / freedom) ** (-(freedom + 1) / 2)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)]) * (at[1] - at[0])
    t = float(np.interp(0.5 - tail, area, at))
    return statistics.NormalDist().cdf(-t * math.sqrt(num_units / freedom))


def _ms_per_token(runs: list[list[_Run]]) -> NDArray[np.float64]:
    """[batches, repeats], milliseconds per token of all requests of a batch together."""
    return np.array(
        [
            [1e3 * run.seconds / sum(len(item.token_ids) for item in run.results) for run in turns]
            for turns in runs
        ]
    )


def _reading_ms(run: _Run) -> float:
    """What a plain run took beyond its other steps, each taken for as long as the median one."""
    usual = steps_of(run.results, first=1)
    usual_ms = statistics.median(step.total_ms for step in usual) if usual else 0.0
    return max(0.0, 1e3 * run.seconds - (len(steps_of(run.results)) - 1) * usual_ms)


def _all_ids(runs: list[list[_Run]]) -> list[list[int]]:
    return [result.token_ids for turns in runs for run in turns for result in run.results]
