"""Measurements on disk while they are made, so that a second call goes on where the first ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import UsageError
from outrider.measure.report import write_whole

__all__ = ["Unfinished"]


class Unfinished:
    """A file beside the result with everything measured so far: conditions, then a record a line.

    Args:
        output: the result's file; the records are in a file beside it.
        conditions: what was asked for, ready for JSON. Records of other conditions are no use.

    Raises:
        UsageError: the file holds records of other conditions, or cannot be read.
    """

    def __init__(self, output: Path, conditions: Mapping[str, object]) -> None:
        self._output = output
        self.path = output.with_name(output.name + ".unfinished.jsonl")
        head = json.dumps(conditions, sort_keys=True)
        try:
            lines = self._lines()
            self.records: list[dict[str, object]] = [json.loads(line) for line in lines[1:]]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot go on from {str(self.path)!r}: {reason}") from error
        if lines and lines[0] != head:
            raise UsageError(
                f"{self.path} holds {len(self.records)} results of a run with other arguments, "
                "prompts or source; repeat that call to finish it, write to another file, or "
                "delete it"
            )
        self._head = head
        self._is_begun = False

    def add(self, record: Mapping[str, object]) -> None:
        """Keep one more record.

        Raises:
            UsageError: it cannot be written; those before it are kept.
        """
        self.records.append(dict(record))
        if not self._is_begun:  # a line that was cut off is left out
            lines = [self._head, *map(json.dumps, self.records)]
            write_whole(self.path, "".join(f"{line}\n" for line in lines))
            self._is_begun = True
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {str(self.path)!r}: {error.strerror}; what was measured before is "
                "kept there, and the same call goes on with it"
            ) from error

    def finish(self, result: Mapping[str, object]) -> None:
        """Write the result; nothing is unfinished any more."""
        write_whole(self._output, json.dumps(result, indent=1) + "\n")
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[str]:
        """Whole lines: the last may have been cut off while it was written."""
        if not self.path.exists():
            return []
        return self.path.read_text(encoding="utf-8").split("\n")[:-1]
