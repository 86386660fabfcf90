"""Who reads, who waits, who is suspended: the loop over a cache that is shared and has an end.

Whatever the loop decides, every request's text is the one it gets alone from a model without any of
this. The model reads its tokens through block tables (`exact.blocks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from exact.blocks import BLOCK, BlockModel
from exact.drafters import HostileDrafter, StoppingDrafter, UniformDrafter
from outrider import decoding
from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import CacheFull, GenerationError, UsageError
from outrider.models import Feed, Prompt
from outrider.models.blocks import BlockPool, BlockTable
from outrider.models.toy import ToyModel, hashed_law, mixed_law
from outrider.requests import Request, Result
from outrider.sampling import SamplingPolicy
from outrider.verification import RULES

SIZE = 40
WHOLE = 10**6  # the law looks back to the first token
LAW = hashed_law(SIZE, seed=61, order=WHOLE, sharpness=2.0)
NEAR = mixed_law(LAW, hashed_law(SIZE, seed=62, order=WHOLE, sharpness=2.0), 0.2)
SAMPLED = SamplingPolicy(temperature=1.0, top_p=0.95)
EOS = frozenset({0})


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([71, seed]).integers(1, SIZE, size=length).tolist()


def target(num_blocks: int = 512, **options: object) -> BlockModel:
    return BlockModel(LAW, SIZE, num_blocks=num_blocks, **options)


def near(num_blocks: int = 512, **options: object) -> ModelDrafter:
    model = BlockModel(NEAR, SIZE, num_blocks=num_blocks, **options)
    return ModelDrafter(model, target_vocab_size=SIZE)


def alone(request: Request, **options: object) -> Result:
    """What a request gets from a model without blocks, with the near drafter."""
    drafter = ModelDrafter(ToyModel(NEAR, SIZE), target_vocab_size=SIZE)
    model = ToyModel(LAW, SIZE, **options)  # type: ignore[arg-type]
    return Engine(model, drafter).generate([request])[0]


def plain(request: Request, **options: object) -> list[int]:
    model = ToyModel(LAW, SIZE, **options)  # type: ignore[arg-type]
    return Engine(model).generate([replace(request, gamma=0)])[0].token_ids


def steps(engine: Engine, limit: int = 2000) -> Iterator[dict[int, list[int]]]:
    """The tokens of every step by request; fails where the engine does not come to an end."""
    for _ in range(limit):
        if not engine.has_work:
            return
        yield {event.request_id: event.token_ids for event in engine.step()}
    raise AssertionError("the engine does not come to an end")


def run(engine: Engine, requests: Sequence[Request], limit: int = 2000) -> list[Result]:
    """Results in order, failed ones too."""
    ids = [engine.add(request) for request in requests]
    results: dict[int, Result] = {}
    for _ in range(limit):
        if not engine.has_work:
            return [results[number] for number in ids]
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result
    raise AssertionError("the engine does not come to an end")


def random_requests(seed: int, count: int, *, longest: int = 60) -> list[Request]:
    """Of all kinds; some of them begin alike."""
    random = np.random.default_rng([72, seed])
    policies = (SamplingPolicy(), SAMPLED, SamplingPolicy(temperature=1.5, presence_penalty=0.4))
    shared = text(longest, seed=100 + seed)
    requests = []
    for i in range(count):
        begin = shared[: int(random.integers(0, longest))]
        requests.append(
            Request(
                [*begin, *text(int(random.integers(1, 9)), seed=10 * seed + i % 3)],
                policies[i % 3],
                max_new_tokens=int(random.integers(1, 30)),
                gamma=int(random.integers(0, 9)),
                rule=str(random.choice(list(RULES))),
                seed=int(random.integers(2**63)),
                ignore_eos=bool(random.integers(2)),
            )
        )
    return requests


# --- The text is that of plain decoding, by way of the blocks ---

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "near": near,
    "near, short of memory": lambda: near(8),
    "near, short of context": lambda: near(context_length=30),
    "lookup": LookupDrafter,
    "uniform": lambda: UniformDrafter(SIZE),
    "hostile": lambda: HostileDrafter(SIZE, LAW),
    "stopping": lambda: StoppingDrafter(SIZE, NEAR),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_and_coupled_text_is_that_of_plain_decoding(drafter: str) -> None:
    for policy, rule in ((SamplingPolicy(), "block"), (SAMPLED, "coupled")):
        request = Request(text(9), policy, 40, rule=rule, seed=2)
        requests = [replace(request, gamma=gamma) for gamma in (0, 1, 2, 5, 20, 39)]
        model, drafting = target(), DRAFTERS[drafter]()
        for result in run(Engine(model, drafting), requests):
            assert result.token_ids == plain(request)
        model.assert_empty()
        if isinstance(drafting, ModelDrafter):
            drafting.model.assert_empty()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_blocks", [24, 40, 512])
@pytest.mark.parametrize("chunk", [5, 256])
def test_requests_of_all_kinds_give_what_each_gives_alone(num_blocks: int, chunk: int) -> None:
    """24 blocks hold one of the longest requests."""
    requests = random_requests(num_blocks, 14)
    model, drafter = target(num_blocks, eos_ids=EOS), near()
    together = run(Engine(model, drafter, prefill_chunk=chunk, max_batch=6), requests)
    for request, result in zip(requests, together, strict=True):
        wanted = alone(request, eos_ids=EOS)
        assert result.token_ids == wanted.token_ids
        assert result.trace == wanted.trace
        assert result.finish_reason == wanted.finish_reason
    model.assert_empty()
    drafter.model.assert_empty()  # type: ignore[attr-defined]


def test_requests_may_join_leave_and_be_cancelled_between_rounds_of_a_full_cache() -> None:
    random = np.random.default_rng(73)
    requests, cancelled = random_requests(5, 16), {3, 8, 9}
    model, drafter = target(26), near()
    engine = Engine(model, drafter, prefill_chunk=20)
    ids: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    left = list(enumerate(requests))
    while left or engine.has_work:
        for _ in range(int(random.integers(0, 3))):
            if left:
                number, request = left.pop(0)
                ids[engine.add(request)] = number
        for event in engine.step():
            texts.setdefault(ids[event.request_id], []).extend(event.token_ids)
        for request_id, number in list(ids.items()):
            if number in cancelled and random.integers(4) == 0:
                engine.cancel(request_id)
    for number, request in enumerate(requests):
        wanted = plain(request) if request.rule == "coupled" else alone(request).token_ids
        if number in cancelled:
            assert wanted[: len(texts.get(number, []))] == texts.get(number, [])
        else:
            assert texts[number] == wanted
    model.assert_empty()
    drafter.model.assert_empty()  # type: ignore[attr-defined]


def sharing_requests() -> list[Request]:
    return [Request(text(50), SAMPLED, 20, gamma=4, seed=seed, rule="coupled") for seed in range(4)]


def do_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockModel, "copy", lambda model, source, target: None)


def swap_two_blocks_of_a_shared_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BlockModel.start

    def swapped(model: BlockModel, prompt: Prompt) -> BlockTable:
        table = start(model, prompt)
        table.blocks[:2] = reversed(table.blocks[:2])
        return table

    monkeypatch.setattr(BlockModel, "start", swapped)


def take_over_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share

    def shared(pool: BlockPool, table: BlockTable, length: int) -> BlockTable:
        return share(pool, table, min(length + 1, table.length))

    monkeypatch.setattr(BlockPool, "share", shared)


@pytest.mark.parametrize(
    "broken",
    [do_not_copy, swap_two_blocks_of_a_shared_beginning, take_over_a_token_too_many],
)
def test_a_wrong_block_table_changes_the_text(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of everything above."""
    shared = text(50)
    requests = [
        Request([*shared, seed + 1, 7, 8], SAMPLED, 20, gamma=4, seed=seed, rule="coupled")
        for seed in range(4)
    ]
    wanted = [plain(request) for request in requests]
    assert [r.token_ids for r in run(Engine(target(), near()), requests)] == wanted
    broken(monkeypatch)
    assert [r.token_ids for r in run(Engine(target(), near()), requests)] != wanted


