"""Drafting with a model: caches, contexts, vocabularies, and the law each token was drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft_length import GoOn
from outrider.drafters.model import ModelDrafter
from outrider.models import Feed, Prompt
from outrider.models.toy import ToyModel, ToySequence, hashed_law
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

Propose = Callable[..., list[Draft]]

SAMPLING = SamplingPolicy(temperature=0.9, top_p=0.95)


class Watched(ToyModel):
    """A toy model that notes its passes and the sequences it started."""

    def __init__(self, vocab_size: int = 6, *, seed: int = 1, context_length: int = 4096) -> None:
        law = hashed_law(vocab_size, seed, sharpness=1.5)
        super().__init__(law, vocab_size, name="watched", context_length=context_length)
        self.passes: list[list[list[int]]] = []
        self.started: list[ToySequence] = []

    def start(self, prompt: Prompt) -> ToySequence:
        self.started.append(super().start(prompt))
        return self.started[-1]

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        self.passes.append([list(feed.tokens) for feed in feeds])
        assert all(feed.keep == 1 for feed in feeds)
        assert len({id(feed.sequence) for feed in feeds}) == len(feeds)
        return super().score(feeds)


def drafter_for(model: ToyModel, target_vocab_size: int | None = None) -> ModelDrafter:
    return ModelDrafter(model, target_vocab_size=target_vocab_size or model.vocab_size)


def commit(
    drafter: ModelDrafter, history: History, draft: Draft, accepted: int, token: int
) -> None:
    """What a round does with a draft: keep `accepted` of its tokens, then one of the target's."""
    history.tokens += [*draft.tokens[:accepted], token]
    drafter.observe([history], [Verdict(accepted, token)])


# The cache


@settings(deadline=None, max_examples=50)
@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    rounds=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), max_size=8),
    greedy=st.booleans(),
)
def test_after_every_round_the_cache_is_a_prefix_of_the_committed_tokens_but_the_last(
    prompt: list[int], rounds: list[tuple[int, float]], greedy: bool, propose: Propose
) -> None:
    model = Watched()
    drafter, history = drafter_for(model), History(prompt)
    for gamma, kept in rounds:
        policy = SamplingPolicy() if greedy else SAMPLING
        [draft] = propose(drafter, [history], gamma, policy)
        accepted = round(kept * gamma)
        assert len(draft.tokens) == gamma
        commit(drafter, history, draft, accepted, (len(history) + gamma) % 6)
        [sequence] = model.started
        assert sequence.length <= len(history) - 1
        assert sequence.tokens == history.tokens[: sequence.length]
        # All accepted: the last draft was never fed. Otherwise only the target's token is missing.
        assert sequence.length == len(history) - (2 if accepted == gamma else 1)


def test_a_fully_accepted_draft_is_caught_up_in_the_next_first_pass(propose: Propose) -> None:
    model = Watched()
    drafter, history = drafter_for(model), History([1, 2])
    [draft] = propose(drafter, [history], 3)
    assert model.passes == [[[1, 2]], [draft.tokens[:1]], [draft.tokens[1:2]]]
    commit(drafter, history, draft, 3, 5)
    model.passes.clear()
    [following] = propose(drafter, [history], 2)
    assert model.passes == [[[draft.tokens[2], 5]], [following.tokens[:1]]]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_after_a_rejection_only_the_new_token_is_fed(accepted: int, propose: Propose) -> None:
    model = Watched()
    drafter, history = drafter_for(model), History([1, 2])
    [draft] = propose(drafter, [history], 3)
    commit(drafter, history, draft, accepted, 5)
    model.passes.clear()
    propose(drafter, [history], 1)
    assert model.passes == [[[5]]]


def test_rounds_without_a_draft_are_caught_up_with(propose: Propose) -> None:
    model = Watched()
    drafter, history = drafter_for(model), History([1, 2])
    [draft] = propose(drafter, [history], 2)
    commit(drafter, history, draft, 1, 5)
    history.tokens += [0, 3, 4]
    model.passes.clear()
    propose(drafter, [history], 1)
    assert model.passes == [[[5, 0, 3, 4]]]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), greedy=st.booleans())
def test_a_draft_after_many_rounds_is_that_of_a_new_drafter(
    seed: int, greedy: bool, propose: Propose
) -> None:
    dice = random.Random(seed)
    policy = SamplingPolicy() if greedy else SAMPLING
    drafter, history = drafter_for(Watched()), History([dice.randrange(6)])
    for _ in range(6):
        gamma = dice.randint(1, 4)
        [draft] = propose(drafter, [history], gamma, policy)
        [fresh] = propose(drafter_for(Watched()), [History(history.tokens)], gamma, policy)
        assert draft.tokens == fresh.tokens
        assert (draft.q is None) == (fresh.q is None) == greedy
        assert greedy or torch.equal(draft.q, fresh.q)
        commit(drafter, history, draft, dice.randint(0, gamma), dice.randrange(6))


