"""The loop: limits, ends, counters, streams, failures. Mostly rows of other projects' bug lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exact.drafters import TestDrafter, UniformDrafter
from outrider.decoding import Engine
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import (
    ContextOverflow,
    GenerationError,
    NothingToDraw,
    NumericalError,
    OutriderError,
    UsageError,
)
from outrider.models import CachedSequence, Feed, Prompt
from outrider.models.toy import ByteTokenizer, ToyModel, hashed_law, load_toy, mixed_law
from outrider.randomness import RoundNoise
from outrider.requests import Request, Result
from outrider.sampling import History, SamplingPolicy
from outrider.verification import RULES, Draft

SIZE = 40
LAW = hashed_law(SIZE, seed=51, order=2, sharpness=2.0)
NEAR = mixed_law(LAW, hashed_law(SIZE, seed=52, order=2, sharpness=2.0), 0.2)
PROMPT = [1, 2, 3, 1, 2]


class RecordingModel(ToyModel):
    """Notes every feed, and which sequences are open."""

    def __init__(self, law=LAW, **options):  # type: ignore[no-untyped-def]
        super().__init__(law, options.pop("vocab_size", SIZE), **options)
        self.feeds: list[list[tuple[list[int], int]]] = []
        self.opened: list[CachedSequence] = []

    def start(self, prompt: Prompt) -> CachedSequence:  # type: ignore[override]
        self.opened.append(super().start(prompt))
        return self.opened[-1]

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        self.feeds.append([(list(feed.tokens), feed.keep) for feed in feeds])
        return super().score(feeds)

    @property
    def num_open(self) -> int:
        return sum(sequence.length > 0 for sequence in self.opened)


class Script(TestDrafter):
    """Drafts what it is told, round after round."""

    def __init__(self, *drafts: list[int]) -> None:
        super().__init__(SIZE)
        self.drafts = list(drafts)

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        return Draft((self.drafts.pop(0) if self.drafts else [])[:gamma])


def near(target: ToyModel | None = None, **options: object) -> ModelDrafter:
    return ModelDrafter(ToyModel(NEAR, SIZE, **options), target_vocab_size=SIZE)  # type: ignore[arg-type]


def itself() -> ModelDrafter:
    return ModelDrafter(ToyModel(LAW, SIZE), target_vocab_size=SIZE)


def run(request: Request, drafter: object = None, target: ToyModel | None = None) -> Result:
    return Engine(target or ToyModel(LAW, SIZE), drafter).generate([request])[0]  # type: ignore[arg-type]


GREEDY_TEXT = run(Request(PROMPT, max_new_tokens=40)).token_ids


def test_exactly_the_asked_number_of_tokens_is_returned_when_every_draft_is_right() -> None:
    for limit in range(1, 8):
        result = run(Request(PROMPT, max_new_tokens=limit, gamma=4), itself())
        assert result.token_ids == GREEDY_TEXT[:limit]
        assert result.finish_reason == "length"


def test_the_text_ends_at_an_end_token_wherever_it_falls_in_a_draft() -> None:
    for index in range(7):
        eos = GREEDY_TEXT[index]
        first = GREEDY_TEXT.index(eos)
        target = ToyModel(LAW, SIZE, eos_ids=frozenset({eos}))
        result = run(Request(PROMPT, max_new_tokens=40, gamma=5), itself(), target)
        assert result.token_ids == GREEDY_TEXT[: first + 1]
        assert result.finish_reason == "eos"
        ignoring = run(
            Request(PROMPT, max_new_tokens=40, gamma=5, ignore_eos=True), itself(), target
        )
        assert ignoring.token_ids == GREEDY_TEXT


def test_a_stop_id_ends_the_text_and_is_the_last_id() -> None:
    stop = GREEDY_TEXT[2]
    first = GREEDY_TEXT.index(stop)
    request = Request(PROMPT, max_new_tokens=40, gamma=5, stop_ids=frozenset({stop}))
    result = run(request, itself())
    assert (result.token_ids, result.finish_reason) == (GREEDY_TEXT[: first + 1], "stop")


@pytest.mark.parametrize("gamma", [0, 1, 3, 8, 16])
def test_a_stop_string_cuts_ids_text_and_logprobs_at_the_same_place(gamma: int) -> None:
    target, drafter = load_toy("toy:target"), load_toy("toy:target")
    prompt = ByteTokenizer().encode("hello")
    free = Request(prompt, SamplingPolicy(banned_tokens=tuple(range(128, 256))), 40, gamma=gamma)
    whole = Engine(target).generate([free])[0]
    stop = whole.text[9:12]
    request = replace(free, stop=(stop, "never there"), logprobs=1)
    result = Engine(target, ModelDrafter(drafter, target_vocab_size=257)).generate([request])[0]
    cut = whole.text.index(stop)
    assert result.text == whole.text[:cut]
    assert result.finish_reason == "stop"
    assert result.token_ids == whole.token_ids[: cut + 3]
    assert result.logprobs is not None
    assert len(result.logprobs) == result.stats.num_tokens == len(result.token_ids)


def test_no_end_comes_before_the_minimum_number_of_tokens() -> None:
    eos = GREEDY_TEXT[1]
    target = ToyModel(LAW, SIZE, eos_ids=frozenset({eos}))
    for minimum in (3, 9):
        request = Request(PROMPT, SamplingPolicy(min_new_tokens=minimum), max_new_tokens=20)
        result = run(request, near(), target)
        assert eos not in result.token_ids[:minimum]
        assert result.token_ids == run(replace(request, gamma=0), None, target).token_ids


@pytest.mark.parametrize("context", [12, 16, 21])
def test_drafts_shrink_at_the_contexts_end_and_the_text_fills_it(context: int) -> None:
    target = RecordingModel(context_length=context)
    result = run(Request(PROMPT, max_new_tokens=100, gamma=6), itself(), target)
    assert len(PROMPT) + len(result.token_ids) == context
    assert result.finish_reason == "length"
    assert result.token_ids == GREEDY_TEXT[: context - len(PROMPT)]


def test_decoding_goes_on_without_drafts_where_the_drafters_context_ends() -> None:
    result = run(Request(PROMPT, max_new_tokens=30, gamma=4), near(context_length=12))
    assert result.token_ids == GREEDY_TEXT[:30]
    assert all(not item.drafted for item in result.trace[-5:])
    assert result.trace[0].drafted


def test_target_passes_never_exceed_those_of_plain_decoding() -> None:
    for drafter in (near(), LookupDrafter(), UniformDrafter(SIZE), Script([9] * 5, [9] * 5)):
        result = run(Request(PROMPT, max_new_tokens=30), drafter)
        assert result.stats.target_passes <= 30


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_counters_add_up_and_agree_with_the_trace(rule: str, temperature: float) -> None:
    request = Request(
        PROMPT, SamplingPolicy(temperature=temperature), 50, gamma=4, rule=rule, seed=3
    )
    result = run(request, near())
    stats, trace = result.stats, result.trace
    rejected = sum(item.accepted < len(item.drafted) for item in trace)
    assert stats.rounds == stats.target_passes == len(trace)
    assert stats.drafted == stats.drafter_steps == sum(len(item.drafted) for item in trace)
    assert stats.accepted == sum(item.accepted for item in trace)
    assert stats.examined == stats.accepted + rejected
    assert stats.emitted == stats.accepted + stats.rounds
    assert [token for item in trace for token in item.emitted] == result.token_ids
    assert stats.alpha_hat == stats.accepted / stats.examined
    assert stats.accepted_fraction == stats.accepted / stats.drafted
    assert stats.tokens_per_call == stats.emitted / stats.target_passes
    assert stats.num_tokens == len(result.token_ids)
    for item in trace:
        assert item.drafted[: item.accepted] == item.emitted[: item.accepted]


def test_acceptance_on_a_fixed_pair_stays_what_it_is() -> None:
    request = Request(PROMPT, SamplingPolicy(temperature=1.0), 400, gamma=4, rule="rejection")
    stats = [run(replace(request, seed=seed), near()).stats for seed in range(5)]
    alpha_hat = sum(item.accepted for item in stats) / sum(item.examined for item in stats)
    assert alpha_hat == pytest.approx(0.808, abs=0.02)


def test_a_long_draft_limit_is_obeyed_and_gamma_zero_never_asks_the_drafter() -> None:
    drafter = near()
    for gamma in (1, 3, 7):
        result = run(Request(PROMPT, max_new_tokens=40, gamma=gamma), drafter)
        assert max(len(item.drafted) for item in result.trace) == gamma

    class Untouchable(TestDrafter):
        def propose(self, *arguments: object) -> list[Draft]:  # type: ignore[override]
            raise AssertionError("asked for a draft")

    result = run(Request(PROMPT, max_new_tokens=10, gamma=0), Untouchable(SIZE))
    assert result.token_ids == GREEDY_TEXT[:10]
    assert result.stats.drafter_steps == result.stats.drafted == 0


def test_empty_drafts_are_plain_steps() -> None:
    result = run(Request([5, 6, 7, 8, 9, 10, 11, 7, 8], max_new_tokens=12), Script())
    assert (
        result.token_ids == run(Request([5, 6, 7, 8, 9, 10, 11, 7, 8], max_new_tokens=12)).token_ids
    )
    assert result.stats.alpha_hat is None


@pytest.mark.parametrize("length", [1, 4])
def test_a_wrong_first_draft_token_is_refused(length: int) -> None:
    wrong = [(GREEDY_TEXT[0] + 1) % SIZE] * length
    result = run(Request(PROMPT, max_new_tokens=8), Script(wrong))
    assert result.token_ids == GREEDY_TEXT[:8]
    assert result.trace[0].accepted == 0


def test_the_targets_cache_holds_all_committed_tokens_but_the_last_after_every_step() -> None:
    target = RecordingModel()
    engine = Engine(target, near())
    engine.add(Request(PROMPT, SamplingPolicy(temperature=1.0), 30, seed=1))
    num_tokens = 0
    while engine.has_work:
        [event] = engine.step()
        num_tokens += len(event.token_ids)
        if event.result is None:
            assert target.opened[0].length == len(PROMPT) + num_tokens - 1
    assert target.num_open == 0


def test_every_emitted_token_was_possible_after_the_text_before_it() -> None:
    policy = SamplingPolicy(temperature=1.5, top_k=5, repetition_penalty=1.2)
    for rule in RULES:
        result = run(Request(PROMPT, policy, 40, gamma=5, rule=rule, seed=9), near())
        history = History(PROMPT)
        for token in result.token_ids:
            row = policy.probs(LAW(history.tokens)[None], history)[0]
            assert row[token] > 0
            history.tokens.append(token)


def test_a_banned_token_never_appears_at_any_position() -> None:
    banned = GREEDY_TEXT[0]
    biased = SamplingPolicy(temperature=1.0, logit_bias={banned: -100.0})
    for policy in (SamplingPolicy(temperature=1.0, banned_tokens=(banned,)), biased):
        for seed in range(5):
            request = Request([banned] * 6, policy, 40, seed=seed)
            assert banned not in run(request, LookupDrafter(min_match=1)).token_ids


def test_opposite_frequency_penalties_give_different_texts_equal_to_plain_ones() -> None:
    texts = []
    for penalty in (-2.0, 2.0):
        request = Request(PROMPT, SamplingPolicy(frequency_penalty=penalty), 40)
        texts.append(run(request, near()).token_ids)
        assert texts[-1] == run(request).token_ids
    assert texts[0] != texts[1]


def test_a_processor_sees_the_right_prefix_of_every_emitted_token() -> None:
    seen: list[list[int]] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    request = Request(PROMPT, SamplingPolicy(processors=(watch,)), 15)
    result = run(request, near())
    assert result.token_ids == GREEDY_TEXT[:15]
    for end in range(15):
        assert [*PROMPT, *GREEDY_TEXT[:end]] in seen


@pytest.mark.parametrize("drafter", [near, LookupDrafter, lambda: UniformDrafter(SIZE)])
@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(temperature=1.0, top_k=8)])
def test_logprobs_are_those_of_plain_decoding(drafter, policy: SamplingPolicy) -> None:  # type: ignore[no-untyped-def]
    request = Request(PROMPT, policy, 20, gamma=4, rule="coupled", seed=4, logprobs=3)
    speculative, plain = run(request, drafter()), run(request)
    assert speculative.logprobs == plain.logprobs
    assert speculative.logprobs is not None
    assert len(speculative.logprobs) == 20
    history = History(PROMPT)
    for entry, token in zip(speculative.logprobs, speculative.token_ids, strict=True):
        law = policy.probs(LAW(history.tokens)[None], history)[0]
        raw = LAW(history.tokens).log_softmax(-1)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(math.log(law[token]), abs=1e-12)
        assert entry.raw_logprob == pytest.approx(float(raw[token]), abs=1e-12)
        assert len(entry.top) == 3
        assert entry.top[0].token_id == int(law.argmax())
        raws = [item.raw_logprob for item in entry.top]
        assert raws == sorted(raws, reverse=True)
        history.tokens.append(token)


@pytest.mark.parametrize("gamma", [0, 1, 2, 5, 9])
def test_a_stream_joined_is_the_whole_text(gamma: int) -> None:
    target = load_toy("toy:target")
    for seed in range(6):
        request = Request(
            ByteTokenizer().encode("x"), SamplingPolicy(temperature=1.2), 60, gamma=gamma, seed=seed
        )
        request = replace(request, stop=("a", "qq"))
        whole = Engine(target).generate([replace(request, rule="coupled")])[0]
        drafter = ModelDrafter(load_toy("toy:near"), target_vocab_size=257)
        events = list(Engine(target, drafter).stream(replace(request, rule="coupled")))
        assert "".join(event.text for event in events) == whole.text
        assert [token for event in events for token in event.token_ids] == whole.token_ids
        assert events[-1].result is not None
        assert events[-1].result.finish_reason == whole.finish_reason
        assert [event.round for event in events] == events[-1].result.trace


@pytest.mark.parametrize("after", [0, 1, 4])
def test_closing_a_stream_early_leaves_nothing_behind(after: int) -> None:
    target = RecordingModel()
    drafting = RecordingModel(NEAR)
    drafter = ModelDrafter(drafting, target_vocab_size=SIZE)
    engine = Engine(target, drafter)
    stream = engine.stream(Request(PROMPT, max_new_tokens=40))
    for _ in range(after):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_work
    assert target.num_open == drafting.num_open == 0
    assert engine.generate([Request(PROMPT, max_new_tokens=10)])[0].token_ids == GREEDY_TEXT[:10]


def test_a_cancelled_request_returns_what_it_has() -> None:
    engine = Engine(ToyModel(LAW, SIZE), near())
    number = engine.add(Request(PROMPT, max_new_tokens=40))
    [event] = engine.step()
    result = engine.cancel(number)
    assert result is not None
    assert (result.finish_reason, result.token_ids) == ("cancelled", event.token_ids)
    assert engine.cancel(number) is None
    waiting = engine.add(Request(PROMPT))
    assert engine.cancel(waiting) is None
    assert not engine.has_work


def poisoned(value: float, at: int) -> ToyModel:
    """Logits that are not a law once the text has `at` tokens."""

    def law(prefix: Sequence[int]) -> Tensor:
        row = LAW(prefix).clone()
        if prefix[0] == 1 and len(prefix) >= at:
            row[3] = value
        return row

    return ToyModel(law, SIZE)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_law_are_an_error(value: float, temperature: float) -> None:
    request = Request(PROMPT, SamplingPolicy(temperature=temperature), 20, gamma=3)
    with pytest.raises(NumericalError, match="not a law"):
        run(request, near(), poisoned(value, at=9))


def test_a_failed_request_keeps_its_tokens_and_does_not_disturb_its_neighbours() -> None:
    good = Request([2, *PROMPT[1:]], max_new_tokens=20)
    bad = Request(PROMPT, max_new_tokens=20, gamma=0)
    with pytest.raises(GenerationError) as caught:
        Engine(poisoned(math.nan, at=9), near()).generate([good, bad, good])
    first, failed, last = caught.value.results
    assert first.token_ids == last.token_ids == run(good).token_ids
    assert (failed.finish_reason, failed.token_ids) == ("error", GREEDY_TEXT[:4])
    assert isinstance(failed.error, NumericalError)


def test_a_sick_drafter_costs_the_drafts_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def law(prefix: Sequence[int]) -> Tensor:
        return NEAR(prefix) * (math.nan if len(prefix) > 8 else 1.0)

    sick = ModelDrafter(ToyModel(law, SIZE), target_vocab_size=SIZE)
    results = Engine(ToyModel(LAW, SIZE), sick).generate([Request(PROMPT, max_new_tokens=20)] * 2)
    assert [result.token_ids for result in results] == [GREEDY_TEXT[:20]] * 2
    assert "decoding without drafts" in caplog.text


def test_settings_that_leave_no_token_are_an_error_not_a_hang() -> None:
    with pytest.raises(NothingToDraw, match="leave no token"):
        run(Request(PROMPT, SamplingPolicy(banned_tokens=tuple(range(SIZE)))), near())
    last_one = SamplingPolicy(temperature=1.0, banned_tokens=tuple(range(1, SIZE)))
    assert run(Request(PROMPT, last_one, 5), near()).token_ids == [0] * 5


@pytest.mark.parametrize(
    "draft",
    [
        Draft([1, 2, 3, 4, 5, 6, 7]),
        Draft([SIZE]),
        Draft([-1]),
        Draft([1, 2], torch.ones(1, SIZE)),
        Draft([1], torch.ones(1, SIZE - 1)),
    ],
)
def test_a_drafter_that_breaks_its_contract_is_an_error(draft: Draft) -> None:
    class Broken(TestDrafter):
        def one(self, *arguments: object) -> Draft:  # type: ignore[override]
            return draft

    with pytest.raises(OutriderError, match="broke its contract"):
        run(Request(PROMPT, gamma=5), Broken(SIZE))


def test_one_pass_serves_a_ragged_batch() -> None:
    target = RecordingModel()
    engine = Engine(target, near())
    engine.generate([Request(PROMPT[:length], max_new_tokens=12) for length in (1, 3, 5)])
    assert [len(tokens) - keep for tokens, keep in target.feeds[0]] == [0, 2, 4]
    assert max(len(feeds) for feeds in target.feeds) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [SIZE]}, "token id 40 is outside the vocabulary"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, not 0"),
        ({"gamma": -1}, "gamma must be"),
        ({"gamma": 4096}, "gamma must be a whole number, from 0 to 4095, not 4096"),
        ({"gamma": 2.5}, "gamma must be"),
        ({"rule": "greedy"}, "rule must be one of rejection, block, coupled, not 'greedy'"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"stop": ("",)}, "must not be empty"),
        ({"stop": "end"}, "sequence of strings"),
        ({"stop": ("end",)}, "need a tokenizer"),
        ({"stop_ids": frozenset({SIZE})}, "stop_ids"),
        ({"logprobs": SIZE + 1}, "logprobs must be"),
        ({"policy": SamplingPolicy(logit_bias={SIZE: 1.0})}, "logit_bias"),
        ({"policy": SamplingPolicy(banned_tokens=(SIZE,))}, "banned_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line_before_anything_runs(
    change: dict[str, object], message: str
) -> None:
    target = RecordingModel()
    with pytest.raises(UsageError, match=message) as caught:
        Engine(target).add(Request(**{"prompt": PROMPT, **change}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not target.feeds


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    target = ToyModel(LAW, SIZE, context_length=5)
    with pytest.raises(ContextOverflow, match=r"5 tokens.*context of 5"):
        Engine(target).add(Request(PROMPT))
    assert len(run(Request(PROMPT[:4], gamma=4), None, target).token_ids) == 1


def test_the_defaults_are_what_the_documentation_says() -> None:
    request = Request(PROMPT)
    assert request.policy == SamplingPolicy()
    assert request.policy.is_greedy
    assert (request.gamma, request.rule, request.max_new_tokens) == (None, "block", 256)
    assert (request.seed, request.stop, request.logprobs) == (None, (), None)
    assert (request.ignore_eos, request.stop_ids) == (False, frozenset())
    with pytest.raises(UsageError, match="max_batch"):
        Engine(ToyModel(LAW, SIZE), max_batch=0)
