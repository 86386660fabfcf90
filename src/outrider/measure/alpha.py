"""alpha as the paper defines it, of several drafters side by side (Leviathan et al. 2023, Table 3).

Along text that the target wrote, at every position: p from the target, q from each drafter, both
through the same sampling policy and after the same tokens; beta = sum_x min(p(x), q(x)), and alpha
is the mean of beta (Corollary 3.6). Nothing is drawn, so alpha has no luck of drafts in it.

* A drafting model's laws come from one pass over many positions; every other drafter is asked for a
  draft of one token at each position, as in decoding.
* A point mass on x has beta = p(x). That is what lookup and n-gram tables draft, `unigram` and
  `bigram` here too. The paper's unigram and bigram draft from a whole law instead, which at
  temperature 0 is a point mass as well.
* Where a drafter proposes nothing, no token can be accepted: beta is 0 there. `alpha_drafted` is
  the mean over the other positions, and what accepted / examined of real rounds estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_length import GoOn
from outrider.drafters import Drafter
from outrider.drafters.model import ModelDrafter, widened
from outrider.drafters.ngram import NgramDrafter, fit_ngrams
from outrider.errors import NothingToDraw, NumericalError
from outrider.measure.estimates import beta_histogram, interval, survival_along_text
from outrider.measure.texts import Text
from outrider.models import Feed, Model, Prompt
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.threads import single_threaded
from outrider.verification import Draft, Verdict

__all__ = [
    "BASELINES",
    "Betas",
    "RandomDrafter",
    "alpha_row",
    "fitted_drafters",
    "match_probabilities",
    "text_betas",
]

BASELINES = ("lookup", "unigram", "bigram", "random")
"""Drafters of negligible cost that need nothing but the target."""

_ORDERS = {"unigram": 1, "bigram": 2}
_CHUNK = 64
"""Positions of one pass: rows of a large vocabulary for no more than that are in memory."""
_PREFILL = 256
_LONGEST = 32
"""Most tokens of a draft whose survival is told."""


class RandomDrafter:
    """Drafts any token of the vocabulary with the same probability, whatever the policy.

    Leviathan et al. 2023, section 3.6: even this gives a small gain.
    """

    name = "random"
    model = None

    def __init__(self, vocab_size: int) -> None:
        self._law = torch.full((vocab_size,), 1.0 / vocab_size)

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """Always as many tokens as asked for."""
        return [
            Draft([dice.draft(i, self._law) for i in range(gamma)], self._law.expand(gamma, -1))
            for gamma, dice in zip(gammas, noise, strict=True)
        ]

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """There is nothing to learn."""

    def release(self, sequence: History) -> None:
        """There is nothing to forget."""


def fitted_drafters(
    names: Sequence[str], texts: Sequence[Text], target: Model
) -> dict[str, Drafter]:
    """Those of "unigram" and "bigram" that are in `names`, counted in these texts."""
    counted = [text.tokens for text in texts]
    return {
        name: NgramDrafter(fit_ngrams(counted, order=order, vocab_size=target.vocab_size))
        for name, order in _ORDERS.items()
        if name in names
    }


# Along one text


@dataclass(frozen=True)
class Betas:
    """One drafter along one text.

    Attributes:
        beta: of every position; None where nothing is drafted.
        match: the sum over positions of the probability that target and drafter, sharing Gumbel
            noise, draw the same token.
    """

    beta: tuple[float | None, ...]
    match: float


class _Proposed(NamedTuple):
    """What would be drafted at n neighbouring positions.

    Attributes:
        tokens: where the point mass is; None where nothing is drafted. Not used beside `q`.
        q: [n, V], a row of zeros where nothing is drafted; None for point masses.
    """

    tokens: Sequence[int | None]
    q: Tensor | None = None


class _Reader(Protocol):
    """Follows one text."""

    def read(self, count: int) -> _Proposed:
        """What the next `count` positions have."""
        ...

    def close(self) -> None:
        """Give back what was held."""
        ...


def text_betas(
    target: Model, drafters: Mapping[str, Drafter], text: Text, policy: SamplingPolicy
) -> dict[str, Betas]:
    """beta at every position of one text, for every drafter.

    Args:
        target: wrote the text under `policy`.
        drafters: by name.
        text: what it wrote.
        policy: how target and drafters sample.
    """
    judge = _LawReader(target, text, policy, target)
    readers: dict[str, _Reader] = {}
    betas: dict[str, list[float | None]] = {name: [] for name in drafters}
    matches = dict.fromkeys(drafters, 0.0)
    try:
        for name, drafter in drafters.items():
            if isinstance(drafter, ModelDrafter):
                readers[name] = _LawReader(drafter.model, text, policy, target)
            else:
                readers[name] = _DraftReader(drafter, text, policy, target)
        for first in range(0, len(text.tokens), _CHUNK):
            count = min(_CHUNK, len(text.tokens) - first)
            p = judge.laws(count, strict=True)
            for name, reader in readers.items():
                found, matched = _compared(p, reader.read(count), policy)
                betas[name] += found
                matches[name] += matched
    finally:
        for reader in (judge, *readers.values()):
            reader.close()
    return {name: Betas(tuple(betas[name]), matches[name]) for name in drafters}


def _compared(
    p: Tensor, proposed: _Proposed, policy: SamplingPolicy
) -> tuple[list[float | None], float]:
    """beta of every row, and the sum of the match probabilities."""
    if proposed.q is None:
        points = [
            None if token is None else float(row[token])
            for row, token in zip(p, proposed.tokens, strict=True)
        ]
        # The noise has no say in what a point mass draws.
        return points, sum(beta for beta in points if beta is not None)
    with single_threaded():
        q = proposed.q.to(p)
        shared = torch.minimum(p, q).sum(-1, dtype=torch.float64).clamp_(max=1.0)
        drafts = (q.amax(-1) > 0).tolist()
        # Likewise where the target's law is a point mass.
        match = shared if policy.is_greedy else match_probabilities(p, q)
    betas = [b if drafted else None for b, drafted in zip(shared.tolist(), drafts, strict=True)]
    return betas, float(match.sum())


def match_probabilities(p: Tensor, q: Tensor) -> Tensor:
    """`theory.gumbel_match_probability` of every row; [n], float64.

    Args:
        p: [n, V], rows sum to 1.
        q: [n, V], rows sum to 1, or are zeros: 0 then.
    """
    rows = zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)
    # Row by row: what a row of a large vocabulary needs stays in the processor's cache.
    return torch.tensor([_match(p_row, q_row) for p_row, q_row in rows], dtype=torch.float64)


def _match(p: NDArray[np.floating], q: NDArray[np.floating]) -> float:
    """Of one row; see `theory.gumbel_match_probability` for the order that makes it a sort."""
    some = (p > 0) | (q > 0)
    p, q = p[some], q[some]
    with np.errstate(divide="ignore"):
        order = np.argsort(q / p)
    p, q = p[order].astype(np.float64), q[order].astype(np.float64)
    p_before = np.cumsum(p)
    q_after = np.maximum(q.sum() - np.cumsum(q), 0.0)
    # 1 / (p_before / p_i + q_after / q_i), without dividing by 0.
    below = p_before * q + q_after * p
    shared = below > 0
    return min(1.0, float((p[shared] * q[shared] / below[shared]).sum()))


class _LawReader:
    """Follows a text with a model, teacher-forced: its laws at many positions from one pass.

    Where the model cannot draft (beyond its context, after an id it does not have, or where the
    policy leaves its vocabulary nothing), the row is zeros; a target has none of these.
    """

    def __init__(self, model: Model, text: Text, policy: SamplingPolicy, target: Model) -> None:
        self._model = model
        self._policy = policy
        self._vocab_size = target.vocab_size
        self._history = History(text.prompt, target.eos_ids)
        self._text = text
        self._sequence = model.start(Prompt(text.prompt))

    def read(self, count: int) -> _Proposed:
        """The next rows as proposals."""
        return _Proposed((), self.laws(count))

    def laws(self, count: int, *, strict: bool = False) -> Tensor:
        """[count, V] of the target: the laws of the next positions, from the policy.

        Args:
            count: of positions.
            strict: let errors of the policy through, instead of a row of zeros.
        """
        history = self._history
        first = len(history) - history.prompt_length
        following = list(self._text.tokens[first : first + count])
        usable = count if strict else self._usable(following)
        rows = torch.zeros(count, self._vocab_size)
        if usable:
            drafted = following[: usable - 1]
            logits = widened(self._logits([*history.tokens, *drafted], usable), self._vocab_size)
            with single_threaded():
                laws = self._laws(logits, drafted, strict=strict)
            rows = laws if usable == count else torch.cat([laws, rows[usable:].to(laws)])
        history.tokens.extend(following)
        return rows

    def close(self) -> None:
        """Close the model's cache."""
        self._sequence.close()

    def _usable(self, following: Sequence[int]) -> int:
        """How many of the next positions have a prefix that the model can read."""
        known = self._model.vocab_size
        if any(token >= known for token in self._history.tokens):
            return 0
        room = self._model.context_length - len(self._history) + 1
        readable = next((i for i, token in enumerate(following) if token >= known), len(following))
        return max(0, min(len(following), room, readable + 1))

    def _logits(self, prefix: Sequence[int], keep: int) -> Tensor:
        """After each of the last `keep` tokens of `prefix`."""
        sequence = self._sequence
        while len(prefix) - sequence.length - keep >= _PREFILL:
            part = prefix[sequence.length : sequence.length + _PREFILL]
            self._model.score([Feed(sequence, part, 1)])
        return self._model.score([Feed(sequence, prefix[sequence.length :], keep)])

    def _laws(self, logits: Tensor, drafted: Sequence[int], *, strict: bool) -> Tensor:
        try:
            return self._policy.probs(logits, self._history, drafted)
        except (NothingToDraw, NumericalError):
            if strict:
                raise
        rows = []
        for i in range(len(logits)):
            try:
                row = self._policy.probs(logits[i : i + 1], self._history, drafted[:i])
            except (NothingToDraw, NumericalError):
                row = torch.zeros_like(logits[i : i + 1])
            rows.append(row)
        return torch.cat(rows)