def test_observing_requests_that_never_drafted_is_harmless() -> None:
    drafter_for(Watched()).observe([History([1])], [Verdict(0, 1)])


def test_a_released_request_gives_its_cache_back(propose: Propose) -> None:
    model = Watched()
    drafter, history, other = drafter_for(model), History([1, 2]), History([3])
    propose(drafter, [history, other], 2)
    drafter.release(history)
    assert [sequence.length for sequence in model.started] == [0, 2]
    propose(drafter, [history], 1)
    assert len(model.started) == 3
    assert model.passes[-1] == [[1, 2]]


def test_releasing_an_unknown_request_is_harmless(propose: Propose) -> None:
    drafter, history = drafter_for(Watched()), History([1])
    drafter.release(history)
    propose(drafter, [history], 1)
    drafter.release(history)
    drafter.release(history)


# The end of the context


@pytest.mark.parametrize(("length", "most"), [(1, 8), (5, 4), (7, 2), (8, 1), (9, 0), (30, 0)])
@pytest.mark.parametrize("gamma", [1, 3, 20])
def test_near_the_end_of_the_context_drafts_are_shorter_and_then_empty(
    length: int, most: int, gamma: int, propose: Propose
) -> None:
    model = Watched(context_length=8)
    for policy in (SamplingPolicy(), SAMPLING):
        [draft] = propose(drafter_for(model), [History([0] * length)], gamma, policy)
        assert len(draft.tokens) == min(gamma, most)
        assert (draft.q is None) == (policy.is_greedy or not draft.tokens)


def test_decoding_past_the_context_drafts_nothing_and_runs_no_pass(propose: Propose) -> None:
    model = Watched(context_length=8)
    drafter, history = drafter_for(model), History([1, 2])
    lengths = []
    for _ in range(6):
        [draft] = propose(drafter, [history], 3)
        lengths.append(len(draft.tokens))
        commit(drafter, history, draft, len(draft.tokens), 4)
    assert lengths == [3, 3, 0, 0, 0, 0]
    num_passes = len(model.passes)
    propose(drafter, [history], 3)
    assert len(model.passes) == num_passes


def test_a_short_context_of_one_request_does_not_shorten_the_others(propose: Propose) -> None:
    drafter = drafter_for(Watched(context_length=8))
    drafts = propose(drafter, [History([1] * 8), History([1]), History([1] * 9)], 4)
    assert [len(draft.tokens) for draft in drafts] == [1, 4, 0]


# Vocabularies


def test_after_a_foreign_token_drafts_are_empty_and_no_pass_is_run(propose: Propose) -> None:
    model = Watched(4)
    drafter, history = drafter_for(model, 8), History([1, 2])
    assert len(propose(drafter, [history], 2)[0].tokens) == 2
    num_passes = len(model.passes)
    history.tokens += [1, 7]
    for token in (0, 1, 2):
        assert propose(drafter, [history], 2) == [Draft([], None)]
        history.tokens.append(token)
    assert len(model.passes) == num_passes


def test_a_foreign_token_in_one_prompt_leaves_the_other_requests_their_drafts(
    propose: Propose,
) -> None:
    drafter = drafter_for(Watched(4), 8)
    foreign, familiar = History([1, 4, 1]), History([1, 3, 1])
    drafts = propose(drafter, [foreign, familiar], 3)
    assert [len(draft.tokens) for draft in drafts] == [0, 3]


def test_the_largest_id_of_the_drafter_is_not_foreign(propose: Propose) -> None:
    [draft] = propose(drafter_for(Watched(4), 8), [History([3])], 1)
    assert len(draft.tokens) == 1


@pytest.mark.parametrize(("ours", "targets"), [(4, 8), (8, 4), (6, 6), (5, 6), (6, 5)])
def test_laws_have_the_width_of_the_target_and_sum_to_one(
    ours: int, targets: int, propose: Propose
) -> None:
    for start in range(min(ours, targets)):
        model = Watched(ours)
        [draft] = propose(drafter_for(model, targets), [History([start])], 4, SAMPLING)
        assert draft.q is not None
        assert draft.q.shape == (4, targets)
        assert (draft.q >= 0).all()
        torch.testing.assert_close(draft.q.sum(-1), torch.ones(4, dtype=torch.float64))
        assert (draft.q[:, ours:] == 0).all()
        assert all(token < min(ours, targets) for token in draft.tokens)


def test_a_larger_vocabulary_is_cut_before_the_policy_sees_it(propose: Propose) -> None:
    model = Watched(8)
    policy = SamplingPolicy(temperature=1.0, top_k=2)
    [draft] = propose(drafter_for(model, 4), [History([1])], 1, policy)
    assert draft.q is not None
    assert torch.equal(draft.q, policy.probs(model.law([1])[None, :4], History([1])))
    assert int((draft.q > 0).sum()) == 2


