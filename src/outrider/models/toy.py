"""Tiny exact models for proofs and for trying things out: the law is a table or a hash.

`toy:NAME` models read bytes (ids 0..255, and 256 for end of text): `toy:target`, `toy:near`, which
agrees with it most of the time, and `toy:far`, which does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelNotFound, UsageError
from outrider.models import CachedSequence, Feed, Prompt
from outrider.text import Message, Tokenizer

__all__ = ["ByteTokenizer", "ToyModel", "hashed_law", "load_toy"]

Law = Callable[[Sequence[int]], Tensor]
"""Logits [V] of the token after a prefix."""


class ToySequence:
    """A cache that is the list of tokens itself."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    def rollback(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        assert 0 <= length <= len(self.tokens), (length, len(self.tokens))
        del self.tokens[length:]

    def close(self) -> None:
        """Forget everything."""
        self.tokens.clear()


class ToyModel:
    """A model whose logits are any function of the prefix.

    Args:
        law: logits [V] after a prefix of ids.
        vocab_size: V.
        name: for messages.
        context_length: most tokens a sequence can hold.
        tokenizer: None if ids are all there is.
        eos_ids: ids that end a text.
    """

    engine = "toy"
    shares_prefixes = False

    def __init__(
        self,
        law: Law,
        vocab_size: int,
        *,
        name: str = "toy",
        context_length: int = 4096,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.law = law
        self.name = name
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.dtype = "float64"

    def start(self, prompt: Prompt) -> ToySequence:
        """An empty sequence."""
        return ToySequence()

    def room(self, sequence: CachedSequence) -> int:
        """What the context has left."""
        return self.context_length - sequence.length

    def forget(self) -> None:
        """Nothing is left in the cache of an ended sequence."""

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits [sum of keep, V] after the last `keep` tokens of every feed."""
        rows: list[Tensor] = []
        for sequence, tokens, keep in feeds:
            assert isinstance(sequence, ToySequence)
            assert 1 <= keep <= len(tokens), (keep, len(tokens))
            sequence.tokens.extend(tokens)
            assert sequence.length <= self.context_length, "fed past the context's end"
            ends = range(sequence.length - keep + 1, sequence.length + 1)
            rows.extend(self.law(sequence.tokens[:end]) for end in ends)
        return torch.stack(rows)


def hashed_law(vocab_size: int, seed: int, *, order: int = 2, sharpness: float = 1.0) -> Law:
    """Logits that look random but depend only on `seed` and the last `order` tokens; float64.

    Args:
        vocab_size: V.
        seed: different seeds give unrelated laws.
        order: how many tokens the law looks back.
        sharpness: standard deviation of the logits; larger is closer to deterministic.
    """
    known: dict[tuple[int, ...], Tensor] = {}

    def law(prefix: Sequence[int]) -> Tensor:
        key = tuple(prefix[-order:]) if order else ()
        if key not in known:
            generator = np.random.default_rng([seed, *key])
            known[key] = torch.from_numpy(generator.normal(scale=sharpness, size=vocab_size))
        return known[key]

    return law


def mixed_law(first: Law, second: Law, weight: float) -> Law:
    """Logits (1 - weight) * first + weight * second: a law near `first` for a small weight."""

    def law(prefix: Sequence[int]) -> Tensor:
        return first(prefix) * (1 - weight) + second(prefix) * weight

    return law


class ByteTokenizer:
    """UTF-8 bytes as ids, and one id for the end of the text."""

    has_chat_template = True
    end_id = 256
    special_ids = frozenset({end_id})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """`role: content` lines, then the answer's opening."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes among `ids`; broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def vocabulary(self) -> list[str | None]:
        """Every byte in hexadecimal, then the end of the text."""
        return [*(f"<{byte:02x}>" for byte in range(256)), "<end>"]


def load_toy(reference: str, *, dtype: str = "auto", device: str = "auto") -> ToyModel:
    """The built-in toy model called `toy:NAME`; it computes in float64 on the CPU only."""
    if dtype != "auto" or device not in ("auto", "cpu"):
        raise UsageError(
            f"{reference} computes in float64 on the CPU; leave dtype {dtype!r} and device "
            f"{device!r} at auto"
        )
    size = 257
    target = hashed_law(size, seed=1, sharpness=4.0)
    laws = {
        "target": target,
        "near": mixed_law(target, hashed_law(size, seed=2, sharpness=4.0), 0.15),
        "far": hashed_law(size, seed=3, sharpness=4.0),
    }
    name = reference.removeprefix("toy:")
    if name not in laws:
        known = ", ".join(f"toy:{known}" for known in laws)
        raise ModelNotFound(f"no toy model is called {name!r}; there are {known}")
    return ToyModel(
        laws[name],
        size,
        name=reference,
        tokenizer=ByteTokenizer(),
        eos_ids=frozenset({ByteTokenizer.end_id}),
    )
