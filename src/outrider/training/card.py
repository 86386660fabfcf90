"""What there is to know about a drafter, for whoever finds its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.models import Model
from outrider.training.learning import Point
from outrider.training.runs import WrittenText

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from outrider.training.distillation import Plan

__all__ = ["PROVENANCE", "card_of", "earlier_provenance"]

PROVENANCE = "provenance.json"
"""In a drafter's folder: settings, versions, machine and date, for programs what the card tells."""


def card_of(
    target: Model,
    plan: Plan,
    form: LlamaConfig,
    course: Sequence[Point],
    num_taught: int,
    others: Sequence[WrittenText],
    num_asked: int,
) -> str:
    """What there is to know about a drafter."""
    judged = course[-1].judged
    turns = "users' turns of its own"
    if num_asked:
        turns = f"{num_asked} given prompts and to {turns}"
    policies = dict.fromkeys([*plan.policies, *(p for other in others for p in other.policies)])
    drawn = ", ".join(map(str, policies))
    begun = "".join(f"\n* Begun as {earlier}." for earlier in _earlier(plan.begin_as))
    if others:
        drawn += f", some from {len(others)} other run{'s' * (len(others) > 1)}"
    return f"""# A drafter for {target.name}

Made by `outrider distill`. It proposes tokens that {target.name} checks (speculative decoding), and
is no use by itself.

* Form: Llama, {form.num_hidden_layers} layers of width {form.hidden_size}, {form.vocab_size} of the
  target's {target.vocab_size} ids (`vocabulary.safetensors`); the others it reads as the closest of
  these and never proposes.
* Data: {num_taught} tokens of the target's own text: answers to {turns}, at temperatures
  {drawn}; no other text. After a slash stands top-p.
* Recipe: loss {plan.recipe.loss}, learning rate {plan.recipe.rate:g}, {plan.recipe.epochs:g}
  epochs, seed {plan.seed}.{begun}
* On {judged.num_tokens} tokens held out: alpha {judged.alpha:.3f} at temperature 1; its most likely
  id is the target's in {judged.greedy:.3f} of them.
* On the way there, epochs counted, on some of these tokens:

| tokens learnt from | alpha | greedy |
|---|---|---|
{_course_table(course)}

Its weights come from the target's, and what holds for their licence holds for these.
"""


def _course_table(course: Sequence[Point]) -> str:
    """Some of the points, each with about twice the tokens of the one before, and the last."""
    chosen: list[Point] = []
    for point in reversed(course):
        if not chosen or 1.9 * point.num_learnt <= chosen[-1].num_learnt:
            chosen.append(point)
    return "\n".join(
        f"| {point.num_learnt} | {point.judged.alpha:.3f} | {point.judged.greedy:.3f} |"
        for point in reversed(chosen)
    )


def _earlier(folder: str) -> Iterator[str]:
    """The drafters that one goes back to which was begun as that in the folder, in words."""
    facts: object = earlier_provenance(folder)
    if folder and facts is None:
        yield Path(folder).name
    while isinstance(facts, Mapping):
        made = facts.get("arguments", {})
        recipe = made.get("recipe", {})
        yield (
            f"a drafter made in the same way from {made.get('tokens')} tokens: loss "
            f"{recipe.get('loss')}, learning rate {recipe.get('rate', 0):g},\n  "
            f"{recipe.get('epochs', 0):g} epochs, seed {made.get('seed')}"
        )
        facts = made.get("begin_as")


def earlier_provenance(folder: str) -> dict[str, object] | None:
    """Where the drafter in that folder comes from; None if it does not tell, or for no folder.

    What that one was begun as is among its arguments, and so on.
    """
    if not folder:  # not the current one's
        return None
    try:
        facts = json.loads((Path(folder) / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
