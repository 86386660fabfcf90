"""Rows of the benchmark, its intervals and its prediction, on toys and on times made up here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from outrider.costs import Costs
from outrider.errors import ContextOverflow, UsageError
from outrider.measure import benchmark as module
from outrider.measure.benchmark import Benchmark, speedup_interval
from outrider.measure.grid import Grid, Row, Setting
from outrider.measure.prediction import (
    BatchCosts,
    Step,
    measure_batch_costs,
    modelled_ms,
    outside_ms_per_row,
    steps_of,
)
from outrider.measure.prompts import PromptItem
from outrider.measure.unfinished import Unfinished
from outrider.models import Feed
from outrider.models.toy import load_toy
from outrider.pair import Pair, load
from outrider.requests import Result, Round, RoundTimes, Statistics
from outrider.theory import expected_tokens_per_round, walltime_improvement

QUESTIONS = [PromptItem("questions", (f"What is {n} and {n}?",), n) for n in range(3)]
TALK = PromptItem("chat", ("Hello there.", "And then?"), 7)
SMALL = Grid(temperatures=(0.0,), gammas=(3,), num_tokens=12, num_prompts=2, repeats=2)


def toys(*drafters: str) -> dict[str, Pair]:
    return {name: load("toy:target", name) for name in drafters or ("toy:near",)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int, int]]:
    """(setting, number of prompts, seed) of every run that is made."""
    made: list[tuple[object, int, int]] = []
    run: Callable[..., object] = Benchmark._run

    def watched(self: Benchmark, side: object, prompts: list[list[int]], *rest: object) -> object:
        made.append((side, len(prompts), rest[2] if len(rest) > 2 else -1))  # type: ignore[arg-type]
        return run(self, side, prompts, *rest)

    monkeypatch.setattr(Benchmark, "_run", watched)
    return made


# --- Rows ---


def test_there_is_a_row_for_every_combination() -> None:
    grid = replace(
        SMALL, temperatures=(0.0, 1.0), gammas=(None, 2), rules=("block", "coupled"), batches=(1, 3)
    )
    bench = Benchmark(toys("toy:near", "lookup"), [TALK, *QUESTIONS], grid)
    rows = [row for cell in bench.cells for row in bench.measure(cell)]
    assert len(rows) == len({(row.cell, row.setting) for row in rows}) == 2 * 2 * 2 * 2 * 2 * 2


def test_a_rows_speedup_is_the_ratio_of_its_times_and_lies_in_its_interval() -> None:
    bench = Benchmark(toys(), QUESTIONS, SMALL)
    [row] = bench.measure(bench.cells[0])
    assert row.speedup == pytest.approx(row.plain_ms_per_token / row.ms_per_token)
    assert row.low <= row.speedup <= row.high
    assert row.plain_ms_per_token > 0.0
    assert row.predicted_speedup > 0.0


def test_counters_of_a_row_are_those_of_the_same_requests_by_hand() -> None:
    bench = Benchmark(toys(), QUESTIONS, SMALL)
    [row] = bench.measure(bench.cells[0])
    pair = load("toy:target", "toy:near")
    prompts = [[{"role": "user", "content": item.turns[0]}] for item in QUESTIONS[:2]]
    stats = [
        result.stats
        for result in pair.generate(prompts, gamma=3, max_new_tokens=12, ignore_eos=True)
    ]
    accepted, examined = sum(s.accepted for s in stats), sum(s.examined for s in stats)
    assert row.alpha_hat == accepted / examined
    calls = sum(s.emitted for s in stats) / sum(s.target_passes for s in stats)
    assert row.tokens_per_call == calls > 1.0


@pytest.mark.parametrize(("rule", "temperature"), [("block", 0.0), ("coupled", 1.0)])
def test_texts_that_must_be_the_same_are_compared(rule: str, temperature: float) -> None:
    grid = replace(SMALL, rules=(rule,), temperatures=(temperature,), batches=(3,))
    bench = Benchmark(toys(), QUESTIONS, grid)
    assert [row.agrees for row in bench.measure(bench.cells[0])] == [True]


def test_plain_decoding_has_the_passes_that_costs_advise() -> None:
    """A slow baseline would make every speed-up look larger."""
    pair = load("toy:target", "toy:near")
    pair.costs = Costs((1, 5, 9), (1.0, 1.0, 2.0), change_ms=0.5)
    widths: list[int] = []
    score = pair.target.score

    def watched(feeds: Sequence[Feed]) -> Tensor:
        widths.append(sum(len(feed.tokens) for feed in feeds))
        return score(feeds)

    pair.target.score = watched  # type: ignore[method-assign]
    bench = Benchmark({"toy:near": pair}, QUESTIONS, SMALL)
    bench._run(None, [[5, 6, 7]], 0.0, 8)
    assert set(widths[1:]) == {5}


def test_texts_that_are_only_equal_in_law_are_not_compared() -> None:
    bench = Benchmark(toys(), QUESTIONS, replace(SMALL, temperatures=(1.0,)))
    assert [row.agrees for row in bench.measure(bench.cells[0])] == [None]


def test_a_difference_that_must_not_be_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Benchmark._run

    def broken(self: Benchmark, side: Setting | None, *rest: object) -> object:
        made = run(self, side, *rest)  # type: ignore[arg-type]
        if side is not None:
            made.results[0].token_ids[-1] ^= 1
        return made

    monkeypatch.setattr(Benchmark, "_run", broken)
    bench = Benchmark(toys(), QUESTIONS, SMALL)
    assert [row.agrees for row in bench.measure(bench.cells[0])] == [False]


def test_a_row_survives_json() -> None:
    row = Row("chat", 0.0, None, "block", "lookup", 2, 2.0, 1.0, 2.0, 1.9, 2.1, None, 1.5, 2, True)
    facts = json.loads(json.dumps(row.as_dict()))
    assert facts["gamma"] == "adaptive"
    assert Row.from_dict(facts) == row
    assert Row.from_dict(replace(row, gamma=4).as_dict()).gamma == 4


# --- Turns ---


def test_every_setting_runs_in_the_turns_of_plain_decoding(
    runs: list[tuple[object, int, int]],
) -> None:
    bench = Benchmark(toys("toy:near", "lookup"), QUESTIONS, SMALL)
    told: list[int] = []
    bench.measure(bench.cells[0], lambda: told.append(len(runs)))
    timed = [side for side, _, _ in runs[-bench.num_runs(bench.cells[0]) :]]
    turns = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert len(told) == bench.num_runs(bench.cells[0]) == 12
    assert all(set(turn) == {None, *bench.settings} for turn in turns)
    assert len({turn[0] for turn in turns}) == 3, "the one that begins changes"


def test_both_sides_of_a_turn_have_one_seed_and_repeats_another(
    runs: list[tuple[object, int, int]],
) -> None:
    bench = Benchmark(toys(), QUESTIONS, replace(SMALL, batches=(2,)))
    bench.measure(bench.cells[0])
    seeds = [seed for _, _, seed in runs[-4:]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_a_batch_larger_than_the_prompts_takes_some_again(
    runs: list[tuple[object, int, int]],
) -> None:
    bench = Benchmark(toys(), QUESTIONS, replace(SMALL, batches=(8,)))
    bench.measure(bench.cells[0])
    assert {size for _, size, _ in runs} == {8}


def test_every_output_has_the_tokens_asked_for_whatever_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = set()
    kept = module._ms_per_token

    def watched(runs: list[list[module._Run]]) -> object:
        for turns in runs:
            lengths.update(len(r.token_ids) for run in turns for r in run.results)
        return kept(runs)

    monkeypatch.setattr(module, "_ms_per_token", watched)
    grid = replace(SMALL, temperatures=(1.0,), num_tokens=40)
    bench = Benchmark(toys(), QUESTIONS, grid)
    bench.measure(bench.cells[0])
    assert lengths == {40}


# --- Conversations ---


def test_a_later_turn_follows_the_targets_own_plain_answer() -> None:
    bench = Benchmark(toys(), [TALK], SMALL)
    pair = load("toy:target", "none")
    first = pair.encode(TALK.turns[0])
    answer = pair.generate(first, max_new_tokens=12, gamma=0).text
    second = pair.encode(
        [
            {"role": "user", "content": TALK.turns[0]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": TALK.turns[1]},
        ]
    )
    assert bench._prompts == {"chat": [first, second]}


def test_no_more_conversations_are_held_than_are_needed() -> None:
    bench = Benchmark(toys(), [TALK, replace(TALK, id=8), replace(TALK, id=9)], SMALL)
    assert len(bench._prompts["chat"]) == 2


def test_a_prompt_without_room_for_its_output_is_refused_by_its_number() -> None:
    long = PromptItem("questions", ("word " * 1000,), 44)
    with pytest.raises(ContextOverflow, match="prompt 44"):
        Benchmark(toys(), [*QUESTIONS[:1], long], SMALL)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"repeats": 1}, "repeats"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"batches": (0,)}, "batches"),
        ({"batches": (2, 2)}, "differ"),
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (-1.0,)}, "temperature"),
        ({"gammas": (-1,)}, "gamma"),
        ({"rules": ("guess",)}, "guess"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(change: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        replace(SMALL, **change).check()  # type: ignore[arg-type]


# --- Intervals ---


def test_an_interval_of_equal_turns_is_a_point() -> None:
    plain = np.full((3, 2), 10.0)
    assert speedup_interval(plain, plain / 2) == (2.0, 2.0)


@pytest.mark.parametrize("num_prompts", [2, 4, 10])
def test_an_interval_covers_the_truth_at_about_its_rate(num_prompts: int) -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        prompts = generator.lognormal(0.0, 0.2, (num_prompts, 1))
        plain = 10.0 * generator.lognormal(0.0, 0.02, (num_prompts, 3))
        fast = 5.0 * prompts * generator.lognormal(0.0, 0.02, (num_prompts, 3))
        low, high = speedup_interval(plain, fast, resamples=400)
        covered += low <= 2.0 / np.exp(0.02) <= high
    # Two prompts cannot say more than where they lie, which holds the truth every other time.
    # Percentiles as they are cover 0.77 with four and 0.89 with ten, expanded ones 0.88 and 0.92.
    least = {2: 0.5, 4: 0.85, 10: 0.9}[num_prompts]
    assert least <= covered / 400 <= 1.0


def test_pairs_of_a_turn_are_drawn_together() -> None:
    drift = np.array([[1.0, 5.0, 2.0], [3.0, 9.0, 1.0]])
    low, high = speedup_interval(3.0 * drift, drift)
    assert low == pytest.approx(3.0)
    assert high == pytest.approx(3.0)


# --- Prediction ---


def steps(*drafted: tuple[int, ...]) -> list[Step]:
    return [Step(item, 0.0, 0.0, 0.0, max(item)) for item in drafted]


ALONE = Costs((1, 2, 5), (10.0, 11.0, 14.0), 2.0)
CROWD = Costs((1, 2, 5), (16.0, 22.0, 40.0), 5.0)


def test_a_models_time_is_passes_steps_and_what_is_outside() -> None:
    costs = BatchCosts(ALONE, ALONE, 1)
    # passes over 4, 4 and 1 positions, 6 drafter steps, 9 positions
    assert modelled_ms(steps((3,), (3,), (0,)), costs, 0.5) == pytest.approx(
        13.0 + 13.0 + 10.0 + 6 * 2.0 + 9 * 0.5
    )


def test_the_first_step_of_every_draft_may_take_longer() -> None:
    begins = replace(ALONE, drafter_begins_ms=3.0)
    drafts = steps((3,), (0,), (1,))
    extra = modelled_ms(drafts, BatchCosts(begins, begins, 1), 0.0) - modelled_ms(
        drafts, BatchCosts(ALONE, ALONE, 1), 0.0
    )
    assert extra == pytest.approx(2 * 3.0)
    crowd = replace(CROWD, drafter_begins_ms=5.0)
    extra = modelled_ms(steps((2, 1)), BatchCosts(begins, crowd, 3), 0.0) - modelled_ms(
        steps((2, 1)), BatchCosts(ALONE, CROWD, 3), 0.0
    )
    assert extra == pytest.approx(4.0)


def test_passes_of_another_width_than_the_last_take_longer() -> None:
    alone, crowd = (replace(costs, change_ms=ms) for costs, ms in ((ALONE, 4.0), (CROWD, 6.0)))
    single = BatchCosts(alone, alone, 1)
    flat = BatchCosts(ALONE, ALONE, 1)
    for widths, changes in (((3, 3, 3), 0), ((3, 3, 0), 1), ((0, 3, 0, 3), 3)):
        rounds = steps(*[(width,) for width in widths])
        extra = modelled_ms(rounds, single, 0.0) - modelled_ms(rounds, flat, 0.0)
        assert extra == pytest.approx(4.0 * changes)
    # Where the engine weighs it: down by a position for 1 ms a pass or for a change of 4.
    for widths, more in (((3, 3, 3), 0.0), ((3, 2), 1.0), ((3, 1), 2.0), ((5, 0, 5), 8.0)):
        rounds = steps(*[(width,) for width in widths])
        found = modelled_ms(rounds, single, 0.0, engine_costs=alone)
        assert found - modelled_ms(rounds, flat, 0.0) == pytest.approx(more)
    # Plain decoding too is filled up where a wider pass takes no longer.
    level = Costs((1, 5, 9), (10.0, 10.0, 20.0), change_ms=4.0)
    plain = steps((0,), (0,))
    assert modelled_ms(plain, flat, 0.0, engine_costs=level) == 2 * ALONE.target(5)
    # Of two requests one more token in all is another width.
    rounds = steps((1, 1), (2, 0), (2, 1))
    extra = modelled_ms(rounds, BatchCosts(alone, crowd, 2), 0.0) - modelled_ms(
        rounds, BatchCosts(ALONE, CROWD, 2), 0.0
    )
    assert extra == pytest.approx(6.0)


def test_costs_between_one_request_and_the_whole_batch_are_linear() -> None:
    costs = BatchCosts(ALONE, CROWD, 4)
    whole = modelled_ms(steps((1, 1, 1, 1)), costs, 0.0)
    half = modelled_ms(steps((1, 1)), costs, 0.0)
    assert whole == pytest.approx(22.0 + 5.0)
    assert half == pytest.approx(11.0 + 2.0 + (22.0 + 5.0 - 13.0) / 3)


def test_a_ragged_step_counts_its_positions_and_the_longest_draft() -> None:
    costs = BatchCosts(ALONE, CROWD, 2)
    # (0, 2) is a pass over two positions each on average, and two drafter steps for both
    assert modelled_ms(steps((0, 2)), costs, 0.0) == pytest.approx(22.0 + 2 * 5.0)


def test_with_free_verification_and_iid_acceptance_it_is_the_papers_formula() -> None:
    alpha, gamma, c = 0.7, 4, 0.1
    flat = Costs((1, 5), (1.0, 1.0), c)
    generator = np.random.default_rng(0)
    accepted = (generator.random((50_000, gamma)) < alpha).cumprod(axis=1).sum(axis=1)
    num_tokens = int((accepted + 1).sum())
    rounds = steps(*[(gamma,)] * len(accepted))
    speedup = num_tokens / modelled_ms(rounds, BatchCosts(flat, flat, 1), 0.0)
    assert num_tokens / 50_000 == pytest.approx(expected_tokens_per_round(alpha, gamma), rel=0.01)
    assert speedup == pytest.approx(walltime_improvement(alpha, gamma, c), rel=0.01)


def traced(*rounds: Round) -> Result:
    return Result("", [], "length", [], 0, Statistics(), list(rounds))


def at(start: float, draft: float, target: float, end: float) -> RoundTimes:
    return RoundTimes(start, draft, target, end, 2)


def test_rounds_of_one_step_are_found_by_their_times() -> None:
    first = traced(
        Round((1, 2), 1, (1, 9), at(0.0, 0.001, 0.02, 0.022)),
        Round((3,), 0, (8,), at(0.022, 0.002, 0.03, 0.056), 1),
    )
    second = traced(Round((4,), 1, (4, 7), at(0.02, 0.002, 0.03, 0.058)))
    found = steps_of([second, first])  # in time, whoever began
    assert [step.drafted for step in found] == [(2,), (1, 1)]
    # Copies take no steps; of one pass over several requests, one drew.
    assert [step.model_steps for step in found] == [0, 1]
    assert found[1].total_ms == pytest.approx(38.0)
    assert found[1].num_rows == 4
    assert [step.drafted for step in steps_of([first, second], first=1)] == [(1,)]


def test_what_is_outside_the_passes_is_spread_over_positions() -> None:
    costs = BatchCosts(ALONE, ALONE, 1)
    measured = [Step((3,), 7.0, 12.0, 24.0, 3), Step((0,), 0.0, 10.0, 11.0)]
    # 24 - 12 - 3 * 2 and 11 - 10, over 5 positions
    assert outside_ms_per_row(measured, costs) == pytest.approx(7.0 / 5)


def test_costs_of_a_batch_are_timed_side_by_side() -> None:
    toy = load_toy("toy:target")
    costs = measure_batch_costs(toy, load_toy("toy:near"), 4, context=8, repeats=2)
    assert costs.size == 4
    assert costs.batch.positions[0] == 1
    assert costs.batch.target_ms[0] > 0.0
    assert costs.batch.drafter_ms > 0.0
    assert measure_batch_costs(toy, None, 1, context=8, repeats=2).alone.drafter_ms == 0.0


@pytest.mark.parametrize(("lasts", "expected"), [(0.0, 2 * 3), (1e9, 1)])
def test_costs_are_timed_again_when_they_are_old(
    monkeypatch: pytest.MonkeyPatch, lasts: float, expected: int
) -> None:
    timed: list[int] = []

    def timing(*args: object, **settings: object) -> BatchCosts:
        timed.append(1)
        time.sleep(0.001)
        return BatchCosts(ALONE, ALONE, 1)

    monkeypatch.setattr(module, "measure_batch_costs", timing)
    monkeypatch.setattr(module, "_CALIBRATION_LASTS", lasts)
    tasks = [replace(item, task=f"task {n}") for n, item in enumerate(QUESTIONS)]
    bench = Benchmark(toys("lookup"), tasks, replace(SMALL, gammas=(0,), num_prompts=1))
    for cell in bench.cells:
        bench.measure(cell)
    # At once old, they are timed anew for both sides of every cell.
    assert len(timed) == expected


def test_a_slow_machine_is_predicted_from_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a target that sleeps: the prediction must find the speed-up that is measured."""
    pairs = toys()
    target = pairs["toy:near"].target
    score = target.score

    def slow(feeds: object) -> object:
        time.sleep(0.01)
        return score(feeds)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "score", slow)
    bench = Benchmark(pairs, QUESTIONS, replace(SMALL, num_tokens=24))
    [row] = bench.measure(bench.cells[0])
    assert row.predicted_speedup == pytest.approx(row.speedup, rel=0.2)
    assert row.speedup > 1.2


