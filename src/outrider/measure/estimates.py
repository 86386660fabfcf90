"""What rounds and betas say about acceptance, with intervals that know how text is correlated.

Letters as in `outrider.theory`. Acceptance comes in stretches: easy text is easy for many tokens,
and one prompt is easier than another. An interval that takes positions as independent is then
several times too narrow. `interval` resamples what is close to independent: whole prompts, or long
blocks of positions.

What rounds can and cannot say:

* Under the `rejection` rule a draft token is kept with probability beta, so alpha_hat = accepted /
  examined estimates alpha, but for one thing: the token after a fully accepted draft is never
  examined, and it follows an easy stretch. On correlated text alpha_hat is a little below alpha.
* `block` keeps more than that, and `coupled` less: alpha_hat then describes the rule, not alpha.
* Where a drafter chose the lengths while drafting (adaptive gamma), long drafts are made where
  drafting goes well. Survival at i counts the rounds that drafted at least i tokens, and so speaks
  of positions at which such a drafter goes on that far; it is no longer the survival that a fixed
  gamma would meet, which it exceeds. Conditional acceptance and tokens per call still describe what
  happened. `survival_along_text` has no such bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.requests import Round

__all__ = [
    "Interval",
    "RoundEstimates",
    "beta_histogram",
    "estimate_rounds",
    "interval",
    "survival_along_text",
]

MIN_PROMPTS = 8
"""From this many prompts on, prompts are resampled; below, blocks within them."""

Floats = NDArray[np.float64]
Values = Sequence[float] | Floats


@dataclass(frozen=True)
class Interval:
    """An estimate and where the truth is, at the stated level.

    Attributes:
        value: the estimate, a ratio of sums over all prompts.
        low, high: the interval; equal to the bounds where the data cannot say more.
        num_values: positions or rounds that it rests on.
        num_units: what was resampled: prompts, or blocks of positions.
    """

    value: float
    low: float
    high: float
    num_values: int
    num_units: int

    def covers(self, truth: float) -> bool:
        """Whether `truth` lies in it."""
        return self.low <= truth <= self.high

    def as_dict(self) -> dict[str, float | int]:
        """Ready for JSON."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "num_values": self.num_values,
        }