# --- Long prompts are read in parts ---


@pytest.mark.parametrize("chunk", [1, 3, 7, 32, 256])
def test_the_size_of_the_parts_does_not_change_the_text(chunk: int) -> None:
    requests = random_requests(6, 8)
    model = target()
    results = run(Engine(model, near(), prefill_chunk=chunk), requests)
    assert [r.trace for r in results] == [alone(request).trace for request in requests]


@pytest.mark.parametrize("sharing", [True, False])
def test_other_requests_emit_in_every_round_while_a_long_prompt_is_read(sharing: bool) -> None:
    model = target()
    model.shares_prefixes = sharing
    engine = Engine(model, near(), prefill_chunk=10)
    first = engine.add(Request(text(8, seed=1), max_new_tokens=100, gamma=2))
    engine.step()
    second = engine.add(Request(text(95, seed=2), max_new_tokens=5, gamma=2))
    for _ in range(9):
        events = {event.request_id: event for event in engine.step()}
        assert len(events[first].token_ids) >= 1
        assert (events[second].text, events[second].token_ids, events[second].result) == (
            "",
            [],
            None,
        )
    events = {event.request_id: event for event in engine.step()}
    assert events[first].token_ids
    assert events[second].token_ids


def test_passes_over_parts_of_a_prompt_are_counted_apart() -> None:
    for length, passes in ((9, 0), (10, 0), (11, 1), (20, 1), (21, 2), (95, 9)):
        request = Request(text(length), max_new_tokens=6, gamma=2)
        [result] = run(Engine(target(), near(), prefill_chunk=10), [request])
        assert result.stats.prefill_passes == passes
        assert result.stats.target_passes == result.stats.rounds == len(result.trace) <= 6


