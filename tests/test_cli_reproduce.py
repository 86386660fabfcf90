"""`outrider reproduce` on the toy pair: what it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from outrider import cli
from outrider.cli import reproduce as command_module
from outrider.cli import terminal
from outrider.models import toy
from outrider.pair import Pair

TOYS = ("--target", "toy:target", "--drafter", "toy:near")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, object]:
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`outrider reproduce ARGUMENTS` in this process, in an empty folder."""
    for name, to_stderr in (("out", False), ("err", True)):
        console = Console(
            highlight=False, markup=False, soft_wrap=True, stderr=to_stderr, color_system=None
        )
        monkeypatch.setattr(terminal, name, console)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, toys: bool = True) -> Outcome:
        given = ["outrider", "reproduce", *(TOYS if toys else ()), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return Outcome(leaving.value.code, *capsys.readouterr())

    return call


def test_quick_writes_the_report_its_page_and_its_figures(run: Run, tmp_path: Path) -> None:
    outcome = run("--quick", "--out", "report/here")
    assert outcome.code == 0, outcome.err
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    figures = [f"report/here/figures/figure-{n}.svg" for n in (2, 3, 4, 5)]
    assert names == [*figures, "report/here/report.html", "report/here/report.md"]
    assert "report/here/report.html" in outcome.out
    assert "3.69x" in outcome.out
    assert "turn 3 of 3 done" in outcome.err


def test_json_has_table_1_computed_and_the_reports_path(run: Run) -> None:
    outcome = run("--quick", "--json")
    assert len(outcome.out.splitlines()) == 1
    facts = outcome.facts
    assert Path(facts["report"]) == Path("outrider-report/report.md")
    assert Path(facts["report"]).is_file()
    assert Path(facts["html"]).is_file()
    assert len(facts["table1"]) == 6
    assert facts["table1"][3] == {
        "alpha": 0.8,
        "gamma": 5,
        "operations": pytest.approx(6 / 3.68928),
        "speed": pytest.approx(3.68928),
    }
    assert facts["table3"] == facts["table4"] == []


def test_the_runs_are_real_and_of_two_draft_lengths_and_none(run: Run) -> None:
    runs = run("--quick", "--json").facts["runs"]
    assert [item["gamma"] for item in runs] == [7, 3, 0]
    assert [item["num_tokens"] for item in runs] == [48, 48, 48]
    assert runs[0]["rounds"] < runs[1]["rounds"] < runs[2]["rounds"] == 48
    assert runs[2]["alpha_hat"] is None
    assert runs[2]["speedup"] == 1.0


def test_the_report_says_how_it_was_made_and_nothing_of_this_machines_folders(
    run: Run, tmp_path: Path
) -> None:
    run("--quick", "--temperature", "1", "--seed", "5")
    text = (tmp_path / "outrider-report" / "report.md").read_text(encoding="utf-8")
    assert "| target | toy:target (toy, float64) |" in text
    assert "| drafter | toy:near |" in text
    assert "| rounds shown | rule rejection, temperature 1, one request |" in text
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text


def test_the_same_seed_shows_the_same_rounds(run: Run, tmp_path: Path) -> None:
    def trace(name: str) -> str:
        outcome = run("--quick", "--temperature", "1", "--seed", "5", "--out", name)
        assert outcome.code == 0, outcome.err
        text = (tmp_path / name / "report.md").read_text(encoding="utf-8")
        return text.split("```")[1]

    assert trace("a") == trace("b")


def test_a_prompt_of_ones_own_is_decoded_and_named(run: Run, tmp_path: Path) -> None:
    run("--quick", "--prompt", "Why is the sky blue?")
    text = (tmp_path / "outrider-report" / "report.md").read_text(encoding="utf-8")
    assert "Prompt: Why is the sky blue?" in text


def test_a_target_without_a_tokenizer_shows_ids(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair_of_ids(*_: object) -> Pair:
        models = [toy.load_toy(f"toy:{name}") for name in ("target", "near")]
        for model in models:
            model.tokenizer = None
        from outrider.drafters.model import ModelDrafter

        return Pair(models[0], ModelDrafter(models[1], target_vocab_size=models[0].vocab_size))

    monkeypatch.setattr(command_module, "load_pair", pair_of_ids)
    outcome = run("--quick")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "outrider-report" / "report.md").read_text(encoding="utf-8")
    assert "Prompt: 0 7 14 21" in text
    assert all(character in " 0123456789[]+-\n" for character in text.split("```")[1][5:])


# --- With files ---

BENCH_ROW = {
    "task": "chat",
    "temperature": 0.0,
    "gamma": 3,
    "rule": "rejection",
    "drafter": "toy:near",
    "batch": 1,
    "speedup": 1.6,
    "low": 1.5,
    "high": 1.7,
    "alpha_hat": 0.6,
    "tokens_per_call": 2.1,
    "predicted_speedup": 1.55,
}
ALPHA = {
    "drafter": "toy:near",
    "temperature": 0.0,
    "policy": "greedy",
    "alpha": 0.5,
    "low": 0.45,
    "high": 0.55,
    "num_tokens": 10_000,
    "survival": [0.5, 0.3],
}
COST = {"c": 0.1, "drafters": {"toy:near": {"c": 0.1, "drafter_ms": 1.0, "c_hat": None}}}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "b.json").write_text("some notes\n" + json.dumps({"rows": [BENCH_ROW]}))
    measurement = {"target": "toy:target", "alpha": [ALPHA], "cost": COST}
    (tmp_path / "m.json").write_text(json.dumps(measurement, indent=1))
    return ("--bench", "b.json", "--measurement", "m.json")


