"""`outrider distill` on the command line: numbers of tokens, and wrong use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import test_cli
from models.test_checkpoints import TEMPLATE, byte_level, llama, save
from outrider.cli.distill import parse_count, parse_policies
from outrider.errors import UsageError
from outrider.training import distillation
from outrider.training.card import PROVENANCE
from outrider.training.distillation import Plan
from outrider.training.writing import POLICIES, DrawPolicy
from test_cli import Run, assert_refused

run = test_cli.run  # the fixture


@pytest.mark.parametrize(
    ("text", "count"),
    [("300000", 300_000), ("300k", 300_000), ("2.5M", 2_500_000), ("1_000", 1000), ("7", 7)],
)
def test_numbers_of_tokens_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "many", "-3", "0", "1.5", "1e", "nan", "infM"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="whole number"):
        parse_count(text)


def test_temperatures_are_read_with_their_top_p() -> None:
    assert parse_policies("0,0.7/0.9,1") == POLICIES
    assert parse_policies(",".join(map(str, POLICIES))) == POLICIES
    assert parse_policies(" 1.5 ") == (DrawPolicy(1.5),)


@pytest.mark.parametrize(
    ("text", "message"),
    [(text, "temperatures must be numbers") for text in ("", "warm", "0.7/", "1,,2", "1/x")]
    + [(text, "must be 0 or at least 0.01") for text in ("-1", "nan", "inf", "0.001")]
    + [(text, "top-p must be above 0") for text in ("0.7/0", "0.7/1.1", "0/0.9", "1/nan")],
)
def test_what_is_no_temperature_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_policies(text)


def test_wrong_use_is_one_clear_line_and_makes_no_folder(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n  \n")
    malformed = tmp_path / "prompts.jsonl"
    malformed.write_text('{"category": "chat", "turns": ["hi"]}\n{"category": "chat"}\n')
    out = str(tmp_path / "out")
    for arguments, part in (
        (("--tokens", "lots"), "'lots'"),
        (("--prompts", str(empty)), "is empty"),
        (("--prompts", str(tmp_path / "none.txt")), "cannot read"),
        (("--prompts", str(malformed)), "line 2 of"),
        (("--temperatures", "hot"), "'hot'"),
        (("--temperatures", "1,1.0"), "each named once; got 1, 1"),
        (("--loss", "hinge"), "loss must be one of"),
        (("--target", "toy:target"), "has no weights to learn from"),
        (("--target", str(tmp_path / "nowhere")), "no model at"),
        (("--engine", "abacus"), "engine must be one of"),
    ):
        assert_refused(run("distill", "--out", out, *arguments), part)
    assert not Path(out).exists()


def test_a_drafter_is_made_told_of_and_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "target", llama(), byte_level(), chat_template=TEMPLATE)
    monkeypatch.setattr(distillation, "Plan", partial(Plan, rows=5, passes=60))
    (tmp_path / "prompts.txt").write_text("the dog\n\nthe dog\n")
    out = tmp_path / "drafter"
    call = (
        *("distill", "--target", folder, "--out", str(out), "--tokens", "600", "--seed", "3"),
        *("--layers", "1", "--vocab-size", "60", "--epochs", "1", "--engine", "torch"),
        *("--prompts", str(tmp_path / "prompts.txt"), "--temperatures", "0,1"),
    )
    made = run(*call, "--json")
    assert made.code == 0
    assert made.facts["folder"] == str(out)
    assert 0.0 < made.facts["alpha"] <= 1.0
    assert "text: 300 of 600; about" in made.err
    source = json.loads((out / PROVENANCE).read_text())
    assert source["alpha"] == made.facts["alpha"]
    assert (source["arguments"]["target"], source["arguments"]["prompts"]) == (folder, 1)
    assert "answers to 1 given prompts" in (out / "README.md").read_text()
    again = run(*call)  # everything is there already
    assert f"use it with --drafter lookup+{out}" in again.out
    assert "text:" not in again.err
    table = str(tmp_path / "table")
    fitted = run("fit", table, "--target", folder, "--distilled", str(out), "--json")
    assert fitted.facts["num_tokens"] > 600
    drafted = run(
        *("generate", "the dog", "--target", folder, "--drafter", str(out), "--engine", "torch"),
        *("--gamma", "3", "--max-new-tokens", "12", "--json"),
    )
    assert drafted.facts["stats"]["drafted"] > 0
