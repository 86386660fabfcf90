"""`outrider bench`: what it prints, what it keeps, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import outrider
import test_cli
from outrider.cli import show_bench
from outrider.decoding import Engine
from outrider.errors import NumericalError
from outrider.measure.benchmark import Benchmark
from outrider.measure.grid import Cell, Row
from outrider.measure.prompts import TASKS
from outrider.requests import Request, Result
from test_cli import Outcome, Run, assert_refused

run = test_cli.run  # the fixture

TOYS = ("--target", "toy:target", "--drafter", "toy:near")
SMALL = ("--tokens", "8", "--prompts-per-task", "1", "--repeats", "2")
KEYS = {
    "task",
    "temperature",
    "gamma",
    "rule",
    "drafter",
    "batch",
    "plain_ms_per_token",
    "ms_per_token",
    "speedup",
    "low",
    "high",
    "alpha_hat",
    "tokens_per_call",
    "predicted_speedup",
}


@pytest.fixture
def bench(run: Run) -> Callable[..., Outcome]:
    """`outrider bench` on the toys, small; a later flag replaces an earlier one."""

    def call(*arguments: str) -> Outcome:
        return run("bench", *TOYS, *SMALL, *arguments)

    return call


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that are measured."""
    cells: list[Cell] = []
    measure = Benchmark.measure

    def watched(self: Benchmark, cell: Cell) -> list[Row]:
        rows = measure(self, cell)
        cells.append(cell)
        return rows

    monkeypatch.setattr(Benchmark, "measure", watched)
    return cells


def a_row(**changes: object) -> Row:
    facts: dict[str, object] = {
        "task": "chat",
        "temperature": 0.0,
        "gamma": "adaptive",
        "rule": "block",
        "drafter": "lookup",
        "batch": 1,
        "plain_ms_per_token": 45.0,
        "ms_per_token": 30.0,
        "speedup": 1.5,
        "low": 1.4,
        "high": 1.6,
        "alpha_hat": 0.5,
        "tokens_per_call": 1.8,
        "predicted_speedup": 1.45,
        "agrees": True,
    }
    return Row.from_dict(facts | changes)