def test_no_round_reads_more_prompt_tokens_than_it_may() -> None:
    model = target()
    prompts = [[i, *text(9 + 17 * i, seed=i)] for i in range(6)]  # no two of them begin alike
    requests = [Request(prompt, max_new_tokens=4, gamma=0) for prompt in prompts]
    run(Engine(model, prefill_chunk=16), requests)
    assert max(sum(tokens for tokens in feeds if tokens > 1) for feeds in model.passes) == 16
    # and what is left over by one prompt goes to the next
    assert sum(sum(feeds) for feeds in model.passes) == sum(len(r.prompt) + 3 for r in requests)
    reading = [sum(feeds) for feeds in model.passes][: sum(len(r.prompt) for r in requests) // 16]
    assert min(reading) >= 16


def test_prompts_are_read_first_come_first_served() -> None:
    engine = Engine(target(), prefill_chunk=10)
    lengths = (40, 15, 25, 3)
    ids = [engine.add(Request(text(n, seed=n), max_new_tokens=30, gamma=0)) for n in lengths]
    first: dict[int, int] = {}
    for number, tokens in enumerate(steps(engine)):
        for request_id, new in tokens.items():
            if new:
                first.setdefault(request_id, number)
    assert [first[request_id] for request_id in ids] == sorted(first.values())
    assert first[ids[0]] == 3
    assert first[ids[-1]] <= 8


def test_up_to_256_prompt_tokens_are_read_in_a_round_if_nothing_is_said() -> None:
    for length, expected in ((256, 0), (257, 1)):
        [result] = run(Engine(target()), [Request(text(length), max_new_tokens=1)])
        assert result.stats.prefill_passes == expected


@pytest.mark.parametrize("chunk", [0, -1])
def test_parts_without_a_token_are_refused(chunk: int) -> None:
    with pytest.raises(UsageError, match=f"prefill_chunk must be 1 or more, not {chunk}"):
        Engine(target(), prefill_chunk=chunk)


@pytest.mark.parametrize("num_steps", [1, 3, 9, 10, 11, 12])
def test_a_request_cancelled_while_its_prompt_is_read_leaves_nothing_behind(num_steps: int) -> None:
    model, drafter = target(), near()
    engine = Engine(model, drafter, prefill_chunk=10)
    request = Request(text(95), max_new_tokens=30)
    number = engine.add(request)
    for _ in range(num_steps):
        engine.step()
    result = engine.cancel(number)
    assert result is not None
    assert result.token_ids == plain(request)[: len(result.token_ids)]
    assert (result.token_ids == []) == (num_steps < 10)
    assert not engine.has_work
    assert not model.pool._live
    assert run(engine, [request])[0].token_ids == plain(request)
    model.assert_empty()
    drafter.model.assert_empty()  # type: ignore[attr-defined]


# --- A beginning that another request is about to read is waited for ---


def fed(model: BlockModel) -> int:
    return sum(sum(feeds) for feeds in model.passes)


def test_samples_of_one_prompt_wait_for_the_first_to_read_it() -> None:
    model = target()
    engine = Engine(model, prefill_chunk=40)
    requests = [Request(text(100), SAMPLED, 5, gamma=0, seed=seed) for seed in range(4)]
    ids = [engine.add(request) for request in requests]
    seen = [set(tokens) for tokens in steps(engine)]
    assert seen[:2] == [{ids[0]}, {ids[0]}]
    # After two of three parts, 80 tokens, fewer than 32 are missing: no wait is worth it.
    assert fed(model) <= 100 + 3 * 20 + 4 * 4
    assert [taken for _, taken in model.opened][1:] == [80] * 3


def test_a_whole_prompt_read_in_one_round_is_read_once() -> None:
    model = target()
    requests = [Request(text(100), SAMPLED, 5, gamma=0, seed=seed) for seed in range(4)]
    results = run(Engine(model), requests)
    assert fed(model) == 100 + 4 + 3 * 5
    assert [r.token_ids for r in results] == [plain(request) for request in requests]


def test_other_requests_pass_by_those_that_wait() -> None:
    engine = Engine(target(), prefill_chunk=40)
    shared = text(80)
    first = engine.add(Request([*shared, 1], max_new_tokens=9, gamma=0))
    waiting = engine.add(Request([*shared, 2], max_new_tokens=9, gamma=0))
    other = engine.add(Request(text(5, seed=9), max_new_tokens=9, gamma=0))
    [one, two, three] = [{e.request_id for e in engine.step()} for _ in range(3)]
    assert one == {first}  # it takes all the round may read
    assert two <= {first, other}
    assert three == {first, other, waiting}


def test_many_that_wait_do_not_hold_up_others_and_keep_their_place() -> None:
    shared = text(80)
    engine = Engine(target(), prefill_chunk=50, max_batch=3)
    requests = [Request([*shared, i], max_new_tokens=3, gamma=0) for i in range(1, 7)]
    requests += [Request(text(4, seed=i), max_new_tokens=3, gamma=0) for i in range(4)]
    ids = [engine.add(request) for request in requests]
    order: list[int] = []
    for tokens in steps(engine):
        order += [number for number in tokens if tokens[number] and number not in order]
    # Two of the others come in beside the first; then those that have waited are served.
    assert order == [ids[0], *ids[6:8], *ids[1:6], *ids[8:]]


@pytest.mark.parametrize("length", [20, 31])
def test_a_short_beginning_is_taken_over_by_those_whose_turn_comes_later(length: int) -> None:
    shared = text(length)
    requests = [Request([*shared, i, *text(29, seed=i)], max_new_tokens=5) for i in range(1, 7)]
    model = target()
    results = run(Engine(model, prefill_chunk=2 * (length + 30)), requests)
    # The first two are read together; the other four take the beginning from them.
    assert fed(model) == 6 * (length + 30 + 4) - 4 * length
    assert [result.token_ids for result in results] == [plain(request) for request in requests]
    model.assert_empty()


def test_nobody_takes_over_a_beginning_from_a_model_that_does_not_share() -> None:
    requests = [Request([*text(20), i, *text(29, seed=i)], max_new_tokens=5) for i in range(1, 5)]
    model = target()
    model.shares_prefixes = False
    run(Engine(model, prefill_chunk=100), requests)
    assert len(model.opened) == 4


def test_nobody_waits_for_a_beginning_that_is_short_or_already_read_or_not_shared() -> None:
    def seen_in_the_second_round(first: list[int], second: list[int], model: BlockModel) -> bool:
        engine = Engine(model, prefill_chunk=1000)
        engine.add(Request(first, max_new_tokens=9, gamma=0))
        number = engine.add(Request(second, max_new_tokens=9, gamma=0))
        return number in {event.request_id for event in engine.step()}

    long, other = text(100), text(100, seed=1)
    assert not seen_in_the_second_round(long, long, target())
    assert not seen_in_the_second_round(long, [*long[:32], *other], target())
    assert seen_in_the_second_round(long, [*long[:31], *other], target())
    assert seen_in_the_second_round(long[:31], long, target())
    assert seen_in_the_second_round(long, other, target())
    known = target()
    run(Engine(known), [Request(long, max_new_tokens=1)])
    assert seen_in_the_second_round(long, long, known)  # an ended request has read it
    separate = target()
    separate.shares_prefixes = False
    assert seen_in_the_second_round(long, long, separate)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_those_who_wait_go_on_when_the_reader_is_cancelled(num_steps: int) -> None:
    engine = Engine(target(), prefill_chunk=20)
    request = Request(text(100), max_new_tokens=5, gamma=0)
    first, second = engine.add(request), engine.add(request)
    for _ in range(num_steps):
        assert {event.request_id for event in engine.step()} == {first}
    engine.cancel(first)
    assert {event.request_id for event in engine.step()} == {second}


def test_one_who_waits_can_be_cancelled() -> None:
    engine = Engine(target(), prefill_chunk=20)
    request = Request(text(100), max_new_tokens=5, gamma=0)
    first, second = engine.add(request), engine.add(request)
    engine.step()
    assert engine.cancel(second) is None
    assert {number for tokens in steps(engine) for number in tokens} == {first}


@pytest.mark.parametrize("max_batch", [1, 2, 5, 32])
def test_many_requests_that_begin_alike_all_come_to_their_end(max_batch: int) -> None:
    """20 of one kind and 3 others behind them, which do not wait for ever either."""
    shared = text(64)
    requests = [Request([*shared, i], max_new_tokens=3, gamma=0) for i in range(1, 21)]
    requests += [Request(text(5, seed=i), max_new_tokens=3, gamma=0) for i in range(3)]
    model = target()
    results = run(Engine(model, max_batch=max_batch, prefill_chunk=16), requests, limit=200)
    assert [r.token_ids for r in results] == [plain(request) for request in requests]
    model.assert_empty()


def test_a_request_gets_its_first_token_no_later_for_having_waited() -> None:
    def first_tokens(sharing: bool) -> list[int]:
        model = target()
        model.shares_prefixes = sharing
        engine = Engine(model, prefill_chunk=16)
        shared = text(90)
        for i, cut in enumerate((90, 90, 40, 70, 10)):
            engine.add(Request([*shared[:cut], i + 1], max_new_tokens=40, gamma=0))
        first: dict[int, int] = {}
        for number, tokens in enumerate(steps(engine)):
            for request_id, new in tokens.items():
                if new:
                    first.setdefault(request_id, number)
        return [first[i] for i in range(5)]

    for waited, unshared in zip(first_tokens(True), first_tokens(False), strict=True):
        assert waited <= unshared


# --- A cache that is too small for all: the latest is suspended ---


def test_the_latest_request_is_suspended_and_goes_on_when_another_has_left() -> None:
    """Three times 8 + 24 tokens in blocks for 64: two fit, at the end."""
    model = target(16)
    engine = Engine(model)
    requests = [Request(text(8, seed=i), max_new_tokens=24, gamma=0) for i in range(3)]
    ids = [engine.add(request) for request in requests]
    seen = [set(tokens) for tokens in steps(engine)]
    assert seen[0] == set(ids)
    suspended = seen.index({ids[0], ids[1]})
    assert suspended == 64 // 3 // BLOCK * BLOCK - 8 + 1
    assert all(step == {ids[0], ids[1]} for step in seen[suspended:24])
    assert all(step == {ids[2]} for step in seen[24:])
    assert len(seen) == 24 + 24 - suspended  # nothing was emitted twice


def test_suspended_requests_end_with_their_own_text_and_trace() -> None:
    requests = [
        Request(text(8 + i, seed=i), SAMPLED, 30, gamma=i, rule="block", seed=i) for i in range(5)
    ]
    model, drafter = target(17), near()
    results = run(Engine(model, drafter), requests)
    assert len(model.opened) > 5  # some were suspended
    for request, result in zip(requests, results, strict=True):
        wanted = alone(request)
        assert result.token_ids == wanted.token_ids
        assert result.trace == wanted.trace
        assert result.stats.drafted == wanted.stats.drafted
        assert result.stats.target_passes == wanted.stats.target_passes
    model.assert_empty()
    drafter.model.assert_empty()  # type: ignore[attr-defined]


def test_a_request_that_is_too_long_alone_fails_and_all_others_end() -> None:
    for place in range(4):
        requests = [Request(text(8, seed=i), max_new_tokens=20, gamma=3) for i in range(3)]
        requests.insert(place, Request(text(70, seed=9), max_new_tokens=5))
        model, drafter = target(16), near()
        engine = Engine(model, drafter)
        with pytest.raises(GenerationError, match="1 of 4 requests failed") as caught:
            engine.generate(requests)
        results = caught.value.results
        assert isinstance(results[place].error, CacheFull)
        assert (results[place].finish_reason, results[place].token_ids) == ("error", [])
        for i in {0, 1, 2, 3} - {place}:
            assert results[i].token_ids == plain(requests[i])
        assert not engine.has_work
        model.assert_empty()
        drafter.model.assert_empty()  # type: ignore[attr-defined]


def test_a_request_that_outgrows_the_cache_keeps_what_it_has() -> None:
    request = Request(text(40), max_new_tokens=100, gamma=0)
    model = target(16)
    [result] = run(Engine(model), [request])
    assert isinstance(result.error, CacheFull)
    assert result.token_ids == plain(request)[:25]  # 64 slots, and one that is not fed
    model.assert_empty()


def test_alone_the_full_cache_is_the_error_itself() -> None:
    with pytest.raises(CacheFull, match="kv_memory"):
        Engine(target(4)).generate([Request(text(40))])
    stream = Engine(target(4)).stream(Request(text(10), max_new_tokens=40, gamma=0))
    tokens: list[int] = []
    with pytest.raises(CacheFull, match="kv_memory"):
        tokens.extend(token for event in stream for token in event.token_ids)
    assert tokens == plain(Request(text(10), max_new_tokens=7))


def test_a_cache_can_be_used_to_its_last_slot_with_and_without_drafts() -> None:
    for gamma in (0, 3, 30):
        request = Request(text(40), max_new_tokens=25, gamma=gamma)
        [result] = run(Engine(target(16), near()), [request])
        assert result.error is None
        assert result.token_ids == plain(request)


def test_speculation_needs_no_more_memory_than_plain_decoding_does() -> None:
    """The text ends at its end token, inside the memory; only the draft would reach beyond it."""
    free = plain(Request(text(40), max_new_tokens=60))
    index = next(i for i in range(14, 60) if free.index(free[i]) == i)
    options = {"eos_ids": frozenset({free[index]})}
    num_blocks = -(-(40 + index) // BLOCK)
    request = Request(text(40), max_new_tokens=200, gamma=0)
    results = [
        run(Engine(target(num_blocks, **options), near()), [replace(request, gamma=gamma)])[0]
        for gamma in (0, 20)
    ]
    assert [r.error for r in results] == [None, None]
    assert results[0].token_ids == results[1].token_ids == free[: index + 1]


def suspended_engine() -> tuple[Engine, int, int]:
    """An engine with one active and one suspended request."""
    engine = Engine(target(16), near())
    first, second = (
        engine.add(Request(text(20, seed=i), max_new_tokens=30, gamma=2)) for i in range(2)
    )
    for _ in range(100):
        if second not in {event.request_id for event in engine.step()}:
            return engine, first, second
    raise AssertionError("nothing was suspended")


def test_a_suspended_request_can_be_cancelled() -> None:
    engine, first, second = suspended_engine()
    result = engine.cancel(second)
    assert result is not None
    assert result.finish_reason == "cancelled"
    wanted = plain(Request(text(20, seed=1), max_new_tokens=30))
    assert 0 < len(result.token_ids) < 30
    assert result.token_ids == wanted[: len(result.token_ids)]
    assert engine.cancel(second) is None
    assert {number for tokens in steps(engine) for number in tokens} == {first}
    engine.target.assert_empty()  # type: ignore[attr-defined]
    engine.drafter.model.assert_empty()  # type: ignore[union-attr]


def test_a_suspended_request_is_work_and_goes_on_when_the_other_is_cancelled() -> None:
    engine, first, second = suspended_engine()
    engine.cancel(first)
    assert engine.has_work
    rest = [token for tokens in steps(engine) for token in tokens[second]]
    assert 0 < len(rest) < 30
    assert rest == plain(Request(text(20, seed=1), max_new_tokens=30))[-len(rest) :]
    assert not engine.has_work
    engine.target.assert_empty()  # type: ignore[attr-defined]


def test_nobody_new_overtakes_a_suspended_request() -> None:
    engine, first, second = suspended_engine()
    third = engine.add(Request(text(4, seed=5), max_new_tokens=4, gamma=0))
    order: list[int] = []
    for tokens in steps(engine):
        order += [number for number in tokens if number not in order]
    assert order == [first, second, third]


@pytest.mark.parametrize(
    "turn",
    [
        1,
        2,
    ],
)
def test_a_suspended_request_is_tried_again_only_when_another_has_left(turn: int) -> None:
    model = target(16)
    engine = Engine(model)
    for _ in range(turn):
        model.opened.clear()
        run(engine, [Request(text(20, seed=i), max_new_tokens=20, gamma=0) for i in range(2)])
    assert len(model.opened) == 3  # both, and the second once more


def test_those_who_come_back_and_are_suspended_again_wait_for_the_next_to_leave() -> None:
    model = target(16)
    engine = Engine(model)
    limits = (6, 30, 30)
    run(
        engine,
        [Request(text(16, seed=i), max_new_tokens=n, gamma=0) for i, n in enumerate(limits)],
    )
    # All three; the third after the first has left, and after the second has.
    assert len(model.opened) == 3 + 2


def test_no_more_requests_run_at_once_than_allowed_when_suspended_ones_come_back() -> None:
    engine = Engine(target(20), near(), max_batch=3)
    for i in range(8):
        engine.add(Request(text(10, seed=i), max_new_tokens=30, gamma=i % 3))
    assert max(len(tokens) for tokens in steps(engine)) <= 3


def test_a_failed_pass_closes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = target(16), near()
    engine = Engine(model, drafter)
    score, calls = model.score, iter(range(100))

    def interrupted(feeds: Sequence[Feed]) -> object:
        if next(calls) == 14:
            raise KeyboardInterrupt
        return score(feeds)

    monkeypatch.setattr(model, "score", interrupted)
    requests = [Request(text(20, seed=i), max_new_tokens=30, gamma=2) for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests)
    assert not engine.has_work
    model.assert_empty()
    drafter.model.assert_empty()  # type: ignore[attr-defined]


def test_suspending_the_first_instead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the order."""
    monkeypatch.setattr(decoding, "max", min, raising=False)
    with pytest.raises((AssertionError, ValueError)):
        test_the_latest_request_is_suspended_and_goes_on_when_another_has_left()


# --- A drafter whose cache is full ---


@pytest.mark.parametrize("num_blocks", [3, 6, 10, 14])
def test_decoding_goes_on_with_fewer_drafts_where_the_drafters_cache_is_full(
    num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [Request(text(6 + i, seed=i), max_new_tokens=40, gamma=3) for i in range(2)]
    with caplog.at_level(logging.WARNING, logger="outrider"):
        drafter = near(num_blocks)
        results = run(Engine(target(), drafter), requests)
        roomy = run(Engine(target(), near()), requests)
    assert [r.token_ids for r in results] == [plain(request) for request in requests]
    drafted, unlimited = (sum(r.stats.drafted for r in side) for side in (results, roomy))
    assert 0 < drafted <= unlimited
    assert (drafted < unlimited) == (num_blocks < 12)  # where one does not fit alone
    assert "memory for keys and values is full" in caplog.text
    drafter.model.assert_empty()  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", RULES)
def test_a_full_drafter_does_not_bend_sampled_text(rule: str) -> None:
    """Drafts are cut where the cache ends, by its length only: a seed's text may differ from that
    of longer drafts, but `coupled` text may not, and counters still add up."""
    request = Request(text(6), SAMPLED, 40, gamma=5, rule=rule, seed=4)
    [result] = run(Engine(target(), near(7)), [request])
    if rule == "coupled":
        assert result.token_ids == plain(request)
    stats = result.stats
    rejected = sum(item.accepted < len(item.drafted) for item in result.trace)
    assert stats.drafted == sum(len(item.drafted) for item in result.trace)
    assert stats.examined == stats.accepted + rejected
    assert stats.emitted == stats.accepted + stats.rounds


def test_a_full_drafter_does_not_make_a_seeds_text_depend_on_other_requests() -> None:
    requests = [
        Request(text(6 + i, seed=i), SAMPLED, 40, gamma=5, rule="block", seed=i) for i in range(3)
    ]
    together = run(Engine(target(), near(15)), requests)
    single = [run(Engine(target(), near(15)), [request])[0] for request in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in single]


def test_a_full_drafter_drafts_again_when_another_request_has_left() -> None:
    drafter = near(9)
    engine = Engine(target(), drafter)
    short = Request(text(12), max_new_tokens=4, gamma=3)
    long = Request(text(12, seed=1), max_new_tokens=14, gamma=3)
    ids = [engine.add(request) for request in (short, replace(long, max_new_tokens=18))]
    results = {}
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result
    assert results[ids[1]].token_ids == plain(replace(long, max_new_tokens=18))
    assert results[ids[1]].trace[-2].drafted


def test_a_full_drafter_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="outrider"):
        run(Engine(target(), near(6)), [Request(text(6), max_new_tokens=40, gamma=3)])
    assert len(caplog.records) == 1


def test_a_prompt_of_many_samples_is_read_once_by_the_drafter_too() -> None:
    drafter = near()
    requests = [Request(text(60), SAMPLED, 6, gamma=2, seed=seed) for seed in range(4)]
    run(Engine(target(), drafter), requests)
    reads = [taken for _, taken in drafter.model.opened]  # type: ignore[attr-defined]
    assert reads[0] == 0
    assert min(reads[1:]) >= 59


def test_prompt_objects_of_any_kind_of_sequence_are_shared() -> None:
    model = target()
    run(Engine(model), [Request(tuple(text(60)), max_new_tokens=3, gamma=0)])
    run(Engine(model), [Request(np.array(text(60)).tolist(), max_new_tokens=3, gamma=0)])
    assert [taken for _, taken in model.opened] == [0, 59]
    assert model.start(Prompt(tuple(text(60)))).length == 59
