"""How many tokens are drafted: by costs, earlier drafts, and how sure the drafter is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.costs import Costs
from outrider.draft_length import LONGEST, Adaptive, Fixed, draft_length

FREE = Costs((1, 33), (1.0, 2.6))  # 0.05 of a pass for every further position
MODEL = Costs((1, 33), (1.0, 2.6), drafter_ms=0.2)


def play(
    length: Adaptive | Fixed,
    accepts: Callable[[int, int], bool],
    *,
    num_rounds: int,
    surety: Callable[[int, int], float] = lambda number, place: 0.7,
    num_requests: int = 1,
) -> list[tuple[int, int]]:
    """(drafted, accepted) of rounds; the drafter draws a token and then knows how sure it is.

    `accepts(round, place)` says whether a draft would be accepted there, given those before.
    """
    played = []
    for number in range(num_rounds):
        go_on = length.begin(num_requests)
        sure: list[float] = []
        while len(sure) < length.limit and go_on(sure):
            sure.append(surety(number, len(sure)))
        accepted = 0
        while accepted < len(sure) and accepts(number, accepted):
            accepted += 1
        length.observe(len(sure), accepted)
        played.append((len(sure), accepted))
    return played


def cost_of(played: Sequence[tuple[int, int]], costs: Costs) -> float:
    """Milliseconds per token."""
    spent = sum(costs.target(drafted + 1) + drafted * costs.drafter_ms for drafted, _ in played)
    return spent / sum(accepted + 1 for _, accepted in played)


def test_gamma_none_is_adaptive_and_a_number_is_fixed() -> None:
    assert isinstance(draft_length(None, FREE), Adaptive)
    fixed = draft_length(4, FREE)
    assert isinstance(fixed, Fixed)
    assert play(fixed, lambda *_: False, num_rounds=3) == [(4, 0)] * 3
    assert play(Fixed(0), lambda *_: True, num_rounds=2) == [(0, 0)] * 2


def test_a_drafter_that_is_always_right_drafts_as_much_as_is_allowed() -> None:
    played = play(Adaptive(FREE), lambda *_: True, num_rounds=40)
    assert played[-1] == (LONGEST, LONGEST)
    assert play(Adaptive(FREE, limit=7), lambda *_: True, num_rounds=40)[-1] == (7, 7)


@pytest.mark.parametrize("costs", [FREE, MODEL])
def test_a_hopeless_drafter_costs_little(costs: Costs) -> None:
    played = play(Adaptive(costs), lambda *_: False, num_rounds=128)
    assert cost_of(played, costs) < 1.05
    assert sum(drafted == 0 for drafted, _ in played) > 64


@pytest.mark.parametrize(("dear", "interval"), [(0.2, 100), (0.4, 200)])
def test_a_hopeless_drafter_is_tried_again_the_more_seldom_the_more_it_costs(
    dear: float, interval: int
) -> None:
    costs = Costs((1, 33), (1.0, 2.6), drafter_ms=dear)
    played = play(Adaptive(costs), lambda *_: False, num_rounds=2000)
    tried = [number for number, (drafted, _) in enumerate(played) if drafted]
    late = [b - a for a, b in pairwise(tried)][-6:]
    assert late == pytest.approx([interval] * 6, rel=0.3)


def test_an_unlucky_beginning_does_not_end_drafting() -> None:
    """Of twelve first tokens one is accepted, where half of those to come would be."""
    costs = Costs((1, 6, 33), (13.3, 13.3, 31.9), drafter_ms=0.8, drafter_begins_ms=0.8)
    lucky = [2, *range(12, 60, 2)]
    played = play(
        Adaptive(costs), lambda number, _: number in lucky, num_rounds=60, surety=lambda *_: 0.3
    )
    assert all(drafted for drafted, _ in played)
    assert all(
        drafted == 0 for drafted, _ in play(Adaptive(costs), lambda *_: False, num_rounds=60)[20:30]
    )


def test_the_first_step_of_a_draft_may_cost_more_than_the_others() -> None:
    costs = Costs((1, 33), (10.0, 10.0), drafter_ms=2.0, drafter_begins_ms=12.0)
    assert not Adaptive(costs).begin(1)([])  # where the next ones are not better either
    assert Adaptive(costs).begin(1)([0.9])
    assert Adaptive(costs).begin(1)([], [0.9])  # a copy needs no step


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    played = play(Adaptive(MODEL), lambda number, place: number >= 60, num_rounds=200)
    assert max(drafted for drafted, _ in played[40:60]) <= 1
    assert min(drafted for drafted, _ in played[-40:]) >= 8


def test_a_text_that_stops_being_predictable_is_noticed() -> None:
    played = play(Adaptive(MODEL), lambda number, place: number < 60, num_rounds=200)
    assert played[59][0] >= 8
    assert cost_of(played[100:], MODEL) < 1.1


def test_sure_tokens_are_followed_by_more_and_unsure_ones_are_the_last() -> None:
    """Where sureness tells the two apart, rounds end right behind the first unsure token."""
    dice = random.Random(3)
    unsure = {(number, dice.randrange(6)) for number in range(300)}

    def surety(number: int, place: int) -> float:
        return 0.1 if (number, place) in unsure else 0.95

    played = play(
        Adaptive(MODEL),
        lambda number, place: (number, place) not in unsure,
        num_rounds=300,
        surety=surety,
    )
    first_unsure = dict(unsure)
    late = range(150, 300)
    assert sum(played[number][0] == first_unsure[number] + 1 for number in late) > 140
    # A fixed length cannot do that.
    best = min(
        cost_of(
            play(Fixed(gamma), lambda n, place: (n, place) not in unsure, num_rounds=300), MODEL
        )
        for gamma in range(11)
    )
    assert cost_of(played[150:], MODEL) < 0.95 * best


def test_the_first_round_goes_on_behind_a_sure_token_and_not_behind_an_unsure_one() -> None:
    # A step costs 0.4 passes: a token must be kept more often than that to be worth it.
    costs = Costs((1, 33), (10.0, 10.0), drafter_ms=4.0)
    assert Adaptive(costs).begin(1)([0.99])
    assert not Adaptive(costs).begin(1)([0.05])
    assert Adaptive(costs).begin(1)([0.9, 0.99])
    assert not Adaptive(costs).begin(1)([0.9, 0.1])
    # Of two drafts that are as likely to stand so far, the one that ends surer goes on longer.
    dear = Costs((1, 33), (10.0, 10.0), drafter_ms=4.5)
    assert Adaptive(dear).begin(1)([0.9, 0.99])
    assert not Adaptive(dear).begin(1)([0.99, 0.9])


def test_bad_luck_with_unsure_tokens_takes_nothing_from_the_trust_in_sure_ones() -> None:
    def after(num_failed: int, confidence: float) -> Adaptive:
        length = Adaptive(Costs((1, 33), (10.0, 10.0), drafter_ms=4.0))
        for _ in range(num_failed):
            length.begin(1)([confidence])
            length.observe(1, 0)
        return length

    assert after(3, 0.5).begin(1)([0.95])
    # What sure ones do themselves is noticed, and then other sure ones are doubted too.
    assert not after(6, 0.95).begin(1)([0.95])
    assert not after(6, 0.95).begin(1)([0.8])


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("costs", [FREE, MODEL])
def test_with_nothing_to_go_by_it_is_nearly_as_fast_as_the_best_fixed_length(
    acceptance: float, costs: Costs
) -> None:
    """Independent acceptance: the paper's setting, in which a fixed length is best."""
    num_rounds = 4000

    def coins(seed: int) -> Callable[[int, int], bool]:
        dice = random.Random(seed)
        return lambda *_: dice.random() < acceptance

    fixed = [
        cost_of(play(Fixed(gamma), coins(gamma), num_rounds=num_rounds), costs)
        for gamma in range(33)
    ]
    adaptive = cost_of(play(Adaptive(costs), coins(99), num_rounds=num_rounds), costs)
    # What a memory of some rounds costs where nothing ever changes.
    assert adaptive < 1.06 * min(fixed)