@pytest.fixture
def printed(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is printed for rows."""

    def call(*rows: Row) -> str:
        capsys.readouterr()
        show_bench.print_rows(rows)
        return capsys.readouterr().out

    return call


# --- What comes out ---


def test_quick_covers_six_tasks_at_two_temperatures(run: Run) -> None:
    outcome = run("bench", "--quick", *TOYS, "--tokens", "6", "--json")
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    rows = outcome.facts["rows"]
    assert [(row["task"], row["temperature"]) for row in rows] == [
        (task, temperature) for task in TASKS for temperature in (0.0, 1.0)
    ]
    assert all(set(row) >= KEYS for row in rows)
    assert {(row["gamma"], row["rule"], row["batch"]) for row in rows} == {("adaptive", "block", 1)}


def test_amounts_are_smaller_with_quick_and_what_is_given_counts(
    bench: Callable[..., Outcome],
) -> None:
    def amounts(*arguments: str) -> tuple[object, object, object]:
        outcome = bench("--task", "chat", "--temperature", "0", "--json", *arguments)
        given = outcome.facts["provenance"]["arguments"]
        return given["num_tokens"], given["num_prompts"], given["repeats"]

    assert amounts("--quick") == (8, 1, 2)
    assert amounts("--quick", "--tokens", "9") == (9, 1, 2)


def test_every_list_spans_the_grid(bench: Callable[..., Outcome]) -> None:
    lists = ("--gammas", "2,adaptive", "--rules", "block,coupled", "--batches", "1,2")
    outcome = bench(
        "--tasks", "chat", "--temperatures", "0", *lists, "--drafter", "lookup", "--json"
    )
    rows = outcome.facts["rows"]
    spanned = {(row["drafter"], row["gamma"], row["rule"], row["batch"]) for row in rows}
    assert len(rows) == len(spanned) == 16
    assert {row["drafter"] for row in rows} == {"toy:near", "lookup"}
    assert {row["gamma"] for row in rows} == {2, "adaptive"}


def test_provenance_names_versions_machine_arguments_and_source(
    bench: Callable[..., Outcome],
) -> None:
    outcome = bench("--task", "chat", "--temperature", "0", "--drafter", "auto", "--json")
    source = outcome.facts["provenance"]
    assert source["outrider"] == outrider.__version__
    assert source["torch"]
    assert source["arguments"]["target"] == "toy:target"
    assert source["proposed_by"] == {"toy:near": "toy:near", "auto": "lookup"}
    assert len(source["source"]) == 16
    assert {"git", "machine", "processor", "python"} <= set(source)


def test_progress_goes_to_stderr_with_the_time_left(bench: Callable[..., Outcome]) -> None:
    outcome = bench("--task", "chat,questions", "--temperature", "0", "--json")
    first, second = outcome.err.splitlines()
    assert first.startswith("1 of 2: chat, temperature 0, batch 1:")
    assert "left" in first
    assert second.startswith("2 of 2: questions")


def test_prompts_of_a_file_are_used(bench: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"question_id": 1, "category": "rag", "turns": ["Where is it?"]}\n')
    rows = bench("--prompts", str(file), "--temperature", "0", "--json").facts["rows"]
    assert [row["task"] for row in rows] == ["retrieval"]


# --- The table ---


def test_no_line_of_a_table_is_wider_than_80_characters(printed: Callable[..., str]) -> None:
    rows = [
        a_row(task=task, batch=batch, plain_ms_per_token=1234.5, speedup=10.25, low=9.87, high=11.2)
        for task in TASKS
        for batch in (1, 16)
    ]
    text = printed(*rows)
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text


def test_conditions_that_all_rows_share_are_said_once(printed: Callable[..., str]) -> None:
    text = printed(a_row(), a_row(task="summary"))
    assert text.count("lookup") == text.count("adaptive") == 1
    other = printed(a_row(), a_row(drafter="org/small"))
    assert "temperature 0, org/small" in other


def test_a_row_is_marked_where_its_whole_interval_is_on_one_side(
    printed: Callable[..., str],
) -> None:
    text = printed(
        a_row(),
        a_row(task="summary", speedup=0.8, low=0.7, high=0.9),
        a_row(task="questions", speedup=1.1, low=0.9, high=1.2),
    )
    assert "1.50x + 1.40-1.60" in text
    assert "0.80x - 0.70-0.90" in text
    assert "1.10x   0.90-1.20" in text


def test_the_mean_over_tasks_is_geometric(printed: Callable[..., str]) -> None:
    text = printed(a_row(speedup=2.0, high=2.1), a_row(task="summary", speedup=0.5, low=0.4))
    [line] = [line for line in text.splitlines() if line.startswith("geom. mean")]
    assert "1.00x" in line


def test_where_the_gain_ends_is_said(printed: Callable[..., str]) -> None:
    speedups = {1: 1.5, 2: 1.3, 4: 1.1, 8: 0.9, 16: 0.7}
    rows = [a_row(batch=batch, speedup=speedup) for batch, speedup in speedups.items()]
    text = printed(*rows)
    assert "gain up to batch 4 (1.10x), none from 8 on (0.90x)" in text
    assert "1.50x  1.30x  1.10x  0.90x  0.70x" in text
    assert "no gain at any batch size" in printed(*[a_row(batch=n, speedup=0.9) for n in (1, 2)])
    assert "gain up to batch 2 (1.50x)" in printed(a_row(), a_row(batch=2))


def test_adaptive_lengths_are_held_against_the_best_fixed_ones(
    printed: Callable[..., str],
) -> None:
    """Fixed lengths of 2 and 4, each the best one of a task; plain decoding takes 45 and 60."""
    times = {"adaptive": (30.0, 20.0), 2: (29.4, 40.0), 4: (45.0, 25.0)}
    rows = [
        a_row(task=task, gamma=gamma, plain_ms_per_token=plain, ms_per_token=ms)
        for gamma, both in times.items()
        for task, plain, ms in zip(("chat", "summary"), (45.0, 60.0), both, strict=True)
    ]
    text = " ".join(printed(*rows).split())
    assert "gamma adaptive: 2.10x over all, the best fixed gamma, 2, 1.51x (+38.8%)" in text
    assert "against the best of each task -2.0% at worst (chat)" in text
    others = [a_row(gamma=2, temperature=1.0), a_row(gamma=2, drafter="ngram"), a_row(gamma=0)]
    assert "best fixed" not in printed(a_row(), *others)
    many = [a_row(batch=n, gamma=gamma) for n in (1, 2) for gamma in ("adaptive", 3)]
    assert "gamma adaptive, batch 2: 1.50x over all" in " ".join(printed(*many).split())


def test_adaptive_lengths_are_held_against_one_fixed_length_for_all_temperatures(
    printed: Callable[..., str],
) -> None:
    """2 is best at temperature 0 and 1 at 1, so either costs something where the other is used."""
    times = {"adaptive": (20.0, 40.0), 1: (30.0, 41.0), 2: (20.0, 60.0)}
    rows = [
        a_row(temperature=temperature, gamma=gamma, plain_ms_per_token=60.0, ms_per_token=ms)
        for gamma, both in times.items()
        for temperature, ms in zip((0.0, 1.0), both, strict=True)
    ]
    text = " ".join(printed(*rows).split())
    assert "temperature 0, gamma adaptive: 3.00x over all, the best fixed gamma, 2, 3.00x" in text
    assert "temperature 1, gamma adaptive: 1.50x over all, the best fixed gamma, 1, 1.46x" in text
    assert (
        "all temperatures, gamma adaptive: 2.00x over all, the best fixed gamma, 1, 1.69x" in text
    )
    assert "+0.0% at worst (chat, temperature 0)" in text
    one = [a_row(gamma=gamma) for gamma in ("adaptive", 3)]
    assert "all temperatures" not in printed(*one)


def test_predictions_within_a_tenth_are_counted(printed: Callable[..., str]) -> None:
    text = printed(a_row(), a_row(task="summary", predicted_speedup=1.7))
    assert "predicted within 10 % of measured in 1 of 2 rows" in text


def test_a_text_that_differs_and_must_not_is_told(printed: Callable[..., str]) -> None:
    assert "must not" in printed(a_row(agrees=False))
    assert "must not" not in printed(a_row(), a_row(task="summary", agrees=None))


# --- What is kept ---


def test_out_holds_rows_and_provenance_and_nothing_else_is_left(
    bench: Callable[..., Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    outcome = bench("--task", "chat", "--temperature", "0", "--out", str(out), "--json")
    assert json.loads(out.read_text()) == outcome.facts
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


@pytest.fixture
def broken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring breaks in the second cell, the first time."""
    measure = Benchmark.measure
    calls = []

    def breaking(self: Benchmark, cell: Cell) -> list[Row]:
        calls.append(cell)
        if len(calls) == 2:
            raise NumericalError("the target went mad")
        return measure(self, cell)

    monkeypatch.setattr(Benchmark, "measure", breaking)


def test_a_second_call_goes_on_where_the_first_broke_off(
    broken_once: None, measured: list[Cell], bench: Callable[..., Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    arguments = ("--task", "chat,summary", "--temperature", "0", "--out", str(out), "--json")
    first = bench(*arguments)
    assert first.code == 2
    assert "went mad" in first.err.splitlines()[-1]
    assert not out.exists()
    [kept] = [
        json.loads(line)
        for line in (tmp_path / "rows.json.unfinished.jsonl").read_text().splitlines()[1:]
    ]
    second = bench(*arguments)
    assert second.code == 0, second.err
    assert second.facts["rows"][0] == kept
    assert [row["task"] for row in second.facts["rows"]] == ["chat", "summary"]
    assert [cell.task for cell in measured] == ["chat", "summary"]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


def test_without_a_file_what_was_measured_is_printed_before_the_error(
    broken_once: None, bench: Callable[..., Outcome]
) -> None:
    outcome = bench("--task", "chat,summary", "--temperature", "0")
    assert outcome.code == 2
    assert "chat" in outcome.out
    assert "went mad" in outcome.err


def test_other_arguments_do_not_touch_what_is_unfinished(
    broken_once: None, bench: Callable[..., Outcome], tmp_path: Path
) -> None:
    arguments = (
        "--task",
        "chat,summary",
        "--temperature",
        "0",
        "--out",
        str(tmp_path / "rows.json"),
    )
    bench(*arguments)
    before = (tmp_path / "rows.json.unfinished.jsonl").read_bytes()
    assert_refused(bench(*arguments, "--gamma", "2"), "other arguments")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    assert_refused(bench(*arguments, "--prompts", str(bad)), "line 1")
    assert (tmp_path / "rows.json.unfinished.jsonl").read_bytes() == before


# --- What is refused ---


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--temperatures", "0,warm"), "--temperatures"),
        (("--temperature", "-1"), "temperature"),
        (("--gammas", "2,most"), "--gammas"),
        (("--gamma", "-2"), "gamma"),
        (("--rule", "guess"), "guess"),
        (("--drafter", "none"), "leave out --drafter none"),
        (("--batches", "0"), "batches"),
        (("--batches", "two"), "--batches"),
        (("--tasks", "poems"), "poems"),
        (("--tokens", "0"), "num_tokens"),
        (("--repeats", "1"), "repeats"),
        (("--prompts", "nothing.jsonl"), "nothing.jsonl"),
        (("--out", "no/such/folder/rows.json"), "rows.json"),
        (("--drafter", "toy:nothing"), ["toy", "nothing"][1]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], part: str, bench: Callable[..., Outcome]
) -> None:
    assert_refused(bench(*arguments), part)


def test_a_malformed_line_is_named(bench: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"category": "qa", "turns": ["Who?"]}\n{"category": "qa"}\n')
    assert_refused(bench("--prompts", str(file)), "line 2")
    file.write_text("\n")
    assert_refused(bench("--prompts", str(file)), "no prompt")


def test_fewer_prompts_than_asked_for_are_told(
    bench: Callable[..., Outcome], tmp_path: Path
) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"category": "qa", "turns": ["Who?"]}\n')
    options = ("--prompts", str(file), "--temperature", "0", "--json")
    assert "of 3 prompts a task, questions has 1" in bench(*options, "--prompts-per-task", "3").err
    assert "prompts a task" not in bench(*options, "--prompts-per-task", "1").err


def test_help_lists_the_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run("bench", "--help").out
    for option in ("--quick", "--prompts", "--tasks", "--gammas", "--batches", "--out", "--json"):
        assert option in text


def test_a_policy_counts_for_every_temperature_and_is_told(
    bench: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    decode = Engine.generate

    def watched(self: Engine, requests: Sequence[Request]) -> list[Result]:
        seen.update(
            (request.policy.temperature, request.policy.top_k, request.policy.top_p)
            for request in requests
            if request.ignore_eos  # the timed ones, not the turns of a conversation before them
        )
        return decode(self, requests)

    monkeypatch.setattr(Engine, "generate", watched)
    narrow = ("--tasks", "chat", "--temperatures", "0.7,1", "--top-p", "0.9", "--top-k", "5")
    facts = bench(*narrow, "--json").facts
    assert seen == {(0.7, 5, 0.9), (1.0, 5, 0.9)}
    arguments = facts["provenance"]["arguments"]
    assert (arguments["top_k"], arguments["top_p"]) == (5, 0.9)
    assert "top-k 5, top-p 0.9" in bench(*narrow).out
    assert_refused(bench("--top-p", "1.5"), "top_p")
