"""`outrider distill` on the command line: numbers of tokens, and wrong use."""

from __future__ import annotations

from pathlib import Path

import pytest

import test_cli
from outrider.cli.distill import parse_count
from outrider.errors import UsageError
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


def test_wrong_use_is_one_clear_line_and_makes_no_folder(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n  \n")
    out = str(tmp_path / "out")
    for arguments, part in (
        (("--tokens", "lots"), "'lots'"),
        (("--prompts", str(empty)), "is empty"),
        (("--prompts", str(tmp_path / "none.txt")), "cannot read"),
        (("--loss", "hinge"), "loss must be one of"),
        (("--target", "toy:target"), "has no weights to learn from"),
        (("--target", str(tmp_path / "nowhere")), "no model at"),
        (("--engine", "abacus"), "engine must be one of"),
    ):
        assert_refused(run("distill", "--out", out, *arguments), part)
    assert not Path(out).exists()
