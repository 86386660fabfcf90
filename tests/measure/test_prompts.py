"""The shipped prompts, and files in Spec-Bench's form."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.errors import UsageError
from outrider.measure.prompts import (
    TASKS,
    PromptItem,
    choose_tasks,
    read_prompts,
    shipped_prompts,
)

GOOD = '{"question_id": 81, "category": "qa", "turns": ["Who?"]}'


def write(folder: Path, *lines: str) -> Path:
    file = folder / "question.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_ten_prompts_of_each_of_the_six_kinds_are_shipped() -> None:
    assert Counter(item.task for item in shipped_prompts()) == dict.fromkeys(TASKS, 10)


def test_all_shipped_prompts_and_their_numbers_differ() -> None:
    items = shipped_prompts()
    turns = [turn for item in items for turn in item.turns]
    assert len(set(turns)) == len(turns)
    assert len({item.id for item in items}) == len(items)


def test_shipped_conversations_have_two_turns_and_all_else_has_one() -> None:
    assert all(len(item.turns) == (2 if item.task == "chat" else 1) for item in shipped_prompts())


def test_summaries_and_passages_bring_texts_of_120_to_250_words() -> None:
    items = choose_tasks(shipped_prompts(), ["summary", "retrieval"])
    assert all(120 <= len(item.turns[0].split()) <= 250 for item in items)


def test_every_shipped_turn_asks_for_something_in_at_least_eight_words() -> None:
    assert all(len(turn.split()) >= 8 for item in shipped_prompts() for turn in item.turns)


def test_no_shipped_texts_share_a_run_of_ten_words() -> None:
    seen: dict[tuple[str, ...], int] = {}
    for item in shipped_prompts():
        if item.task in ("summary", "retrieval", "translation"):
            words = item.turns[0].split("\n\n", 1)[1].split()
            runs = {tuple(words[i : i + 10]) for i in range(len(words) - 9)}
            assert all(seen.setdefault(run, item.id) == item.id for run in runs), item.id


@pytest.mark.parametrize(
    ("category", "task"),
    [
        ("writing", "chat"),
        ("math", "chat"),
        ("humanities", "chat"),
        ("translation", "translation"),
        ("summarization", "summary"),
        ("qa", "questions"),
        ("math_reasoning", "mathematics"),
        ("rag", "retrieval"),
        ("poems", "poems"),
    ],
)
def test_spec_benchs_categories_become_tasks_and_others_stay(
    category: str, task: str, tmp_path: Path
) -> None:
    line = json.dumps({"question_id": 5, "category": category, "turns": ["One?", "Two?"]})
    assert read_prompts(write(tmp_path, line)) == [PromptItem(task, ("One?", "Two?"), 5)]


def test_blank_lines_are_skipped_and_other_fields_ignored(tmp_path: Path) -> None:
    other = '{"question_id": 2, "category": "qa", "turns": ["What?"], "reference": ["That."]}'
    items = read_prompts(write(tmp_path, "", GOOD, "  ", other, ""))
    assert [(item.id, item.turns) for item in items] == [(81, ("Who?",)), (2, ("What?",))]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    line = '{"question_id": 1, "category": "qa", "turns": ["before\u2028after"]}'
    assert read_prompts(write(tmp_path, line))[0].turns == ("before\u2028after",)


def test_a_missing_question_id_is_the_lines_number(tmp_path: Path) -> None:
    lines = (GOOD, "", '{"category": "qa", "turns": ["What?"]}')
    assert read_prompts(write(tmp_path, *lines))[1].id == 3


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"category": "qa"}', "turns"),
        ('{"category": "qa", "turns": []}', "turns"),
        ('{"category": "qa", "turns": "Who?"}', "turns"),
        ('{"category": "qa", "turns": ["Who?", " "]}', "turns"),
        ('{"category": "qa", "turns": [7]}', "turns"),
        ('{"turns": ["Who?"]}', "category"),
        ('{"category": 4, "turns": ["Who?"]}', "category"),
        ('{"question_id": "x", "category": "qa", "turns": ["Who?"]}', "question_id"),
        ('{"question_id": true, "category": "qa", "turns": ["Who?"]}', "question_id"),
        ('{"category": "qa", "turns": ["\\ud800"]}', "surrogate"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(line: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"line 3 of .*{part}") as refused:
        read_prompts(write(tmp_path, GOOD, "", line, GOOD))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_a_file_without_prompts_is_refused(lines: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(write(tmp_path, *lines))


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "nothing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_prompts(tmp_path / "bytes")


def test_tasks_come_in_the_order_asked_for() -> None:
    chosen = choose_tasks(shipped_prompts(), ["retrieval", "chat"])
    assert [item.task for item in chosen] == ["retrieval"] * 10 + ["chat"] * 10


def test_an_unknown_task_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'poems'.*chat, translation"):
        choose_tasks(shipped_prompts(), ["chat", "poems"])
