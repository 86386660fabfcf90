"""Drafting from counted n-grams: the likeliest next token after the last few, with back-off.

The longest counted context that fits decides; unknown contexts back off to shorter ones, down to
the most frequent token of all. Drafts are point masses, so a table lookup is all that a token costs
(Leviathan et al. 2023, section 3.6: a drafter with c near 0).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.draft_length import GoOn, always
from outrider.errors import ModelNotFound, UsageError, VocabularyMismatch
from outrider.models.cache import written_whole
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.text import Tokenizer
from outrider.verification import Draft, Verdict

__all__ = ["NgramDrafter", "NgramTable", "fit_ngrams", "load_ngrams", "tokenizer_fingerprint"]

_FORMAT = 1


@dataclass(frozen=True)
class NgramTable:
    """The likeliest next token after every counted context.

    Attributes:
        order: n; contexts have 0 to n - 1 tokens.
        vocab_size: ids are below this.
        fingerprint: of the tokenizer the ids belong to; empty if there was none.
        contexts: for each context length, sorted packed contexts (see `_pack`).
        tokens: for each context length, the token to propose after each context.
    """

    order: int
    vocab_size: int
    fingerprint: str
    contexts: tuple[NDArray[np.uint64], ...]
    tokens: tuple[NDArray[np.int32], ...]

    def best(self, prefix: Sequence[int]) -> int | None:
        """The token to propose after `prefix`, or None if nothing was counted."""
        for length in range(min(self.order - 1, len(prefix)), -1, -1):
            context = prefix[len(prefix) - length :]
            if any(token >= self.vocab_size for token in context):
                continue
            packed = _pack(context, self.vocab_size)
            at = int(np.searchsorted(self.contexts[length], packed))
            if at < len(self.contexts[length]) and self.contexts[length][at] == packed:
                return int(self.tokens[length][at])
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to one file; one already there is replaced as a whole or not at all."""
        arrays: dict[str, np.ndarray] = {}
        for i, (contexts, tokens) in enumerate(zip(self.contexts, self.tokens, strict=True)):
            arrays |= {f"contexts{i}": contexts, f"tokens{i}": tokens}
        place = Path(path)
        with written_whole(place) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(
                file,
                header=np.array([_FORMAT, self.order, self.vocab_size]),
                fingerprint=np.array(self.fingerprint),
                **arrays,  # type: ignore[arg-type]
            )


def fit_ngrams(
    texts: Iterable[Sequence[int]],
    *,
    order: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    min_count: int = 1,
) -> NgramTable:
    """The table of the n-grams in `texts`.

    Args:
        texts: sequences of ids; n-grams do not run across two of them.
        order: n, at least 1 (1 proposes the most frequent token always).
        vocab_size: ids are below this.
        tokenizer: what the ids belong to, so that the table is refused for another one.
        min_count: contexts seen less often than this are left out.

    Raises:
        UsageError: `order` too small, or so large that a context does not fit 64 bits; an id
            outside the vocabulary.
    """
    bits = _bits(vocab_size)
    if not 1 <= order <= 64 // bits + 1:
        raise UsageError(
            f"order must be from 1 to {64 // bits + 1} for a vocabulary of {vocab_size}, "
            f"not {order!r}"
        )
    arrays = [_checked(text, vocab_size) for text in texts]
    contexts, tokens = [], []
    for length in range(order):
        grams = [_windows(ids, length, bits) for ids in arrays if len(ids) > length]
        packed = np.concatenate([context for context, _ in grams]) if grams else _EMPTY
        following = np.concatenate([token for _, token in grams]) if grams else _EMPTY
        best_context, best_token = _likeliest(packed, following, min_count)
        contexts.append(best_context)
        tokens.append(best_token)
    fingerprint = tokenizer_fingerprint(tokenizer)
    return NgramTable(order, vocab_size, fingerprint, tuple(contexts), tuple(tokens))


