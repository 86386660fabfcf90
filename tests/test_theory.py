"""The paper's formulas against its printed numbers, exact arithmetic and one another."""

from __future__ import annotations

import ast
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider import theory
from outrider.errors import UsageError

Laws = tuple[list[float], list[float]]

alphas = st.floats(0.0, 1.0) | st.integers(0, 1000).map(lambda k: 1.0 - k * 2.0**-53)
gammas = st.integers(0, 40)
ratios = st.floats(0.0, 2.0)
unhurried = settings(deadline=None)  # a loaded machine is no failure


@st.composite
def pairs_of_laws(draw: st.DrawFn) -> Laws:
    """Two laws over one to six tokens, often with exact zeros."""
    size = draw(st.integers(1, 6))
    weights = st.lists(st.integers(0, 3) | st.integers(0, 1000), min_size=size, max_size=size)
    p, q = draw(weights.filter(any)), draw(weights.filter(any))
    return [w / sum(p) for w in p], [w / sum(q) for w in q]


def printed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def close(a: float, b: float, tolerance: float = 1e-12) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def exact_tokens(alpha: float, gamma: int) -> Fraction:
    """Equation (1) as the sum it stands for, in fractions."""
    return sum((Fraction(alpha) ** i for i in range(gamma + 1)), Fraction(0))


def exact_improvement(alpha: Fraction, gamma: int, c: Fraction) -> Fraction:
    return (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))


# The paper's printed numbers


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, "1.53", "1.96"),
        (0.7, 3, "1.58", "2.53"),
        (0.8, 2, "1.23", "2.44"),
        (0.8, 5, "1.63", "3.69"),
        (0.9, 2, "1.11", "2.71"),
        (0.9, 10, "1.60", "6.86"),
    ],
)
def test_table_1_is_reproduced_with_a_free_drafter(
    alpha: float, gamma: int, operations: str, speed: str
) -> None:
    assert printed(theory.operations_factor(alpha, gamma, 0.0), 2) == operations
    assert printed(theory.walltime_improvement(alpha, gamma, 0.0), 2) == speed


@pytest.mark.parametrize(
    ("task", "gamma", "alpha", "c", "recomputed"),
    [
        ("EnDe small t=0", 7, 0.75, 0.02, "3.157"),
        ("EnDe base t=0", 7, 0.80, 0.04, "3.251"),
        ("EnDe large t=0", 7, 0.82, 0.11, "2.497"),
        ("EnDe small t=1", 7, 0.62, 0.02, "2.258"),
        ("EnDe base t=1", 5, 0.68, 0.04, "2.347"),
        ("EnDe large t=1", 3, 0.71, 0.11, "1.934"),
        ("CNN/DM small t=0", 5, 0.65, 0.02, "2.402"),
        ("CNN/DM base t=0", 5, 0.73, 0.04, "2.619"),
        ("CNN/DM large t=0", 3, 0.74, 0.11, "2.025"),
        ("CNN/DM small t=1", 5, 0.53, 0.02, "1.891"),
        ("CNN/DM base t=1", 3, 0.55, 0.04, "1.803"),
        ("CNN/DM large t=1", 3, 0.56, 0.11, "1.541"),
    ],
)
def test_table_4_follows_from_theorem_3_8(
    task: str, gamma: int, alpha: float, c: float, recomputed: str
) -> None:
    assert printed(theory.walltime_improvement(alpha, gamma, c), 3) == recomputed, task


@pytest.mark.parametrize(
    ("gamma", "at_half", "at_nine_tenths"),
    [(1, "1.50", "1.90"), (3, "1.88", "3.44"), (5, "1.97", "4.69"), (7, "1.99", "5.70")],
)
def test_figure_2_curves_end_where_they_are_drawn(
    gamma: int, at_half: str, at_nine_tenths: str
) -> None:
    assert printed(theory.expected_tokens_per_round(0.5, gamma), 2) == at_half
    assert printed(theory.expected_tokens_per_round(0.9, gamma), 2) == at_nine_tenths


def test_figure_2_curve_without_limit_is_the_oracle() -> None:
    assert printed(theory.oracle_tokens_per_round(0.5), 2) == "2.00"
    assert printed(theory.oracle_tokens_per_round(0.9), 2) == "10.00"


