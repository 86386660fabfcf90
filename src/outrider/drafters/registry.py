"""Drafters that come with Outrider, by the target they were made for.

A target is known by its form (architecture, depth, width, vocabulary) and its tokenizer, so the
same model counts as the same whatever file or precision it came from. Another model of that form
and tokenizer, such as a fine-tuned one, is taken for it too: its drafts are then accepted less
often, and its text is its own all the same.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.models import Model
from outrider.models.trimmed import tokenizer_digest

__all__ = ["FOLDER", "INDEX", "shipped_drafter", "target_fingerprint"]

FOLDER = Path(__file__).parent.parent / "data" / "drafters"
INDEX = "index.json"


def target_fingerprint(target: Model) -> str:
    """What a target is known by; "" for one that cannot be told from others."""
    form = getattr(target, "form", "")
    digest = tokenizer_digest(target.tokenizer)
    return f"{form}-{digest}" if form and digest else ""


def shipped_drafter(target: Model) -> Path | None:
    """The folder of the drafter that comes with Outrider for this target, or None.

    {"llama-30x576-49152-0123456789abcdef": "smollm2-135m-instruct"}
    """
    file = FOLDER / INDEX
    if not file.is_file():
        return None
    name = json.loads(file.read_text(encoding="utf-8")).get(target_fingerprint(target))
    return None if name is None else FOLDER / str(name)
