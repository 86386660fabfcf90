"""Intervals cover the truth as often as they say, on text that comes in stretches.

The simulated text is a chain of two states, easy and hard, whose acceptance probabilities differ;
every truth below is computed from the chain, not simulated. Counts of covering intervals are
bounded so that an interval which covers at exactly its level fails with probability 1e-6 on either
side (seeds are fixed: what passes once, passes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from outrider.errors import UsageError
from outrider.measure.estimates import (
    Interval,
    RoundEstimates,
    beta_histogram,
    estimate_rounds,
    interval,
    survival_along_text,
)
from outrider.requests import Round

LEVEL = 0.95
FALSE_ALARM = 1e-6
SIMULATIONS = 300
RESAMPLES = 500
GAMMA = 4


@dataclass(frozen=True)
class Chain:
    """Two states of text: how likely a draft is accepted in each, and how long each lasts."""

    easy: float = 0.95
    hard: float = 0.35
    leave_easy: float = 0.08
    leave_hard: float = 0.08

    @property
    def betas(self) -> np.ndarray:
        return np.array([self.easy, self.hard])

    @property
    def steps(self) -> np.ndarray:
        return np.array(
            [[1 - self.leave_easy, self.leave_easy], [self.leave_hard, 1 - self.leave_hard]]
        )

    @property
    def share(self) -> np.ndarray:
        """How often each state is met."""
        return np.array([self.leave_hard, self.leave_easy]) / (self.leave_easy + self.leave_hard)

    def states(self, n: int, start: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """n states in a row."""
        uniforms = random.random(n)
        state = int(uniforms[0] >= start[0])
        found = [state]
        for u in uniforms[1:]:
            state ^= int(u < (self.leave_hard if state else self.leave_easy))
            found.append(state)
        return np.array(found)

    def text(self, n: int, random: np.random.Generator) -> np.ndarray:
        """Betas of n positions, with a little noise that is independent."""
        return self.betas[self.states(n, self.share, random)] + random.uniform(-0.05, 0.05, n)

    def survival(self, k: int) -> float:
        """E[beta_t ... beta_{t+k-1}]."""
        row = self.share
        for _ in range(k):
            row = (row * self.betas) @ self.steps
        return float(row.sum())

    def round_law(self) -> tuple[np.ndarray, np.ndarray]:
        """[2, GAMMA + 1]: law of accepted from each state a round starts in; the law of starts."""
        laws, moves = np.zeros((2, GAMMA + 1)), np.zeros((2, 2))
        for start in range(2):
            row = np.eye(2)[start]
            for accepted in range(GAMMA):
                refused = row * (1 - self.betas)
                laws[start, accepted] = refused.sum()
                moves[start] += refused @ self.steps
                row = (row * self.betas) @ self.steps
            laws[start, GAMMA] = row.sum()
            moves[start] += row @ self.steps
        starts = np.array([moves[1, 0], moves[0, 1]])
        return laws, starts / starts.sum()

    def rounds(self, count: int, random: np.random.Generator) -> list[Round]:
        """`count` rounds of GAMMA drafts along one text, the first from the law of starts."""
        _, starts = self.round_law()
        states = self.states(count * (GAMMA + 1), starts, random)
        kept = random.random(states.size) < self.betas[states]
        trace, at = [], 0
        for _ in range(count):
            run = kept[at : at + GAMMA]
            accepted = GAMMA if run.all() else int(run.argmin())
            trace.append(a_round(GAMMA, accepted))
            at += accepted + 1
        return trace


def a_round(drafted: int, accepted: int) -> Round:
    return Round(tuple(range(drafted)), accepted, tuple(range(accepted + 1)))


def naive(values: np.ndarray) -> Interval:
    """What is printed where positions are taken as independent."""
    half = 1.96 * values.std() / math.sqrt(values.size)
    mean = float(values.mean())
    return Interval(mean, mean - half, mean + half, values.size, values.size)


def coverage(intervals: Sequence[Interval], truth: float) -> int:
    return sum(item.covers(truth) for item in intervals)


def right_count(covered: int) -> bool:
    law = stats.binom(SIMULATIONS, LEVEL)
    return bool(law.cdf(covered) > FALSE_ALARM and law.sf(covered - 1) > FALSE_ALARM)


def test_a_wrong_level_would_be_seen() -> None:
    """At 87 % the bound is missed more often than not; at 80 % it is met once in 10,000."""
    least = int(stats.binom(SIMULATIONS, LEVEL).ppf(FALSE_ALARM))
    assert stats.binom(SIMULATIONS, 0.87).cdf(least) > 0.5
    assert stats.binom(SIMULATIONS, 0.80).sf(least) < 1 / 10_000
    assert not right_count(SIMULATIONS)


# Betas along text

TEXT = Chain()


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 250), (1, 1500), (3, 200)])
def test_few_long_prompts_are_covered_at_the_stated_rate(num_prompts: int, length: int) -> None:
    random = np.random.default_rng(1)
    found = [
        interval([TEXT.text(length, random) for _ in range(num_prompts)], resamples=RESAMPLES)
        for _ in range(SIMULATIONS)
    ]
    assert right_count(coverage(found, TEXT.survival(1)))


def test_a_naive_interval_misses_text_that_comes_in_stretches() -> None:
    random = np.random.default_rng(1)
    found = [naive(TEXT.text(1500, random)) for _ in range(SIMULATIONS)]
    assert coverage(found, TEXT.survival(1)) < 0.7 * SIMULATIONS


def test_few_prompts_that_differ_are_covered_for_more_text_of_the_same_prompts() -> None:
    random = np.random.default_rng(2)
    chains = [Chain(hard=0.2), Chain(hard=0.5), Chain(hard=0.8)]
    truth = sum(chain.survival(1) for chain in chains) / 3
    found = [
        interval([chain.text(300, random) for chain in chains], resamples=RESAMPLES)
        for _ in range(SIMULATIONS)
    ]
    assert right_count(coverage(found, truth))


def prompts_of_many_kinds(count: int, random: np.random.Generator) -> list[np.ndarray]:
    """Prompts of random difficulty (mean 0.75) and length, each in stretches around its own."""
    return [
        random.beta(6, 2) + Chain(0.1, -0.1).text(int(random.integers(40, 160)), random)
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_prompts", [8, 12, 30])
def test_prompts_that_differ_are_covered_at_the_stated_rate(num_prompts: int) -> None:
    random = np.random.default_rng(3)
    found = [
        interval(
            prompts_of_many_kinds(num_prompts, random), bounds=(-1.0, 2.0), resamples=RESAMPLES
        )
        for _ in range(SIMULATIONS)
    ]
    assert right_count(coverage(found, 0.75))


def test_a_naive_interval_misses_prompts_that_differ() -> None:
    random = np.random.default_rng(3)
    found = [naive(np.concatenate(prompts_of_many_kinds(12, random))) for _ in range(SIMULATIONS)]
    assert coverage(found, 0.75) < 0.5 * SIMULATIONS


@pytest.mark.parametrize("k", [2, 4])
def test_survival_along_text_is_covered_at_the_stated_rate(k: int) -> None:
    random = np.random.default_rng(4)
    found = [
        survival_along_text([TEXT.text(600, random)], k, resamples=RESAMPLES)[k - 1]
        for _ in range(SIMULATIONS)
    ]
    # The noise within +-0.05 is independent of everything and has mean 0.
    assert right_count(coverage(found, TEXT.survival(k)))


def test_survival_along_text_is_not_the_power_of_alpha() -> None:
    text = [TEXT.text(4000, np.random.default_rng(5))]
    fourth = survival_along_text(text, 4)[3]
    assert fourth.covers(TEXT.survival(4))
    assert fourth.low > TEXT.survival(1) ** 4


# Rounds

KINDS = (Chain(easy=0.98, hard=0.6), Chain(easy=0.8, hard=0.2))


class Simulated(NamedTuple):
    estimates: list[RoundEstimates]
    traces: list[list[list[Round]]]


@pytest.fixture(scope="module")
def simulated() -> Simulated:
    """Twelve requests, each of one of two kinds by chance, 30 rounds each; many times."""
    random = np.random.default_rng(6)
    traces = [
        [KINDS[int(random.integers(2))].rounds(30, random) for _ in range(12)]
        for _ in range(SIMULATIONS)
    ]
    return Simulated([estimate_rounds(item, resamples=RESAMPLES) for item in traces], traces)


def mean_over_rounds(value: Sequence[float]) -> float:
    """E[value(accepted)] in a round of either kind with probability 1/2."""
    total = 0.0
    for kind in KINDS:
        laws, starts = kind.round_law()
        total += float(starts @ laws @ np.array(value)) / len(KINDS)
    return total


ACCEPTED = [float(a) for a in range(GAMMA + 1)]
EXAMINED = [float(min(a + 1, GAMMA)) for a in range(GAMMA + 1)]
TRUE_ALPHA_HAT = mean_over_rounds(ACCEPTED) / mean_over_rounds(EXAMINED)


def test_alpha_hat_of_rounds_is_covered_at_the_stated_rate(simulated: Simulated) -> None:
    found = [item.alpha_hat for item in simulated.estimates if item.alpha_hat is not None]
    assert right_count(coverage(found, TRUE_ALPHA_HAT))


def test_a_naive_interval_misses_alpha_hat(simulated: Simulated) -> None:
    found = []
    for traces in simulated.traces:
        rounds = [item for trace in traces for item in trace]
        kept = sum(item.accepted for item in rounds)
        examined = sum(min(item.accepted + 1, GAMMA) for item in rounds)
        found.append(naive(np.repeat([1.0, 0.0], [kept, examined - kept])))
    assert coverage(found, TRUE_ALPHA_HAT) < 0.7 * SIMULATIONS


def test_tokens_per_call_is_covered_at_the_stated_rate(simulated: Simulated) -> None:
    found = [item.tokens_per_call for item in simulated.estimates]
    assert right_count(coverage(found, 1.0 + mean_over_rounds(ACCEPTED)))


@pytest.mark.parametrize("i", [1, 3, 4])
def test_survival_in_rounds_is_covered_at_the_stated_rate(simulated: Simulated, i: int) -> None:
    truth = mean_over_rounds([float(a >= i) for a in range(GAMMA + 1)])
    assert right_count(coverage([item.survival[i - 1] for item in simulated.estimates], truth))


@pytest.mark.parametrize("i", [2, 4])
def test_conditional_acceptance_is_covered_at_the_stated_rate(simulated: Simulated, i: int) -> None:
    passed = mean_over_rounds([float(a >= i) for a in range(GAMMA + 1)])
    reached = mean_over_rounds([float(a >= i - 1) for a in range(GAMMA + 1)])
    found = [item.conditional[i - 1] for item in simulated.estimates]
    assert right_count(coverage(found, passed / reached))


def test_alpha_hat_lies_below_alpha_where_text_comes_in_stretches() -> None:
    """The module says so: tokens after fully accepted drafts are easy and never examined."""
    laws, starts = TEXT.round_law()
    alpha_hat = float(starts @ laws @ np.array(ACCEPTED)) / float(
        starts @ laws @ np.array(EXAMINED)
    )
    assert alpha_hat < TEXT.survival(1) - 0.02


# What is counted


def test_the_worked_example_of_estimate_rounds_holds() -> None:
    found = estimate_rounds([[a_round(3, 3), a_round(3, 1), a_round(1, 0)]])
    assert found.num_rounds == 3
    assert found.alpha_hat is not None
    assert found.alpha_hat.value == 4 / 6
    assert found.accepted_fraction is not None
    assert found.accepted_fraction.value == 4 / 7
    assert found.tokens_per_call.value == 7 / 3
    assert [item.value for item in found.survival] == [2 / 3, 1 / 2, 1 / 2]
    assert [item.num_values for item in found.survival] == [3, 2, 2]
    assert [item.value for item in found.conditional] == [2 / 3, 1 / 2, 1.0]
    assert found.accepted_counts == (1, 1, 0, 1)


def test_the_worked_example_of_survival_along_text_holds() -> None:
    found = survival_along_text([[1.0, 0.5, 0.5]], 5)
    assert [item.value for item in found] == [2 / 3, (0.5 + 0.25) / 2, 0.25]


def test_prompts_shorter_than_the_draft_leave_the_longer_survivals() -> None:
    found = survival_along_text([[0.5], [0.5, 0.5, 0.5]], 4)
    assert [item.num_values for item in found] == [4, 2, 1]


def test_survival_along_text_never_rises() -> None:
    """The last positions of a text fit no long draft; without them the mean could rise."""
    found = survival_along_text([[1.0] * 30 + [0.0]], 3)
    assert [item.value for item in found] == sorted((item.value for item in found), reverse=True)
    rising = survival_along_text([[1.0, 1.0], [0.0]], 2)
    assert rising[1].value == rising[0].value == 2 / 3


def test_rounds_without_drafts_count_in_tokens_per_call_alone() -> None:
    found = estimate_rounds([[a_round(0, 0), a_round(2, 2)]])
    assert found.alpha_hat is not None
    assert found.alpha_hat.value == 1.0
    assert found.tokens_per_call.value == 2.0


def test_plain_decoding_has_one_token_per_call_and_no_alpha_hat() -> None:
    found = estimate_rounds([[a_round(0, 0)] * 5])
    assert found.alpha_hat is None
    assert found.survival == ()
    assert (found.tokens_per_call.low, found.tokens_per_call.high) == (1.0, 1.0)


def test_estimates_are_ready_for_json() -> None:
    facts = estimate_rounds([[a_round(2, 1)] * 40]).as_dict()
    assert facts["accepted_counts"] == [0, 40]
    assert facts["alpha_hat"] == {"value": 0.5, "low": 0.5, "high": 0.5, "num_values": 40}


# The interval itself


def test_the_ratio_is_of_sums_and_not_a_mean_of_ratios() -> None:
    assert interval([[1.0], [9.0]], per=[[2.0], [10.0]]).value == 10 / 12


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    text = [TEXT.text(300, np.random.default_rng(7))]
    assert interval(text, seed=1) == interval(text, seed=1) == interval(text, seed=1)
    assert interval(text, seed=1) != interval(text, seed=2)


def test_a_higher_level_gives_a_wider_interval() -> None:
    text = [TEXT.text(300, np.random.default_rng(7))]
    wide, narrow = interval(text, level=0.99), interval(text, level=0.5)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


@pytest.mark.parametrize("num_prompts", [1, 3, 9])
def test_an_interval_stays_within_its_bounds_around_its_value(num_prompts: int) -> None:
    random = np.random.default_rng(8)
    for _ in range(30):
        found = interval((random.random((num_prompts, 12)) < 0.97).astype(float), resamples=200)
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0


def test_values_that_are_all_alike_have_no_spread() -> None:
    found = interval([[0.3] * 50] * 2)
    assert (found.low, found.high) == pytest.approx((0.3, 0.3))


def test_a_share_without_a_single_failure_is_not_certain() -> None:
    """Ten prompts without a failure: a failing share of 1 - 0.025 ** 0.1 would show none."""
    found = interval([[1.0] * 5] * 10)
    assert found.high == 1.0
    assert found.low == pytest.approx(0.025**0.1)
    assert interval([[0.0] * 5] * 10).high == pytest.approx(1 - 0.025**0.1)


def test_one_unusual_prompt_leaves_a_finite_interval() -> None:
    """A third of the resamples miss it and have no spread of their own."""
    values = [[1.0] * 20] * 9 + [[0.8] * 20]
    found = interval(values, bounds=(-100.0, 100.0))
    assert 0.8 < found.low < found.value < found.high < 1.2


def test_a_single_value_says_nothing() -> None:
    found = interval([[0.4]])
    assert (found.value, found.low, found.high) == (0.4, 0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        ([], {}, "at least one value"),
        ([[]], {}, "at least one value"),
        ([[1.0]], {"per": [[0.0]]}, "at least one value"),
        ([[float("nan")]], {}, "finite"),
        ([[1.0, 0.5]], {"per": [[1.0]]}, "one entry each"),
        ([[1.0]], {"level": 1.0}, "level must be between 0 and 1"),
        ([[1.0]], {"resamples": 10}, "resamples must be 100 or more"),
    ],
)
def test_what_cannot_be_averaged_is_refused(
    values: list[list[float]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        interval(values, **settings)  # type: ignore[arg-type]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one round"):
        estimate_rounds([[]])


def test_a_draft_length_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="max_gamma must be 1 or more"):
        survival_along_text([[0.5]], 0)


# The histogram


def test_betas_fall_into_tenths_with_the_ends_included() -> None:
    shares = beta_histogram([[0.0, 0.05, 0.1, 0.3], [0.99, 1.0, 1.0, 1.0]])
    assert shares == [2 / 8, 1 / 8, 0.0, 1 / 8, 0.0, 0.0, 0.0, 0.0, 0.0, 4 / 8]


def test_a_histogram_refuses_what_is_no_probability() -> None:
    with pytest.raises(UsageError, match=r"beta must be in \[0, 1\]: got 0.5 to 1.5"):
        beta_histogram([[0.5, 1.5]])
    with pytest.raises(UsageError, match="at least one beta"):
        beta_histogram([[], []])
