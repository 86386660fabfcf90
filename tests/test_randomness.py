"""Noise: pure, independent between its keys, and following the law it is asked for.

The statistical tests run on fixed seeds. Each would fail for a correct generator with probability
`FALSE_ALARM`, had the seed been drawn at random; a wrong one fails it by many orders of magnitude.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.randomness import (
    MAX_SEED,
    Noise,
    Purpose,
    RoundNoise,
    exponentials,
    fresh_seed,
    uniform,
)

FALSE_ALARM = 1e-6
LARGEST_UNIFORM = 1 - 2.0**-53


@pytest.fixture
def set_uniform(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every uniform the given number."""

    def set_to(value: float) -> None:
        monkeypatch.setattr("outrider.randomness.uniform", lambda *key: value)

    return set_to


def law(*weights: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(weights, dtype=dtype)


def assert_follows(draws: list[int], weights: Tensor) -> None:
    """Chi-square test of `draws` against `weights`; no draw outside the support."""
    p = weights.double().numpy() / float(weights.double().sum())
    counts = np.bincount(draws, minlength=len(p))
    support = p > 0
    assert (counts[~support] == 0).all()
    expected = p[support] / p[support].sum() * len(draws)
    assert stats.chisquare(counts[support], expected).pvalue > FALSE_ALARM


# Purity


PINNED_UNIFORMS = (0.6784726079334252, 0.2847463247588393)
PINNED_EXPONENTIALS = (1.0734997062239777, 0.3064197051480485, 0.1242299143142588)


def test_the_same_arguments_give_the_same_noise_whatever_was_drawn_before() -> None:
    first = uniform(7, Purpose.ACCEPT, 3, 2), exponentials(7, Purpose.TOKEN, 3, 5).tolist()
    for i in range(20):
        uniform(i, Purpose.DRAFT, i, i)
        exponentials(i, Purpose.TOKEN, i, 100)
    second = uniform(7, Purpose.ACCEPT, 3, 2), exponentials(7, Purpose.TOKEN, 3, 5).tolist()
    assert first == second


def test_global_generators_are_neither_read_nor_moved() -> None:
    draws = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        noise = RoundNoise(5, 4)
        row = torch.full((50,), 0.02)
        draws.append((noise.draft(0, row), noise.residual(1, row), noise.token(2, row)))
        after = random.random(), float(np.random.rand()), float(torch.rand(()))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert after == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert draws[0] == draws[1]


def test_the_noise_of_a_seed_is_the_same_in_every_version() -> None:
    # Changing these numbers changes the text that every published seed gives.
    assert uniform(0, Purpose.DRAFT, 0) == PINNED_UNIFORMS[0]
    assert uniform(MAX_SEED, Purpose.RESIDUAL, 123, 45) == PINNED_UNIFORMS[1]
    np.testing.assert_allclose(exponentials(42, Purpose.TOKEN, 7, 3), PINNED_EXPONENTIALS, 1e-14)


# Independence of keys


def test_every_seed_purpose_position_and_origin_has_its_own_uniform() -> None:
    numbers = [0, 1, 2, 255, 256, 65536, 2**32]
    keys = list(itertools.product([*numbers, MAX_SEED], Purpose, numbers, numbers))
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_every_seed_purpose_and_position_has_its_own_exponentials() -> None:
    numbers = [0, 1, 2, 255, 256, 65536, 2**32]
    keys = list(itertools.product([*numbers, MAX_SEED], Purpose, numbers))
    vectors = {tuple(exponentials(*key, 2)) for key in keys}
    assert len({value for vector in vectors for value in vector}) == 2 * len(keys)


def test_the_origin_of_a_uniform_is_0_by_default() -> None:
    assert uniform(3, Purpose.ACCEPT, 9) == uniform(3, Purpose.ACCEPT, 9, 0)


def test_fresh_seeds_are_in_range_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    # All 64 bits are used: no seed of 50 above 2**60 has probability (1/16)**50.
    assert max(seeds) > 2**60


# Their laws


SWEEPS: dict[str, Callable[[int], float]] = {
    "seed": lambda i: uniform(i, Purpose.ACCEPT, 3, 2),
    "position": lambda i: uniform(1, Purpose.DRAFT, i, 2),
    "origin": lambda i: uniform(1, Purpose.RESIDUAL, 5, i),
    "round": lambda i: uniform(1, Purpose.ACCEPT, i + i % 5, i),
}


@pytest.mark.parametrize("swept", SWEEPS)
def test_uniforms_are_uniform(swept: str) -> None:
    values = [SWEEPS[swept](i) for i in range(10_000)]
    assert min(values) >= 0
    assert max(values) < 1
    assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("swept", SWEEPS)
def test_neighbouring_uniforms_are_independent(swept: str) -> None:
    values = np.array([SWEEPS[swept](i) for i in range(10_000)])
    cells = (values[0::2] * 8).astype(int) * 8 + (values[1::2] * 8).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=64)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("pair", list(itertools.combinations(Purpose, 2)))
