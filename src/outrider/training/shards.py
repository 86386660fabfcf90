"""A target's text on disk, with its law at every token it drew: files of a fixed size.

A shard holds whole rows of text end to end, and for every drawn token the most likely ids before it
with their probabilities; what these leave out is the rest. It is written under another name first
and then renamed: a shard is there whole, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import UsageError
from outrider.models.cache import written_whole

__all__ = ["KeptText", "Shard", "read_shard", "shard_file", "shards_in", "write_shard"]


class KeptText(NamedTuple):
    """One conversation of a shard.

    Attributes:
        ids: int32 [n].
        drawn: which of the shard's drawn tokens are its own.
        places: int32 [len of `drawn`], where these stand in `ids`.
    """

    ids: Tensor
    drawn: slice
    places: Tensor


@dataclass(frozen=True)
class Shard:
    """Some conversations and the target's law in them.

    Attributes:
        tokens: int32 [N], the conversations end to end.
        begins: int32 [C + 1], where each begins; the last is N.
        places: int32 [A], indices into `tokens` of those the target drew.
        parts: uint8 [A], whose words they are (`conversations.Part`).
        policies: uint8 [A], index of the policy each was drawn by.
        top_ids: int32 [A, K], the K most likely ids before that token was drawn, falling.
        top_probs: float16 [A, K], their probabilities at temperature 1 without any filter; the rest
            of the mass is 1 minus their sum.
    """

    tokens: Tensor
    begins: Tensor
    places: Tensor
    parts: Tensor
    policies: Tensor
    top_ids: Tensor
    top_probs: Tensor

    @property
    def num_drawn(self) -> int:
        """A, the tokens the target drew."""
        return len(self.places)

    def conversations(self) -> Iterator[KeptText]:
        """The conversations, in order."""
        bounds = torch.searchsorted(self.places, self.begins).tolist()
        spans = pairwise(self.begins.tolist())
        for (begin, end), (first, last) in zip(spans, pairwise(bounds), strict=True):
            places = self.places[first:last] - begin
            yield KeptText(self.tokens[begin:end], slice(first, last), places)


def shard_file(folder: Path, number: int) -> Path:
    """Where shard `number` is kept."""
    return folder / f"shard-{number:05d}.safetensors"


def shards_in(folder: Path) -> list[Path]:
    """Whole shards, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(file: Path, shard: Shard) -> None:
    """Keep a shard.

    Raises:
        UsageError: it cannot be written; what was kept before is untouched.
    """
    tensors = {name: getattr(shard, name).contiguous() for name in Shard.__annotations__}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as unfinished:
            save_file(tensors, unfinished)
            with unfinished.open("rb") as handle:
                os.fsync(handle.fileno())
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot write {file}: {reason}; all shards before it are kept, and the same call goes "
            "on from there"
        ) from error


def read_shard(file: Path) -> Shard:
    """A kept shard.

    Raises:
        UsageError: it is not one.
    """
    try:
        return Shard(**load_file(file))
    except (OSError, SafetensorError, TypeError) as error:
        raise UsageError(
            f"{file} is no shard: {error}; delete it to have it written again"
        ) from error
