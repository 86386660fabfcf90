"""`outrider measure`: what it prints, what it keeps, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import test_cli
from outrider.cli import measure as command
from outrider.cli import show_measure
from outrider.drafters import registry
from outrider.errors import NumericalError
from outrider.measure import measuring
from outrider.measure.alpha import BASELINES
from outrider.measure.candidates import candidates_from
from outrider.measure.records import measurement_from
from test_cli import Outcome, Run, assert_refused

run = test_cli.run  # the fixture

TOYS = ("--target", "toy:target", "--drafter", "toy:near")
SMALL_TEXT = ("--tokens", "90")
SMALL_COST = ("--contexts", "16", "--batches", "1")
NAMES = ["toy:near", "lookup", "unigram", "bigram", "random"]


@pytest.fixture
def measure(run: Run) -> Callable[..., Outcome]:
    """`outrider measure` on the toys, small; a later flag replaces an earlier one."""

    def call(*arguments: str) -> Outcome:
        text = () if "--cost-only" in arguments else SMALL_TEXT
        cost = () if "--no-cost" in arguments else SMALL_COST
        return run("measure", *TOYS, *text, *cost, *arguments)

    return call


# --- What comes out ---


def test_json_is_a_measurement_of_every_drafter_at_both_temperatures(
    measure: Callable[..., Outcome],
) -> None:
    outcome = measure("--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 1
    facts = outcome.facts
    assert facts["target"] == "toy:target"
    assert [(row["drafter"], row["policy"]) for row in facts["alpha"]] == [
        (name, policy) for policy in ("greedy", "temperature 1") for name in NAMES
    ]
    for row in facts["alpha"]:
        assert 0.0 <= row["low"] <= row["alpha"] <= row["high"] <= 1.0
        assert row["num_tokens"] >= 90
        assert len(row["beta_histogram"]) == 10
        assert {"survival", "conditional", "match", "block_gain", "temperature"} <= set(row)
    counted = {row["drafter"] for row in facts["alpha"] if "rounds" in row}
    assert counted == {"toy:near", "lookup"}
    assert set(facts["cost"]["drafters"]) == set(NAMES)
    assert facts["cost"]["verify_cost"]["1"] == 1.0
    assert {"c", "target_ms", "drafter_ms", "outside_ms", "c_hat", "contexts"} <= set(facts["cost"])


def test_plan_and_the_report_read_it(measure: Callable[..., Outcome]) -> None:
    facts = measure("--no-rounds", "--json").facts
    found, _ = candidates_from(facts)
    assert [item.drafter for item in found] == NAMES
    measured = measurement_from(facts)
    assert measured.cost_of("toy:near") == facts["cost"]["c"]


def test_either_half_can_be_left_out(measure: Callable[..., Outcome]) -> None:
    facts = measure("--cost-only", "--json").facts
    assert facts["alpha"] == []
    assert set(facts["cost"]["drafters"]) == set(NAMES)
    facts = measure("--no-cost", "--temperature", "1", "--no-rounds", "--json").facts
    assert "cost" not in facts
    assert [row["temperature"] for row in facts["alpha"]] == [1.0] * 5
    assert not any("rounds" in row for row in facts["alpha"])
    assert measurement_from(facts).c is None


def test_only_the_drafters_named_are_measured_without_baselines(
    measure: Callable[..., Outcome],
) -> None:
    facts = measure("--no-baselines", "--drafter", "toy:far", "--no-cost", "--json").facts
    assert {row["drafter"] for row in facts["alpha"]} == {"toy:near", "toy:far"}


def test_with_none_named_the_drafter_that_comes_with_outrider_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("measure", "--target", "toy:target", *SMALL_TEXT, "--no-cost", "--json")
    options = (*options, "--temperature", "1")
    facts = run(*options).facts
    assert {row["drafter"] for row in facts["alpha"]} == {*BASELINES}
    assert facts["provenance"]["proposed_by"] == {}
    monkeypatch.setattr(registry, "shipped_drafter", lambda target: "toy:near")
    facts = run(*options).facts
    assert {row["drafter"] for row in facts["alpha"]} == {"auto", *BASELINES}
    assert facts["provenance"]["proposed_by"] == {"auto": "lookup+toy:near"}


def test_the_policy_is_the_one_asked_for(measure: Callable[..., Outcome]) -> None:
    options = ("--no-cost", "--no-rounds", "--no-baselines", "--temperature", "0.7", "--json")
    [plain] = measure(*options).facts["alpha"]
    [cut] = measure(*options, "--top-k", "3", "--top-p", "0.9").facts["alpha"]
    assert plain["policy"] == "temperature 0.7"
    assert cut["policy"] == "temperature 0.7, top-k 3, top-p 0.9"
    assert plain["alpha"] != cut["alpha"]


def test_the_curve_is_whole_with_full_curve_and_short_with_quick(
    measure: Callable[..., Outcome],
) -> None:
    def numbers(*options: str) -> list[str]:
        return list(measure("--cost-only", "--json", *options).facts["cost"]["verify_cost"])

    assert numbers("--full-curve") == [str(n) for n in range(1, 34)]
    assert len(numbers("--quick")) < len(numbers()) < 33


@pytest.mark.parametrize(
    ("given", "quick", "expected"),
    [(None, False, 10_000), (None, True, 600), (700, True, 700), (700, False, 700)],
)
def test_quick_measures_600_tokens_and_what_is_given_counts(
    given: int | None, quick: bool, expected: int
) -> None:
    amounts = command._amounts(given, None, None, [], quick, False, False)
    assert amounts.num_tokens == expected


def test_curves_are_measured_at_every_context_and_batch(measure: Callable[..., Outcome]) -> None:
    cost = measure("--cost-only", "--contexts", "8,300", "--batches", "1,2", "--json").facts["cost"]
    places = [(item["context"], item["batch"]) for item in cost["contexts"]]
    assert places == [(8, 1), (300, 1), (8, 2), (300, 2)]
    assert cost["context"] == 300


def test_the_table_for_people_has_alpha_survival_and_c(measure: Callable[..., Outcome]) -> None:
    outcome = measure()
    lines = outcome.out.splitlines()
    assert any(line.split()[:3] == ["drafter", "greedy", "temperature"] for line in lines)
    assert sum(line.startswith("toy:near") and " to " in line for line in lines) >= 3
    assert "tokens per round counted: rejection" in outcome.out
    assert "A target step takes" in lines[-1]
    assert "c = " in lines[-1]
    tables = [line for line in lines if not line.startswith(("toy:near:", "lookup:", "A target"))]
    assert max(map(len, tables)) <= 100


def test_a_drafters_folders_are_not_shown_unless_they_tell_two_apart() -> None:
    assert show_measure._shown(["/home/me/mine", "lookup+/home/me/mine", "ngram:a/b.ngram"]) == {
        "/home/me/mine": "mine",
        "lookup+/home/me/mine": "lookup+mine",
        "ngram:a/b.ngram": "ngram:b.ngram",
    }
    alike = ["./old/mine", "./new/mine", "auto"]
    assert show_measure._shown(alike) == {name: name for name in alike}


def test_progress_tells_the_time_left(
    measure: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PROGRESS_S", 0.0)
    monkeypatch.setattr(command.time, "perf_counter", iter(range(10**6)).__next__)
    lines = measure("--no-cost", "--no-rounds", "--json").err.splitlines()
    assert any("greedy: 3 of 8 texts read" in line for line in lines)
    assert any("; about " in line and line.endswith(" left") for line in lines)


def test_texts_that_end_too_soon_are_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"category": "qa", "turns": ["Who?"]}\n{"category": "qa", "turns": ["Why"]}\n')
    from outrider.models import toy

    load = toy.load_toy

    def ending(reference: str, **settings: str) -> toy.ToyModel:
        model = load(reference, **settings)
        model.eos_ids = frozenset(range(257))
        return model

    monkeypatch.setattr(toy, "load_toy", ending)
    options = ("--no-cost", "--no-rounds", "--prompts", str(file), "--temperature", "0")
    outcome = run("measure", *TOYS, *SMALL_TEXT, *options)
    assert outcome.code == 0, outcome.err
    assert "the texts of all prompts have 1 of 90 tokens" in outcome.err


# --- What is kept ---


def test_out_holds_the_measurement_and_nothing_else_is_left(
    measure: Callable[..., Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "m.json"
    outcome = measure("--no-rounds", "--out", str(out), "--json")
    assert json.loads(out.read_text()) == outcome.facts
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (NumericalError("the target went mad"), 0),
        (KeyboardInterrupt(), 3),
        (KeyboardInterrupt(), 9),
    ],
)
def test_an_interrupted_call_goes_on_and_ends_with_the_same_file(
    error: BaseException,
    after: int,
    measure: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--no-cost", "--tokens", "40", "--json")
    whole, broken = tmp_path / "whole.json", tmp_path / "broken.json"
    measure(*options, "--out", str(whole))
    read, calls = measuring.text_betas, []

    def breaking(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == after + 1:
            raise error
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "text_betas", breaking)
    first = measure(*options, "--out", str(broken))
    assert first.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert first.out == ""
    assert "the same call goes on there" in first.err
    assert not broken.exists()
    second = measure(*options, "--out", str(broken))
    assert second.code == 0, second.err
    assert "going on after" in second.err
    assert broken.read_text() == whole.read_text()
    # Nothing was read twice but the text at which it broke.
    assert len(calls) == 16 + 1
    assert not list(tmp_path.glob("*.unfinished.jsonl"))


def test_curves_that_were_timed_before_an_interruption_are_not_timed_again(
    measure: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_curve, time_drafter = measuring.measure_curve, measuring.measure_drafter
    curves: list[object] = []

    def watched(*arguments: object, **settings: object) -> dict[str, object]:
        curves.append(time_curve(*arguments, **settings))  # type: ignore[arg-type]
        return curves[-1]  # type: ignore[return-value]

    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure_curve", watched)
    monkeypatch.setattr(measuring, "measure_drafter", interrupted)
    options = ("--cost-only", "--batches", "1,2", "--out", str(tmp_path / "m.json"), "--json")
    assert measure(*options).code == 130
    monkeypatch.setattr(measuring, "measure_drafter", time_drafter)
    facts = measure(*options).facts
    assert len(curves) == 2
    assert facts["cost"]["contexts"] == curves


def test_without_a_file_the_rows_found_are_printed_before_the_error(
    measure: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = measuring.Measuring.alpha_rows

    def breaking(self: measuring.Measuring, policy: object) -> object:
        if policy.temperature > 0:  # type: ignore[attr-defined]
            raise NumericalError("the target went mad")
        return rows(self, policy)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring.Measuring, "alpha_rows", breaking)
    outcome = measure("--no-rounds")
    assert outcome.code == 2
    assert "bigram" in outcome.out
    assert outcome.err.splitlines()[-1] == "error: the target went mad"
    lines = measure("--no-rounds", "--json").err.splitlines()
    assert [json.loads(line)["drafter"] for line in lines[:-1]] == NAMES


def test_other_arguments_do_not_touch_what_is_unfinished(
    measure: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "text_betas", interrupted)
    out = ("--out", str(tmp_path / "m.json"))
    assert measure(*out).code == 130
    [kept] = tmp_path.iterdir()
    before = kept.read_bytes()
    assert_refused(measure(*out, "--top-k", "5"), "other arguments")
    assert_refused(measure(*out, "--tokens", "0"), "--tokens")
    assert kept.read_bytes() == before


# --- What is refused ---


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--tokens", "0"), "--tokens must be 1 or more, not 0"),
        (("--temperatures", "0,warm"), "--temperatures"),
        (("--temperatures", "1,1"), "differ"),
        (("--temperature", "-1"), "temperature"),
        (("--top-k", "-1"), "top_k"),
        (("--top-p", "0"), "top_p"),
        (("--contexts", "0"), "--contexts"),
        (("--batches", "4,8"), "--batches must have 1"),
        (("--batches", "two"), "--batches"),
        (("--drafter", "toy:nothing"), "no toy model is called 'nothing'"),
        (("--drafter", "none"), "nothing to measure of --drafter none"),
        (("--drafter", "bigram"), "bigram is a baseline"),
        (("--drafter", "ngram:absent"), "absent"),
        (("--cost-only", "--no-cost"), "nothing to measure"),
        (("--no-cost", "--contexts", "8"), "drop --no-cost"),
        (("--cost-only", "--tokens", "40"), "drop --cost-only"),
        (("--cost-only", "--no-rounds"), "drop --cost-only"),
        (("--contexts", "16,100000"), "--contexts 100000 leaves no room"),
        (("--prompts", "nothing.jsonl"), "nothing.jsonl"),
        (("--out", "no/such/folder/m.json"), "cannot write"),
        (("--engine", "steam"), "engine"),
        (("--drafter-dtype", "float7"), "dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    part: str,
    measure: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: object, **__: object) -> object:
        raise AssertionError("refused only after work was done")

    monkeypatch.setattr(measuring, "next_texts", late)
    monkeypatch.setattr(measuring, "measure_curve", late)
    assert_refused(measure(*arguments), part)


def test_no_drafter_at_all_is_refused(run: Run) -> None:
    assert_refused(run("measure", "--target", "toy:target", "--no-baselines"), "no drafter")


def test_a_drafters_dtype_without_a_drafting_model_is_refused(run: Run) -> None:
    options = ("--target", "toy:target", "--drafter-dtype", "float32")
    assert_refused(run("measure", *options), "--drafter-dtype is for a drafting model")


def test_files_without_usable_prompts_are_refused(
    measure: Callable[..., Outcome], tmp_path: Path
) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text("\n")
    assert_refused(measure("--prompts", str(file)), "no prompt")
    file.write_text('{"category": "qa", "turns": ["Who?"]}\n{"category": "qa"}\n')
    assert_refused(measure("--prompts", str(file)), "line 2")
    file.write_text('{"category": "qa", "turns": ["Who?"]}\n')
    assert_refused(measure("--prompts", str(file)), "only one prompt")
    assert measure("--prompts", str(file), "--no-baselines", "--no-cost").code == 0
    long = json.dumps({"category": "qa", "turns": ["word " * 1000], "question_id": 7})
    file.write_text(long + "\n")
    assert_refused(measure("--prompts", str(file)), "prompt 7 (questions) has")


def test_help_lists_the_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run("measure", "--help").out
    for option in ("--quick", "--cost-only", "--full-curve", "--tokens", "--out", "--json"):
        assert option in text