def load_ngrams(path: str | os.PathLike[str], tokenizer: Tokenizer | None) -> NgramTable:
    """The table in a file made by `NgramTable.save`.

    Args:
        path: the file.
        tokenizer: the target's; a table for another one is refused.

    Raises:
        ModelNotFound: no such file, or not an n-gram table.
        VocabularyMismatch: the table was counted with another tokenizer.
    """
    if not Path(path).is_file():
        raise ModelNotFound(f"no n-gram table at {str(path)!r}; make one with `outrider fit`")
    try:
        with np.load(path, allow_pickle=False) as data:
            version, order, vocab_size = (int(number) for number in data["header"])
            if version != _FORMAT:
                raise ModelNotFound(
                    f"{path}: n-gram format {version}, expected {_FORMAT}; fit the table again"
                )
            table = NgramTable(
                order,
                vocab_size,
                str(data["fingerprint"]),
                tuple(data[f"contexts{i}"] for i in range(order)),
                tuple(data[f"tokens{i}"] for i in range(order)),
            )
    except ModelNotFound:
        raise
    except Exception as error:  # a damaged archive raises whatever its damage leads to
        raise ModelNotFound(f"{path}: not an n-gram table made by `outrider fit`") from error
    ours = tokenizer_fingerprint(tokenizer)
    if ours and table.fingerprint and ours != table.fingerprint:
        raise VocabularyMismatch(
            f"{path} was counted with another tokenizer; fit a table with this target"
        )
    return table


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str:
    """Identifies the meaning of a tokenizer's ids; empty for None."""
    if tokenizer is None:
        return ""
    return hashlib.sha256(repr(tokenizer.vocabulary()).encode()).hexdigest()[:32]


class NgramDrafter:
    """Drafts the likeliest token of an n-gram table, again and again."""

    model = None

    def __init__(self, table: NgramTable) -> None:
        self.name = f"ngram (order {table.order})"
        self._table = table

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """Point-mass drafts; empty only when the table is."""
        drafts = []
        asked = go_on or [always] * len(sequences)
        for sequence, gamma, more in zip(sequences, gammas, asked, strict=True):
            prefix = sequence.tokens[max(0, len(sequence) - self._table.order + 1) :]
            drawn: list[int] = []
            while len(drawn) < gamma and more([_SURETY] * len(drawn), [_SURETY], range(len(drawn))):
                token = self._table.best([*prefix, *drawn])
                if token is None:
                    break
                drawn.append(token)
            drafts.append(Draft(drawn))
        return drafts

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """The table is fixed."""

    def release(self, sequence: History) -> None:
        """There is nothing to forget."""


_SURETY = 0.5
"""Whatever the table says; how often it is right on a text shows soon."""

_EMPTY = np.zeros(0, dtype=np.uint64)


def _checked(text: Sequence[int], vocab_size: int) -> NDArray[np.uint64]:
    ids = np.asarray(text, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UsageError(
            f"the texts hold ids from {ids.min()} to {ids.max()}; this vocabulary has 0 to "
            f"{vocab_size - 1}"
        )
    return ids.astype(np.uint64)


def _bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())


def _pack(context: Sequence[int], vocab_size: int) -> np.uint64:
    """A context as one number: its ids side by side, the oldest in the highest bits."""
    bits, packed = _bits(vocab_size), 0
    for token in context:
        packed = packed << bits | token
    return np.uint64(packed)


def _windows(
    ids: NDArray[np.uint64], length: int, bits: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(packed contexts of `length` tokens, the token after each) for every place in `ids`."""
    packed = np.zeros(len(ids) - length, dtype=np.uint64)
    for i in range(length):
        packed = packed << np.uint64(bits) | ids[i : i + len(packed)]
    return packed, ids[length:]


def _likeliest(
    contexts: NDArray[np.uint64], tokens: NDArray[np.uint64], min_count: int
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """For each distinct context the token that followed most often; the lowest id on ties."""
    pairs, counts = np.unique(np.stack([contexts, tokens], axis=1), axis=0, return_counts=True)
    order = np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))
    pairs, counts = pairs[order], counts[order]
    unique, first = np.unique(pairs[:, 0], return_index=True)
    totals = np.add.reduceat(counts, first) if len(first) else counts
    kept = totals >= min_count
    return unique[kept], pairs[first, 1][kept].astype(np.int32)
