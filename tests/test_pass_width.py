"""How wide passes are made."""

from __future__ import annotations

import random

import pytest

from outrider.costs import Costs
from outrider.pass_width import PassWidth

COSTS = Costs((1, 2, 9, 33), (10.0, 12.0, 12.7, 30.0), change_ms=4.0)


def widths(needed: list[int], costs: Costs = COSTS) -> list[int]:
    chosen = PassWidth(costs)
    return [n + chosen.padding(n) for n in needed]


def test_a_pass_stays_as_wide_as_the_last_one_where_that_is_cheaper() -> None:
    assert widths([9, 4, 7, 2, 9]) == [9, 9, 9, 9, 9]
    assert widths([4, 9, 4]) == [4, 9, 9]


def test_a_width_that_costs_more_than_a_change_is_left_at_once() -> None:
    assert widths([33, 9, 5]) == [33, 9, 9]


def test_a_width_is_left_when_its_rent_has_reached_the_price_of_a_change() -> None:
    # One position for the price of nine: 2.7 more in every pass, so the second one changes.
    assert widths([9, 1, 1, 1]) == [9, 9, 1, 1]
    # Each time it is needed again the rent begins anew.
    assert widths([9, 1, 9, 1, 9, 1, 1]) == [9, 9, 9, 9, 9, 9, 1]


def test_a_new_width_is_the_widest_that_costs_no_more() -> None:
    level = Costs((1, 2, 5, 9, 17), (10.0, 12.0, 12.0, 12.0, 15.0), change_ms=4.0)
    assert widths([1, 2, 6, 4, 10, 17], level) == [1, 9, 9, 9, 10, 17]


def test_where_a_change_costs_nothing_passes_are_as_wide_as_they_must_be() -> None:
    needed = [9, 4, 7, 2, 9]
    flat = Costs((1, 33), (1.0, 1.0))
    assert widths(needed, flat) == needed


def test_a_pass_made_otherwise_is_the_last_one() -> None:
    chosen = PassWidth(COSTS)
    chosen.padding(9)
    chosen.now(5)
    assert chosen.padding(4) == 1


@pytest.mark.parametrize("seed", range(20))
def test_it_never_costs_more_than_twice_the_best_in_hindsight(seed: int) -> None:
    dice = random.Random(seed)
    usual = dice.choice([(1, 2, 9), (1, 1, 1, 6), (3, 8, 20), (1, 33)])
    needed = [dice.choice(usual) for _ in range(60)]

    def extra(before: int, width: int, n: int) -> float:
        change = COSTS.change_ms if width != before else 0.0
        return change + COSTS.target(width) - COSTS.target(n)

    chosen = widths(needed)
    paid = sum(
        extra(before, width, n)
        for before, width, n in zip([0, *chosen], chosen, needed, strict=False)
    )
    # The best in hindsight: shortest path over the width of every pass.
    best = {0: 0.0}
    for n in needed:
        best = {
            width: min(cost + extra(before, width, n) for before, cost in best.items())
            for width in usual
            if width >= n
        }
    assert paid <= 2 * min(best.values()) + COSTS.change_ms