def test_copies_cost_no_steps_and_their_fate_is_counted_apart() -> None:
    costs = Costs((1, 33), (10.0, 10.0), drafter_ms=20.0)
    length = Adaptive(costs)
    for _ in range(5):
        assert length.begin(1)([], [0.9])  # a copy is free
        length.observe(1, 1)
        # Drawn by a model whose step takes two passes, nothing is worth it, however well copies do.
        assert not length.begin(1)([])
        length.observe(0, 0)
    one, other = Adaptive(MODEL), Adaptive(MODEL)
    for _ in range(40):
        one.begin(1)([], [0.9])
        one.observe(1, 0)
        other.begin(1)([0.9])
        other.observe(1, 0)
    # Copies that fail say nothing of the model's drafts, the model's own failures do.
    assert one.begin(1)([])
    assert not other.begin(1)([])


def test_upcoming_sureness_is_used_before_anything_is_drawn() -> None:
    """A drafter that copies knows beforehand how good its match is."""
    length = Adaptive(FREE)
    for number in range(200):
        good = number % 2 == 0
        ahead = [0.95 if good else 0.3] * 8
        go_on = length.begin(1)
        drafted = 0
        while drafted < 8 and go_on(ahead[:drafted], ahead[drafted:], range(drafted)):
            drafted += 1
        length.observe(drafted, drafted if good else 0)
        if number > 60:
            assert (drafted == 8) if good else (drafted <= 1)