def interval(
    values_by_prompt: Iterable[Values],
    *,
    per: Iterable[Values] | None = None,
    level: float = 0.95,
    bounds: tuple[float, float] = (0.0, 1.0),
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean of all values, or sum(values) / sum(per), with a studentised bootstrap interval.

    From 8 prompts on, prompts are resampled, and the interval speaks of other prompts like these.
    With fewer, circular blocks of 2 * sqrt(n) consecutive values are resampled within each prompt
    of n values, and it speaks of more text for these prompts. Blocks must be longer than the
    memory of the text; 2 * sqrt(n) leaves sqrt(n) / 2 of them. Each resample's distance from the
    estimate is divided by the resample's own standard error (bootstrap-t), which makes up for the
    small number of prompts or blocks; plain percentiles are too narrow below some 40 of them. That
    error is taken as no less than a quarter of the estimate's, because resamples that miss the only
    unusual prompt have none.

    A share of 0 or 1 has no spread to resample. Its interval then reaches to the share that would
    give such data with probability (1 - level) / 2 if prompts (or blocks) were single trials.

    Args:
        values_by_prompt: for each prompt its values in the order of the text; empty ones are left
            out.
        per: denominators of the same shape, at least 0: accepted with per=examined gives alpha_hat.
        level: probability of covering the truth, between 0 and 1.
        bounds: least and greatest possible value.
        resamples: how many, at least 100.
        seed: of the resampling; the same seed gives the same interval.

    Raises:
        UsageError: there is nothing to average, or an argument is out of range.
    """
    if not 0.0 < level < 1.0:
        raise UsageError(f"level must be between 0 and 1, not {level!r}")
    if resamples < 100:
        raise UsageError(f"resamples must be 100 or more, not {resamples!r}")
    prompts = _rows(values_by_prompt, per)
    top, bottom = (sum(math.fsum(rows[k]) for rows in prompts) for k in (0, 1))
    if bottom <= 0.0:
        raise UsageError("an estimate needs at least one value: got none")
    value = top / bottom
    generator = np.random.default_rng(seed)
    if len(prompts) >= MIN_PROMPTS:
        error, t, num_units = _over_prompts(prompts, value, generator, resamples)
    else:
        error, t, num_units = _over_blocks(prompts, value, generator, resamples)
    num_values = sum(int(np.count_nonzero(rows[1])) for rows in prompts)
    least, most = bounds
    tail = (1.0 - level) / 2.0
    if num_units < 2:
        low, high = least, most
    elif error > 0.0:
        below, above = np.quantile(t, [tail, 1.0 - tail])
        low, high = value - float(above) * error, value - float(below) * error
    elif bounds == (0.0, 1.0) and value in bounds:
        unseen = 1.0 - tail ** (1.0 / num_units)
        low, high = (0.0, unseen) if value == 0.0 else (1.0 - unseen, 1.0)
    else:
        low = high = value
    # The order of sums may leave the estimate a rounding error outside.
    low, high = min(value, max(low, least)), max(value, min(high, most))
    return Interval(value, low, high, num_values, num_units)


def _rows(values_by_prompt: Iterable[Values], per: Iterable[Values] | None) -> list[Floats]:
    """[2, n] for each prompt: values and denominators."""
    values = [np.asarray(row, dtype=np.float64) for row in values_by_prompt]
    if per is None:
        weights = [np.ones_like(row) for row in values]
    else:
        weights = [np.asarray(row, dtype=np.float64) for row in per]
    if [row.shape for row in values] != [row.shape for row in weights]:
        raise UsageError("values and denominators must have one entry each per position")
    rows = [np.stack(pair) for pair in zip(values, weights, strict=True) if pair[0].size]
    if not all(np.isfinite(row).all() for row in rows):
        raise UsageError("an estimate needs finite values: got NaN or infinity")
    return [row for row in rows if row[1].sum() > 0.0]


def _over_prompts(
    prompts: Sequence[Floats], value: float, generator: np.random.Generator, resamples: int
) -> tuple[float, Floats, int]:
    """Standard error, studentised distances of the resamples, number of prompts."""
    sums = np.array([rows.sum(axis=1) for rows in prompts])  # [m, 2]
    m = len(sums)

    def error(drawn: Floats, ratio: Floats) -> Floats:
        rest = drawn[..., 0] - ratio[..., None] * drawn[..., 1]
        scale: Floats = np.sqrt((rest**2).sum(axis=-1) * m / (m - 1)) / drawn[..., 1].sum(axis=-1)
        return scale

    own = float(error(sums, np.array(value)))
    drawn = sums[generator.integers(0, m, (resamples, m))]  # [resamples, m, 2]
    ratios = drawn[..., 0].sum(axis=1) / drawn[..., 1].sum(axis=1)
    return own, _studentised(ratios - value, error(drawn, ratios), own), m


def _over_blocks(
    prompts: Sequence[Floats], value: float, generator: np.random.Generator, resamples: int
) -> tuple[float, Floats, int]:
    """The same for blocks within prompts; what prompts differ by is not resampled."""
    total = sum(float(rows[1].sum()) for rows in prompts)
    variance, num_units = 0.0, 0
    top, bottom, spread = (np.zeros(resamples) for _ in range(3))
    for rows in prompts:
        n = rows.shape[1]
        num_blocks = max(min(n, 2), round(math.sqrt(n) / 2))
        length = n // num_blocks
        if num_blocks < 2:
            top, bottom = top + rows[0, 0], bottom + rows[1, 0]
            continue
        # Sums of every block of the prompt bent to a ring: all positions are in equally many.
        ring = np.concatenate([np.zeros((2, 1)), rows, rows[:, : length - 1]], axis=1).cumsum(
            axis=1
        )
        blocks = ring[:, length:] - ring[:, :-length]  # [2, n]
        share = n / (num_blocks * length)
        drawn = blocks[:, generator.integers(0, n, (resamples, num_blocks))]
        top, bottom = top + share * drawn[0].sum(axis=1), bottom + share * drawn[1].sum(axis=1)
        rest = blocks[0] - value * blocks[1]
        # One block more or less of freedom: the blocks' own mean is subtracted.
        variance += share * num_blocks**2 / (num_blocks - 1) * float(rest.var())
        spread += share * num_blocks * (drawn[0] - value * drawn[1]).var(axis=1, ddof=1)
        num_units += num_blocks
    own = math.sqrt(variance) / total
    usable = bottom > 0.0
    if not usable.any():
        return 0.0, np.zeros(1), 0
    top, bottom, spread = top[usable], bottom[usable], spread[usable]
    t = _studentised(top / bottom - value, np.sqrt(spread) / bottom, own)
    return own, t, num_units


def _studentised(distances: Floats, errors: Floats, own: float) -> Floats:
    # Equal values leave rounding errors that are no spread.
    if own <= 1e-12:
        return np.zeros(1)
    scaled: Floats = distances / np.maximum(errors, own / 4.0)
    return scaled


# From rounds


@dataclass(frozen=True)
class RoundEstimates:
    """What the rounds of some requests show.

    Attributes:
        num_rounds: how many.
        alpha_hat: accepted / examined; None if nothing was drafted.
        accepted_fraction: accepted / drafted; None likewise.
        tokens_per_call: emitted / target passes, the tokens counted before outputs are cut.
        survival: for i = 1, 2, ...: the first i drafts accepted, among rounds that drafted i.
        conditional: for i = 1, 2, ...: draft i accepted, among rounds that examined it.
        accepted_counts: for a = 0, 1, ...: rounds that accepted a drafts.
    """

    num_rounds: int
    alpha_hat: Interval | None
    accepted_fraction: Interval | None
    tokens_per_call: Interval
    survival: tuple[Interval, ...]
    conditional: tuple[Interval, ...]
    accepted_counts: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "num_rounds": self.num_rounds,
            "alpha_hat": self.alpha_hat.as_dict() if self.alpha_hat else None,
            "accepted_fraction": (
                self.accepted_fraction.as_dict() if self.accepted_fraction else None
            ),
            "tokens_per_call": self.tokens_per_call.as_dict(),
            "survival": [item.as_dict() for item in self.survival],
            "conditional": [item.as_dict() for item in self.conditional],
            "accepted_counts": list(self.accepted_counts),
        }


def estimate_rounds(
    traces: Iterable[Sequence[Round]],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> RoundEstimates:
    """Acceptance in the rounds of some requests (one trace a request), with intervals.

    Drafted [3, 3, 1] and accepted [3, 1, 0] give: examined 3 + 2 + 1, so alpha_hat 4/6; accepted
    fraction 4/7; tokens per call 7/3; survival 2/3, 1/2, 1/2 (of 3, 2 and 2 rounds); conditional
    2/3, 1/2, 1/1; one round each accepted 0, 1 and 3.

    Rounds that drafted nothing count in tokens per call alone. See the module's docstring for what
    lengths chosen while drafting, and rules other than `rejection`, do to these numbers.

    Args:
        traces: `Result.trace` of each request.
        level, resamples, seed: as for `interval`.

    Raises:
        UsageError: there is no round.
    """
    rounds = [
        np.array([(len(item.drafted), item.accepted) for item in trace], float).reshape(-1, 2).T
        for trace in traces
    ]
    drafted, accepted = [trace[0] for trace in rounds], [trace[1] for trace in rounds]
    longest = int(max((row.max() for row in drafted if row.size), default=0))
    most = int(max((row.max() for row in accepted if row.size), default=0))

    def estimate(
        top: list[Floats], bottom: list[Floats], bounds: tuple[float, float] = (0.0, 1.0)
    ) -> Interval:
        return interval(top, per=bottom, level=level, bounds=bounds, resamples=resamples, seed=seed)

    def at_least(rows: list[Floats], i: int) -> list[Floats]:
        return [(row >= i).astype(float) for row in rows]

    if not sum(row.size for row in accepted):
        raise UsageError("an estimate needs at least one round: got none")
    tokens_per_call = estimate(
        [row + 1.0 for row in accepted],
        [np.ones_like(row) for row in accepted],
        (1.0, longest + 1.0),
    )
    alpha_hat = accepted_fraction = None
    if longest:
        examined = [np.minimum(a + 1, d) for d, a in zip(drafted, accepted, strict=True)]
        alpha_hat = estimate(accepted, examined)
        accepted_fraction = estimate(accepted, drafted)
    positions = range(1, longest + 1)
    conditional = [
        estimate(
            at_least(accepted, i),
            [(d >= i) * (a >= i - 1).astype(float) for d, a in zip(drafted, accepted, strict=True)],
        )
        for i in positions
        if any(((d >= i) & (a >= i - 1)).any() for d, a in zip(drafted, accepted, strict=True))
    ]
    counts = np.bincount(np.concatenate(accepted).astype(int), minlength=most + 1)
    return RoundEstimates(
        num_rounds=sum(row.size for row in accepted),
        alpha_hat=alpha_hat,
        accepted_fraction=accepted_fraction,
        tokens_per_call=tokens_per_call,
        survival=tuple(estimate(at_least(accepted, i), at_least(drafted, i)) for i in positions),
        conditional=tuple(conditional),
        accepted_counts=tuple(int(count) for count in counts),
    )


# From betas along target-generated text


def survival_along_text(
    betas_by_prompt: Iterable[Values],
    max_gamma: int,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Interval, ...]:
    """Expected survival of drafts made at every position: mean over t of beta_t ... beta_{t+k-1}.

    For k = 1..max_gamma, as far as the longest prompt has that many positions; for k = 1 it is
    alpha. betas [1, 0.5, 0.5] give 2/3, (0.5 + 0.25) / 2, 0.25.

    Nothing is taken as independent: the products follow the text. One approximation stays. The
    betas are those of text that the target wrote. A draft that has been accepted so far follows
    min(p, q) / beta instead of p, that is, tokens on which target and drafter agree a little more
    than on the target's own.

    Args:
        betas_by_prompt: beta of consecutive positions, in [0, 1], for each prompt.
        max_gamma: longest draft, at least 1.
        level, resamples, seed: as for `interval`.

    Raises:
        UsageError: there is no beta, or max_gamma is below 1.
    """
    if max_gamma < 1:
        raise UsageError(f"max_gamma must be 1 or more, not {max_gamma!r}")
    betas = [np.asarray(row, dtype=np.float64) for row in betas_by_prompt]
    products = betas
    found: list[Interval] = []
    for k in range(1, max_gamma + 1):
        if k > 1:
            products = [
                before[:-1] * row[k - 1 :] for before, row in zip(products, betas, strict=True)
            ]
        if found and not any(row.size for row in products):
            break
        item = interval(products, level=level, resamples=resamples, seed=seed)
        if found and item.value > found[-1].value:
            # Longer drafts fit fewer positions; those left may be the easier ones.
            least = found[-1]
            item = Interval(
                least.value,
                min(item.low, least.value),
                least.high,
                item.num_values,
                item.num_units,
            )
        found.append(item)
    return tuple(found)


def beta_histogram(betas_by_prompt: Iterable[Values]) -> list[float]:
    """The share of positions with beta in each tenth: [0, 0.1), [0.1, 0.2), ..., [0.9, 1].

    Args:
        betas_by_prompt: beta of every position, in [0, 1].

    Raises:
        UsageError: there is no beta, or one outside [0, 1].
    """
    betas = np.concatenate([np.zeros(0), *(np.asarray(row, float) for row in betas_by_prompt)])
    if not betas.size:
        raise UsageError("a histogram needs at least one beta: got none")
    # betas of rows computed in float32 may pass 1 by a rounding error
    if betas.min() < 0.0 or betas.max() > 1.0 + 1e-4:
        raise UsageError(
            f"beta must be in [0, 1]: got {float(betas.min())} to {float(betas.max())}"
        )
    # The small step keeps 0.3 / 0.1 = 2.9999... in its own tenth.
    tenths = np.minimum((betas * 10.0 + 1e-9).astype(int), 9)
    counts = np.bincount(tenths, minlength=10)
    return [float(share) for share in counts / betas.size]
