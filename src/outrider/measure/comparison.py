"""Speculative and plain decoding of the same request, run by turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.errors import UsageError
from outrider.pair import Pair
from outrider.requests import Request, Result

if TYPE_CHECKING:
    from outrider.models.reference import TransformersGenerate

__all__ = ["Comparison", "compare_with_plain"]


@dataclass(frozen=True)
class Comparison:
    """What speculation changed: the time, and nothing else.

    Attributes:
        speculative, plain: the results of the last turn.
        speedups: plain time / speculative time of every turn, per token.
        transformers_ms: transformers' `generate`, milliseconds per token of every turn, if asked
            for.
        must_agree: whether the two texts have to be the same (greedy, or the `coupled` rule);
            otherwise only their laws are.
    """

    speculative: Result
    plain: Result
    speedups: tuple[float, ...]
    must_agree: bool
    transformers_ms: tuple[float, ...] = ()

    @property
    def speedup(self) -> float:
        """The median of `speedups`."""
        return statistics.median(self.speedups)

    @property
    def agrees(self) -> bool:
        """Whether the two outputs are the same, token for token."""
        return self.speculative.token_ids == self.plain.token_ids


def compare_with_plain(
    pair: Pair,
    request: Request,
    *,
    repeats: int = 3,
    beside: TransformersGenerate | None = None,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Run `request` with and without speculation by turns, after one warm-up of a few tokens.

    Every run reads the prompt anew.

    Args:
        pair: target and drafter.
        request: what to run; its seed is fixed for all runs.
        repeats: how many turns.
        beside: transformers with the same model; timed in the same turns, for as many tokens.
        progress: told the number of finished turns.
    """
    if repeats < 1:
        raise UsageError(f"repeats must be 1 or more, not {repeats!r}")
    plain_request = replace(request, gamma=0)
    engine = pair.engine()

    def run(request: Request) -> Result:
        pair.forget()
        [result] = engine.generate([request])
        return result

    run(replace(request, max_new_tokens=min(4, request.max_new_tokens)))
    if beside is not None:
        beside.generate(request.prompt, request.policy, 4)
    speedups, transformers_ms = [], []
    for turn in range(repeats):
        plain = run(plain_request)
        speculative = run(request)
        plain_s = plain.stats.wall_s / plain.stats.num_tokens
        speedups.append(plain_s / (speculative.stats.wall_s / speculative.stats.num_tokens))
        if beside is not None:
            num_tokens = plain.stats.num_tokens
            _, seconds = beside.generate(request.prompt, request.policy, num_tokens)
            transformers_ms.append(1e3 * seconds / num_tokens)
        if progress is not None:
            progress(turn + 1)
    must_agree = request.policy.is_greedy or request.rule == "coupled"
    return Comparison(speculative, plain, tuple(speedups), must_agree, tuple(transformers_ms))
