"""Where the command line prints, and how it reads what a user points it to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from outrider.errors import UsageError

__all__ = [
    "err",
    "number",
    "one_line",
    "out",
    "print_unfinished",
    "read_file",
    "read_prompt",
    "utf8",
]

out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(message.split())


def print_unfinished(
    rows: Sequence[Mapping[str, object]],
    kept_in: tuple[int, Path] | None,
    show: Callable[[], None],
    *,
    as_json: bool,
) -> None:
    """Before an error ends a command: nothing that was measured is lost.

    Args:
        rows: measured so far.
        kept_in: how many pieces are kept in which file, if they are.
        show: prints the rows for people.
        as_json: whether they were asked for as JSON; then they go to stderr, a line each.
    """
    if kept_in is not None:
        number, file = kept_in
        err.print(f"{number} pieces are kept in {file}; the same call goes on there")
    elif rows and as_json:
        for row in rows:
            err.print(json.dumps(row))
    elif rows:
        show()


def read_prompt(argument: str) -> str:
    """The prompt that an argument stands for: text, - for stdin, @FILE, @@ for an @."""
    if argument == "-":
        if sys.stdin is None:
            raise UsageError("there is no stdin to read the prompt from; pass text or @FILE")
        data = sys.stdin.buffer.read()
        return _decoded(data, "stdin")
    if argument.startswith("@@"):
        argument = argument[1:]
    elif argument.startswith("@"):
        return read_file(Path(argument[1:]))
    return utf8(argument, "the prompt")


def utf8(text: str, what: str) -> str:
    """`text`, unless it carries bytes that are not UTF-8 (kept by Python as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid UTF-8; check the terminal's encoding") from error
    return text


def read_file(path: Path) -> str:
    """A file's text; UsageError where it cannot be read or is not UTF-8."""
    try:
        data = path.expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {str(path)!r}: {reason}") from error
    return _decoded(data, repr(str(path)))


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not valid UTF-8: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it first"
        ) from error


def number(value: float | None, form: str) -> str:
    """A number in that form, or a dash for none."""
    return "-" if value is None else format(value, form)
