"""Drafting with a smaller language model that has a cache of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.draft_length import GoOn, always
from outrider.errors import CacheFull, NothingToDraw, NumericalError
from outrider.models import CachedSequence, Feed, Model, Prompt
from outrider.models.trimmed import TrimmedModel
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.threads import all_threads
from outrider.verification import Draft, Verdict

__all__ = ["Drawing", "Drawn", "ModelDrafter", "stacked", "widened"]

_LOG = logging.getLogger("outrider")


class Drawing(NamedTuple):
    """A request for which one token is to be drawn.

    Attributes:
        sequence: its committed tokens.
        drafted: tokens of this round's draft so far.
        policy: how it samples.
        noise: the round's draws.
    """

    sequence: History
    drafted: Sequence[int]
    policy: SamplingPolicy
    noise: RoundNoise


class Drawn(NamedTuple):
    """A drawn token.

    Attributes:
        token: its id.
        law: [V], what it was drawn from; None for the point mass of a greedy policy.
        surety: how probable the model finds its likeliest token, before the policy. What the policy
            makes of a law says little of how near the target's is: a point mass, nothing.
    """

    token: int
    law: Tensor | None
    surety: float


class ModelDrafter:
    """Proposes what a smaller model of the same tokenizer would say.

    Before each proposal the model is fed whatever it has not seen of the committed tokens, so the
    last token of a fully accepted draft needs no special case. Where the model's context ends, or a
    token is beyond its vocabulary, drafts become shorter or empty; decoding goes on without them.

    Args:
        model: the drafting model.
        target_vocab_size: V of the target. Logits are cut or padded with -infinity to this width:
            ids that only one of the two has are never drafted, and processors see the target's V.
    """

    def __init__(self, model: Model, *, target_vocab_size: int) -> None:
        self.name = model.name
        self.model = model
        self._target_vocab_size = target_vocab_size
        self._few: TrimmedModel | None = None
        if isinstance(model, TrimmedModel) and model.vocab_size == target_vocab_size:
            self._few = model
        self._cached: dict[History, CachedSequence] = {}
        self._told_full = False
        self._foreign: dict[History, int] = {}  # how far each history was searched for foreign ids

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """Drafts drawn token by token, all sequences advancing together in one pass per token."""
        asked = go_on or [always] * len(sequences)
        tokens: list[list[int]] = [[] for _ in sequences]
        laws: list[list[Tensor | None]] = [[] for _ in sequences]
        surety: list[list[float]] = [[] for _ in sequences]
        active = list(range(len(sequences)))
        while active:
            active = [i for i in active if len(tokens[i]) < gammas[i] and asked[i](surety[i])]
            drawn = self.draw(
                {i: Drawing(sequences[i], tokens[i], policies[i], noise[i]) for i in active}
            )
            active = list(drawn)
            for i, item in drawn.items():
                tokens[i].append(item.token)
                laws[i].append(item.law)
                surety[i].append(item.surety)
        return [
            Draft(drawn, stacked(drawn, rows), len(drawn))
            for drawn, rows in zip(tokens, laws, strict=True)
        ]

    def draw(self, drawings: dict[int, Drawing]) -> dict[int, Drawn]:
        """One token for each of some requests, in one pass; none where the model has none to give.

        Args:
            drawings: by any number. Those without room in the context, with a token beyond the
                vocabulary, or whose policy leaves nothing that the model knows, get none.
        """
        able = {i: item for i, item in drawings.items() if self._can_read(item)}
        if not able:
            return {}
        logits = self._score(able)
        drawn: dict[int, Drawn] = {}
        for i, (sequence, drafted, policy, noise) in able.items():
            if i not in logits:  # no room although it had all of it
                continue
            # What is drawn by numbers alone is drawn among the few ids that the model knows.
            few = self._few if not (policy.names_ids or noise.coupled) else None
            row = logits[i] if few is not None else self._whole(logits[i])
            try:
                if policy.is_greedy:
                    law = None
                    [token] = policy.choices(row, sequence, drafted)
                else:
                    law = policy.probs(row, sequence, drafted)
                    token = noise.draft(len(drafted), law[0])
            except NothingToDraw:  # what the policy allows, this vocabulary does not have
                continue
            except NumericalError as error:
                # A sick drafter must not cost the target its requests.
                _LOG.warning("drafter %s: %s; decoding without drafts", self.name, error)
                continue
            if few is not None:
                token = int(few.kept[token])
                law = None if law is None else few.spread(law, 0.0)
            surety = float(row.softmax(-1).max())
            drawn[i] = Drawn(token, None if law is None else law[0], surety)
        return drawn

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """Roll the caches back to the tokens that stand."""
        for sequence in sequences:
            cached = self._cached.get(sequence)
            if cached is not None:
                # Of the emitted tokens the last one is the target's own and was never fed here.
                kept = len(sequence) - 1
                cached.rollback(min(cached.length, kept))

    def release(self, sequence: History) -> None:
        """Close the request's cache."""
        self._foreign.pop(sequence, None)
        cached = self._cached.pop(sequence, None)
        if cached is not None:
            cached.close()

    def _score(self, drawing: dict[int, Drawing]) -> dict[int, Tensor]:
        """Logits [1, V or V'] after what each sequence has drawn; none if it has no room alone.

        Where they do not fit together, they take turns in the cache. That is slow, but how long a
        draft is must not depend on the neighbours: a seed's text would.
        """
        feeds = [self._feed(item.sequence, item.drafted) for item in drawing.values()]
        try:
            with all_threads():
                rows = self.model.score(feeds) if self._few is None else self._few.score_kept(feeds)
            return {i: rows[k : k + 1] for k, i in enumerate(drawing)}
        except CacheFull:
            if not self._told_full:
                _LOG.warning(
                    "drafter %s: its memory for keys and values is full; drafting is slow, or "
                    "drafts are shorter",
                    self.name,
                )
                self._told_full = True
        if len(drawing) > 1:
            logits: dict[int, Tensor] = {}
            for i, drawn in drawing.items():
                logits |= self._score({i: drawn})
            return logits
        [alone] = drawing.values()
        others = [other for other in self._cached if other is not alone.sequence]
        for other in others:
            self._cached.pop(other).close()
        return self._score(drawing) if others else {}

    def _whole(self, rows: Tensor) -> Tensor:
        """Logits [n, V of the target] of rows that `_score` gave."""
        if self._few is not None:
            rows = self._few.spread(rows, -math.inf)
        return widened(rows, self._target_vocab_size)

    def _feed(self, sequence: History, drawn: Sequence[int]) -> Feed:
        cached = self._cached.get(sequence)
        if cached is None:
            cached = self._cached[sequence] = self.model.start(Prompt(sequence.tokens))
        unseen = [
            *sequence.tokens[cached.length :],
            *drawn[max(0, cached.length - len(sequence)) :],
        ]
        return Feed(cached, unseen, 1)

    def _can_read(self, item: Drawing) -> bool:
        """Whether all that a token is drawn behind is in the vocabulary and fits the context."""
        sequence, drafted = item.sequence, item.drafted
        if len(sequence) + len(drafted) > self.model.context_length:
            return False
        searched = self._foreign.get(sequence, 0)
        size = self.model.vocab_size
        if any(token >= size for token in (*sequence.tokens[searched:], *drafted)):
            return False
        self._foreign[sequence] = len(sequence)
        return True


def stacked(tokens: Sequence[int], laws: Sequence[Tensor | None]) -> Tensor | None:
    """q [gamma, V] from each token's law, None for a point mass; None if all of them are."""
    drawn = next((law for law in laws if law is not None), None)
    if drawn is None:
        return None
    return torch.stack(
        [
            torch.zeros_like(drawn).index_fill_(0, torch.tensor(token), 1.0) if law is None else law
            for token, law in zip(tokens, laws, strict=True)
        ]
    )


def widened(logits: Tensor, vocab_size: int) -> Tensor:
    """[n, V of the drafter] -> [n, `vocab_size`]: cut, or padded with -infinity."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return logits[:, :vocab_size]