@pytest.mark.parametrize(
    ("c", "optima"),
    [
        (0.01, [5, 9, 14, 24]),
        (0.02, [4, 8, 11, 19]),
        (0.05, [3, 6, 8, 13]),
        (0.10, [2, 4, 6, 10]),
    ],
)
def test_figure_3_optimal_gammas_are_reproduced(c: float, optima: list[int]) -> None:
    assert [theory.best_gamma(alpha, c) for alpha in (0.5, 0.7, 0.8, 0.9)] == optima


@pytest.mark.parametrize(
    ("gamma", "at_half", "at_nine_tenths"),
    [
        (1, "1.33", "1.05"),
        (3, "2.13", "1.16"),
        (5, "3.05", "1.28"),
        (7, "4.02", "1.40"),
        (10, "5.50", "1.60"),
    ],
)
def test_figure_4_operation_curves_end_where_they_are_drawn(
    gamma: int, at_half: str, at_nine_tenths: str
) -> None:
    assert printed(theory.operations_factor(0.5, gamma, 0.0), 2) == at_half
    assert printed(theory.operations_factor(0.9, gamma, 0.0), 2) == at_nine_tenths


def test_figure_4_speed_curve_for_gamma_10_ends_where_it_is_drawn() -> None:
    assert printed(theory.walltime_improvement(0.5, 10, 0.0), 1) == "2.0"
    assert printed(theory.walltime_improvement(0.9, 10, 0.0), 2) == "6.86"


def test_a_bigram_drafter_gives_the_speed_of_section_3_6() -> None:
    assert printed(theory.walltime_improvement(0.2, 3, 0.0), 3) == "1.248"


@pytest.mark.parametrize(("alpha", "speed"), [(0.75, "3.30"), (0.80, "3.87"), (0.87, "4.91")])
def test_greedy_lenience_speeds_of_appendix_a_5_follow_from_theorem_3_8(
    alpha: float, speed: str
) -> None:
    assert printed(theory.walltime_improvement(alpha, 8, 0.015), 2) == speed


@pytest.mark.parametrize(
    ("alpha", "speed"), [(0.62, "2.33"), (0.71, "2.94"), (0.76, "3.45"), (0.84, "4.79")]
)
def test_sampled_lenience_speeds_take_the_best_gamma(alpha: float, speed: str) -> None:
    gamma = theory.best_gamma(alpha, 0.015)
    assert printed(theory.walltime_improvement(alpha, gamma, 0.015), 2) == speed


@pytest.mark.parametrize(
    ("alpha", "c", "gain"), [(0.95, 0.05, "1.55"), (0.9, 0.1, "1.53"), (0.999, 0.00139, "1.58")]
)
def test_an_oracle_gains_up_to_about_60_percent_over_the_best_gamma(
    alpha: float, c: float, gain: str
) -> None:
    drafted = alpha / (1.0 - alpha)
    oracle = theory.oracle_tokens_per_round(alpha) / (1.0 + c * drafted)
    best = theory.walltime_improvement(alpha, theory.best_gamma(alpha, c), c)
    assert printed(oracle / best, 2) == gain


def test_the_example_of_plain_rejection_sampling_keeps_four_tenths_against_seven() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    assert close(theory.plain_rejection_keep_rate(p, q), 0.4)
    assert close(theory.beta(p, q), 0.7)


def test_accepted_over_drafted_stays_below_alpha_as_printed() -> None:
    assert printed(theory.expected_tokens_per_round(0.8, 5), 2) == "3.69"
    assert printed(theory.expected_accepted_fraction(0.8, 5), 3) == "0.538"


# Two laws at one position


@unhurried
@given(pairs_of_laws())
def test_d_lk_is_one_minus_the_shared_mass(laws: Laws) -> None:
    p, q = laws
    assert close(theory.d_lk(p, q), 1.0 - sum(map(min, p, q)))


@unhurried
@given(pairs_of_laws())
def test_d_lk_is_the_distance_of_both_laws_from_their_middle(laws: Laws) -> None:
    p, q = laws
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    for law in laws:
        assert close(theory.d_lk(p, q), sum(abs(a - m) for a, m in zip(law, middle, strict=True)))


@unhurried
@given(pairs_of_laws())
def test_d_lk_is_symmetric_and_within_zero_and_one(laws: Laws) -> None:
    p, q = laws
    assert theory.d_lk(p, q) == theory.d_lk(q, p)
    assert 0.0 <= theory.d_lk(p, q) <= 1.0


