"""Copies and a model's tokens in one draft: who proposes what, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import pytest
import torch

from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.model import ModelDrafter
from outrider.models import Feed
from outrider.models.toy import ToyModel, hashed_law
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

Propose = Callable[..., list[Draft]]

V = 12
SAMPLED = SamplingPolicy(temperature=1.0)
# 1 2 3 4 5 stood there before; 9 never.
TEXT = [9, 1, 2, 3, 4, 5, 6, 0, 7, 1]


class Counting(ToyModel):
    """Says that the next number comes next, and counts its passes."""

    def __init__(self) -> None:
        def law(ids: Sequence[int]) -> torch.Tensor:
            row = torch.full((V,), -2.0, dtype=torch.float64)
            row[(ids[-1] + 1) % V] = 3.0
            return row

        super().__init__(law, V, name="counting")
        self.passes: list[list[list[int]]] = []

    def score(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self.passes.append([list(feed.tokens) for feed in feeds])
        return super().score(feeds)


def mixed(model: ToyModel | None = None, min_match: int = 2) -> tuple[LookupFirst, ToyModel]:
    model = model or Counting()
    return LookupFirst(ModelDrafter(model, target_vocab_size=V), min_match=min_match), model


def test_the_model_begins_and_a_match_that_arises_is_copied(propose: Propose) -> None:
    drafter, model = mixed()
    # Behind 1 alone nothing is copied; 2 is drawn, and behind 1 2 the text goes on with 3 4 5 6 0.
    [draft] = propose(drafter, [History(TEXT)], 6)
    assert draft.tokens == [2, 3, 4, 5, 6, 0]
    assert draft.steps == 1
    assert draft.q is None  # greedy: all of them point masses
    assert model.passes == [[TEXT]]  # type: ignore[attr-defined]


def test_where_no_drawn_token_is_worth_its_step_a_copy_may_be() -> None:
    def only_copies(
        sure: Sequence[float], upcoming: Sequence[float] = (), copied: Container[int] = ()
    ) -> bool:
        return bool(upcoming)

    drafter, model = mixed()
    noise = RoundNoise(0, len(TEXT))
    # Behind 1 alone the model would draw: one token is a poor match, but it costs no step.
    [draft] = drafter.propose([History(TEXT)], [4], [SAMPLED], [noise], [only_copies])
    assert draft.tokens == [2, 3, 4, 5]
    assert (draft.steps, draft.q, model.passes) == (0, None, [])  # type: ignore[attr-defined]
    [draft] = drafter.propose([History([9, 1, 2])], [4], [SAMPLED], [noise], [only_copies])
    assert draft.tokens == []  # 2 was never there before
    [draft] = drafter.propose([History(TEXT)], [4], [SAMPLED], [noise], [lambda *_: False])
    assert draft.tokens == []


def test_every_token_reports_the_law_it_came_from(propose: Propose) -> None:
    drafter, _ = mixed()
    for seed in range(50):
        [draft] = drafter.propose([History(TEXT)], [5], [SAMPLED], [RoundNoise(seed, len(TEXT))])
        if draft.tokens[0] != 2:
            continue
        assert draft.tokens[1:] == [3, 4, 5, 6]
        assert draft.q is not None
        assert draft.q.shape == (5, V)
        assert 0.5 < float(draft.q[0, 2]) < 1.0
        assert draft.q[1:].tolist() == torch.eye(V)[[3, 4, 5, 6]].tolist()
        return
    raise AssertionError("2 was never drawn")


def test_behind_a_copy_the_model_reads_what_was_copied(propose: Propose) -> None:
    drafter, model = mixed()
    history = History([3, 4, 8, 3, 4])
    # 8 3 4 8 3 4 ... would go on for ever; make the copies fail until they are worth less.
    for _ in range(12):
        [draft] = propose(drafter, [history], 1)
        if draft.steps:
            break
        assert draft.tokens == [8]
        drafter.observe([history], [Verdict(0, 0)])
    assert draft.tokens == [5]
    assert model.passes == [[[3, 4, 8, 3, 4]]]  # type: ignore[attr-defined]


def test_a_request_learns_which_of_the_two_is_right_and_tells_no_other(propose: Propose) -> None:
    drafter, _ = mixed()
    first, second = History([3, 4, 8, 3, 4]), History([3, 4, 8, 3, 4])
    for _ in range(12):
        propose(drafter, [first], 1)
        drafter.observe([first], [Verdict(0, 0)])
    assert propose(drafter, [first], 1)[0].tokens == [5]
    assert propose(drafter, [second], 1)[0].tokens == [8]
    drafter.release(first)
    assert propose(drafter, [first], 1)[0].tokens == [8]


def test_a_drafting_model_that_is_always_wrong_gives_way_to_copies(propose: Propose) -> None:
    drafter, _ = mixed()
    history = History([3, 4, 8, 3, 4])
    drawn = []
    for _ in range(80):  # both fail: the one that has failed less often so far proposes
        [draft] = propose(drafter, [history], 1)
        drawn.append(draft.steps)
        drafter.observe([history], [Verdict(0, 0)])
    assert 20 < sum(drawn[20:]) < 40
    for _ in range(20):  # from now on copies are right
        [draft] = propose(drafter, [history], 1)
        drafter.observe([history], [Verdict(1 - draft.steps, 0)])
    assert propose(drafter, [history], 1)[0].steps == 0


def test_unexamined_tokens_say_nothing(propose: Propose) -> None:
    drafter, _ = mixed()
    history = History([3, 4, 8, 3, 4])
    for _ in range(3):
        [draft] = propose(drafter, [history], 6)
        assert draft.tokens == [8, 3, 4, 8, 3, 4]
        drafter.observe([history], [Verdict(0, 0)])
    # Three failures behind matches of two: there the model proposes now.
    assert propose(drafter, [history], 1)[0].tokens == [5]
    # The copies behind longer matches were never examined.
    history.tokens.append(8)
    assert propose(drafter, [history], 1)[0].tokens == [3]


@pytest.mark.parametrize("policy", [SamplingPolicy(), SAMPLED], ids=["greedy", "sampled"])
def test_requests_side_by_side_get_what_they_get_alone(policy: SamplingPolicy) -> None:
    texts = [TEXT, [3, 4, 8, 3, 4], [5, 5, 5, 5], [7], [0, 1, 2, 0, 1, 3, 0, 1]]
    law = hashed_law(V, seed=3, order=2)

    def noise(i: int) -> RoundNoise:
        return RoundNoise(40 + i, len(texts[i]))

    together, _ = mixed(ToyModel(law, V))
    found = together.propose(
        [History(text) for text in texts], [4] * 5, [policy] * 5, [noise(i) for i in range(5)]
    )
    for i, text in enumerate(texts):
        alone, _ = mixed(ToyModel(law, V))
        [draft] = alone.propose([History(text)], [4], [policy], [noise(i)])
        assert (draft.tokens, draft.steps) == (found[i].tokens, found[i].steps)
        if draft.q is not None:
            torch.testing.assert_close(draft.q, found[i].q)
    assert {draft.steps for draft in found} > {0}


def test_it_is_asked_before_every_token_and_told_which_were_copied() -> None:
    drafter, _ = mixed()
    calls: list[tuple[int, int, list[int]]] = []

    def more(
        confidences: Sequence[float], upcoming: Sequence[float] = (), copied: object = ()
    ) -> bool:
        calls.append((len(confidences), len(upcoming), sorted(copied)))  # type: ignore[call-overload]
        return len(confidences) < 3

    [draft] = drafter.propose(
        [History(TEXT)], [9], [SamplingPolicy()], [RoundNoise(0, len(TEXT))], [more]
    )
    assert draft.tokens == [2, 3, 4]
    assert calls == [(0, 0, []), (1, 8, []), (2, 7, [1]), (3, 6, [1, 2])]


def test_where_the_model_can_draw_nothing_the_draft_ends(propose: Propose) -> None:
    small = ToyModel(hashed_law(4, seed=1), 4)  # knows ids 0 to 3
    drafter = LookupFirst(ModelDrafter(small, target_vocab_size=V))
    assert propose(drafter, [History([9, 8])], 4)[0].tokens == []
    # Copies need no model, also of ids that it does not know.
    assert propose(drafter, [History([9, 8, 7, 9, 8])], 2)[0].tokens == [7, 9]
