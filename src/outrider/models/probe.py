"""A proof at load: a cache that is fed, rolled back and batched gives the plain pass's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.models import Feed, Model, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["plain_logits", "probe", "probe_ids"]


def probe_ids(count: int, vocab_size: int) -> list[int]:
    """`count` token ids without a pattern that a model could profit from."""
    return [(7 + 31 * i) % vocab_size for i in range(count)]


@torch.inference_mode()
def plain_logits(module: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """[n, V] of one forward pass without a cache, in float32."""
    inputs = torch.tensor([list(ids)], device=module.device)
    logits: Tensor = module(input_ids=inputs, use_cache=False).logits[0]
    return logits.float()


def probe(model: Model, ids: Sequence[int], expected: Tensor) -> float:
    """Largest relative difference between `expected` [n, V] and logits by way of the cache.

    Feeds part of `ids`, then wrong tokens, rolls those back, and feeds the rest in one pass with a
    second sequence.
    """
    half, third = len(ids) // 2, max(1, len(ids) // 3)
    first, second = model.start(Prompt(ids)), model.start(Prompt(ids))
    wrong = list(reversed(ids))[: len(ids) - half]
    rows = [model.score([Feed(first, ids[:half], half)])] if half else []
    model.score([Feed(first, wrong, 1)])
    first.rollback(half)
    rest = ids[half:]
    rows.append(model.score([Feed(first, rest, len(rest)), Feed(second, ids[:third], third)]))
    found = torch.cat(rows)
    wanted = torch.cat([expected, expected[:third]])
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    first.close()
    second.close()
    return float(error.max())
