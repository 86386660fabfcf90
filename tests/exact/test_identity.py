"""Level 3: greedy and coupled text equals plain decoding, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from exact.blocks import BlockModel
from exact.controls import WRONG_RULES
from exact.drafters import HostileDrafter, SoftGreedyDrafter, StoppingDrafter, UniformDrafter
from outrider import decoding, verification
from outrider.costs import Costs
from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter, fit_ngrams
from outrider.models import Feed, Prompt
from outrider.models.toy import ToyModel, hashed_law, mixed_law
from outrider.models.trimmed import TrimmedModel, Vocabulary
from outrider.requests import Request
from outrider.sampling import SamplingPolicy
from outrider.verification import Draft, Verdict, greedy

SIZE = 40
EOS = frozenset({0})
TARGET_LAW = hashed_law(SIZE, seed=31, order=2, sharpness=2.0)
NEAR_LAW = mixed_law(TARGET_LAW, hashed_law(SIZE, seed=32, order=2, sharpness=2.0), 0.25)
PROMPT = [1, 2, 3, 4, 1, 2, 3]


def target() -> ToyModel:
    return ToyModel(TARGET_LAW, SIZE, eos_ids=EOS)


def model_drafter(context_length: int = 4096) -> ModelDrafter:
    return ModelDrafter(
        ToyModel(NEAR_LAW, SIZE, context_length=context_length), target_vocab_size=SIZE
    )


def trimmed() -> TrimmedModel:
    """Knows every second id, and reads the others as the one before."""
    kept = torch.arange(0, SIZE, 2)
    read_as = torch.arange(SIZE) // 2
    law = hashed_law(len(kept), seed=33, order=2, sharpness=2.0)
    return TrimmedModel(ToyModel(law, len(kept)), Vocabulary(kept, read_as, ""))


def fitted() -> NgramDrafter:
    texts = [plain(Request(PROMPT, max_new_tokens=60)).token_ids]
    return NgramDrafter(fit_ngrams(texts, order=3, vocab_size=SIZE))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "near model": model_drafter,
    "short context": lambda: model_drafter(20),
    "itself": lambda: ModelDrafter(target(), target_vocab_size=SIZE),
    "trimmed": lambda: ModelDrafter(trimmed(), target_vocab_size=SIZE),
    "lookup": LookupDrafter,
    "lookup first": lambda: LookupFirst(model_drafter(), min_match=2),
    "ngram": fitted,
    "uniform": lambda: UniformDrafter(SIZE),
    "hostile": lambda: HostileDrafter(SIZE, TARGET_LAW),
    "stopping": lambda: StoppingDrafter(SIZE, NEAR_LAW),
}
GREEDY = SamplingPolicy()
PENALISED = SamplingPolicy(
    repetition_penalty=1.3, frequency_penalty=0.5, min_new_tokens=6, logit_bias={5: 2.0}
)
SAMPLED = SamplingPolicy(temperature=1.0, top_p=0.9, presence_penalty=0.3)


def plain(request: Request):  # type: ignore[no-untyped-def]
    return Engine(target()).generate([request])[0]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8, 20, 64, None])
@pytest.mark.parametrize("rule", verification.RULES)
def test_greedy_text_is_that_of_plain_decoding(rule: str, gamma: int | None, drafter: str) -> None:
    for policy in (GREEDY, PENALISED):
        request = Request(PROMPT, policy, max_new_tokens=40, gamma=gamma, rule=rule)
        [result] = Engine(target(), DRAFTERS[drafter]()).generate([request])
        assert result.token_ids == plain(request).token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, 3, 8, 64, None])
def test_coupled_text_is_that_of_plain_decoding(gamma: int | None, drafter: str) -> None:
    for seed in range(5):
        request = Request(
            PROMPT, SAMPLED, max_new_tokens=40, gamma=gamma, rule="coupled", seed=seed
        )
        [result] = Engine(target(), DRAFTERS[drafter]()).generate([request])
        assert result.token_ids == plain(request).token_ids


def random_request(random: np.random.Generator) -> Request:
    policies = (GREEDY, PENALISED, SAMPLED, SamplingPolicy(temperature=1.5, top_k=10))
    return Request(
        random.integers(1, SIZE, size=random.integers(1, 12)).tolist(),
        policies[random.integers(len(policies))],
        max_new_tokens=int(random.integers(1, 30)),
        gamma=int(random.integers(0, 9)) if random.integers(2) else None,
        rule=str(random.choice(list(verification.RULES))),
        seed=int(random.integers(2**63)),
        ignore_eos=bool(random.integers(2)),
        logprobs=2 if random.integers(2) else None,
    )


@pytest.mark.parametrize(
    "drafter", ["near model", "lookup", "lookup first", "trimmed", "uniform", "short context"]
)
def test_a_request_does_not_depend_on_its_neighbours(drafter: str) -> None:
    random = np.random.default_rng(7)
    requests = [random_request(random) for _ in range(24)]
    alone = [Engine(target(), DRAFTERS[drafter]()).generate([item])[0] for item in requests]
    for max_batch in (2, 7, 24):
        engine = Engine(target(), DRAFTERS[drafter](), max_batch=max_batch)
        together = engine.generate(requests)
        for request, one, other in zip(requests, alone, together, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            # Where the text does not depend on them, adaptive lengths may depend on the batch.
            if request.gamma is not None or not (
                request.policy.is_greedy or request.rule == "coupled"
            ):
                assert one.trace == other.trace
            assert one.finish_reason == other.finish_reason


def test_lengths_that_depend_on_the_batch_would_change_sampled_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why they must not, where another length is another draw."""
    requests = [Request(PROMPT, SAMPLED, max_new_tokens=40, seed=seed) for seed in range(8)]
    # A pass that costs more with every position: eight requests draft less than one.
    steep = Costs((1, 8, 33), (1.0, 1.2, 20.0), drafter_ms=0.05)

    def texts(max_batch: int) -> list[list[int]]:
        engine = Engine(target(), model_drafter(), max_batch=max_batch, costs=steep)
        return [result.token_ids for result in engine.generate(requests)]

    assert texts(8) == texts(1)
    monkeypatch.setattr(decoding._Active, "is_free_of_lengths", True)
    assert texts(8) != texts(1)


