"""`outrider plan`: what it prints, what it takes, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import test_cli
from outrider import theory
from test_cli import Run

run = test_cli.run  # the fixture

MEASUREMENT: dict[str, object] = {
    "target": "org/big",
    "alpha": [
        {
            "drafter": name,
            "temperature": temperature,
            "policy": "",
            "alpha": alpha,
            "low": alpha - 0.03,
            "high": alpha + 0.03,
            "num_tokens": 10000,
            "survival": [alpha * 0.9**i for i in range(8)],
        }
        for name, temperature, alpha in (
            ("org/small", 0.0, 0.8),
            ("lookup", 0.0, 0.4),
            ("unigram", 0.0, 0.04),
            ("org/small", 1.0, 0.6),
        )
    ],
    "cost": {
        "c": 0.1,
        "target_ms": 40.0,
        "drafter_ms": 4.0,
        "c_hat": 0.05,
        "verify_cost": {"1": 1.0, "5": 1.2, "9": 1.6},
        "drafters": {
            "org/small": {"c": 0.1, "drafter_ms": 4.0, "c_hat": 0.05},
            "lookup": {"c": 0.0, "drafter_ms": 0.0, "c_hat": 0.0},
            "unigram": {"c": 0.0, "drafter_ms": 0.0, "c_hat": 0.0},
        },
    },
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps(MEASUREMENT))
    return str(path)


def test_json_holds_the_papers_formulas_for_given_numbers(run: Run) -> None:
    outcome = run(
        "plan", "--alpha", "0.8", "--c", "0.05", "--c-hat", "0.02", "--gamma", "5", "--json"
    )
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    facts = outcome.facts
    assert facts["expected_tokens"] == theory.expected_tokens_per_round(0.8, 5)
    assert facts["walltime_factor"] == theory.walltime_improvement(0.8, 5, 0.05)
    assert facts["operations_factor"] == theory.operations_factor(0.8, 5, 0.02)
    assert facts["optimal_gamma"] == theory.best_gamma(0.8, 0.05)
    assert facts["measured"] is None


def test_c_hat_is_c_unless_it_is_given(run: Run) -> None:
    facts = run("plan", "--alpha", "0.8", "--c", "0.05", "--gamma", "5", "--json").facts
    assert facts["operations_factor"] == theory.operations_factor(0.8, 5, 0.05)


def test_without_gamma_the_best_length_is_planned_with(run: Run) -> None:
    facts = run("plan", "--alpha", "0.8", "--c", "0.05", "--json").facts
    assert facts["gamma"] == facts["optimal_gamma"] == 8


def test_people_get_a_table_a_sentence_and_settings(run: Run) -> None:
    outcome = run("plan", "--alpha", "0.8", "--c", "0.05")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert "Draft 8 tokens; expect 3.09x; below alpha 0.05 do not speculate." in lines
    assert " ".join(lines[0].split()) == "alpha 0.80, c 0.050, c_hat 0.050 paper's formula"
    for row in (
        "expected tokens per round 4.33",
        "walltime factor 3.09x",
        "operations factor 2.17x",
        "left to an oracle 35 %",
        "speculation pays above alpha 0.05",
        "drafting 8 pays above alpha 0.29",
    ):
        assert row.split() in [line.split() for line in lines], row
    assert "vllm serve TARGET --speculative-config" in outcome.out
    assert "num_assistant_tokens = 8" in outcome.out
    assert "--spec-draft-n-max 8" in outcome.out


def test_the_best_length_has_its_own_rows_only_where_another_was_asked_for(run: Run) -> None:
    assert "best draft length" not in run("plan", "--alpha", "0.8", "--c", "0.05").out
    assert "best draft length" in run("plan", "--alpha", "0.8", "--c", "0.05", "--gamma", "3").out


def test_no_settings_are_given_where_speculation_does_not_pay(run: Run) -> None:
    outcome = run("plan", "--alpha", "0.3", "--c", "0.5")
    assert outcome.code == 0
    assert outcome.out.rstrip().splitlines()[-1].startswith("Do not speculate")


def test_the_longest_draft_can_be_limited(run: Run) -> None:
    facts = run("plan", "--alpha", "0.8", "--c", "0", "--max-gamma", "5", "--json").facts
    assert facts["optimal_gamma"] == 5


def test_a_perfect_and_free_drafter_is_still_json(run: Run) -> None:
    facts = run("plan", "--alpha", "1", "--c", "0", "--json").facts
    assert facts["oracle_factor"] is None


def test_names_given_go_into_the_settings(run: Run) -> None:
    given = ("--target", "org/big", "--drafter", "lookup")
    facts = run("plan", "--alpha", "0.8", "--c", "0.05", *given, "--json").facts
    settings = facts["settings"]
    assert isinstance(settings, dict)
    assert settings["vllm"].startswith("vllm serve org/big ")
    assert '"method": "ngram"' in settings["vllm"]


# From a file


def test_a_file_gives_the_fastest_drafter_and_both_computations(run: Run, file: str) -> None:
    facts = run("plan", "--from", file, "--json").facts
    assert facts["drafter"] == "org/small"
    assert isinstance(facts["drafters"], list)
    assert [item["drafter"] for item in facts["drafters"]] == ["org/small", "lookup", "unigram"]
    paper, measured = facts["paper"], facts["measured"]
    assert isinstance(paper, dict)
    assert isinstance(measured, dict)
    assert facts["walltime_factor"] == measured["walltime_factor"] != paper["walltime_factor"]
    survival = [0.8 * 0.9**i for i in range(8)]
    gamma = facts["optimal_gamma"]
    curve = {1: 1.0, 5: 1.2, 9: 1.6}
    assert gamma == theory.best_gamma_measured(survival, 0.1, curve, max_gamma=8)
    assert facts["walltime_factor"] == theory.walltime_factor(survival, gamma, 0.1, curve)
    assert "Fastest: org/small" in str(facts["why"])


def test_people_see_every_drafter_and_why_one_was_picked(run: Run, file: str) -> None:
    outcome = run("plan", "--from", file)
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["drafter", "org/small", "lookup", "unigram"]
    assert any(line.startswith("Fastest: org/small, ") for line in lines)
    assert "measured v(n), survival" in outcome.out
    assert "over alpha's interval" in outcome.out
    assert "temperature 0 of 0, 1" in outcome.err


def test_a_temperature_picks_its_rows(run: Run, file: str) -> None:
    outcome = run("plan", "--from", file, "--temperature", "1", "--json")
    assert outcome.facts["alpha"] == 0.6
    assert outcome.err == ""


def test_one_drafter_of_the_file_can_be_asked_for(run: Run, file: str) -> None:
    outcome = run("plan", "--from", file, "--drafter", "unigram", "--gamma", "2")
    assert outcome.out.startswith("The only drafter measured: unigram.")


def test_the_saved_output_of_a_command_is_a_file_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "saved.txt"
    path.write_text("measuring ...\n" + json.dumps(MEASUREMENT) + "\n")
    assert run("plan", "--from", str(path), "--json").facts["drafter"] == "org/small"


def test_a_drafter_without_counterpart_gives_no_settings(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps(MEASUREMENT).replace("lookup", "ngram:table"))
    outcome = run("plan", "--from", str(path), "--drafter", "ngram:table", "--temperature", "0")
    assert outcome.code == 0
    assert "have no counterpart to ngram:table" in outcome.err
    assert "vllm" not in outcome.out


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to plan with: pass --alpha and --c, or --from FILE"),
        (("--alpha", "0.5"), "nothing to plan with"),
        (("--alpha", "1.2", "--c", "0.1"), "alpha must be in [0, 1]: got 1.2"),
        (("--alpha", "-0.1", "--c", "0.1"), "alpha must be in [0, 1]: got -0.1"),
        (("--alpha", "nan", "--c", "0.1"), "alpha must be in [0, 1]: got nan"),
        (("--alpha", "0.5", "--c", "-1"), "c must be a finite number, at least 0: got -1.0"),
        (("--alpha", "0.5", "--c", "inf"), "c must be a finite number"),
        (("--alpha", "0.5", "--c", "0.1", "--c-hat", "-1"), "c_hat must be a finite number"),
        (("--alpha", "0.5", "--c", "0.1", "--gamma", "-1"), "gamma must be a whole number"),
        (("--alpha", "0.5", "--c", "0.1", "--max-gamma", "0"), "max_gamma must be 1 or more"),
        (("--alpha", "0.5", "--c", "0.1", "--temperature", "0"), "--temperature reads a file"),
        (("--alpha", "0.5", "--c", "0.1", "--policy", "x"), "--policy reads a file"),
        (("--from", "FILE", "--alpha", "0.5"), "--alpha comes from the file"),
        (("--from", "FILE", "--c", "0.5"), "--c comes from the file"),
        (("--from", "FILE", "--c-hat", "0.5"), "--c-hat comes from the file"),
        (("--from", "FILE", "--gamma", "9"), "survival must reach to gamma = 9: got 8 values"),
        (("--from", "FILE", "--temperature", "3"), "no row at temperature 3; it has 0, 1"),
        (("--from", "FILE.not"), "cannot read"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    run: Run, file: str, arguments: tuple[str, ...], message: str
) -> None:
    outcome = run("plan", *(item.replace("FILE", file) for item in arguments))
    assert outcome.code == 2
    assert outcome.out == ""
    [line] = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "holds no JSON object"),
        ("[1, 2]", "holds no JSON object"),
        ("{}", 'neither "alpha" nor "cost"'),
        (json.dumps(MEASUREMENT).replace("0.04,", "1.04,", 1), "alpha[2]: alpha must be"),
    ],
)
def test_a_file_that_is_no_measurement_is_refused_with_the_row(
    run: Run, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    outcome = run("plan", "--from", str(path))
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_planning_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['outrider', 'plan', '--alpha', '0.8', '--c', '0.1', '--json']\n"
        "from outrider.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