@unhurried
@given(pairs_of_laws())
def test_d_lk_is_zero_only_for_equal_laws(laws: Laws) -> None:
    p, q = laws
    assert theory.d_lk(p, p) == 0.0
    assert (theory.d_lk(p, q) == 0.0) == (p == q)


def test_d_lk_is_one_for_laws_that_share_no_token() -> None:
    assert theory.d_lk([0.25, 0.75, 0.0], [0.0, 0.0, 1.0]) == 1.0


@unhurried
@given(pairs_of_laws())
def test_beta_is_one_minus_d_lk(laws: Laws) -> None:
    assert close(theory.beta(*laws), 1.0 - theory.d_lk(*laws))


def test_a_tiny_beta_keeps_its_digits() -> None:
    assert theory.beta([1.0, 1e-30], [0.0, 1.0]) == 1e-30


def test_alpha_is_the_mean_of_beta_over_positions() -> None:
    pairs = [([0.5, 0.5], [0.5, 0.5]), ([1.0, 0.0], [0.25, 0.75]), ([1.0, 0.0], [0.0, 1.0])]
    assert close(theory.alpha_from_pairs(iter(pairs)), 1.25 / 3)


@unhurried
@given(pairs_of_laws())
def test_plain_rejection_is_the_least_ratio_and_never_keeps_more_than_beta(laws: Laws) -> None:
    p, q = laws
    keep = theory.plain_rejection_keep_rate(p, q)
    ratios_on_support = [b / a for a, b in zip(p, q, strict=True) if a > 0]
    assert close(keep, min(ratios_on_support))
    assert keep <= theory.beta(p, q) + 1e-12


def test_rows_rounded_to_a_little_over_one_give_probabilities() -> None:
    even, over = [0.5, 0.5], [0.50004, 0.50004]
    assert theory.beta(over, over) == 1.0
    assert theory.plain_rejection_keep_rate(even, over) == 1.0
    assert theory.gumbel_match_lower_bound(over, over) == 1.0
    assert theory.d_lk([1.00005, 0.0], [0.0, 1.00005]) == 1.0


# Shared Gumbel noise


@unhurried
@given(pairs_of_laws())
def test_gumbel_match_lies_between_its_bound_and_beta(laws: Laws) -> None:
    match = theory.gumbel_match_probability(*laws)
    tv = theory.d_lk(*laws)
    assert match <= 1.0
    assert close(theory.gumbel_match_lower_bound(*laws), (1.0 - tv) / (1.0 + tv))
    assert theory.gumbel_match_lower_bound(*laws) - 1e-12 <= match <= 1.0 - tv + 1e-12


@unhurried
@given(pairs_of_laws())
def test_gumbel_match_is_the_double_sum_over_tokens(laws: Laws) -> None:
    tokens = [token for token in zip(*laws, strict=True) if max(token) > 0]
    terms = [
        1.0 / sum(max(p_j / p_i, q_j / q_i) for p_j, q_j in tokens)
        for p_i, q_i in tokens
        if min(p_i, q_i) > 0
    ]
    assert close(theory.gumbel_match_probability(*laws), sum(terms))


def test_gumbel_match_meets_its_bound_when_one_token_is_shared() -> None:
    p, q = [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]
    assert close(theory.gumbel_match_probability(p, q), 1.0 / 3.0)
    assert close(theory.gumbel_match_lower_bound(p, q), 1.0 / 3.0)


def test_gumbel_match_reaches_beta_over_two_tokens() -> None:
    p, q = [0.7, 0.3], [0.45, 0.55]
    assert close(theory.gumbel_match_probability(p, q), theory.beta(p, q))


def test_gumbel_match_is_the_frequency_with_shared_noise() -> None:
    """Hoeffding: a right value is off by 0.015 in 40,000 draws with probability under 4e-8."""
    p, q = [0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]
    noise = random.Random(0)
    draws = 40_000
    matches = 0
    for _ in range(draws):
        gumbels = [-math.log(noise.expovariate(1.0)) for _ in p]
        by_target, by_drafter = (
            max(
                (math.log(mass) + gumbel, x)
                for x, (mass, gumbel) in enumerate(zip(law, gumbels, strict=True))
            )
            for law in (p, q)
        )
        matches += by_target[1] == by_drafter[1]
    assert abs(matches / draws - theory.gumbel_match_probability(p, q)) < 0.015