def test_larger_batches_draft_less_and_the_largest_nothing() -> None:
    bound_by_arithmetic = Costs((1, 8, 64), (1.0, 1.2, 8.4))
    lengths = []
    for num_requests in (1, 4, 32):
        dice = random.Random(5)
        played = play(
            Adaptive(bound_by_arithmetic),
            lambda *_, dice=dice: dice.random() < 0.6,  # type: ignore[misc]
            num_rounds=300,
            num_requests=num_requests,
        )
        lengths.append(sum(drafted for drafted, _ in played[100:]) / 200)
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[2] < 0.1


def test_in_a_batch_a_draft_must_be_worth_the_change_of_width() -> None:
    steady = Costs((1, 64), (1.0, 4.15))
    changing = Costs((1, 64), (1.0, 4.15), change_ms=0.4)

    def share_drafted(costs: Costs, num_requests: int) -> float:
        played = play(
            Adaptive(costs),
            lambda number, _: number % 2 == 0,
            num_rounds=300,
            surety=lambda *_: 0.5,
            num_requests=num_requests,
        )
        return sum(drafted > 0 for drafted, _ in played[100:]) / 200

    assert share_drafted(steady, 8) > 0.9
    assert share_drafted(changing, 8) < 0.2
    # Alone, whoever drafts in one round mostly drafts in the next one too.
    assert share_drafted(changing, 1) == share_drafted(steady, 1) > 0.9


def test_a_draft_that_needs_a_wider_pass_must_be_worth_two_changes_of_width() -> None:
    """Up to five positions cost what one does; beyond, 2 % more each."""
    level = Costs((1, 5, 33), (1.0, 1.0, 1.5))

    def longest(costs: Costs) -> int:
        played = play(
            Adaptive(costs),
            lambda _, place: place < 6,
            num_rounds=60,
            surety=lambda *_: 0.9,
        )
        return max(drafted for drafted, _ in played[30:])

    assert longest(level) > 4
    assert longest(replace(level, change_ms=3.0)) == 4


def test_behind_a_long_context_drafts_are_longer_since_every_pass_costs_more() -> None:
    costs = Costs((1, 33), (1.0, 4.2), context=64, context_ms=0.002)

    def drafted(context: int) -> float:
        length = Adaptive(costs)
        dice = random.Random(7)
        total = 0
        for _ in range(200):
            go_on = length.begin(1, context)
            sure: list[float] = []
            while len(sure) < length.limit and go_on(sure):
                sure.append(0.7)
            accepted = 0
            while accepted < len(sure) and dice.random() < 0.7:
                accepted += 1
            length.observe(len(sure), accepted)
            total += len(sure)
        return total / 200

    assert drafted(64) == drafted(0)
    assert drafted(2000) > 1.2 * drafted(64)


def test_two_requests_share_nothing() -> None:
    first, second = Adaptive(MODEL), Adaptive(MODEL)
    play(first, lambda *_: False, num_rounds=50)
    assert play(second, lambda *_: True, num_rounds=30) == play(
        Adaptive(MODEL), lambda *_: True, num_rounds=30
    )


def test_the_same_past_gives_the_same_lengths() -> None:
    def once() -> list[tuple[int, int]]:
        dice = random.Random(8)
        return play(Adaptive(MODEL), lambda *_: dice.random() < 0.7, num_rounds=100)

    assert once() == once()
    assert len({drafted for drafted, _ in once()}) > 1
