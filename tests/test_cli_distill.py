"""`outrider distill` on the command line: numbers of tokens, and wrong use."""

from __future__ import annotations

from pathlib import Path

import pytest

import test_cli
from outrider.cli.distill import parse_count, parse_policies
from outrider.errors import UsageError
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