def test_gumbel_match_of_a_real_vocabulary_needs_no_square_of_it() -> None:
    noise = random.Random(0)
    weights = [[noise.expovariate(1.0) for _ in range(50_000)] for _ in range(2)]
    totals = [sum(row) for row in weights]
    p, q = ([w / total for w in row] for row, total in zip(weights, totals, strict=True))
    match = theory.gumbel_match_probability(p, q)
    assert theory.gumbel_match_lower_bound(p, q) < match < theory.beta(p, q)


# Rounds


@unhurried
@given(alphas, gammas)
@example(1.0, 7)
@example(0.0, 7)
@example(1.0 - 2.0**-53, 40)
def test_equation_1_is_the_sum_of_powers_of_alpha_for_every_alpha(alpha: float, gamma: int) -> None:
    tokens = theory.expected_tokens_per_round(alpha, gamma)
    exact = exact_tokens(alpha, gamma)
    assert abs(Fraction(tokens) - exact) <= exact * Fraction(2) ** -49


def test_a_round_with_alpha_one_emits_the_whole_draft_and_one_more() -> None:
    assert theory.expected_tokens_per_round(1.0, 7) == 8.0


@unhurried
@given(alphas, gammas)
def test_no_draft_length_beats_the_oracle(alpha: float, gamma: int) -> None:
    tokens = theory.expected_tokens_per_round(alpha, gamma)
    assert tokens <= theory.oracle_tokens_per_round(alpha) * (1.0 + 1e-12)


def test_the_oracle_never_stops_when_every_draft_is_accepted() -> None:
    assert theory.oracle_tokens_per_round(1.0) == math.inf


@unhurried
@given(alphas, st.integers(1, 40))
def test_accepted_fraction_is_tokens_per_round_less_one_over_gamma(
    alpha: float, gamma: int
) -> None:
    fraction = theory.expected_accepted_fraction(alpha, gamma)
    assert close(fraction, float(exact_tokens(alpha, gamma) - 1) / gamma)
    assert fraction <= alpha * (1.0 + 1e-12)


def test_a_tiny_accepted_fraction_keeps_its_digits() -> None:
    assert theory.expected_accepted_fraction(1e-30, 4) == 2.5e-31


@unhurried
@given(alphas, gammas, ratios)
def test_walltime_improvement_is_theorem_3_8(alpha: float, gamma: int, c: float) -> None:
    exact = float(exact_tokens(alpha, gamma) / (gamma * Fraction(c) + 1))
    assert close(theory.walltime_improvement(alpha, gamma, c), exact)


@unhurried
@given(alphas, gammas, ratios)
def test_operations_factor_is_theorem_3_11(alpha: float, gamma: int, c_hat: float) -> None:
    exact = float((gamma * Fraction(c_hat) + gamma + 1) / exact_tokens(alpha, gamma))
    assert close(theory.operations_factor(alpha, gamma, c_hat), exact)


@unhurried
@given(alphas, ratios)
def test_a_round_without_drafts_changes_nothing(alpha: float, ratio: float) -> None:
    assert close(theory.walltime_improvement(alpha, 0, ratio), 1.0)
    assert close(theory.operations_factor(alpha, 0, ratio), 1.0)
    assert close(theory.memory_reads_factor(alpha, 0), 1.0)


@unhurried
@given(alphas, gammas)
def test_memory_reads_fall_by_the_tokens_of_a_round(alpha: float, gamma: int) -> None:
    reads = theory.memory_reads_factor(alpha, gamma)
    assert reads == theory.expected_tokens_per_round(alpha, gamma)


def test_numbers_of_numpy_count_as_numbers() -> None:
    (alpha, c), (gamma,) = np.array([0.5, 0.125], dtype=np.float32), np.array([2])
    assert theory.best_gamma(alpha, c, max_gamma=gamma) == 2
    for value in (
        theory.expected_accepted_fraction(alpha, gamma),
        theory.walltime_improvement(alpha, gamma, c),
        theory.operations_factor(alpha, gamma, c),
    ):
        assert type(value) is float


# Choosing gamma


