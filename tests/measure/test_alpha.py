"""alpha along target-generated text: exact on toys, in agreement with counted rounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from exact.exhaustive import ExhaustiveNoise, Walk
from outrider import theory
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter, fit_ngrams
from outrider.errors import NumericalError, UsageError
from outrider.measure.alpha import (
    Betas,
    RandomDrafter,
    alpha_row,
    fitted_drafters,
    match_probabilities,
    text_betas,
)
from outrider.measure.rounds import block_gain, count_rounds, expected_accepted
from outrider.measure.texts import Question, Text, choose_questions, next_texts
from outrider.models.toy import Law, ToyModel, hashed_law, mixed_law
from outrider.requests import Request
from outrider.sampling import History, SamplingPolicy
from outrider.verification import RULES, Draft, block, rejection

V = 5
TARGET_LAW = hashed_law(V, seed=1, sharpness=1.5)
NEAR_LAW = mixed_law(TARGET_LAW, hashed_law(V, seed=2, sharpness=1.5), 0.4)
TARGET = ToyModel(TARGET_LAW, V)
SAMPLED = SamplingPolicy(temperature=1.0)
TEXT = Text(0, (1, 2, 0), tuple(np.random.default_rng(0).integers(0, V, 150).tolist()))


def near(law: Law = NEAR_LAW, **settings: int) -> ModelDrafter:
    return ModelDrafter(ToyModel(law, V, **settings), target_vocab_size=V)


def softmax(logits: torch.Tensor) -> list[float]:
    return logits.softmax(-1).tolist()


def exact_betas(p_law: Law, q_law: Law, text: Text = TEXT) -> list[float]:
    """beta at every position, from the laws and the paper's formula."""
    prefixes = [[*text.prompt, *text.tokens[:i]] for i in range(len(text.tokens))]
    return [theory.beta(softmax(p_law(x)), softmax(q_law(x))) for x in prefixes]


def measured_betas(drafter: object, policy: SamplingPolicy = SAMPLED, text: Text = TEXT) -> Betas:
    return text_betas(TARGET, {"it": drafter}, text, policy)["it"]  # type: ignore[dict-item]


# --- One text ---


def test_beta_of_a_drafting_model_is_the_papers_at_every_position() -> None:
    found = measured_betas(near())
    assert found.beta == pytest.approx(exact_betas(TARGET_LAW, NEAR_LAW), abs=1e-12)


def test_alpha_is_their_exact_mean() -> None:
    row = alpha_row([TEXT], [measured_betas(near())])
    exact = exact_betas(TARGET_LAW, NEAR_LAW)
    assert row["alpha"] == pytest.approx(np.mean(exact), abs=1e-12)
    assert row["num_tokens"] == 150
    assert row["survival"][0] == row["alpha"]
    assert row["survival"][1] == pytest.approx(np.mean(np.multiply(exact[:-1], exact[1:])))
    assert row["conditional"][1] == pytest.approx(row["survival"][1] / row["survival"][0])
    assert sum(row["beta_histogram"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda prefix: NEAR_LAW(prefix[:-1]),
        lambda prefix: NEAR_LAW([*prefix, 0]),
        TARGET_LAW,
    ],
    ids=["one position late", "one position early", "p taken for q"],
)
def test_a_wrong_q_is_caught_by_the_exact_mean(wrong: Law) -> None:
    row = alpha_row([TEXT], [measured_betas(near(wrong))])
    exact = np.mean(exact_betas(TARGET_LAW, NEAR_LAW))
    assert abs(row["alpha"] - exact) > 0.005


def test_both_laws_go_through_the_policy_with_the_history_of_their_position() -> None:
    policy = SamplingPolicy(
        temperature=0.8, top_k=4, frequency_penalty=0.7, repetition_penalty=1.3, min_new_tokens=70
    )
    ends = ToyModel(TARGET_LAW, V, eos_ids=frozenset({3}))

    def processed(law: Law, offset: int) -> list[float]:
        """The policy's law, in this test's own words."""
        prefix = [*TEXT.prompt, *TEXT.tokens[:offset]]
        scores = law(prefix).tolist()
        for x in set(prefix):
            scores[x] = scores[x] / 1.3 if scores[x] > 0 else scores[x] * 1.3
        scores = [s - 0.7 * TEXT.tokens[:offset].count(x) for x, s in enumerate(scores)]
        if offset < 70:
            scores[3] = -math.inf
        top = sorted(scores)[-4]
        weights = [math.exp((s - max(scores)) / 0.8) if s >= top else 0.0 for s in scores]
        return [w / sum(weights) for w in weights]

    found = text_betas(ends, {"near": near()}, TEXT, policy)["near"].beta
    exact = [theory.beta(processed(TARGET_LAW, i), processed(NEAR_LAW, i)) for i in range(150)]
    assert found == pytest.approx(exact, abs=1e-9)


