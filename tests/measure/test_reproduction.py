"""What the report says of runs and files: recordings, points on the curves, tables."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from outrider.measure import reproduction
from outrider.measure.evidence import (
    Evidence,
    best_gamma_points,
    own_costs,
    pair_rows,
    speed_points,
    tokens_points,
)
from outrider.measure.figures import Measured
from outrider.measure.recording import Recording, record, time_row
from outrider.measure.records import AlphaRecord, BenchRecord, Measurement
from outrider.measure.report import Report, Section, Table, Trace, to_markdown
from outrider.measure.traces import Piece
from outrider.pair import load
from outrider.requests import Result, Round, RoundTimes, Statistics
from outrider.theory import walltime_improvement


def result(*rounds: tuple[int, int, int, float, float], steps: int = 0) -> Result:
    """A result of rounds given as (drafted, accepted, emitted, start, end), times in ms.

    Of each round the first millisecond is the drafter's and the rest but the last the target's.
    """
    trace = [
        Round(
            tuple(range(drafted)),
            accepted,
            tuple(range(emitted)),
            RoundTimes(start / 1e3, 1e-3, (end - start - 2) / 1e3, end / 1e3),
            steps,
        )
        for drafted, accepted, emitted, start, end in rounds
    ]
    tokens = [token for item in trace for token in item.emitted]
    stats = Statistics(rounds=len(trace), num_tokens=len(tokens))
    return Result("", tokens, "length", [1], 0, stats, trace)


def bench_row(**changes: object) -> BenchRecord:
    row = BenchRecord("chat", 0.0, 3, "rejection", "lookup", 1, 1.5, 1.4, 1.6, 0.6, 2.0, 1.45)
    return replace(row, **changes)


def alpha_record(**changes: object) -> AlphaRecord:
    return replace(AlphaRecord("lookup", 0.0, 0.5, 0.4, 0.6, 1000, (0.5, 0.3, 0.2)), **changes)


@cache
def toy_evidence() -> Evidence:
    pair = load("toy:target", "toy:near")
    request = pair.request("abc", max_new_tokens=30, rule="rejection", temperature=1.0, seed=3)
    recordings = tuple(record(pair, request, (7, 3, 0), repeats=1))
    return Evidence(recordings, pair.target.tokenizer, runs_model=True, prompt="abc")


@cache
def toy_report() -> Report:
    return reproduction.build_report(toy_evidence())


def evidence(**changes: object) -> Evidence:
    return replace(toy_evidence(), **changes)


def section(report: Report, start: str) -> Section:
    [found] = [section for section in report.sections if section.title.startswith(start)]
    return found


def tables(report: Report, start: str) -> list[Table]:
    return [block for block in section(report, start).blocks if isinstance(block, Table)]


# --- Recordings ---


def test_a_recording_of_each_draft_length_comes_back_in_order() -> None:
    seven, three, plain = toy_evidence().recordings
    assert (seven.gamma, three.gamma, plain.gamma) == (7, 3, 0)
    assert max(len(item.drafted) for item in seven.result.trace) == 7
    assert max(len(item.drafted) for item in three.result.trace) == 3
    assert plain.result.stats.drafted == 0
    assert {len(item.result.token_ids) for item in (seven, three, plain)} == {30}


def test_of_several_turns_the_one_with_the_median_time_is_kept() -> None:
    pair = load("toy:target", "toy:near")
    engine = pair.engine()
    walls = iter([9.0, 3.0, 1.0, 2.0])  # the first warms up

    class Timed:
        def generate(self, requests: list[object]) -> list[Result]:
            [found] = engine.generate(requests)
            found.stats.wall_s = next(walls)
            return [found]

    pair.engine = Timed  # type: ignore[method-assign]
    turns: list[int] = []
    request = pair.request("abc", max_new_tokens=5)
    [kept] = record(pair, request, (2,), repeats=3, progress=turns.append)
    assert kept.result.stats.wall_s == 2.0
    assert turns == [1, 2, 3]


def test_time_per_token_leaves_out_the_round_that_read_the_prompt() -> None:
    recording = Recording(3, result((0, 0, 1, 0, 100), (3, 2, 3, 101, 110), (3, 1, 2, 111, 125)))
    assert recording.ms_per_token == pytest.approx((125 - 100) / 5)


def test_a_single_round_has_no_time_per_token_and_no_speed() -> None:
    alone = Recording(0, result((0, 0, 1, 0, 100)))
    assert alone.ms_per_token is None
    assert evidence(recordings=(alone,)).speedup(alone) is None


def test_a_time_row_starts_behind_the_prompt_and_ends_with_the_round_that_has_enough() -> None:
    rounds = result(
        (0, 0, 1, 0, 100),
        (3, 2, 3, 101, 110),
        (3, 1, 2, 111, 125),
        (3, 3, 4, 126, 140),
        steps=3,
    )
    row = time_row("x", rounds, 4)
    assert [item.num_emitted for item in row.rounds] == [3, 2]
    first, second = row.rounds
    assert first == pytest.approx((1, 1, 7, 10, 3, 3))
    assert (second.start_ms, second.end_ms) == (pytest.approx(11), pytest.approx(25))


def test_a_drafter_without_a_model_has_no_steps_on_the_time_line() -> None:
    rounds = result((0, 0, 1, 0, 100), (3, 2, 3, 101, 110))
    assert [item.num_steps for item in time_row("x", rounds, 9).rounds] == [0]


def test_a_time_row_of_nothing_is_empty() -> None:
    assert time_row("x", result(), 4).rounds == ()


# --- Points ---


def test_the_bench_gives_the_points_where_there_is_one() -> None:
    rows = (
        bench_row(gamma=3, tokens_per_call=2.2, speedup=1.7),
        bench_row(gamma=None, alpha_hat=0.7),
        bench_row(batch=8),
        bench_row(gamma=0, alpha_hat=None),
    )
    given = evidence(bench=rows, measurement=Measurement("t", (alpha_record(),), {}, None))
    assert tokens_points(given)[0] == [Measured(0.6, 2.2, 3), Measured(0.7, 2.0, None)]
    assert speed_points(given)[0] == [Measured(0.6, 1.7, 3), Measured(0.7, 1.5, None)]


def test_without_a_bench_the_measured_survival_gives_tokens_per_round() -> None:
    given = evidence(measurement=Measurement("t", (alpha_record(),), {}, None))
    points, what = tokens_points(given)
    assert points == [Measured(0.5, 1.5, 1), Measured(0.5, 2.0, 3)]
    assert "survival" in what


def test_without_files_the_short_runs_give_the_points_and_the_caption_says_so() -> None:
    points, what = tokens_points(toy_evidence())
    stats = [item.result.stats for item in toy_evidence().recordings[:2]]
    assert points == [
        Measured(item.alpha_hat, item.tokens_per_call, gamma)
        for item, gamma in zip(stats, (7, 3), strict=True)
    ]
    assert "the few rounds" in what
    assert [point.gamma for point in speed_points(toy_evidence())[0]] == [7, 3]


def test_a_best_gamma_needs_several_draft_lengths_and_is_the_fastest_of_them() -> None:
    speeds = {1: 1.2, 3: 1.9, 7: 1.4, None: 2.5}
    rows = [bench_row(gamma=gamma, speedup=speed) for gamma, speed in speeds.items()]
    assert best_gamma_points(evidence(bench=tuple(rows))) == [Measured(0.6, 3.0)]
    assert best_gamma_points(evidence(bench=tuple(rows[:2]))) == []


def test_own_costs_are_the_drafters_or_the_pairs_where_no_drafter_was_timed() -> None:
    both = Measurement("t", (), {"a": 0.1, "b": 0.3}, 0.2)
    assert own_costs(evidence(measurement=both)) == [0.3, 0.1]
    assert own_costs(evidence(measurement=Measurement("t", (), {}, 0.2))) == [0.2]
    assert own_costs(toy_evidence()) == []


def test_the_expected_speed_is_theorem_3_8_with_the_measured_alpha_and_cost() -> None:
    given = evidence(
        bench=(bench_row(), bench_row(gamma=None), bench_row(drafter="other")),
        measurement=Measurement("t", (), {"lookup": 0.05}, None),
    )
    fixed, adaptive, unknown = pair_rows(given)
    assert fixed.expected == walltime_improvement(0.6, 3, 0.05)
    assert adaptive.expected is None
    assert (unknown.c, unknown.expected) == (None, None)


# --- The report ---


def test_the_report_has_every_figure_and_table_of_the_paper() -> None:
    report = toy_report()
    titles = [section.title.partition(":")[0] for section in report.sections]
    assert titles == [
        *("In short", "Figure 1", "Table 1", "Figure 2", "Figure 3", "Figure 4", "Figure 5"),
        *("Tables 2 and 4", "Table 3", "How this was made"),
    ]
    assert [picture.name for picture in report.pictures] == [f"figure-{n}" for n in (2, 3, 4, 5)]


def test_table_1_stands_with_printed_beside_computed_values() -> None:
    [table] = tables(toy_report(), "Table 1")
    assert table.rows[3] == ("0.8", "5", "1.63x", "1.63x", "3.69x", "3.69x")
    assert len(table.rows) == 6
    assert all(row[2:4] == (row[2],) * 2 and row[4] == row[5] for row in table.rows)


def test_the_trace_is_that_of_the_longest_draft_length() -> None:
    report = toy_report()
    [trace] = [block for block in section(report, "Figure 1").blocks if isinstance(block, Trace)]
    stats = toy_evidence().recordings[0].result.stats
    assert len(trace.rounds) == stats.rounds
    rejecting = [pieces for pieces in trace.rounds if any(p.fate == "rejected" for p in pieces)]
    assert len(rejecting) == stats.examined - stats.accepted > 0


def test_a_text_that_ended_shows_its_end() -> None:
    pair = load("toy:target", "toy:near")
    request = pair.request("abc", max_new_tokens=9, logit_bias={256: 1e4})
    ended = tuple(record(pair, request, (3, 0), repeats=1))
    report = reproduction.build_report(evidence(recordings=ended))
    [trace] = [b for b in section(report, "Figure 1").blocks if isinstance(b, Trace)]
    assert trace.rounds == ((Piece("correction", "<end>"),),)


def test_without_a_tokenizer_the_trace_shows_ids() -> None:
    text = to_markdown(reproduction.build_report(evidence(tokenizer=None)))
    first = toy_evidence().recordings[0].result.trace[0]
    shown = "".join(f" {token}" for token in first.emitted[: first.accepted])
    assert re.search(rf"^ *1 {re.escape(shown)}\[", text, re.MULTILINE)


def test_the_papers_table_4_stands_with_its_three_values_that_round_differently() -> None:
    report = toy_report()
    [table] = tables(report, "Tables 2")
    rounded = [row for row in table.rows if f"{float(row[7][:-1]):.1f}x" != row[6]]
    assert len(table.rows) == 12
    assert [row[:3] for row in rounded] == [
        ("EnDe", "T5-base", "1"),
        ("EnDe", "T5-large", "1"),
        ("CNN/DM", "T5-large", "1"),
    ]


def test_parts_that_were_not_measured_say_how_to_measure_them() -> None:
    text = to_markdown(toy_report())
    assert "`outrider bench --json` measures it; pass what it wrote with `--bench FILE`" in text
    assert "`outrider measure --json` measures it; pass what it wrote with `--measurement" in text


def test_a_bench_fills_the_own_table_4_with_the_fastest_fixed_length_of_each_task() -> None:
    rows = (
        bench_row(speedup=1.2, gamma=1),
        bench_row(),
        bench_row(speedup=1.7, gamma=None),
        bench_row(task="summary", gamma=None),
        bench_row(task="qa"),
    )
    given = evidence(bench=rows, measurement=Measurement("t", (), {"lookup": 0.05}, None))
    own, _ = tables(reproduction.build_report(given), "Tables 2")
    expected = f"{walltime_improvement(0.6, 3, 0.05):.2f}x"
    measured = ("1.45x", "1.50x", "1.40 to 1.60")
    common = ("0", "lookup", "rejection", "0.60", "0.050")
    assert own.rows == (
        ("chat", *common[:3], "3", *common[3:], expected, *measured, "1.70x"),
        ("summary", *common[:3], "adaptive", *common[3:], "-", *measured, "1.50x"),
        ("qa", *common[:3], "3", *common[3:], expected, *measured, "-"),
    )


def test_the_report_counts_how_many_predictions_were_close() -> None:
    rows = (
        bench_row(speedup=1.0, predicted_speedup=1.09),
        bench_row(speedup=1.0, predicted_speedup=0.91),
        bench_row(speedup=1.0, predicted_speedup=1.12),
        bench_row(predicted_speedup=None),
    )
    text = to_markdown(reproduction.build_report(evidence(bench=rows)))
    assert "Of 3 settings measured one by one, 2 took the predicted time within 10%." in text


def test_table_3_has_a_row_for_each_drafter_and_a_column_for_each_temperature() -> None:
    records = (
        alpha_record(),
        alpha_record(temperature=1.0, alpha=0.25, low=0.2, high=0.3, num_tokens=900),
        alpha_record(drafter="bigram"),
    )
    given = evidence(measurement=Measurement("the target", records, {}, None))
    [table] = tables(reproduction.build_report(given), "Table 3")
    assert table.columns == ("drafter", "T = 0", "T = 1")
    assert table.rows == (
        ("lookup", "0.50 (0.40 to 0.60)", "0.25 (0.20 to 0.30)"),
        ("bigram", "0.50 (0.40 to 0.60)", "-"),
    )
    text = to_markdown(reproduction.build_report(given))
    assert "over 900 to 1000 tokens generated by the target" in text


def test_policies_at_one_temperature_have_columns_of_their_own() -> None:
    records = (alpha_record(policy="top-k 4", alpha=0.7), alpha_record(policy="plain"))
    given = evidence(measurement=Measurement("t", records, {}, None))
    [table] = tables(reproduction.build_report(given), "Table 3")
    assert table.columns == ("drafter", "T = 0, plain", "T = 0, top-k 4")
    assert table.rows == (("lookup", "0.50 (0.40 to 0.60)", "0.70 (0.40 to 0.60)"),)