def test_different_purposes_at_one_position_are_independent(pair: tuple[Purpose, Purpose]) -> None:
    first, second = (np.array([uniform(5, one, i, 1) for i in range(5_000)]) for one in pair)
    cells = (first * 6).astype(int) * 6 + (second * 6).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=36)).pvalue > FALSE_ALARM


def test_a_uniform_has_53_bits() -> None:
    scaled = [uniform(i, Purpose.DRAFT, 0) * 2.0**53 for i in range(200)]
    assert all(value == int(value) for value in scaled)
    # Were the last bit always 0, all of 200 would be even: 2**-200.
    assert {int(value) % 2 for value in scaled} == {0, 1}


def test_exponentials_are_exponential() -> None:
    noise = exponentials(1, Purpose.TOKEN, 0, 20_000)
    across = [float(exponentials(1, Purpose.TOKEN, i, 4)[3]) for i in range(5_000)]
    for values in (noise, across):
        assert stats.kstest(values, "expon").pvalue > FALSE_ALARM


def test_exponentials_are_finite_and_not_negative() -> None:
    noise = exponentials(1, Purpose.TOKEN, 0, 200_000)
    assert noise.dtype == np.float64
    assert noise.shape == (200_000,)
    assert np.isfinite(noise).all()
    assert noise.min() >= 0


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, MAX_SEED),
    position=st.integers(0, 2**40),
    sizes=st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_an_exponential_does_not_depend_on_how_many_are_asked_for(
    seed: int, position: int, sizes: tuple[int, int]
) -> None:
    short, long = sorted(sizes)
    whole = exponentials(seed, Purpose.TOKEN, position, long)
    assert np.array_equal(exponentials(seed, Purpose.TOKEN, position, short), whole[:short])


# Draws from a row


BY_CHOICE: list[Callable[[RoundNoise, Tensor], int]] = [
    lambda noise, row: noise.draft(0, row),
    lambda noise, row: noise.residual(0, row),
]
EVERY_DRAW = [*BY_CHOICE, lambda noise, row: noise.token(0, row)]
NAMES = ["draft", "residual", "token"]

some_weights = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def first_above(weights: list[int], u: Fraction) -> int:
    """The inverse of the cumulative weights, in exact arithmetic."""
    reached = 0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > u * sum(weights):
            return token
    raise AssertionError("u is below 1")


