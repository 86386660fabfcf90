"""Copying where the text repeats itself, a drafting model everywhere else, token by token.

Of every token of a draft it is settled which of the two proposes it, by what stands before it: the
committed tokens, those drafted in this round, and how earlier drafts of the request fared. So each
has one law it comes from: a point mass on a copied token, the model's q on a drawn one.

The better one proposes. For copies, how often they were right behind matches about as long; for the
model, how often it was right at all; both begin at a guess, fade, and belong to one request alone.
A copy takes no pass, and a small model is worst where a text goes over what it has said before.
Where another drawn token is not worth its step, a copy may still be: a target pass often takes no
longer for a few positions more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor

from outrider.draft_length import GoOn, Share, always
from outrider.drafters import LOOKUP_FIRST
from outrider.drafters.lookup import AHEAD, Cursor, LookupDrafter
from outrider.drafters.model import Drawing, ModelDrafter, stacked
from outrider.models import Model
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

__all__ = ["LookupFirst"]

# Chosen on answers of the default target and the drafter made for it; docs/log.md has the figures.
_LENGTHS = (2, 3, 4, 6, 9)
"""Where a longer match counts as another kind."""
_GUESSES = (0.2, 0.5, 0.5, 0.65, 0.75, 0.85)
_DRAWN_GUESS = 0.4
_GUESS_WEIGHT = 12.0
_DRAWN = -1


class _Chances:
    """How often a request's drafted tokens stood, by where they came from."""

    def __init__(self) -> None:
        guesses = (*_GUESSES, _DRAWN_GUESS)  # the model's is the last one, at place -1
        self._shares = [Share(_GUESS_WEIGHT * guess, _GUESS_WEIGHT) for guess in guesses]
        self.sources: list[int] = []
        """Of the last draft's tokens."""

    def of(self, source: int) -> float:
        return self._shares[source].successes / self._shares[source].trials

    def observe(self, accepted: int) -> None:
        """Count what was examined of the last draft."""
        for place, source in enumerate(self.sources[: accepted + 1]):
            self._shares[source].add(place < accepted)
        self.sources = []


class _Drafting:
    """One request's draft in the making."""

    def __init__(self, cursor: Cursor, chances: _Chances, min_match: int) -> None:
        self._cursor = cursor
        self._chances = chances
        self._min_match = min_match
        self.tokens: list[int] = []
        self.laws: list[Tensor | None] = []
        self._sureties: list[float] = []
        self._copied: set[int] = set()

    def copies(self) -> bool:
        """Whether the next token is to be copied."""
        length = self._cursor.length
        if length < self._min_match:
            return False
        return self._chances.of(_kind(length)) >= self._chances.of(_DRAWN)

    def matches(self) -> bool:
        """Whether there is anything to copy, however little speaks for it."""
        return self._cursor.length > 0

    def is_worth_more(self, more: GoOn, limit: int, *, copying: bool) -> bool:
        """Whether to draft one more token, copied or drawn."""
        if len(self.tokens) >= limit:
            return False
        upcoming: list[float] = []
        if copying:
            num_ahead = min(AHEAD, limit - len(self.tokens))
            upcoming = [self._chances.of(_kind(self._cursor.length + i)) for i in range(num_ahead)]
        return more(self._sureties, upcoming, self._copied)

    def copy_on(self, more: GoOn, limit: int) -> bool:
        """Copy as much as is to be copied now; whether a drawn token is to follow."""
        while True:
            copying = self.copies()
            if self.is_worth_more(more, limit, copying=copying):
                if not copying:
                    return True
            # What is not worth a step of the model may be worth a copy, which takes none.
            elif copying or not self.matches() or not self.is_worth_more(more, limit, copying=True):
                return False
            self._copy()

    def _copy(self) -> None:
        """Put the token behind the match into the draft."""
        source = _kind(self._cursor.length)
        self._copied.add(len(self.tokens))
        self._add(self._cursor.following, None, self._chances.of(source), source)

    def put(self, token: int, law: Tensor | None, surety: float) -> None:
        """Put a drawn token into the draft."""
        self._add(token, law, surety, _DRAWN)

    def _add(self, token: int, law: Tensor | None, surety: float, source: int) -> None:
        self.tokens.append(token)
        self.laws.append(law)
        self._sureties.append(surety)
        self._chances.sources.append(source)
        self._cursor.advance(token)

    def draft(self) -> Draft:
        num_drawn = len(self.tokens) - len(self._copied)
        return Draft(self.tokens, stacked(self.tokens, self.laws), num_drawn)


class LookupFirst:
    """Drafts every token by a match in the text or by a model, whichever is the more often right.

    Args:
        model_drafter: draws tokens.
        min_match: tokens that must match for a copy in the place of a drawn token.
    """

    def __init__(self, model_drafter: ModelDrafter, *, min_match: int = 2) -> None:
        self._lookup = LookupDrafter(min_match=min_match)
        self._min_match = min_match
        self._model_drafter = model_drafter
        self._chances: dict[History, _Chances] = {}
        self.name = f"{LOOKUP_FIRST}{model_drafter.name}"

    @property
    def model(self) -> Model:
        """The drafting model."""
        return self._model_drafter.model

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """Drafts of copied and drawn tokens; whoever needs a drawn one gets it in the same pass."""
        asked = go_on or [always] * len(sequences)
        drafting = []
        for sequence in sequences:
            chances = self._chances.setdefault(sequence, _Chances())
            chances.sources = []
            drafting.append(_Drafting(self._lookup.cursor(sequence), chances, self._min_match))
        active = list(range(len(sequences)))
        while active:
            drawing: dict[int, Drawing] = {}
            for i in active:
                if drafting[i].copy_on(asked[i], gammas[i]):
                    drawing[i] = Drawing(sequences[i], drafting[i].tokens, policies[i], noise[i])
            drawn = self._model_drafter.draw(drawing)
            for i, found in drawn.items():
                drafting[i].put(*found)
            active = list(drawn)
        return [item.draft() for item in drafting]

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """Learn which of the two was right."""
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            if sequence in self._chances:
                self._chances[sequence].observe(verdict.accepted)
        self._model_drafter.observe(sequences, verdicts)

    def release(self, sequence: History) -> None:
        """Forget the request."""
        self._chances.pop(sequence, None)
        self._lookup.release(sequence)
        self._model_drafter.release(sequence)


def _kind(length: int) -> int:
    """Which kind of match one of that length is."""
    return bisect_right(_LENGTHS, length)
