"""Where a figure comes from: versions, machine, arguments, revision; saved beside every result."""

from __future__ import annotations

import argparse
import hashlib
import platform
import subprocess
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent


def provenance(arguments: argparse.Namespace, **facts: object) -> dict[str, object]:
    """Facts about this run that a reader needs to judge or repeat it.

    Args:
        arguments: the command line; of paths only the last part is kept.
        facts: anything the benchmark adds.
    """
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return {
        "arguments": {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
        },
        "git": revision.stdout.strip(),
        "source": source_digest(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "processors": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **facts,
    }


def source_digest() -> str:
    """A digest of the package's source: tells two uncommitted states apart."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "src").rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def processor_name() -> str:
    """What the system calls the processor; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