def test_greedy_drafts_stay_inside_a_smaller_target(propose: Propose) -> None:
    model = ToyModel(lambda prefix: torch.tensor([0.0, 1.0, 0.5, 9.0, 8.0]), 5)
    [draft] = propose(drafter_for(model, 3), [History([0])], 3)
    assert draft == Draft([1, 1, 1], None, 3)


# A drafter can move the speed only: what it cannot do, it leaves to the target


def test_a_policy_that_leaves_a_smaller_drafter_no_token_gives_an_empty_draft(
    propose: Propose,
) -> None:
    policy = SamplingPolicy(banned_tokens=(0, 1, 2, 3))
    [draft] = propose(drafter_for(Watched(4), 8), [History([1])], 2, policy)
    assert draft == Draft([], None)


def test_processors_see_rows_of_the_targets_width(propose: Propose) -> None:
    def ban_7(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 7] = -torch.inf
        return scores

    policy = SamplingPolicy(temperature=1.0, processors=(ban_7,))
    [draft] = propose(drafter_for(Watched(4), 8), [History([1])], 2, policy)
    assert len(draft.tokens) == 2


def force_7(input_ids: Tensor, scores: Tensor) -> Tensor:
    forced = torch.full_like(scores, -torch.inf)
    forced[:, 7] = 0.0
    return forced


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_smaller_drafter_is_never_fed_an_id_that_it_does_not_have(
    temperature: float, propose: Propose
) -> None:
    model = Watched(4)
    policy = SamplingPolicy(temperature=temperature, processors=(force_7,))
    propose(drafter_for(model, 8), [History([1])], 3, policy)
    assert all(token < 4 for feeds in model.passes for tokens in feeds for token in tokens)


def test_a_draft_ends_where_the_policy_leaves_a_smaller_drafter_no_token(propose: Propose) -> None:
    def only_7_after_three(input_ids: Tensor, scores: Tensor) -> Tensor:
        return force_none(scores) if input_ids.shape[1] >= 3 else scores

    def force_none(scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 7] = scores[:, 7]
        return forced

    model = Watched(4)
    for temperature in (0.0, 1.0):
        policy = SamplingPolicy(temperature=temperature, processors=(only_7_after_three,))
        free = SamplingPolicy(temperature=temperature)
        histories = [History([1]), History([2])]
        drafts = drafter_for(model, 8).propose(
            histories, [5, 5], [policy, free], [RoundNoise(0, 1), RoundNoise(1, 1)]
        )
        assert [len(draft.tokens) for draft in drafts] == [2, 5]
        assert all(draft.q is None or draft.q.shape[0] == len(draft.tokens) for draft in drafts)


# The law a token was drawn from


class Witness(RoundNoise):
    """Notes every row that a draft was drawn from."""

    def __init__(self, seed: int, origin: int) -> None:
        super().__init__(seed, origin)
        self.drawn: list[tuple[int, Tensor, int]] = []

    def draft(self, offset: int, q: Tensor) -> int:
        token = super().draft(offset, q)
        self.drawn.append((offset, q.clone(), token))
        return token


PENALISED = SamplingPolicy(
    temperature=0.8,
    top_k=4,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    min_new_tokens=3,
    logit_bias={5: 1.0},
)


@pytest.mark.parametrize("policy", [SAMPLING, PENALISED, SamplingPolicy(temperature=1.0)])
@pytest.mark.parametrize("seed", range(5))
def test_q_is_the_processed_law_that_each_token_was_drawn_from(
    policy: SamplingPolicy, seed: int
) -> None:
    model, history = Watched(), History([2, 4], frozenset({0}))
    history.tokens += [1]
    noise = Witness(seed, 3)
    [draft] = drafter_for(model).propose([history], [4], [policy], [noise])
    assert draft.q is not None
    assert [offset for offset, _, _ in noise.drawn] == [0, 1, 2, 3]
    assert [token for _, _, token in noise.drawn] == draft.tokens
    assert torch.equal(torch.stack([row for _, row, _ in noise.drawn]), draft.q)
    for i, row in enumerate(draft.q):
        logits = model.law([*history.tokens, *draft.tokens[:i]])
        wanted = policy.probs(logits[None], history, draft.tokens[:i])[0]
        assert torch.equal(row, wanted)
        assert row[draft.tokens[i]] > 0


def test_q_of_a_padded_vocabulary_is_the_law_that_was_drawn_from() -> None:
    noise = Witness(3, 1)
    [draft] = drafter_for(Watched(4), 7).propose([History([1])], [3], [SAMPLING], [noise])
    assert draft.q is not None
    assert torch.equal(torch.stack([row for _, row, _ in noise.drawn])[:, :4], draft.q[:, :4])