def test_in_a_batch_greedy_requests_draft_less_and_their_text_stays() -> None:
    requests = [Request(PROMPT, max_new_tokens=40, ignore_eos=True)] * 8
    steep = Costs((1, 8, 33), (1.0, 1.2, 20.0), drafter_ms=0.05)

    def run(max_batch: int) -> tuple[list[list[int]], int]:
        engine = Engine(target(), model_drafter(), max_batch=max_batch, costs=steep)
        results = engine.generate(requests)
        return [r.token_ids for r in results], sum(r.stats.drafted for r in results)

    (alone, drafted_alone), (together, drafted_together) = run(1), run(8)
    assert alone == together
    assert drafted_together < 0.8 * drafted_alone


@pytest.mark.parametrize("max_batch", [1, 3, 24])
def test_passes_that_stay_wide_change_no_text(max_batch: int) -> None:
    random = np.random.default_rng(11)
    # Adaptive lengths weigh what a change costs: of sampled texts they would make another draw.
    requests = [
        item if item.gamma is not None or item.policy.is_greedy else replace(item, gamma=4)
        for item in (random_request(random) for _ in range(24))
    ]
    texts = []
    num_positions = []
    for change_ms in (0.0, 3.0):
        model = BlockModel(TARGET_LAW, SIZE, eos_ids=EOS)
        costs = Costs((1, 33), (1.0, 3.0), drafter_ms=0.1, change_ms=change_ms)
        engine = Engine(model, model_drafter(), max_batch=max_batch, costs=costs)
        texts.append([result.token_ids for result in engine.generate(requests)])
        num_positions.append(sum(map(sum, model.passes)))
    assert texts[0] == texts[1]
    assert num_positions[1] > num_positions[0]


def test_a_request_that_is_alone_has_the_passes_of_the_first() -> None:
    """A pass of another width adds in another order."""
    first = Request(PROMPT, max_new_tokens=30, gamma=8, ignore_eos=True)
    second = Request([5, 6], max_new_tokens=30, gamma=3, ignore_eos=True)
    costs = Costs((1, 33), (1.0, 1.0), change_ms=3.0)

    def passes(*requests: Request) -> list[list[int]]:
        model = BlockModel(TARGET_LAW, SIZE)
        engine = Engine(model, model_drafter(), costs=costs)
        for request in requests:
            model.passes.clear()
            engine.generate([request])
        return model.passes

    assert passes(first, second) == passes(second)


def test_a_pass_stays_as_wide_only_where_there_is_room() -> None:
    """Two sequences with a block each; one wants a block more, the other one or, if wide, two."""
    costs = Costs((1, 33), (1.0, 1.0), change_ms=3.0)
    for num_blocks, width in ((5, 6), (4, 2)):
        model = BlockModel(TARGET_LAW, SIZE, num_blocks=num_blocks)
        engine = Engine(model, costs=costs)
        tables = [model.start(Prompt([token] * 5)) for token in (1, 2)]
        model.score([Feed(table, [token] * 4, 1) for token, table in enumerate(tables, 1)])
        engine._pass_width.now(6)
        rows = engine._pass([Feed(table, [3], 1) for table in tables])
        assert len(rows) == sum(model.passes[-1]) == width


