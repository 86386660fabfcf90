"""A few real rounds of one request at several draft lengths, for traces and time lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.measure.figures import TimedRound, TimeRow
from outrider.pair import Pair
from outrider.requests import Request, Result

__all__ = ["Recording", "record", "time_row"]


@dataclass(frozen=True)
class Recording:
    """One request, decoded with one draft length.

    Attributes:
        gamma: most tokens drafted per round; 0 is plain decoding.
        result: of the turn whose time is the median of all turns.
    """

    gamma: int
    result: Result

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token after the round that read the prompt; None if that was all."""
        first, last = self.result.trace[0], self.result.trace[-1]
        num_tokens = sum(len(item.emitted) for item in self.result.trace[1:])
        if not num_tokens:
            return None
        return 1e3 * (last.times.end_s - first.times.end_s) / num_tokens


def record(
    pair: Pair,
    request: Request,
    gammas: Sequence[int],
    *,
    repeats: int = 3,
    progress: Callable[[int], None] | None = None,
) -> list[Recording]:
    """Decode `request` with each of `gammas` by turns; a recording of each, in their order.

    Every run reads the prompt anew. One run before the first turn warms up and is not counted.

    Args:
        pair: target and drafter.
        request: what to decode; its own gamma is not used.
        gammas: draft lengths, at least one.
        repeats: how many turns, at least 1.
        progress: told the number of finished turns.
    """
    engine = pair.engine()

    def run(gamma: int) -> Result:
        pair.forget()
        [result] = engine.generate([replace(request, gamma=gamma)])
        return result

    run(gammas[0])
    turns: list[list[Result]] = []
    for turn in range(repeats):
        turns.append([run(gamma) for gamma in gammas])
        if progress is not None:
            progress(turn + 1)
    recordings = []
    for gamma, results in zip(gammas, zip(*turns, strict=True), strict=True):
        by_time = sorted(results, key=lambda result: result.stats.wall_s)
        recordings.append(Recording(gamma, by_time[len(by_time) // 2]))
    return recordings


def time_row(label: str, result: Result, num_tokens: int) -> TimeRow:
    """The first rounds after the one that read the prompt, until they make `num_tokens` tokens.

    Args:
        label: the row's name.
        result: whose rounds.
        num_tokens: where to end; the round that reaches it is the last one.
    """
    if not result.trace:
        return TimeRow(label, ())
    zero = result.trace[0].times.end_s
    rounds: list[TimedRound] = []
    made = 0
    for item in result.trace[1:]:
        if made >= num_tokens:
            break
        times = item.times
        made += len(item.emitted)
        rounds.append(
            TimedRound(
                start_ms=1e3 * (times.start_s - zero),
                draft_ms=1e3 * times.draft_s,
                target_ms=1e3 * times.target_s,
                end_ms=1e3 * (times.end_s - zero),
                num_steps=item.steps,
                num_emitted=len(item.emitted),
            )
        )
    return TimeRow(label, tuple(rounds))
