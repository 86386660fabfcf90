"""The exception tree. Every error meant for a user is an `OutriderError` with a one-line message.

OutriderError
├── UsageError           a value the caller chose is wrong (also a ValueError)
│   ├── ModelNotFound    a model reference leads nowhere
│   ├── ContextOverflow  a prompt does not fit the context
│   └── NothingToDraw    the sampling settings exclude every token
├── UnsupportedModel     a model that cannot be served exactly
├── VocabularyMismatch   target and drafter do not share a tokenizer
├── NumericalError       the model returned something that is not a law (NaN, infinity)
├── CacheFull            the memory for keys and values is used up
└── GenerationError      some requests of a batch failed; the others' results are attached
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.requests import Result

__all__ = [
    "CacheFull",
    "ContextOverflow",
    "GenerationError",
    "ModelNotFound",
    "NothingToDraw",
    "NumericalError",
    "OutriderError",
    "UnsupportedModel",
    "UsageError",
    "VocabularyMismatch",
]


class OutriderError(Exception):
    """Anything Outrider raises for its user."""


class UsageError(OutriderError, ValueError):
    """A setting, an argument or an input that cannot be used as given."""


class ModelNotFound(UsageError):
    """A model reference that names no folder, `.gguf` file, reachable hub id or `toy:NAME`."""


class ContextOverflow(UsageError):
    """A prompt that leaves no room for a new token in the target's context."""


class NothingToDraw(UsageError):
    """Sampling settings that leave no token at some position."""


class UnsupportedModel(OutriderError):
    """A model that cannot be rolled back or batched exactly, refused before the first token."""


class VocabularyMismatch(OutriderError):
    """A drafter whose token ids do not mean what the target's mean."""


class NumericalError(OutriderError):
    """Logits or processed rows that are not a probability law."""


class CacheFull(OutriderError):
    """The memory for keys and values holds no more tokens. Nothing that was cached is lost."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(
            f"the memory for keys and values is full: room for {wanted} tokens is needed and "
            f"{free} are free; give it more (kv_memory, --kv-memory), shorten the prompt, or run "
            "fewer requests at once"
        )


class GenerationError(OutriderError):
    """Some requests of a batch failed. `results` holds every request's result, in order."""

    def __init__(self, message: str, results: Sequence[Result]) -> None:
        super().__init__(message)
        self.results = list(results)
