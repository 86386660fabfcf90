"""Text that the target writes, for measuring on: alpha is a mean over positions of such text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest

from outrider.decoding import Engine
from outrider.errors import ContextOverflow, UsageError
from outrider.measure.prompts import PromptItem
from outrider.models import Model
from outrider.pair import Pair
from outrider.requests import Request
from outrider.sampling import SamplingPolicy

__all__ = ["BATCH", "Question", "Text", "choose_questions", "encoded", "next_texts"]

BATCH = 8
"""Texts written side by side."""

_FITTED_EVERY = 4
_SHORTEST = 48
_FEWEST = 8
_SPARE = 1.25
"""Some texts end before their limit; the others are allowed that much more."""


@dataclass(frozen=True)
class Question:
    """A prompt's place in its file and its ids."""

    place: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """What the target wrote.

    Attributes:
        place: of its prompt in the file.
        prompt, tokens: ids; an end token that ended it is the last of `tokens`.
    """

    place: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, object]) -> Text:
        """The inverse of `as_dict`, after JSON."""
        place, prompt, tokens = (facts[name] for name in ("place", "prompt", "tokens"))
        assert isinstance(place, int)
        assert isinstance(prompt, (list, tuple))
        assert isinstance(tokens, (list, tuple))
        return cls(place, tuple(prompt), tuple(tokens))


def encoded(pair: Pair, items: Sequence[PromptItem]) -> list[Question]:
    """The first turn of every conversation, tasks taking turns so that any few of them are mixed.

    Raises:
        ContextOverflow: one leaves no room for an answer.
        UsageError: the target has no tokenizer.
    """
    by_task: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        by_task.setdefault(item.task, []).append(place)
    questions = []
    for place in chain(*zip_longest(*by_task.values())):
        if place is None:
            continue
        item = items[place]
        ids = pair.encode(item.turns[0])
        if len(ids) >= pair.target.context_length:
            raise ContextOverflow(
                f"prompt {item.id} ({item.task}) has {len(ids)} tokens, and {pair.target.name} has "
                f"a context of {pair.target.context_length}; leave the prompt out"
            )
        questions.append(Question(place, tuple(ids)))
    return questions


def choose_questions(
    questions: Sequence[Question], num_tokens: int, *, fitting: bool
) -> tuple[list[Question], list[Question]]:
    """Prompts to measure on, and other ones whose texts n-grams are counted in.

    A text has at least 48 tokens if it does not end before; fewer tokens are spread over fewer
    prompts, but at least 8.

    Args:
        questions: all of them, in the order in which they are preferred.
        num_tokens: tokens to be measured.
        fitting: whether n-grams are fitted; without, every prompt may be measured on.

    Raises:
        UsageError: there is no prompt left for one of the two.
    """
    fitted = list(questions[_FITTED_EVERY - 1 :: _FITTED_EVERY]) or list(questions[1:2])
    if fitting and not fitted:
        raise UsageError(
            "n-grams are counted in texts of other prompts than those measured on, and there is "
            "only one prompt; pass more prompts, or --no-baselines"
        )
    chosen = set(fitted) if fitting else set()
    measured = [item for item in questions if item not in chosen]
    wanted = max(_FEWEST, num_tokens // _SHORTEST)
    return measured[:wanted], fitted[:wanted] if fitting else []


def next_texts(
    target: Model,
    questions: Sequence[Question],
    policy: SamplingPolicy,
    num_tokens: int,
    written: Sequence[Sequence[Text]] = (),
) -> list[Text]:
    """The next batch of texts that are to have `num_tokens` tokens in all, by plain decoding.

    Text k has seed k, so that the same calls write the same texts. When every prompt has been
    answered and tokens are missing, sampled texts are written to the same prompts once more; greedy
    ones would be the same again, and what there is has to do.

    Args:
        target: writes them.
        questions: the prompts, at least one.
        policy: how tokens are sampled.
        num_tokens: how many are wanted.
        written: the batches before.

    Returns:
        Nothing when there are enough.
    """
    have = sum(len(text.tokens) for batch in written for text in batch)
    done = sum(len(batch) for batch in written)
    if have >= num_tokens or (policy.is_greedy and done >= len(questions)):
        return []
    left = questions[done % len(questions) :]
    limit = math.ceil(_SPARE * (num_tokens - have) / len(left))
    results = Engine(target, max_batch=BATCH).generate(
        [
            Request(item.ids, policy, max_new_tokens=limit, gamma=0, seed=done + i)
            for i, item in enumerate(left[:BATCH])
        ]
    )
    return [
        Text(item.place, item.ids, tuple(result.token_ids))
        for item, result in zip(left, results, strict=False)
    ]
