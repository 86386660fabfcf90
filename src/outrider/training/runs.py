"""The folder that a drafter is made in: the settings of the run and the text it has on disk.

    folder/making/run.json                  the settings: a call that goes on must have the same
    folder/making/shard-00000.safetensors   the target's text and laws

A run may also learn from text that other runs have written. They may go on writing: how much of
it counts is settled when the run begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import UsageError
from outrider.models import Model
from outrider.models.cache import clear_unfinished, written_whole
from outrider.training.shards import Shard, read_shard, shards_in
from outrider.training.writing import DrawPolicy

__all__ = ["MAKING", "WrittenText", "open_run", "written_text"]

MAKING = "making"
"""Inside a drafter's folder, what it is made from."""
_SETTINGS = "run.json"
_LONGEST_DIFFERENCE = 120


@dataclass(frozen=True)
class WrittenText:
    """What a run has written so far.

    Attributes:
        folder: of the run, absolute.
        files: its shards, whole ones, in order.
        policies: that its answers are drawn by.
        seed: of the text.
    """

    folder: Path
    files: tuple[Path, ...]
    policies: tuple[DrawPolicy, ...]
    seed: int

    def shards(self) -> Iterator[Shard]:
        """Read them, one by one."""
        return map(read_shard, self.files)

    def conversations(self) -> Iterator[list[int]]:
        """Token ids of every conversation."""
        return (text.ids.tolist() for shard in self.shards() for text in shard.conversations())


def written_text(folder: Path, target: Model) -> WrittenText:
    """The text of a run, finished or not.

    Args:
        folder: of the run.
        target: whose run it should be.

    Raises:
        UsageError: the folder holds no run, no text yet, or another target's.
    """
    try:
        settings = json.loads((folder / MAKING / _SETTINGS).read_text())
        name = settings["target"]
        policies = tuple(DrawPolicy(**policy) for policy in settings["policies"])
        seed = int(settings["seed"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{folder} holds no run of `outrider distill`, at least none that this version can "
            f"read, with its {MAKING} folder"
        ) from error
    if name != target.name:
        raise UsageError(f"{folder} holds text of {name}, not of {target.name}; name that target")
    files = tuple(shards_in(folder / MAKING))
    if not files:
        raise UsageError(f"{folder} holds no text yet; let `outrider distill` write some")
    return WrittenText(folder.resolve(), files, policies, seed)


def open_run(
    folder: Path, settings: dict[str, object], others: Sequence[WrittenText]
) -> tuple[Path, list[WrittenText]]:
    """The folder of what a drafter is made from, its settings checked or written.

    Args:
        folder: of the drafter.
        settings: everything the run depends on but that, as JSON has it.
        others: text of other runs as it is now.

    Returns:
        That folder, and as much of the other text as there was when the run began.

    Raises:
        UsageError: the folder holds another run or other files, or cannot be used; or text of
            another run is gone.
    """
    making = folder / MAKING
    file = making / _SETTINGS
    names = [str(text.folder) for text in others]
    settings = {**settings, "also_from": names}
    try:
        if file.is_file():
            found = json.loads(file.read_text())
            _check_same(folder, settings, found)
            clear_unfinished(making)
            amounts = found["also_from"]
            return making, [_first(text, amounts[str(text.folder)]) for text in others]
        if not _is_free(folder, making):
            raise UsageError(
                f"{folder} exists and holds no run to go on with; choose another folder"
            )
        making.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as unfinished:
            amounts = {str(text.folder): len(text.files) for text in others}
            unfinished.write_text(json.dumps({**settings, "also_from": amounts}, indent=1) + "\n")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot use {folder}: {reason}") from error
    return making, list(others)


def _check_same(folder: Path, settings: dict[str, object], found: dict[str, object]) -> None:
    amounts = found.get("also_from")
    found = {**found, "also_from": list(amounts) if isinstance(amounts, dict) else amounts}
    for name in sorted(settings):
        if found.get(name) != settings[name]:
            raise UsageError(
                f"{folder} holds a run with {_difference(name, found.get(name), settings[name])}; "
                "repeat that call to go on with it, or choose another folder"
            )


def _difference(name: str, found: object, wanted: object) -> str:
    """One thing in which two settings differ, in a few words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for part in sorted(wanted):
            if found.get(part) != wanted[part]:
                return _difference(f"{name}.{part}", found.get(part), wanted[part])
    text = f"{name} {found!r}, not {wanted!r}"
    return text if len(text) <= _LONGEST_DIFFERENCE else f"other {name}"


def _first(text: WrittenText, number: int) -> WrittenText:
    if len(text.files) < number:
        raise UsageError(
            f"{text.folder} held {number} shards of text when this run began, and holds "
            f"{len(text.files)} now; bring them back, or begin in another folder"
        )
    return replace(text, files=text.files[:number])


def _is_free(folder: Path, making: Path) -> bool:
    """Whether a run can begin here: nothing stands here but what a call cut short at once left."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    begun = making.iterdir() if making.is_dir() else iter(())
    return all(item == making for item in folder.iterdir()) and all(
        item.name.startswith(f".{_SETTINGS}.") for item in begun
    )
