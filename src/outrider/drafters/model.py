"""Drafting with a smaller language model that has a cache of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.draft_length import GoOn
from outrider.errors import CacheFull, NothingToDraw, NumericalError
from outrider.models import CachedSequence, Feed, Model, Prompt
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy, single_threaded
from outrider.verification import Draft, Verdict

__all__ = ["ModelDrafter", "widened"]

_LOG = logging.getLogger("outrider")


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
        limits = [
            min(gamma, self._room(sequence))
            for sequence, gamma in zip(sequences, gammas, strict=True)
        ]
        tokens: list[list[int]] = [[] for _ in sequences]
        laws: list[list[Tensor]] = [[] for _ in sequences]
        surety: list[list[float]] = [[] for _ in sequences]
        for step in range(max(limits, default=0)):
            for i, more in enumerate(go_on):
                if limits[i] > step and not more(surety[i]):
                    limits[i] = step
            active = [i for i, limit in enumerate(limits) if limit > step]
            if not active:
                break
            logits = self._score({i: (sequences[i], tokens[i]) for i in active})
            with single_threaded():
                for i in active:
                    if i not in logits:  # no room although it had all of it
                        limits[i] = step
                        continue
                    row = widened(logits[i], self._target_vocab_size)
                    try:
                        law = policies[i].probs(row, sequences[i], tokens[i])[0]
                    except NothingToDraw:  # what the policy allows, this vocabulary does not have
                        limits[i] = step
                        continue
                    except NumericalError as error:
                        # A sick drafter must not cost the target its requests.
                        _LOG.warning("drafter %s: %s; decoding without drafts", self.name, error)
                        limits[i] = step
                        continue
                    one_hot = policies[i].is_greedy
                    tokens[i].append(int(law.argmax()) if one_hot else noise[i].draft(step, law))
                    laws[i].append(law)
                    if go_on:
                        # A one-hot law says nothing of how close the choice was.
                        sure = row[0].softmax(-1) if one_hot else law
                        surety[i].append(float(sure[tokens[i][-1]]))
                    if tokens[i][-1] >= self.model.vocab_size:  # forced by a processor
                        limits[i] = step + 1
        return [
            Draft(drawn, None if policy.is_greedy or not drawn else torch.stack(rows), len(drawn))
            for drawn, rows, policy in zip(tokens, laws, policies, strict=True)
        ]

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

    def _score(self, drawing: dict[int, tuple[History, list[int]]]) -> dict[int, Tensor]:
        """Logits [1, V] after what each sequence has drawn; none for one that does not fit alone.

        Where they do not fit together, they take turns in the cache. That is slow, but how long a
        draft is must not depend on the neighbours: a seed's text would.
        """
        feeds = [self._feed(*drawn) for drawn in drawing.values()]
        try:
            rows = self.model.score(feeds)
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
        [(history, _)] = drawing.values()
        others = [other for other in self._cached if other is not history]
        for other in others:
            self._cached.pop(other).close()
        return self._score(drawing) if others else {}

    def _feed(self, sequence: History, drawn: list[int]) -> Feed:
        cached = self._cached.get(sequence)
        if cached is None:
            cached = self._cached[sequence] = self.model.start(Prompt(sequence.tokens))
        unseen = [
            *sequence.tokens[cached.length :],
            *drawn[max(0, cached.length - len(sequence)) :],
        ]
        return Feed(cached, unseen, 1)

    def _room(self, sequence: History) -> int:
        """Most tokens that can be drafted: drawing the k-th needs all before it in the context."""
        searched = self._foreign.get(sequence, 0)
        if any(token >= self.model.vocab_size for token in sequence.tokens[searched:]):
            return 0
        self._foreign[sequence] = len(sequence)
        return max(0, self.model.context_length - len(sequence) + 1)


def widened(logits: Tensor, vocab_size: int) -> Tensor:
    """[n, V of the drafter] -> [n, `vocab_size`]: cut, or padded with -infinity."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return logits[:, :vocab_size]