def test_the_beta_of_a_point_mass_is_p_of_its_token() -> None:
    table = fit_ngrams([TEXT.tokens], order=2, vocab_size=V)
    found = measured_betas(NgramDrafter(table))
    for i, beta in enumerate(found.beta):
        prefix = [*TEXT.prompt, *TEXT.tokens[:i]]
        token = table.best(prefix)
        assert token is not None
        assert beta == pytest.approx(softmax(TARGET_LAW(prefix))[token])
    assert found.match == pytest.approx(sum(b for b in found.beta if b is not None))


def test_lookup_reads_the_true_text_and_is_none_where_it_has_no_match() -> None:
    text = Text(0, (0, 1, 2, 3, 0, 1), (2, 3, 4, 4))
    found = measured_betas(LookupDrafter(), text=text)
    laws = [softmax(TARGET_LAW([*text.prompt, *text.tokens[:i]])) for i in range(4)]
    # After 0 1 came 2; after 0 1 2 came 3; after 3 came 0; 4 was never seen.
    assert found.beta == (
        pytest.approx(laws[0][2]),
        pytest.approx(laws[1][3]),
        pytest.approx(laws[2][0]),
        None,
    )


def test_where_nothing_is_drafted_beta_is_0_and_alpha_drafted_leaves_it_out() -> None:
    row = alpha_row([TEXT], [Betas((0.5, None, 1.0, None), 1.5)])
    assert row["alpha"] == 0.375
    assert row["alpha_drafted"]["value"] == 0.75
    assert row["survival"][:2] == [0.375, 0.0]
    nothing = alpha_row([TEXT], [Betas((None, None), 0.0)])
    assert (nothing["alpha"], nothing["alpha_drafted"]) == (0.0, None)


def test_random_drafts_have_the_uniform_law_whatever_the_policy() -> None:
    beta = [sum(min(p, 1 / V) for p in softmax(TARGET_LAW(TEXT.prompt)))]
    assert measured_betas(RandomDrafter(V)).beta[:1] == pytest.approx(beta)
    greedy = measured_betas(RandomDrafter(V), SamplingPolicy())
    assert greedy.beta == pytest.approx([1 / V] * 150)
    assert greedy.match == pytest.approx(150 / V)


def test_under_a_greedy_policy_beta_says_whether_both_agree() -> None:
    found = measured_betas(near(), SamplingPolicy())
    prefixes = [[*TEXT.prompt, *TEXT.tokens[:i]] for i in range(150)]
    agree = [float(TARGET_LAW(x).argmax() == NEAR_LAW(x).argmax()) for x in prefixes]
    assert list(found.beta) == agree
    assert found.match == sum(agree)


def test_a_drafting_model_drafts_nothing_beyond_its_context() -> None:
    found = measured_betas(near(context_length=100))
    exact = exact_betas(TARGET_LAW, NEAR_LAW)
    # Position 98 has a prefix of 3 + 97 = 100 tokens, the last that fits.
    assert found.beta[:98] == pytest.approx(exact[:98])
    assert set(found.beta[98:]) == {None}


def test_a_drafting_model_drafts_nothing_behind_an_id_it_does_not_have() -> None:
    small = ToyModel(hashed_law(4, seed=2), 4)
    text = Text(0, (1, 2), (0, 3, 1, 4, 2, 2))
    found = measured_betas(ModelDrafter(small, target_vocab_size=V), text=text)
    assert [beta is None for beta in found.beta] == [False] * 4 + [True] * 2


def test_a_drafter_that_goes_mad_drafts_nothing_and_a_target_is_an_error() -> None:
    def sick(prefix: Sequence[int]) -> torch.Tensor:
        return NEAR_LAW(prefix) * (math.nan if len(prefix) == 10 else 1.0)

    found = measured_betas(near(sick))
    assert [i for i, beta in enumerate(found.beta) if beta is None] == [7]
    with pytest.raises(NumericalError):
        text_betas(ToyModel(sick, V), {"near": near()}, TEXT, SAMPLED)


