"""What Outrider keeps on disk: imported models and converted graphs, each whole or not at all.

A kept folder carries a list of its files and their sizes. It is written beside its place and
renamed, so whatever stands under its name was finished; one that was damaged since is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from outrider.errors import UsageError

__all__ = [
    "MANIFEST",
    "cache_folder",
    "clear_cache",
    "clear_unfinished",
    "fingerprint",
    "is_whole",
    "kept_folder",
    "read_manifest",
    "written_whole",
]

MANIFEST = "outrider.json"
_KINDS = ("models", "graphs", "costs")


def cache_folder() -> Path:
    """Where everything is kept: `$OUTRIDER_CACHE`, else `~/.cache/outrider`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("OUTRIDER_CACHE") or Path(home) / "outrider")


def clear_cache() -> int:
    """Delete every imported model, converted graph and measured cost; returns the bytes freed."""
    freed = 0
    for folder in (cache_folder() / kind for kind in _KINDS):
        if folder.exists():
            freed += sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
            shutil.rmtree(folder)
    return freed


def kept_folder(
    kind: str,
    name: str,
    make: Callable[[Path], dict[str, object]],
    *,
    facts: Sequence[str] = (),
    notify: Callable[[], None],
) -> Path:
    """The kept folder of this kind and name, made now if it is missing or broken.

    Args:
        kind: "models", "graphs" or "costs".
        name: of the folder; says everything its content depends on.
        make: fills an empty folder and returns what its manifest shall say beside the sizes.
        facts: names of what the manifest must say.
        notify: called before `make`, which may take long.

    Raises:
        UsageError: the cache cannot be written.
    """
    assert kind in _KINDS, kind
    folder = cache_folder() / kind / name
    if is_whole(folder, facts):
        return folder
    notify()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as unfinished:
            _write_manifest(Path(unfinished), make(Path(unfinished)))
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(unfinished, folder)
            Path(unfinished).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot keep {kind} in {str(folder.parent)!r} ({error.strerror or error}); "
            "set OUTRIDER_CACHE to a folder that can be written and has room"
        ) from error
    return folder


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write a file that is moved to `path` once all of it is written.

    Whoever reads `path` finds all of it or what stood there before; if writing fails, nothing is
    left beside it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def clear_unfinished(folder: Path) -> None:
    """Delete what processes that were killed in `written_whole` left in a folder."""
    if os.name != "posix":  # elsewhere there is no harmless signal to ask a process by
        return
    for file in folder.glob(".*.*"):
        process = file.suffix.removeprefix(".")
        if not process.isdecimal():
            continue
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                file.unlink()
        except (OSError, OverflowError):
            continue


def is_whole(folder: Path, facts: Sequence[str] = ()) -> bool:
    """Whether a kept folder holds every file it was written with, at its full size.

    Args:
        folder: a kept one.
        facts: names of what its manifest must say.
    """
    try:
        manifest = read_manifest(folder)
        sizes = manifest["sizes"]
        assert isinstance(sizes, dict)
        assert set(facts) <= set(manifest)
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AssertionError):
        return False


def read_manifest(folder: Path) -> dict[str, object]:
    """What a kept folder's manifest says; raises OSError or ValueError where there is none."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if not isinstance(manifest, dict):
        raise ValueError(f"{folder / MANIFEST} is not an object")
    return manifest


def fingerprint(files: Iterable[Path], *facts: str) -> str:
    """Identifies files by size and 64 blocks spread over each; instant for any size.

    Args:
        files: what the kept folder is made from.
        facts: whatever else it depends on, such as versions and precision.
    """
    digest = hashlib.sha256("\n".join(facts).encode())
    block = 64 * 1024
    for file in files:
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(64):
                stream.seek(max(0, size - block) * i // 63)
                digest.update(stream.read(block))
    return digest.hexdigest()[:16]


def _write_manifest(folder: Path, facts: dict[str, object]) -> None:
    sizes = {item.name: item.stat().st_size for item in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(facts | {"sizes": sizes}, indent=1))