def test_requests_may_join_and_leave_between_rounds() -> None:
    random = np.random.default_rng(8)
    requests = [random_request(random) for _ in range(12)]
    alone = [Engine(target(), model_drafter()).generate([item])[0] for item in requests]
    engine = Engine(target(), model_drafter())
    waiting = list(enumerate(requests))
    ids: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    cancelled = 3
    while waiting or engine.has_work:
        for _ in range(int(random.integers(0, 3))):
            if waiting:
                number, request = waiting.pop(0)
                ids[engine.add(request)] = number
        for event in engine.step():
            texts.setdefault(ids[event.request_id], []).extend(event.token_ids)
            if ids[event.request_id] == cancelled and event.result is None:
                engine.cancel(event.request_id)
    for number, result in enumerate(alone):
        if number == cancelled:
            assert result.token_ids[: len(texts[number])] == texts[number]
        else:
            assert texts[number] == result.token_ids


def test_the_same_seed_gives_the_same_text_and_no_seed_gives_another() -> None:
    request = Request(PROMPT, SamplingPolicy(temperature=2.0), max_new_tokens=10, ignore_eos=True)
    seeded = Request(**{**request.__dict__, "seed": 42})
    engine = Engine(target(), model_drafter())
    assert engine.generate([seeded])[0].token_ids == engine.generate([seeded])[0].token_ids
    first, second = engine.generate([request, request])
    assert first.token_ids != second.token_ids
    assert first.seed != second.seed
    again = Request(**{**request.__dict__, "seed": first.seed})
    assert engine.generate([again])[0].token_ids == first.token_ids


@pytest.mark.parametrize("rule", ["block", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_drafts_for_itself_is_always_accepted(rule: str, temperature: float) -> None:
    request = Request(
        PROMPT,
        SamplingPolicy(temperature=temperature),
        max_new_tokens=60,
        rule=rule,
        gamma=4,
        ignore_eos=True,
    )
    [result] = Engine(target(), DRAFTERS["itself"]()).generate([request])
    assert result.stats.alpha_hat == 1.0
    assert result.stats.target_passes <= -(-60 // 5) + 1


@pytest.mark.parametrize(
    "name", ["accept all", "target row off by one", "bonus from q", "swapped ratio"]
)
def test_a_wrong_rule_changes_greedy_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is asked for greedy text only where the rows are wanted as well."""
    monkeypatch.setitem(verification.RULES, "wrong", WRONG_RULES[name])
    request = Request(PROMPT, max_new_tokens=40, gamma=4, rule="wrong", logprobs=0, ignore_eos=True)
    [result] = Engine(target(), model_drafter()).generate([request])
    assert result.token_ids != plain(request).token_ids


WRONG_GREEDY: dict[str, Callable[[list[int], Draft], Verdict]] = {
    "accept all": lambda choices, draft: Verdict(len(draft.tokens), choices[-1]),
    "choices off by one": lambda choices, draft: greedy([*choices[1:], choices[-1]], draft),
    "next token from the last row": lambda choices, draft: Verdict(
        greedy(choices, draft).accepted, choices[-1]
    ),
}


@pytest.mark.parametrize("name", WRONG_GREEDY)
def test_a_wrong_greedy_verdict_changes_greedy_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "greedy", WRONG_GREEDY[name])
    request = Request(PROMPT, max_new_tokens=40, gamma=4, ignore_eos=True)
    [result] = Engine(target(), model_drafter()).generate([request])
    assert result.token_ids != plain(request).token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_asking_for_logprobs_does_not_change_greedy_text(drafter: str) -> None:
    request = Request(PROMPT, max_new_tokens=40, seed=3, ignore_eos=True)
    results = [
        Engine(target(), DRAFTERS[drafter]()).generate([replace(request, logprobs=logprobs)])[0]
        for logprobs in (None, 0)
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].trace == results[1].trace


def test_a_soft_q_for_a_greedy_draft_is_harmless_only_for_greedy_targets() -> None:
    """Caught by the other levels; here it must not disturb, since one-hot rows reject by p = 0."""
    request = Request(PROMPT, max_new_tokens=40, gamma=4)
    [result] = Engine(target(), SoftGreedyDrafter(SIZE, NEAR_LAW)).generate([request])
    assert result.token_ids == plain(request).token_ids


def test_coupling_without_shared_noise_keeps_fewer_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of `coupled`: emitting the target's own draw is exact whatever was drafted, so
    what breaks without shared noise is acceptance, not the text."""
    from outrider.randomness import RoundNoise

    request = Request(
        PROMPT, SamplingPolicy(temperature=1.0), max_new_tokens=60, rule="coupled", seed=5
    )
    [shared] = Engine(target(), model_drafter()).generate([request])
    apart = RoundNoise._choose
    monkeypatch.setattr(RoundNoise, "draft", lambda self, i, q: apart(self, 1, i, q))
    [unshared] = Engine(target(), model_drafter()).generate([request])
    assert unshared.token_ids == shared.token_ids
    assert (unshared.stats.alpha_hat or 0) < 0.8 * (shared.stats.alpha_hat or 0)