# --- What is kept ---


def test_records_are_there_again_for_the_same_conditions(tmp_path: Path) -> None:
    kept = Unfinished(tmp_path / "out.json", {"a": 1})
    kept.add({"x": 1})
    kept.add({"x": 2})
    assert Unfinished(tmp_path / "out.json", {"a": 1}).records == [{"x": 1}, {"x": 2}]


def test_a_record_that_was_cut_off_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    kept = Unfinished(tmp_path / "out.json", {"a": 1})
    kept.add({"x": 1})
    with kept.path.open("a") as file:
        file.write('{"x": 2')
    again = Unfinished(tmp_path / "out.json", {"a": 1})
    again.add({"x": 3})
    assert Unfinished(tmp_path / "out.json", {"a": 1}).records == [{"x": 1}, {"x": 3}]


def test_a_record_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    kept = Unfinished(tmp_path / "out.json", {"a": 1})
    kept.add({"x": 1})
    kept.path.unlink()
    kept.path.mkdir()
    with pytest.raises(UsageError, match="goes on with it"):
        kept.add({"x": 2})


def test_records_of_other_conditions_are_refused_and_stay(tmp_path: Path) -> None:
    kept = Unfinished(tmp_path / "out.json", {"a": 1})
    kept.add({"x": 1})
    before = kept.path.read_bytes()
    with pytest.raises(UsageError, match="other arguments"):
        Unfinished(tmp_path / "out.json", {"a": 2})
    assert kept.path.read_bytes() == before