@pytest.mark.parametrize("draw", BY_CHOICE, ids=NAMES[:2])
@settings(deadline=None, max_examples=50)
@given(weights=some_weights, numerator=st.integers(0, 2**20 - 1))
def test_a_draw_inverts_the_cumulative_weights(
    draw: Callable[[RoundNoise, Tensor], int], weights: list[int], numerator: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.randomness.uniform", lambda *key: numerator / 2**20)
        drawn = draw(RoundNoise(0, 1), law(*weights, dtype=torch.float32))
    assert drawn == first_above(weights, Fraction(numerator, 2**20))


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, LARGEST_UNIFORM])
@pytest.mark.parametrize("draw", BY_CHOICE, ids=NAMES[:2])
@pytest.mark.parametrize(
    "row",
    [
        law(0, 0, 1, 0),
        law(0, 0.5, 0, 0.5, 0),
        law(0, 1e-300, 0, 1, 0, 1e-300, 0),
        law(0, 0.1, 0.2, 0, 0.7, 0, 0, dtype=torch.float32),
        law(0, 3e38, 0, 3e38, 0, dtype=torch.float32),
        law(0, 1e-45, 0, dtype=torch.float32),
        law(0, 5e-324, 0),
        law(0, 5e-324, 5e-324, 0),
    ],
    ids=str,
)
def test_a_token_without_weight_is_never_drawn(
    row: Tensor,
    draw: Callable[[RoundNoise, Tensor], int],
    u: float,
    set_uniform: Callable[[float], None],
) -> None:
    set_uniform(u)
    assert row[draw(RoundNoise(0, 1), row)] > 0


@pytest.mark.parametrize("draw", BY_CHOICE, ids=NAMES[:2])
def test_the_smallest_and_largest_uniform_draw_the_first_and_last_token_with_weight(
    draw: Callable[[RoundNoise, Tensor], int], set_uniform: Callable[[float], None]
) -> None:
    row = law(0, 0.25, 0.5, 0.25, 0, dtype=torch.float32)
    set_uniform(0.0)
    assert draw(RoundNoise(0, 1), row) == 1
    set_uniform(LARGEST_UNIFORM)
    assert draw(RoundNoise(0, 1), row) == 3


@pytest.mark.parametrize("draw", BY_CHOICE, ids=NAMES[:2])
def test_each_token_of_a_tail_too_light_for_sums_in_float32_is_drawn(
    draw: Callable[[RoundNoise, Tensor], int], set_uniform: Callable[[float], None]
) -> None:
    # Beside 1, float32 cannot tell 2**-25 from nothing.
    row = law(1.0, *[2.0**-25] * 100, dtype=torch.float32)
    total = 1 + 100 * 2.0**-25
    for token in range(1, 101):
        set_uniform((1 + (token - 0.5) * 2.0**-25) / total)
        assert draw(RoundNoise(0, 1), row) == token


def rounds(number: int) -> Iterator[RoundNoise]:
    return (RoundNoise(9, origin) for origin in range(1, number + 1))


@pytest.mark.parametrize("draw", EVERY_DRAW, ids=NAMES)
@pytest.mark.parametrize(
    "row",
    [
        law(0.4, 0.3, 0.2, 0.1, dtype=torch.float32),
        law(0, 0.05, 0, 0, 0.9, 0.05, 0),
        torch.softmax(torch.linspace(-3, 3, 40), 0),
    ],
    ids=["four", "gaps", "forty"],
)
def test_draws_follow_the_row(draw: Callable[[RoundNoise, Tensor], int], row: Tensor) -> None:
    assert_follows([draw(noise, row) for noise in rounds(6_000)], row)


@pytest.mark.parametrize("draw", BY_CHOICE, ids=NAMES[:2])
@settings(deadline=None, max_examples=50)
@given(weights=some_weights, seed=st.integers(0, 1000))
def test_zeros_between_the_weights_do_not_change_which_of_them_is_drawn(
    draw: Callable[[RoundNoise, Tensor], int], weights: list[int], seed: int
) -> None:
    # A filtered row of a large vocabulary is nearly empty.
    sparse = torch.zeros(20 * len(weights))
    sparse[7::20] = law(*weights, dtype=torch.float32)
    noise = RoundNoise(seed, 3)
    drawn = draw(noise, law(*weights, dtype=torch.float32))
    assert weights[drawn] > 0
    assert draw(noise, sparse) == 20 * drawn + 7


def test_weights_need_not_be_normalised() -> None:
    weights = law(3e-4, 0, 1e-4, 2e-4, dtype=torch.float32)
    assert_follows([noise.residual(2, weights) for noise in rounds(6_000)], weights)


