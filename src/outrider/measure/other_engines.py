"""A drafter and a fixed draft length as settings of vLLM, transformers and llama.cpp.

The names are those of vLLM's `SpeculativeConfig` (0.20 and later), transformers' `GenerationConfig`
(5.x; the length is the drafting model's own setting) and llama.cpp's `--spec-*` flags (builds of
2026; before them the length was `--draft-max`, which they refuse).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

__all__ = ["settings_for"]

_LOOKUP_MATCH = 3
"""Longest n-gram that the others look up; Outrider itself follows the longest match there is."""


def settings_for(*, target: str, drafter: str, gamma: int) -> dict[str, str | None]:
    """The same advice for vLLM, transformers and llama.cpp: what to type, or None.

    They have no counterpart to drafters with a table (n-gram files, unigrams, random tokens), to
    those of few ids (`models.trimmed`) or to models behind lookup, and nothing is to be set where
    gamma is 0; all of these give None.

    Args:
        target: as Outrider calls it; what only Outrider knows becomes TARGET.
        drafter: "lookup" or a model, as Outrider calls it; likewise DRAFTER.
        gamma: tokens drafted in a round.
    """
    lookup = drafter == "lookup"
    if gamma < 1 or (not lookup and not _is_model(drafter)):
        return dict.fromkeys(("vllm", "transformers", "llama.cpp"))
    model, helper = _known(target, "TARGET"), _known(drafter, "DRAFTER")
    return {
        "vllm": _vllm(model, None if lookup else helper, gamma),
        "transformers": _transformers(gamma, lookup=lookup),
        "llama.cpp": _llama_cpp(model, None if lookup else helper, gamma),
    }


def _vllm(target: str, drafter: str | None, gamma: int) -> str:
    config: dict[str, str | int]
    if drafter is None:
        config = {
            "method": "ngram",
            "num_speculative_tokens": gamma,
            "prompt_lookup_max": _LOOKUP_MATCH,
        }
    else:
        config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": gamma}
    return (
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(config))}"
    )


def _transformers(gamma: int, *, lookup: bool) -> str:
    if lookup:
        return (
            f"target.generate(**inputs, prompt_lookup_num_tokens={gamma}, "
            f"max_matching_ngram_size={_LOOKUP_MATCH})"
        )
    # A threshold above 0 ends drafts early, which is on by default.
    return "\n".join(
        [
            f"drafter.generation_config.num_assistant_tokens = {gamma}",
            'drafter.generation_config.num_assistant_tokens_schedule = "constant"',
            "drafter.generation_config.assistant_confidence_threshold = 0.0",
            "target.generate(**inputs, assistant_model=drafter)",
        ]
    )


def _llama_cpp(target: str, drafter: str | None, gamma: int) -> str:
    start = f"llama-server -m {shlex.quote(_gguf(target))}"
    if drafter is None:
        return (
            f"{start} --spec-type ngram-simple --spec-ngram-simple-size-n {_LOOKUP_MATCH} "
            f"--spec-ngram-simple-size-m {gamma}"
        )
    return (
        f"{start} -md {shlex.quote(_gguf(drafter))} --spec-type draft-simple "
        f"--spec-draft-n-max {gamma} --spec-draft-n-min 0 --spec-draft-p-min 0"
    )


def _is_model(drafter: str) -> bool:
    own = {"auto", "none", "random", "unigram", "bigram", "trigram"}
    if drafter in own or drafter.startswith(("ngram:", "lookup+")):
        return False
    folder = Path(drafter).expanduser()
    if not drafter or not folder.is_dir():
        return True
    from outrider.models.trimmed import is_trimmed  # seconds of imports

    return not is_trimmed(folder)


def _known(reference: str, placeholder: str) -> str:
    """The reference, unless its name means something to Outrider alone."""
    own = reference in ("", "default", "lookup") or reference.startswith("toy:")
    return placeholder if own else reference


def _gguf(reference: str) -> str:
    if reference.endswith(".gguf"):
        return reference
    return reference.rstrip("/").split("/")[-1] + ".gguf"