def test_every_drafter_is_read_in_one_go_and_nothing_is_left_open() -> None:
    drafter, lookup = near(), LookupDrafter()
    found = text_betas(TARGET, {"near": drafter, "lookup": lookup}, TEXT, SAMPLED)
    assert found["near"].beta == measured_betas(near()).beta
    assert found["lookup"].beta == measured_betas(LookupDrafter()).beta
    assert not lookup._indexes
    assert not drafter._cached


def test_match_probabilities_are_those_of_the_theory() -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(40, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    p[:20][p[:20] < 0.4] = 0.0
    q[10:30][q[10:30] < 0.4] = 0.0
    q[30] = 0.0
    q[30, 2] = 1.0
    p[31], q[31] = torch.eye(7, dtype=torch.float64)[:2]
    q[32] = p[32]
    p, q = (rows / rows.sum(-1, keepdim=True) for rows in (p, q))
    found = match_probabilities(p, q).tolist()
    exact = [
        theory.gumbel_match_probability(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True)
    ]
    assert found == pytest.approx(exact, abs=1e-12)
    assert match_probabilities(p[:1], torch.zeros(1, 7).double()).tolist() == [0.0]


# --- Rules ---


def drafts_of(p_law: Law, q_law: Law, gamma: int) -> list[tuple[float, torch.Tensor, Draft]]:
    """Every draft after the prompt (0, 1), with its probability, p and q."""
    found = []
    for tokens in itertools.product(range(3), repeat=gamma):
        prefixes = [[0, 1, *tokens[:i]] for i in range(gamma + 1)]
        p = torch.stack([p_law(x).softmax(-1) for x in prefixes])
        q = torch.stack([q_law(x).softmax(-1) for x in prefixes[:-1]])
        chance = math.prod(float(row[x]) for row, x in zip(q, tokens, strict=True))
        found.append((chance, p, Draft(list(tokens), q)))
    return found


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_expected_acceptance_is_what_enumerating_the_rule_gives(name: str) -> None:
    target, drafter = (hashed_law(3, seed=seed, order=3) for seed in (1, 2))
    for _, p, draft in drafts_of(target, drafter, 3):
        total, script = 0.0, [0]
        while script:
            walk = Walk([*script])
            verdict = RULES[name](p, draft, ExhaustiveNoise(walk, 2))
            total += walk.weight * verdict.accepted
            script = [branch for branch, _ in walk.taken]
            sizes = [size for _, size in walk.taken]
            while script and script[-1] == sizes[len(script) - 1] - 1:
                script.pop()
            if script:
                script[-1] += 1
        assert expected_accepted(RULES[name], p, draft) == pytest.approx(total, abs=1e-12)


def test_block_is_never_below_rejection_in_expectation_over_drafts_and_above_it_here() -> None:
    target, drafter = (hashed_law(3, seed=seed, order=3) for seed in (1, 2))
    expected = [
        sum(
            chance * expected_accepted(rule, p, d) for chance, p, d in drafts_of(target, drafter, 3)
        )
        for rule in (rejection, block)
    ]
    assert expected[1] > expected[0] + 0.01


def test_the_rules_agree_on_point_masses() -> None:
    p = torch.rand(4, V, generator=torch.Generator().manual_seed(1)).double()
    p /= p.sum(-1, keepdim=True)
    draft = Draft([2, 0, 4])
    kept = [float(p[i, x]) for i, x in enumerate(draft.tokens)]
    exact = kept[0] + kept[0] * kept[1] + kept[0] * kept[1] * kept[2]
    for rule in (rejection, block):
        assert expected_accepted(rule, p, draft) == pytest.approx(exact, abs=1e-12)


def test_the_gain_of_block_is_counted_over_the_drafters_own_drafts() -> None:
    texts = [replace(TEXT, place=k) for k in range(2)]
    found = block_gain(TARGET, near(), texts, SAMPLED, gamma=4, num_drafts=300)
    assert found is not None
    assert found.num_drafts == 300
    assert found.factor > 1.01
    assert found.rejection > 1.0
    assert block_gain(TARGET, near(), texts, SamplingPolicy(), gamma=4, num_drafts=9) is None
    assert block_gain(TARGET, LookupDrafter(), texts, SAMPLED, gamma=4, num_drafts=9) is None


def test_copies_among_the_drafts_count_for_both_rules() -> None:
    class EverySecondCopied:
        """A drafter like `lookup+MODEL`: whole drafts are copies, others have laws."""

        model = None
        name = "mixed"

        def __init__(self) -> None:
            self.inner, self.turn = near(), 0

        def propose(self, sequences: Sequence[History], *rest: object) -> list[Draft]:
            self.turn += 1
            [draft] = self.inner.propose(sequences, *rest)  # type: ignore[arg-type]
            return [Draft(draft.tokens) if self.turn % 2 else draft]

        def release(self, sequence: History) -> None:
            self.inner.release(sequence)

    mixed = block_gain(TARGET, EverySecondCopied(), [TEXT], SAMPLED, gamma=4, num_drafts=200)  # type: ignore[arg-type]
    whole = block_gain(TARGET, near(), [TEXT], SAMPLED, gamma=4, num_drafts=200)
    assert mixed is not None
    assert whole is not None
    assert mixed.num_drafts == whole.num_drafts
    assert 1.0 + (whole.factor - 1.0) / 4 < mixed.factor < whole.factor


def test_rules_are_compared_after_prefixes_of_the_text_as_decoding_would_have_them() -> None:
    seen = []

    class Watched(RandomDrafter):
        def propose(self, sequences: Sequence[History], *rest: object) -> list[Draft]:
            seen.extend((history.prompt_length, tuple(history.tokens)) for history in sequences)
            return super().propose(sequences, *rest)  # type: ignore[arg-type]

    texts = [Text(0, (1, 2), (0, 1)), Text(1, (3,), (4,))]
    block_gain(TARGET, Watched(V), texts, SAMPLED, gamma=2, num_drafts=3)
    assert seen == [(2, (1, 2)), (2, (1, 2, 0)), (1, (3,))]


def test_with_one_drafted_token_the_rules_agree_and_accept_alpha_of_the_drafts() -> None:
    found = block_gain(TARGET, near(), [TEXT], SAMPLED, gamma=1, num_drafts=150)
    assert found is not None
    assert found.factor == pytest.approx(1.0, abs=1e-12)
    alpha = float(np.mean(exact_betas(TARGET_LAW, NEAR_LAW)))
    assert found.rejection == pytest.approx(1.0 + alpha, abs=0.08)


def test_drafts_at_the_contexts_end_are_shorter() -> None:
    short = ToyModel(TARGET_LAW, V, context_length=5)
    text = Text(0, (1, 2), (0, 1, 2))
    found = block_gain(short, near(), [text], SAMPLED, gamma=4, num_drafts=3)
    assert found is not None
    assert found.num_drafts == 3
    assert found.rejection <= 1 + (3 + 2 + 1) / 3


# --- Texts, and rounds ---

QUESTIONS = [Question(k, (k % V, (k * k + 1) % V, 2)) for k in range(12)]


def written(policy: SamplingPolicy, num_tokens: int, model: ToyModel = TARGET) -> list[list[Text]]:
    batches: list[list[Text]] = []
    while batch := next_texts(model, QUESTIONS, policy, num_tokens, batches):
        batches.append(batch)
    return batches


def test_texts_are_plain_outputs_of_their_seed_and_enough_of_them() -> None:
    from outrider.decoding import Engine

    batches = written(SAMPLED, 600)
    texts = [text for batch in batches for text in batch]
    assert [text.place for text in texts] == list(range(12))
    assert sum(len(text.tokens) for text in texts) >= 600
    request = Request(QUESTIONS[9].ids, SAMPLED, max_new_tokens=5, gamma=0, seed=9)
    [alone] = Engine(TARGET).generate([request])
    assert texts[9].tokens[:5] == tuple(alone.token_ids)
    assert all(Text.from_dict(text.as_dict()) == text for text in texts)


def test_when_prompts_run_out_sampled_texts_go_on_and_greedy_ones_do_not() -> None:
    ending = ToyModel(TARGET_LAW, V, eos_ids=frozenset({3}))
    greedy = [text for batch in written(SamplingPolicy(), 10**6, ending) for text in batch]
    ended = [text for text in greedy if text.tokens[-1] == 3]
    assert len(greedy) == 12
    assert ended
    sampled = [text for batch in written(SAMPLED, 400, ending) for text in batch]
    assert len(sampled) > 12
    assert sampled[0].prompt == sampled[12].prompt
    assert sampled[0].tokens != sampled[12].tokens
    assert sum(len(text.tokens) for text in sampled) >= 400


def test_n_grams_are_counted_in_texts_of_other_prompts() -> None:
    measured, fitted = choose_questions(QUESTIONS, 10_000, fitting=True)
    assert not set(measured) & set(fitted)
    assert len(measured) + len(fitted) == 12
    assert choose_questions(QUESTIONS, 10_000, fitting=False) == (QUESTIONS, [])
    two, one = choose_questions(QUESTIONS[:2], 10, fitting=True)
    assert (two, one) == (QUESTIONS[:1], QUESTIONS[1:2])
    with pytest.raises(UsageError, match="only one prompt"):
        choose_questions(QUESTIONS[:1], 10, fitting=True)


def test_few_tokens_are_spread_over_few_prompts() -> None:
    many = [Question(k, (1, 2)) for k in range(60)]
    assert len(choose_questions(many, 600, fitting=True)[0]) == 12
    assert len(choose_questions(many, 10, fitting=True)[0]) == 8
    assert len(choose_questions(many, 10_000, fitting=True)[0]) == 45


def test_unigram_and_bigram_are_those_of_the_texts_given() -> None:
    drafters = fitted_drafters(["bigram", "unigram"], [Text(0, (4, 4, 4), (1, 2, 1, 2, 1))], TARGET)
    text = Text(1, (1,), (2, 0))
    laws = [softmax(TARGET_LAW([1, *text.tokens[:i]])) for i in range(2)]
    found = text_betas(TARGET, drafters, text, SAMPLED)
    assert found["unigram"].beta == pytest.approx([laws[0][1], laws[1][1]])
    assert found["bigram"].beta == pytest.approx([laws[0][2], laws[1][1]])
    assert list(fitted_drafters(["lookup"], [text], TARGET)) == []


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return [text for batch in written(SAMPLED, 1200) for text in batch]


def test_alpha_agrees_with_rounds_counted_under_rejection(texts: list[Text]) -> None:
    row = alpha_row(texts, [measured_betas(near(), text=text) for text in texts])
    rounds = count_rounds(
        TARGET, near(), texts, SAMPLED, gamma=3, alpha_drafted=row["alpha_drafted"]
    )
    assert set(rounds) == {"rejection", "block", "coupled", "agrees"}
    assert rounds["agrees"] is True
    alpha_hat = rounds["rejection"]["alpha_hat"]
    assert alpha_hat["low"] <= row["alpha"] <= alpha_hat["high"]
    assert alpha_hat["high"] - alpha_hat["low"] < 0.15  # narrow enough to say something
    assert rounds["block"]["tokens_per_call"]["value"] > 1.5
    assert row["match"] < row["alpha"]


def test_rounds_that_do_not_agree_are_told(texts: list[Text]) -> None:
    wrong = {"low": 0.1, "high": 0.2}
    rounds = count_rounds(TARGET, near(), texts[:2], SAMPLED, gamma=3, alpha_drafted=wrong)
    assert rounds["agrees"] is False


def test_under_a_greedy_policy_one_rule_is_counted(texts: list[Text]) -> None:
    rounds = count_rounds(TARGET, near(), texts[:2], SamplingPolicy(), gamma=3, alpha_drafted=None)
    assert set(rounds) == {"rejection"}
    assert sum(rounds["rejection"]["accepted_counts"]) == rounds["rejection"]["num_rounds"]


def test_texts_of_one_prompt_are_one_unit_of_the_interval() -> None:
    same = [replace(TEXT, place=0, tokens=(1, 2))] * 16
    betas = [Betas((0.2 + 0.05 * k, 0.3 + 0.02 * k), 0.0) for k in range(16)]
    apart = [replace(text, place=k) for k, text in enumerate(same)]
    assert alpha_row(same, betas)["num_prompts"] == 1
    row = alpha_row(apart, betas)
    assert row["num_prompts"] == 16
    assert row["low"] < row["alpha"] < row["high"]
