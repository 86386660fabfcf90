"""Where a figure comes from: versions, machine, arguments, revision; saved beside every result."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

import outrider
from outrider.drafters import LOOKUP_FIRST, Drafter

__all__ = ["processor_name", "proposed_by", "provenance", "revision", "source_digest"]

_PACKAGE = Path(outrider.__file__).resolve().parent
_LIBRARIES = ("numpy", "openvino", "torch", "transformers")


def provenance(arguments: Mapping[str, object], **facts: object) -> dict[str, object]:
    """Facts about this run that a reader needs to judge or repeat it, ready for JSON.

    Args:
        arguments: the command line; of paths only the last part is kept.
        facts: anything the caller adds.
    """
    return {
        "arguments": {
            name: value.name if isinstance(value, Path) else value
            for name, value in arguments.items()
        },
        "git": revision(),
        "source": source_digest(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "processors": torch.get_num_threads(),
        "python": platform.python_version(),
        "outrider": outrider.__version__,
        **{name: _version(name) for name in _LIBRARIES},
        **facts,
    }


def proposed_by(drafters: Mapping[str, Drafter | None]) -> dict[str, str]:
    """Of every drafter by what it was called, what proposed: says what "auto" was."""
    names = {called: drafter.name if drafter else "none" for called, drafter in drafters.items()}
    return {
        called: LOOKUP_FIRST * name.startswith(LOOKUP_FIRST)
        + Path(name.removeprefix(LOOKUP_FIRST)).name
        for called, name in names.items()
    }


def revision() -> str:
    """What git calls the state of the source; empty where the package is not in a repository."""
    # An environment may lie inside a repository that has nothing to do with the package.
    if not _git("ls-files", "__init__.py"):
        return ""
    return _git("describe", "--always", "--dirty")


def source_digest() -> str:
    """A digest of the package's source: tells two uncommitted states apart."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        name = file.relative_to(_PACKAGE).as_posix()
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def processor_name() -> str:
    """What the system calls the processor; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=_PACKAGE
        )
    except OSError:  # no git here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