class _DraftReader:
    """Follows a text with a drafter's own proposals of one token, token by token."""

    def __init__(self, drafter: Drafter, text: Text, policy: SamplingPolicy, target: Model) -> None:
        self._drafter = drafter
        self._policy = policy
        self._target = target
        self._history = History(text.prompt, target.eos_ids)
        self._text = text

    def read(self, count: int) -> _Proposed:
        """What is proposed at the next positions."""
        drafts = [self._propose() for _ in range(count)]
        if all(draft.q is None for draft in drafts):
            return _Proposed([draft.tokens[0] if draft.tokens else None for draft in drafts])
        return _Proposed((), torch.cat([self._law(draft) for draft in drafts]))

    def _law(self, draft: Draft) -> Tensor:
        if draft.q is not None:
            return draft.q[:1]
        row = torch.zeros(1, self._target.vocab_size)
        row[0, draft.tokens] = 1.0
        return row

    def close(self) -> None:
        """The drafter forgets the text."""
        self._drafter.release(self._history)

    def _propose(self) -> Draft:
        history = self._history
        token = self._text.tokens[len(history) - history.prompt_length]
        noise = RoundNoise(0, len(history))
        with single_threaded():
            [draft] = self._drafter.propose([history], [1], [self._policy], [noise])
        history.tokens.append(token)
        self._drafter.observe([history], [Verdict(int(draft.tokens == [token]), token)])
        return draft