def test_a_greedy_draft_is_a_chain_of_argmax_tokens_with_point_masses(propose: Propose) -> None:
    model, history = Watched(), History([1, 2])
    [draft] = propose(drafter_for(model), [history], 5)
    assert draft.q is None
    wanted: list[int] = []
    for _ in range(5):
        wanted.append(int(model.law([*history.tokens, *wanted]).argmax()))
    assert draft.tokens == wanted
    assert all(type(token) is int for token in draft.tokens)


def test_a_greedy_draft_follows_the_policy(propose: Propose) -> None:
    model = ToyModel(lambda prefix: torch.tensor([0.0, 3.0, 2.0]), 3)
    policy = SamplingPolicy(presence_penalty=1.5)
    [draft] = propose(drafter_for(model), [History([1])], 3, policy)
    assert draft.tokens == [1, 2, 1]


def test_a_greedy_draft_uses_no_noise() -> None:
    noise = Witness(0, 1)
    drafter_for(Watched()).propose([History([1])], [3], [SamplingPolicy()], [noise])
    assert noise.drawn == []


def test_a_coupled_draft_uses_the_noise_shared_with_the_target() -> None:
    noise = RoundNoise(5, 1, coupled=True)
    [draft] = drafter_for(Watched()).propose([History([1])], [4], [SAMPLING], [noise])
    assert draft.q is not None
    assert draft.tokens == [noise.token(i, row) for i, row in enumerate(draft.q)]


@pytest.mark.parametrize(
    "policy",
    [
        SamplingPolicy(),
        SamplingPolicy(temperature=1.0),
        SamplingPolicy(temperature=0.7, top_p=0.5),
        SamplingPolicy(temperature=0.1),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_as_sure_as_the_model_is_of_its_likeliest_token_whatever_the_policy(
    policy: SamplingPolicy, seed: int
) -> None:
    model, history = Watched(), History([2, 4])
    heard: list[list[float]] = []

    def go_on(confidences: Sequence[float], *_: object) -> bool:
        heard.append(list(confidences))
        return True

    [draft] = drafter_for(model, 7).propose(
        [history], [4], [policy], [Witness(seed, 3)], [cast(GoOn, go_on)]
    )
    prefixes = [[*history.tokens, *draft.tokens[:i]] for i in range(3)]
    wanted = [float(model.law(prefix).softmax(-1).max()) for prefix in prefixes]
    assert heard[-1] == pytest.approx(wanted)


# Several requests at once


def test_one_pass_per_token_serves_all_requests(propose: Propose) -> None:
    model = Watched()
    histories = [History([1, 2]), History([3]), History([4, 5, 0]), History([1])]
    drafts = propose(drafter_for(model), histories, [1, 4, 2, 4], SAMPLING)
    assert [len(draft.tokens) for draft in drafts] == [1, 4, 2, 4]
    assert [len(feeds) for feeds in model.passes] == [4, 3, 2, 2]


def test_a_request_drafts_in_a_batch_as_it_does_alone() -> None:
    histories = [History([1, 2]), History([3]), History([4, 5, 0]), History([1])]
    gammas = [2, 5, 3, 1]
    policies = [SAMPLING, SamplingPolicy(), PENALISED, SamplingPolicy(temperature=2.0)]
    noise = [RoundNoise(10 + i, len(history)) for i, history in enumerate(histories)]
    together = drafter_for(Watched(5), 6).propose(histories, gammas, policies, noise)
    for i, draft in enumerate(together):
        [alone] = drafter_for(Watched(5), 6).propose(
            [histories[i]], [gammas[i]], [policies[i]], [noise[i]]
        )
        assert draft.tokens == alone.tokens
        assert (draft.q is None) == (alone.q is None)
        assert draft.q is None or torch.equal(draft.q, alone.q)


def test_requests_that_join_and_leave_keep_their_own_caches(propose: Propose) -> None:
    model = Watched()
    drafter = drafter_for(model)
    first, second = History([1, 2]), History([1, 2])
    drafts = propose(drafter, [first], 3)
    commit(drafter, first, drafts[0], 1, 5)
    drafts = propose(drafter, [second, first], [2, 3])
    for history, draft in zip([second, first], drafts, strict=True):
        [fresh] = propose(drafter_for(Watched()), [History(history.tokens)], len(draft.tokens))
        assert draft == fresh
    assert len(model.started) == 2


def test_no_request_means_no_pass(propose: Propose) -> None:
    model = Watched()
    assert propose(drafter_for(model), [], []) == []
    assert model.passes == []


def test_it_is_called_as_its_model_and_runs_it() -> None:
    model = Watched()
    drafter = drafter_for(model)
    assert drafter.name == "watched"
    assert drafter.model is model