def test_the_offsets_of_a_round_are_independent() -> None:
    row = law(0.25, 0.25, 0.5)
    cells = [3 * noise.draft(0, row) + noise.draft(1, row) for noise in rounds(6_000)]
    assert_follows(cells, torch.outer(row, row).flatten())


@pytest.mark.parametrize("draw", EVERY_DRAW, ids=NAMES)
def test_a_draw_leaves_the_row_as_it_was(draw: Callable[[RoundNoise, Tensor], int]) -> None:
    row = torch.softmax(torch.linspace(-1, 1, 10), 0)
    before = row.clone()
    draw(RoundNoise(3, 4), row)
    assert torch.equal(row, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("draw", EVERY_DRAW, ids=NAMES)
def test_a_row_in_half_precision_is_not_taken_for_a_law(
    draw: Callable[[RoundNoise, Tensor], int], dtype: torch.dtype
) -> None:
    with pytest.raises(AssertionError, match="float32 or float64"):
        draw(RoundNoise(0, 1), torch.ones(3).to(dtype))


# Accepting


def test_a_token_the_target_cannot_emit_is_refused_even_at_u_zero(
    set_uniform: Callable[[float], None],
) -> None:
    set_uniform(0.0)
    assert not RoundNoise(0, 1).accepts(0, 0.0, 0.5)
    assert not RoundNoise(0, 1).accepts(0, 0.0, 1.0)
    assert RoundNoise(0, 1).accepts(0, 1e-300, 1.0)


def test_a_token_the_target_likes_at_least_as_much_is_kept_at_the_largest_u(
    set_uniform: Callable[[float], None],
) -> None:
    set_uniform(LARGEST_UNIFORM)
    assert RoundNoise(0, 1).accepts(0, 0.3, 0.3)
    assert RoundNoise(0, 1).accepts(0, 0.4, 0.3)
    assert not RoundNoise(0, 1).accepts(0, 0.2999, 0.3)


@pytest.mark.parametrize(("p", "q"), [(0.2, 0.5), (0.03, 0.9), (0.5, 0.5), (0.9, 0.1)])
def test_a_token_is_accepted_with_the_ratio_of_p_and_q(p: float, q: float) -> None:
    kept = sum(noise.accepts(1, p, q) for noise in rounds(10_000))
    assert stats.binomtest(kept, 10_000, min(1.0, p / q)).pvalue > FALSE_ALARM


# What a round asks for


@pytest.mark.parametrize(
    ("purpose", "decide"),
    [
        (Purpose.DRAFT, lambda noise: noise.draft(3, law(1, 1))),
        (Purpose.ACCEPT, lambda noise: noise.accepts(3, 0.5, 1.0)),
        (Purpose.RESIDUAL, lambda noise: noise.residual(3, law(1, 1))),
    ],
)
def test_a_decision_uses_one_uniform_of_its_purpose_position_and_origin(
    purpose: Purpose, decide: Callable[[RoundNoise], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[tuple[int, ...]] = []

    def note(*key: int) -> float:
        keys.append(key)
        return 0.5

    monkeypatch.setattr("outrider.randomness.uniform", note)
    decide(RoundNoise(77, 10))
    assert keys == [(77, purpose, 13, 10)]


ROW = torch.softmax(torch.linspace(-1, 1, 64), 0)


@pytest.mark.parametrize(("origin", "offset"), [(5, 7), (8, 4), (12, 0)])
def test_token_noise_belongs_to_the_position_whatever_the_round(origin: int, offset: int) -> None:
    for seed in range(30):
        here = RoundNoise(seed, origin).token(offset, ROW)
        assert here == RoundNoise(seed, 10).token(2, ROW)


@pytest.mark.parametrize("draw", [RoundNoise.draft, RoundNoise.residual])
def test_draft_and_residual_noise_of_a_position_is_fresh_in_every_round(
    draw: Callable[[RoundNoise, int, Tensor], int],
) -> None:
    # Equal by chance with probability below 1/40 each; 15 of 30 alike: below 1e-15.
    pairs = [(draw(RoundNoise(s, 5), 7, ROW), draw(RoundNoise(s, 10), 2, ROW)) for s in range(30)]
    assert sum(one == other for one, other in pairs) < 15


def test_accept_noise_of_a_position_is_fresh_in_every_round() -> None:
    # Fair coins: 100 alike in two rounds have probability 2**-100.
    pairs = [
        (RoundNoise(s, 5).accepts(7, 0.5, 1.0), RoundNoise(s, 10).accepts(2, 0.5, 1.0))
        for s in range(100)
    ]
    assert any(one != other for one, other in pairs)


def test_token_noise_differs_between_positions_and_seeds() -> None:
    drawn = {
        (seed, offset): RoundNoise(seed, 3).token(offset, ROW)
        for seed in range(10)
        for offset in range(10)
    }
    assert len({drawn[seed, 0] for seed in range(10)}) > 2
    assert len({drawn[0, offset] for offset in range(10)}) > 2


def test_a_coupled_drafter_draws_with_the_token_noise() -> None:
    for seed in range(50):
        noise = RoundNoise(seed, 4, coupled=True)
        assert noise.draft(2, ROW) == noise.token(2, ROW)


def test_an_uncoupled_drafter_does_not_use_the_token_noise() -> None:
    # As above: 25 of 50 alike by chance is below 1e-20.
    noises = [RoundNoise(seed, 4) for seed in range(50)]
    assert sum(noise.draft(2, ROW) == noise.token(2, ROW) for noise in noises) < 25


# The shared noise


@settings(deadline=None, max_examples=50)
@given(
    weights=some_weights,
    padding=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_padding_the_vocabulary_with_zeros_does_not_change_the_token(
    weights: list[int], padding: int, seed: int
) -> None:
    row = law(*weights)
    padded = torch.cat([row, torch.zeros(padding, dtype=torch.float64)])
    noise = RoundNoise(seed, 2)
    assert noise.token(0, row) == noise.token(0, padded)
    assert row[noise.token(0, row)] > 0


def test_the_token_is_the_gumbel_maximum_keyed_by_token_id() -> None:
    for seed in range(50):
        row = ROW.double() * (torch.arange(len(ROW)) % 7 > seed % 5)
        gumbel = -np.log(exponentials(seed, Purpose.TOKEN, 6, len(row)))
        wanted = int(np.argmax(row.log().numpy() + gumbel))
        assert RoundNoise(seed, 4).token(2, row) == wanted


def test_close_laws_mostly_share_their_token() -> None:
    # Daliri, Musco & Suresh, theorem 3: equal with probability at least (1 - TV) / (1 + TV).
    p, q = law(0.4, 0.3, 0.2, 0.1), law(0.3, 0.35, 0.2, 0.15)
    least = (1 - 0.1) / (1 + 0.1)
    equal = sum(noise.token(0, p) == noise.token(0, q) for noise in rounds(5_000))
    assert stats.binomtest(equal, 5_000, least, alternative="less").pvalue > FALSE_ALARM


def test_a_one_hot_row_always_gives_its_token() -> None:
    row = torch.zeros(20)
    row[13] = 1.0
    for draw in EVERY_DRAW:
        assert {draw(noise, row) for noise in rounds(50)} == {13}


# The noise of a request


def test_the_noise_of_a_request_hands_out_its_rounds() -> None:
    here = Noise(3, coupled=True).at(8)
    assert (here.seed, here.origin, here.coupled) == (3, 8, True)


def test_noise_is_not_coupled_by_default() -> None:
    assert not Noise(3).coupled
    assert not Noise(3).at(8).coupled
    assert not RoundNoise(3, 8).coupled


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
def test_every_seed_in_range_can_be_used(seed: int) -> None:
    noise = Noise(seed).at(1)
    assert 0 <= noise.draft(0, ROW) < len(ROW)
    assert 0 <= noise.token(0, ROW) < len(ROW)
    assert math.isfinite(float(exponentials(seed, Purpose.TOKEN, 0, 1)[0]))