def test_files_fill_the_tables_of_ones_own_pair(
    run: Run, files: tuple[str, ...], tmp_path: Path
) -> None:
    facts = run("--quick", *files, "--json").facts
    [row] = facts["table4"]
    assert (row["speedup"], row["c"]) == (1.6, 0.1)
    assert row["expected"] == pytest.approx((1 - 0.6**4) / (0.4 * 1.3))
    assert [item["alpha"] for item in facts["table3"]] == [0.5]
    text = (tmp_path / "outrider-report" / "report.md").read_text(encoding="utf-8")
    assert "| toy:near | 0.50 (0.45 to 0.55) |" in text
    assert "yours: 0.1" in (tmp_path / "outrider-report/figures/figure-3.svg").read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full run, cut down to what toys need."""
    monkeypatch.setattr(command_module, "BENCH_TOKENS", 6)
    monkeypatch.setattr(command_module, "BENCH_PROMPTS", 1)
    monkeypatch.setattr(command_module, "BENCH_GAMMAS", "1,3")
    monkeypatch.setattr(command_module, "MEASURED_TOKENS", 60)


def test_the_full_run_measures_what_was_not_given_and_keeps_it(
    run: Run, small: None, tmp_path: Path
) -> None:
    outcome = run("--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 1
    kept = json.loads((tmp_path / "outrider-report" / "bench.json").read_text())
    assert len(outcome.facts["table4"]) == len(kept["rows"]) == 6 * 2 * 2
    assert {row["gamma"] for row in kept["rows"]} == {1, 3}
    assert {row["drafter"] for row in kept["rows"]} == {"toy:near"}
    measured = json.loads((tmp_path / "outrider-report" / "measurement.json").read_text())
    names = {"toy:near", "lookup", "unigram", "bigram", "random"}
    assert {row["drafter"] for row in measured["alpha"]} == names
    assert [row["alpha"] for row in outcome.facts["table3"]] == [
        row["alpha"] for row in measured["alpha"]
    ]
    assert {row["c"] for row in outcome.facts["table4"]} == {measured["cost"]["c"]}


@pytest.mark.parametrize("given", [0, 2])
def test_of_two_files_only_the_one_that_was_not_given_is_measured(
    run: Run, small: None, files: tuple[str, ...], tmp_path: Path, given: int
) -> None:
    outcome = run(*files[given : given + 2], "--json")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "outrider-report"
    kept = {file.name for file in folder.glob("*.json")}
    assert kept == {"measurement.json" if given == 0 else "bench.json"}


def test_the_full_run_measures_nothing_that_was_given(
    run: Run, files: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = run(*files, "--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.facts["table4"]) == 1
    assert not list((tmp_path / "outrider-report").glob("*.json"))


# --- Wrong use ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "none"), "needs a drafter; pass another --drafter than none"),
        (("--temperature", "-1"), "temperature"),
        (("--prompt", ""), "the prompt is empty"),
        (("--bench", "absent.json"), "cannot read 'absent.json': No such file"),
        (("--measurement", "words"), "'words' holds no JSON object"),
        (("--bench", "object"), "'object' has no \"rows\""),
        (("--measurement", "object"), '\'object\' has neither "alpha" nor "cost"'),
        (("--out", "words"), "cannot write 'words': File exists"),
        (("--out", "words/below"), "cannot write 'words/below': Not a directory"),
    ],
)
def test_wrong_use_is_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "words").write_text("just words")
    (tmp_path / "object").write_text("{}")
    outcome = run("--quick", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not list(tmp_path.rglob("report.*"))


def test_a_file_is_refused_before_a_model_is_read(run: Run) -> None:
    outcome = run("--bench", "absent.json", "--target", "no/such/model", toys=False)
    assert "absent.json" in outcome.err