# Over all texts


def alpha_row(texts: Sequence[Text], betas: Sequence[Betas]) -> dict[str, object]:
    """What one drafter's betas amount to, ready for JSON.

    Args:
        texts: what was read.
        betas: of each text.
    """
    by_text = [[beta or 0.0 for beta in item.beta] for item in betas]
    by_prompt: dict[int, list[float]] = {}
    drafted: dict[int, list[float]] = {}
    for text, item, values in zip(texts, betas, by_text, strict=True):
        by_prompt.setdefault(text.place, []).extend(values)
        drafted.setdefault(text.place, []).extend(beta for beta in item.beta if beta is not None)
    alpha = interval(by_prompt.values())
    made = interval(drafted.values()) if any(drafted.values()) else None
    # Only values are kept of these: the fewest resamples do.
    survival = [item.value for item in survival_along_text(by_text, _LONGEST, resamples=100)]
    return {
        "alpha": alpha.value,
        "low": alpha.low,
        "high": alpha.high,
        "num_tokens": alpha.num_values,
        "num_prompts": len(by_prompt),
        "alpha_drafted": None if made is None else made.as_dict(),
        "survival": survival,
        "conditional": [
            after / before if before else 0.0
            for before, after in zip([1.0, *survival], survival, strict=False)
        ],
        "beta_histogram": beta_histogram(by_text),
        "match": sum(item.match for item in betas) / alpha.num_values,
    }
