"""Prompts to measure on: six kinds that come with Outrider, or a file in Spec-Bench's form.

A file holds one JSON object a line: {"question_id": int, "category": str, "turns": [str, ...]}, the
form of Spec-Bench's `question.jsonl` (Xia et al., ACL Findings 2024) and of MT-bench before it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from outrider.errors import UsageError

__all__ = ["TASKS", "PromptItem", "choose_tasks", "digest", "read_prompts", "shipped_prompts"]

TASKS = ("chat", "translation", "summary", "questions", "mathematics", "retrieval")
"""The kinds of the shipped prompts."""

_MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
_TASK_OF_CATEGORY = {
    **dict.fromkeys(_MT_BENCH, "chat"),
    "summarization": "summary",
    "qa": "questions",
    "math_reasoning": "mathematics",
    "rag": "retrieval",
}
"""Spec-Bench's categories; its eight of MT-bench are its multi-turn kind."""

_FORM = '{"question_id": 1, "category": "qa", "turns": ["..."]}'


@dataclass(frozen=True)
class PromptItem:
    """One conversation of a user.

    Attributes:
        task: its kind; one of `TASKS`, or the category of the user's own file.
        turns: what the user says, at least one; the answers between them are the target's own.
        id: the number the file gives it.
    """

    task: str
    turns: tuple[str, ...]
    id: int


def digest(items: Sequence[PromptItem]) -> str:
    """Tells whether two measurements were made on the same prompts."""
    return hashlib.sha256(repr(list(items)).encode()).hexdigest()[:16]


def shipped_prompts() -> list[PromptItem]:
    """The prompts that come with Outrider, ten of each of `TASKS`."""
    file = resources.files("outrider") / "data" / "prompts.jsonl"
    return _parsed(file.read_text(encoding="utf-8"), "the shipped prompts")


def read_prompts(path: Path | str) -> list[PromptItem]:
    """The prompts of a file; blank lines are skipped, a missing question_id is the line's number.

    Raises:
        UsageError: the file cannot be read, holds no prompt, or a line of it, whose number is
            named, is malformed.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not valid UTF-8; convert it first") from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {str(path)!r}: {reason}") from error
    return _parsed(text, repr(str(path)))


def choose_tasks(items: Sequence[PromptItem], tasks: Sequence[str] | None) -> list[PromptItem]:
    """The items of these tasks, task by task in the order asked for; None takes all.

    Raises:
        UsageError: a task has no prompt.
    """
    counts = Counter(item.task for item in items)
    for task in tasks or ():
        if task not in counts:
            raise UsageError(f"no prompts for task {task!r}; there are {', '.join(counts)}")
    wanted = counts if tasks is None else dict.fromkeys(tasks)
    return [item for task in wanted for item in items if item.task == task]


def _parsed(text: str, source: str) -> list[PromptItem]:
    items = []
    # Not splitlines: U+2028 and its like are allowed inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            items.append(_item(line, number, f"line {number} of {source}"))
    if not items:
        raise UsageError(f"{source} holds no prompt; expected lines such as {_FORM}")
    return items


def _item(line: str, number: int, where: str) -> PromptItem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({error}); expected {_FORM}") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where} is no JSON object; expected {_FORM}")
    category, turns = record.get("category"), record.get("turns")
    question_id = record.get("question_id", number)
    if not isinstance(category, str) or not category.strip():
        raise UsageError(f"{where}: category must be a name, not {category!r}; expected {_FORM}")
    if isinstance(question_id, bool) or not isinstance(question_id, int):
        raise UsageError(f"{where}: question_id must be a whole number, not {question_id!r}")
    good = isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns)
    if not good or not turns:
        raise UsageError(
            f"{where}: turns must be a list of texts that are not empty, not {turns!r:.60}"
        )
    try:
        "".join([category, *turns]).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} holds half of a surrogate pair, which is no text") from error
    return PromptItem(_TASK_OF_CATEGORY.get(category, category), tuple(turns), question_id)
