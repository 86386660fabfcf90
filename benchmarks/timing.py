"""What several benchmarks time: passes of a model, the machine's memory, this process's size."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider import Model
from outrider.models import CachedSequence, Feed, Prompt

__all__ = ["MemoryReader", "TimedModel", "read_bandwidth_gbs", "read_weight_bytes", "resident_mb"]


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


class MemoryReader:
    """Reads a gigabyte with all threads, as often as asked: a sum, which computes next to none."""

    def __init__(self) -> None:
        self._values = torch.ones(2**28)

    def read_s(self, num_bytes: int) -> float:
        """Seconds that reading `num_bytes` takes now, over and over the same gigabyte."""
        per_read = self._values.numel() * self._values.element_size()
        begun = time.perf_counter()
        for _ in range(num_bytes // per_read):
            self._values.sum()
        self._values[: num_bytes % per_read // self._values.element_size()].sum()
        return time.perf_counter() - begun


def read_bandwidth_gbs(num_threads: int | None = None, *, tries: int = 5) -> float:
    """10^9 bytes per second at which all threads together read a gigabyte: the best of `tries`."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    reader = MemoryReader()
    return 2**30 / min(reader.read_s(2**30) for _ in range(tries)) / 1e9


def read_weight_bytes(folder: Path) -> int:
    """Bytes of the weights that a pass over one token reads.

    All of them, but for the table of embeddings where it is not the output layer as well: of that,
    a pass reads one row.
    """
    sizes: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            head = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        for name, tensor in head.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                sizes[name] = end - begin
    if any(name.startswith("lm_head.") for name in sizes):
        sizes = {name: size for name, size in sizes.items() if "embed_tokens" not in name}
    return sum(sizes.values())


def resident_mb() -> float:
    """10^6 bytes of this process in memory now (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024 / 1e6
