"""What several benchmarks time: passes of a model, the machine's memory, this process's size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider import Model
from outrider.models import CachedSequence, Feed, Prompt

__all__ = ["TimedModel", "read_bandwidth_gbs", "resident_mb"]


class TimedModel:
    """A model whose time in `score` is added up.

    Attributes:
        score_s: seconds in `score` since it was last set to 0.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.score_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def start(self, prompt: Prompt) -> CachedSequence:
        return self._model.start(prompt)

    def score(self, feeds: Sequence[Feed]) -> torch.Tensor:
        begun = time.perf_counter()
        logits = self._model.score(feeds)
        self.score_s += time.perf_counter() - begun
        return logits


def read_bandwidth_gbs(repeats: int = 5) -> float:
    """10^9 bytes per second at which all threads together read a gigabyte: the best of `repeats`.

    A sum reads every byte once and computes next to nothing.
    """
    numbers = torch.ones(2**28)
    best = 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.numel() * 4 / (time.perf_counter() - begun) / 1e9)
    return best


def resident_mb() -> float:
    """10^6 bytes of this process in memory now (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024 / 1e6
