"""What a user would run without Outrider: transformers' own `generate`, for a comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from outrider.errors import UsageError
from outrider.models.checkpoints import find_checkpoint, load_weights, quietly
from outrider.sampling import SamplingPolicy

__all__ = ["TransformersGenerate"]


class TransformersGenerate:
    """A model run by transformers' `generate` with default settings.

    Args:
        reference: as for `load_model`, but no toy.
        dtype: "float32" or "bfloat16".
    """

    def __init__(self, reference: str, dtype: str) -> None:
        if reference.startswith("toy:") or dtype not in ("float32", "bfloat16"):
            raise UsageError(f"transformers cannot run {reference} in {dtype} beside it")
        precision = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self._module = load_weights(find_checkpoint(reference, precision), precision)

    def generate(
        self, prompt: Sequence[int], policy: SamplingPolicy, num_tokens: int
    ) -> tuple[list[int], float]:
        """Exactly `num_tokens` ids continuing `prompt`, and the seconds they took.

        Temperature, top-k and top-p are followed; a policy with other settings is refused.
        """
        plain = SamplingPolicy(
            temperature=policy.temperature, top_k=policy.top_k, top_p=policy.top_p
        )
        if policy != plain:
            raise UsageError(
                "transformers is run with temperature, top_k and top_p only; leave min_p, "
                "penalties and the other sampling settings out of this comparison"
            )
        sampling: dict[str, object] = {"do_sample": False}
        if not policy.is_greedy:
            sampling = {
                "do_sample": True,
                "temperature": policy.temperature,
                "top_k": policy.top_k,
                "top_p": policy.top_p,
            }
        ids = torch.tensor([list(prompt)])
        with quietly():
            begun = time.perf_counter()
            output = self._module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                eos_token_id=None,
                repetition_penalty=1.0,
                **sampling,
            )
            seconds = time.perf_counter() - begun
        return output[0, len(prompt) :].tolist(), seconds
