"""A drafting model that knows only the most frequent tokens of its target's vocabulary.

The rows of a small model's embedding are most of its weights, and the widest of its matrix
products. A drafter needs few of them: what it cannot propose it is never asked for, and q is zero
there (Zhao et al. 2025, "FR-Spec", arXiv 2502.14856).

What it reads is another matter: a context may hold any token. Each one outside is read as the kept
token whose embedding in the target is closest. That is sensible because the target's own weights
say so: inflections, spellings and names of one kind lie together there, so the drafter sees what
sort of word stood at that place, at the price of an array of V numbers. Where it matters, as in
copying a rare name, a match in the text (`lookup`) proposes better than any small model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import UnsupportedModel, VocabularyMismatch
from outrider.models import CachedSequence, Feed, Model, Prompt
from outrider.text import Tokenizer
from outrider.threads import single_threaded

__all__ = [
    "TrimmedModel",
    "Vocabulary",
    "is_trimmed",
    "read_vocabulary",
    "tokenizer_digest",
    "write_vocabulary",
]

_FILE = "vocabulary.safetensors"
_FACTS = ("form", "weights", "num_parameters", "kv_bytes_per_token", "device")
"""What an engine may tell of a model beside the seam, where somebody wants to know."""


@dataclass(frozen=True)
class Vocabulary:
    """Which of a target's ids a drafting model knows, and how it reads the others.

    Attributes:
        kept: int64 [V'], rising: the target's id of each of the model's ids.
        read_as: int64 [V], the model's id of each of the target's.
        digest: of the target's tokenizer; "" if it had none.
    """

    kept: Tensor
    read_as: Tensor
    digest: str


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Put a vocabulary beside a checkpoint's other files."""
    tensors = {
        "kept": vocabulary.kept.to(torch.int32),
        "read_as": vocabulary.read_as.to(torch.int32),
    }
    save_file(tensors, folder / _FILE, metadata={"tokenizer": vocabulary.digest})


def is_trimmed(folder: Path) -> bool:
    """Whether a checkpoint is one of few ids."""
    return (folder / _FILE).is_file()


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a checkpoint, None for one that knows all of its target's.

    Raises:
        UnsupportedModel: there is one, but it cannot be used.
    """
    if not is_trimmed(folder):
        return None
    file = folder / _FILE
    try:
        with safe_open(file, "pt") as opened:
            digest = (opened.metadata() or {}).get("tokenizer", "")
            kept, read_as = (opened.get_tensor(name).long() for name in ("kept", "read_as"))
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{file} cannot be read: {error}") from error
    is_rising = kept.dim() == 1 and bool((kept.diff() > 0).all())
    if not is_rising or read_as.dim() != 1 or not len(kept) or int(kept[-1]) >= len(read_as):
        raise UnsupportedModel(f"{file} holds no rising list of ids below its target's vocabulary")
    if int(read_as.min()) < 0 or int(read_as.max()) >= len(kept):
        raise UnsupportedModel(f"{file} reads ids as ones beyond the {len(kept)} it keeps")
    return Vocabulary(kept, read_as, digest)


def tokenizer_digest(tokenizer: Tokenizer | None) -> str:
    """Which ids stand for which strings, in 16 hexadecimal digits; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    listed = "\n".join("" if token is None else token for token in tokenizer.vocabulary())
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


class TrimmedModel:
    """A model of few ids behind the `Model` seam of its target's.

    Args:
        model: the small model, whose ids are 0 to V' - 1.
        vocabulary: what they mean.

    Attributes:
        kept: int64 [V'], its target's ids that it knows, rising.

    Raises:
        UnsupportedModel: the two have different sizes.
    """

    def __init__(self, model: Model, vocabulary: Vocabulary) -> None:
        if model.vocab_size != len(vocabulary.kept):
            raise UnsupportedModel(
                f"{model.name} has logits for {model.vocab_size} ids, its vocabulary keeps "
                f"{len(vocabulary.kept)}"
            )
        self._model = model
        self._read_as: list[int] = vocabulary.read_as.tolist()
        self.kept = vocabulary.kept
        self._digest = vocabulary.digest
        self.name = model.name
        self.engine = model.engine
        self.dtype = model.dtype
        self.vocab_size = len(vocabulary.read_as)
        self.context_length = model.context_length
        self.tokenizer: Tokenizer | None = None
        self.eos_ids = frozenset(int(vocabulary.kept[token]) for token in model.eos_ids)
        self.shares_prefixes = model.shares_prefixes
        for fact in _FACTS:
            if hasattr(model, fact):
                setattr(self, fact, getattr(model, fact))

    def check_tokenizer(self, target: Model) -> None:
        """Refuse a target with another tokenizer than the one this model was made for.

        Raises:
            VocabularyMismatch: its ids mean something else there.
        """
        theirs = tokenizer_digest(target.tokenizer)
        if self._digest and theirs and self._digest != theirs:
            raise VocabularyMismatch(
                f"{self.name} was made for another tokenizer than that of {target.name}; make one "
                "for this target with `outrider distill`, or use --drafter lookup"
            )

    def start(self, prompt: Prompt) -> CachedSequence:
        """A sequence of the small model."""
        return self._model.start(Prompt(self._read(prompt.ids)))

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits [sum of keep, V], minus infinity for every id that is not kept."""
        few = self.score_kept(feeds)
        with single_threaded():
            return self.spread(few, -math.inf)

    def score_kept(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits [sum of keep, V'] of the kept ids alone: a sixth of the rows, or less."""
        return self._model.score(
            [Feed(sequence, self._read(tokens), keep) for sequence, tokens, keep in feeds]
        )

    def spread(self, few: Tensor, rest: float) -> Tensor:
        """[n, V'] -> [n, V], with `rest` for every id that is not kept."""
        whole = few.new_full((len(few), self.vocab_size), rest)
        return whole.index_copy_(1, self.kept.to(few.device), few)

    def room(self, sequence: CachedSequence) -> int:
        """As the small model's."""
        return self._model.room(sequence)

    def forget(self) -> None:
        """As the small model's."""
        self._model.forget()

    def _read(self, ids: Sequence[int]) -> list[int]:
        return [self._read_as[token] for token in ids]