@unhurried
@given(alphas, ratios)
@example(0.5, 0.5)
def test_corollary_3_9_holds_in_both_directions(alpha: float, c: float) -> None:
    improves = theory.some_gamma_improves(alpha, c)
    assert improves == (alpha > c)
    gamma = theory.best_gamma(alpha, c, max_gamma=10**6)
    if improves:
        guaranteed = theory.guaranteed_improvement(alpha, c)
        assert close(guaranteed, (1.0 + alpha) / (1.0 + c))
        assert theory.walltime_improvement(alpha, gamma, c) >= guaranteed * (1.0 - 1e-12)
    else:
        assert gamma == 0
        assert all(theory.walltime_improvement(alpha, g, c) <= 1.0 + 1e-12 for g in range(50))


@unhurried
@given(st.integers(0, 960), st.integers(20, 1500))
@example(512, 512)
@example(960, 20)
def test_best_gamma_is_the_first_maximum_of_a_search_over_every_gamma(a: int, b: int) -> None:
    alpha, c = Fraction(a, 1024), Fraction(b, 1024)
    # A gamma that improves has 1 + gamma * c < 1 / (1 - alpha), the oracle's tokens.
    bound = math.ceil(alpha / ((1 - alpha) * c))
    by_search = max(range(bound + 1), key=lambda gamma: exact_improvement(alpha, gamma, c))
    assert theory.best_gamma(float(alpha), float(c)) == by_search


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.62, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99])
def test_best_gamma_is_exact_one_float_beside_every_tie(alpha: float) -> None:
    """The two floats around the c at which gamma and gamma + 1 tie part the two."""
    for gamma in range(1, 60):
        power = Fraction(alpha) ** (gamma + 1)
        tie = power / (exact_tokens(alpha, gamma) - gamma * power)
        below = float(tie)
        if Fraction(below) > tie:
            below = math.nextafter(below, 0.0)
        above = math.nextafter(below, 1.0)
        assert Fraction(below) < tie < Fraction(above)
        assert theory.best_gamma(alpha, above) == gamma
        assert theory.best_gamma(alpha, below) == gamma + 1


def test_best_gamma_is_found_without_a_walk_when_it_is_far_away() -> None:
    alpha, c = 1.0 - 2.0**-40, 2.0**-60
    gamma = theory.best_gamma(alpha, c)
    best = theory.walltime_improvement(alpha, gamma, c)
    assert gamma > 2**40
    assert all(theory.walltime_improvement(alpha, g, c) < best for g in (gamma // 2, 2 * gamma))


def test_best_gamma_of_the_smallest_floats_is_found() -> None:
    tiny = math.ulp(0.0)
    # alpha^(gamma + 1) * (1 + gamma * tiny / 2 + tiny) / 2 > tiny, to first order 2^-(gamma + 2).
    assert theory.best_gamma(0.5, tiny) == 1073
    assert theory.best_gamma(2 * tiny, tiny) == 1


def test_best_gamma_is_zero_when_nothing_improves() -> None:
    assert theory.best_gamma(0.3, 0.4) == 0
    assert theory.best_gamma(0.4, 0.4) == 0
    assert theory.best_gamma(0.0, 0.0) == 0
    assert theory.best_gamma(1.0, 1.0) == 0


def test_best_gamma_has_no_limit_by_default() -> None:
    assert theory.best_gamma(0.9, 0.001) == theory.best_gamma(0.9, 0.001, max_gamma=10**9) > 32


def test_best_gamma_stops_at_max_gamma() -> None:
    assert theory.best_gamma(0.9, 0.01, max_gamma=24) == 24
    assert theory.best_gamma(0.9, 0.01, max_gamma=23) == 23
    assert theory.best_gamma(0.9, 0.01, max_gamma=0) == 0


@pytest.mark.parametrize(("alpha", "c"), [(0.2, 0.0), (1.0, 0.0), (1.0, 0.99)])
def test_best_gamma_without_a_finite_answer_wants_a_max_gamma(alpha: float, c: float) -> None:
    with pytest.raises(UsageError, match="pass max_gamma"):
        theory.best_gamma(alpha, c)
    assert theory.best_gamma(alpha, c, max_gamma=12) == 12


# Errors


@pytest.mark.parametrize("alpha", [-0.1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize(
    "call",
    [
        lambda alpha: theory.expected_tokens_per_round(alpha, 3),
        lambda alpha: theory.oracle_tokens_per_round(alpha),
        lambda alpha: theory.expected_accepted_fraction(alpha, 3),
        lambda alpha: theory.walltime_improvement(alpha, 3, 0.1),
        lambda alpha: theory.operations_factor(alpha, 3, 0.1),
        lambda alpha: theory.memory_reads_factor(alpha, 3),
        lambda alpha: theory.some_gamma_improves(alpha, 0.1),
        lambda alpha: theory.guaranteed_improvement(alpha, 0.1),
        lambda alpha: theory.best_gamma(alpha, 0.1),
    ],
)
def test_an_alpha_that_is_no_probability_is_refused(
    call: Callable[[float], object], alpha: float
) -> None:
    with pytest.raises(UsageError, match=rf"alpha must be in \[0, 1\]: got {alpha!r}; pass"):
        call(alpha)


@pytest.mark.parametrize("gamma", [-1, 2.0, None])
@pytest.mark.parametrize(
    "call",
    [
        lambda gamma: theory.expected_tokens_per_round(0.5, gamma),
        lambda gamma: theory.expected_accepted_fraction(0.5, gamma),
        lambda gamma: theory.walltime_improvement(0.5, gamma, 0.1),
        lambda gamma: theory.operations_factor(0.5, gamma, 0.1),
        lambda gamma: theory.memory_reads_factor(0.5, gamma),
    ],
)
def test_a_gamma_that_is_no_count_is_refused(
    call: Callable[[object], object], gamma: object
) -> None:
    with pytest.raises(UsageError, match=f"gamma must be a whole number.*got {gamma!r}; pass"):
        call(gamma)


def test_an_accepted_fraction_of_no_drafts_is_refused() -> None:
    with pytest.raises(UsageError, match="gamma must be a whole number, at least 1: got 0"):
        theory.expected_accepted_fraction(0.5, 0)


@pytest.mark.parametrize("limit", [-1, 2.5])
def test_a_max_gamma_that_is_no_count_is_refused_even_where_it_would_not_bind(
    limit: float,
) -> None:
    with pytest.raises(UsageError, match=f"max_gamma must be a whole number.*got {limit!r}"):
        theory.best_gamma(0.1, 0.5, max_gamma=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("c", lambda c: theory.walltime_improvement(0.5, 3, c)),
        ("c_hat", lambda c: theory.operations_factor(0.5, 3, c)),
        ("c", lambda c: theory.some_gamma_improves(0.5, c)),
        ("c", lambda c: theory.guaranteed_improvement(0.5, c)),
        ("c", lambda c: theory.best_gamma(0.5, c)),
    ],
)
def test_a_cost_ratio_that_is_negative_or_not_finite_is_refused(
    name: str, call: Callable[[float], object], ratio: float
) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be a finite number.*got {ratio!r}; pass"):
        call(ratio)


@pytest.mark.parametrize("c", [0.5, 0.6])
def test_nothing_is_guaranteed_when_the_drafter_costs_more_than_it_earns(c: float) -> None:
    with pytest.raises(UsageError, match=f"needs alpha > c: got alpha = 0.5, c = {c!r}; use"):
        theory.guaranteed_improvement(0.5, c)


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([0.5, 0.5], [1.0], "p and q must cover the same tokens: got 2 and 1 entries"),
        ([], [], "p must sum to 1 within .*: got a sum of 0.0; normalise"),
        ([0.5, 0.4], [0.5, 0.5], "p must sum to 1 within .*: got a sum of 0.9; normalise"),
        ([0.5, 0.5], [0.5, 0.5005], "q must sum to 1"),
        ([0.5, 0.5], [1.1, -0.1], "q must hold probabilities: got 1.1 for token 0; pass"),
        ([0.5, -0.1, 0.6], [1.0, 0.0, 0.0], "p must hold probabilities: got -0.1 for token 1"),
        ([math.nan, 1.0], [0.5, 0.5], "p must hold probabilities: got nan for token 0"),
        ([1.0, 0.0], [math.inf, 0.0], "q must hold probabilities: got inf for token 0"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        theory.d_lk,
        theory.beta,
        theory.plain_rejection_keep_rate,
        theory.gumbel_match_probability,
        theory.gumbel_match_lower_bound,
    ],
)
def test_rows_that_are_no_laws_are_refused(
    function: Callable[[Sequence[float], Sequence[float]], float],
    p: list[float],
    q: list[float],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        function(p, q)


def test_alpha_names_the_position_of_a_row_that_is_no_law() -> None:
    good, bad = ([0.5, 0.5], [0.5, 0.5]), ([0.5, 0.5], [0.5, 0.6])
    with pytest.raises(UsageError, match="q at position 1 must sum to 1"):
        theory.alpha_from_pairs([good, bad])


def test_alpha_of_no_position_is_refused() -> None:
    with pytest.raises(UsageError, match=r"at least one .* got none; pass"):
        theory.alpha_from_pairs([])


# Imports


def test_theory_names_only_the_standard_library_and_the_errors() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(theory.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
    outside = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert outside == {"outrider.errors"}


def test_importing_theory_loads_nothing_outside_the_standard_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import outrider.theory; "
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(loaded - sys.stdlib_module_names))"
    )
    source = Path(theory.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['outrider']"


# From measured survival and verify cost

flat = {1: 1.0}
curves = st.lists(st.floats(0.0, 0.5), min_size=1, max_size=6).map(
    lambda steps: {n: 1.0 + sum(steps[: n - 1]) for n in range(1, len(steps) + 2)}
)


@unhurried
@given(alphas, gammas, ratios)
def test_walltime_factor_with_flat_cost_and_iid_survival_is_theorem_3_8(
    alpha: float, gamma: int, c: float
) -> None:
    survival = theory.geometric_survival(alpha, gamma)
    factor = theory.walltime_factor(survival, gamma, c, flat)
    assert close(factor, theory.walltime_improvement(alpha, gamma, c))


def test_walltime_factor_is_tokens_over_the_cost_of_a_round() -> None:
    factor = theory.walltime_factor([0.8, 0.7, 0.1], 2, 0.1, {1: 1.0, 3: 1.3})
    assert close(factor, (1 + 0.8 + 0.7) / (1.3 + 2 * 0.1))


def test_geometric_survival_is_the_powers_of_alpha() -> None:
    assert theory.geometric_survival(0.5, 3) == [0.5, 0.25, 0.125]
    assert theory.geometric_survival(0.5, 0) == []


@pytest.mark.parametrize(
    ("num_positions", "cost"), [(1, 1.0), (2, 1.1), (3, 1.2), (5, 1.4), (7, 2.0), (11, 3.2)]
)
def test_verify_cost_is_linear_between_measured_numbers_and_beyond_them(
    num_positions: int, cost: float
) -> None:
    curve = {7: 2.0, 1: 1.0, 3: 1.2, 5: 1.4}
    assert close(theory.verify_cost_at(curve, num_positions), cost)


def test_a_verify_cost_known_at_one_position_stands_for_all() -> None:
    assert theory.verify_cost_at({1: 1.5}, 33) == 1.5


def test_a_verify_cost_may_be_a_function() -> None:
    def cost(num_positions: int) -> float:
        return 1.0 + 0.1 * (num_positions - 1)

    assert close(theory.verify_cost_at(cost, 4), 1.3)
    assert close(theory.walltime_factor([0.5], 1, 0.0, cost), 1.5 / 1.1)


@unhurried
@given(st.floats(0.0, 0.99), st.floats(0.01, 2.0))
def test_the_best_measured_gamma_is_the_papers_where_its_assumptions_hold(
    alpha: float, c: float
) -> None:
    best = theory.best_gamma(alpha, c, max_gamma=20)
    survival = theory.geometric_survival(alpha, 20)
    found = theory.best_gamma_measured(survival, c, flat, max_gamma=20)
    # Two lengths may differ by less than a rounding error; the formula decides those exactly.
    factors = [theory.walltime_improvement(alpha, gamma, c) for gamma in (best, found)]
    assert close(*factors)


@unhurried
@given(st.floats(0.0, 1.0), curves, st.floats(0.0, 1.0))
def test_no_length_beats_the_best_measured_gamma_and_none_the_oracle(
    alpha: float, curve: dict[int, float], c: float
) -> None:
    survival = theory.geometric_survival(alpha, 8)
    factors = [theory.walltime_factor(survival, gamma, c, curve) for gamma in range(9)]
    best = theory.best_gamma_measured(survival, c, curve, max_gamma=8)
    assert factors[best] == max(factors)
    oracle = theory.oracle_factor(survival, c, curve, max_gamma=8)
    assert oracle >= max(factors) * (1.0 - 1e-12)


def test_a_longer_draft_can_help_again_after_a_dearer_step() -> None:
    """A pass over 5 costs as much as one over 3: four drafts pay where two do not."""
    curve = {1: 1.0, 2: 1.1, 3: 1.9, 5: 1.9}
    survival = [0.9, 0.85, 0.8, 0.8]
    factors = [theory.walltime_factor(survival, gamma, 0.0, curve) for gamma in range(5)]
    assert factors[2] < factors[1] < factors[4]
    assert theory.best_gamma_measured(survival, 0.0, curve, max_gamma=4) == 4


@unhurried
@given(st.floats(0.0, 0.99), st.floats(0.0, 2.0))
def test_the_oracle_without_limit_is_the_limit_of_the_measured_one(alpha: float, c: float) -> None:
    survival = theory.geometric_survival(alpha, 3000)
    measured = theory.oracle_factor(survival, c, lambda n: 1.0, max_gamma=3000)
    assert math.isclose(theory.oracle_improvement(alpha, c), measured, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("alpha", "c", "gain"), [(0.95, 0.05, "1.55"), (0.9, 0.1, "1.53"), (0.999, 0.00139, "1.58")]
)
def test_the_oracles_improvement_is_that_of_section_3_5(alpha: float, c: float, gain: str) -> None:
    best = theory.walltime_improvement(alpha, theory.best_gamma(alpha, c), c)
    assert printed(theory.oracle_improvement(alpha, c) / best, 2) == gain


def test_an_oracle_with_a_free_and_perfect_drafter_has_no_limit() -> None:
    assert theory.oracle_improvement(1.0, 0.0) == math.inf
    assert theory.oracle_improvement(1.0, 3.0) == 1.0


@unhurried
@given(st.floats(0.0, 0.99))
def test_speculation_pays_above_c_where_passes_cost_the_same(c: float) -> None:
    found = theory.break_even_alpha(c, flat, max_gamma=10)
    assert found is not None
    assert math.isclose(found, c, abs_tol=1e-9)


@unhurried
@given(curves, st.floats(0.0, 1.0), st.integers(1, 8))
def test_the_factor_passes_one_at_the_break_even_alpha(
    curve: dict[int, float], c: float, gamma: int
) -> None:
    found = theory.break_even_alpha(c, curve, max_gamma=gamma)

    def best_factor(alpha: float) -> float:
        survival = theory.geometric_survival(alpha, gamma)
        return max(theory.walltime_factor(survival, n, c, curve) for n in range(1, gamma + 1))

    if found is None:
        assert best_factor(1.0) <= 1.0 + 1e-9
    else:
        assert best_factor(max(0.0, found - 1e-6)) <= 1.0 + 1e-9
        assert best_factor(min(1.0, found + 1e-6)) >= 1.0 - 1e-9


def test_the_break_even_of_one_length_is_its_own() -> None:
    found = theory.break_even_alpha(0.1, flat, min_gamma=2, max_gamma=2)
    assert found is not None
    assert close(found + found**2, 0.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.walltime_factor([0.5], 2, 0.1, flat), "must reach to gamma = 2"),
        (lambda: theory.walltime_factor([1.5], 1, 0.1, flat), "got 1.5 for 1 tokens"),
        (lambda: theory.walltime_factor([0.5], 1, -0.1, flat), "c must be a finite number"),
        (lambda: theory.walltime_factor([0.5], 1, 0.1, {2: 1.0}), "known at 1 position"),
        (lambda: theory.walltime_factor([0.5], 1, 0.1, {}), "known at 1 position"),
        (lambda: theory.walltime_factor([0.5], 1, 0.1, {1: 0.0}), "above 0"),
        (lambda: theory.geometric_survival(1.5, 3), "alpha must be in"),
        (lambda: theory.best_gamma_measured([0.5], 0.1, flat, max_gamma=2), "reach to gamma = 2"),
        (lambda: theory.break_even_alpha(0.1, flat, max_gamma=0), "max_gamma must be a whole"),
        (lambda: theory.oracle_factor([0.5], 0.1, flat, max_gamma=2), "reach to gamma = 2"),
    ],
)
def test_measured_quantities_out_of_range_are_refused(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        call()
