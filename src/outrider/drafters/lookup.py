"""Prompt lookup: propose what followed the last time the text read as it does now.

The index is a suffix automaton over prompt and output, extended token by token (amortised constant
time), so a round costs the same however long the prompt is, and the match found is the longest
suffix of the text that occurred before, not one of a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft_length import GoOn, always
from outrider.errors import UsageError
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

__all__ = ["AHEAD", "Cursor", "LookupDrafter", "SuffixIndex"]


class SuffixIndex:
    """The longest suffix of a growing sequence that occurred in it before.

    A suffix automaton (Blumer et al. 1985): every state stands for the substrings that end at the
    same set of places; its suffix link leads to the longest of its suffixes that ends at more of
    them. For the whole text, that link is the longest suffix with an earlier occurrence.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # where the state's substrings ended, the last time it was noticed
        self._whole = 0
        self._match = (0, 0)

    def append(self, token: int) -> None:
        """Take one more token into the index."""
        self.tokens.append(token)
        end = len(self.tokens)
        state = self._add_state({}, -1, end, end)
        previous = self._whole
        while previous >= 0 and token not in self._next[previous]:
            self._next[previous][token] = state
            previous = self._link[previous]
        if previous < 0:
            self._link[state] = 0
        else:
            found = self._next[previous][token]
            if self._length[found] == self._length[previous] + 1:
                self._link[state] = found
            else:
                self._link[state] = self._split(previous, token, found)
        self._whole = state
        longest = self._link[state]
        self._match = (self._length[longest], self._end[longest]) if longest else (0, 0)
        # The next time this very suffix ends the text, today's occurrence is the one to follow:
        # what was said last is the likelier continuation.
        self._end[longest] = end

    def match(self) -> tuple[int, int]:
        """(length, end): the longest suffix that occurred before, and where that occurrence ended.

        `tokens[end]` is what followed it. Length 0 when the last token was never seen before.

            tokens [5, 6, 7, 5, 6] -> (2, 2): the suffix [5, 6] ended at 2 before, then came 7
        """
        return self._match

    def cursor(self) -> Cursor:
        """Behind the text as it is now."""
        return Cursor(self, self._link[self._whole], *self._match)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int, int]:
        """The longest suffix that occurs, when a token is put behind one that does.

        Args:
            state: of the one that occurs; 0 or less for nothing.
            length: of it.
            token: to come behind it. The text itself stays as it is.

        Returns:
            The state and length of the longest suffix with it, and where that ended; length 0 for a
            token that the text does not have.
        """
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        found = self._next[max(0, state)].get(token, 0)
        return (found, length + 1, self._end[found]) if found else (0, 0, 0)

    def _split(self, previous: int, token: int, found: int) -> int:
        clone = self._add_state(
            dict(self._next[found]),
            self._link[found],
            self._length[previous] + 1,
            self._end[found],
        )
        while previous >= 0 and self._next[previous].get(token) == found:
            self._next[previous][token] = clone
            previous = self._link[previous]
        self._link[found] = clone
        return clone

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1


class Cursor:
    """What followed earlier, while tokens come behind the text that are only drafted.

    Args:
        index: of the text, which stays as it is.
        state, length, end: of the longest suffix that occurred before.

    Attributes:
        length: tokens of the longest match, drafted ones among them; 0 for none.
    """

    def __init__(self, index: SuffixIndex, state: int, length: int, end: int) -> None:
        self._index = index
        self._state, self._known = state, length
        self.length, self._end = length, end
        self._drafted: list[int] = []

    @property
    def following(self) -> int:
        """The token that followed the match; asked only where there is one."""
        # A match may overlap the end (a text that repeats itself): then it goes on in the draft.
        beyond = self._end - len(self._index.tokens)
        return self._index.tokens[self._end] if beyond < 0 else self._drafted[beyond]

    def advance(self, token: int) -> None:
        """One more token is drafted."""
        goes_on = self.length > 0 and self.following == token
        self._drafted.append(token)
        self._state, self._known, end = self._index.follow(self._state, self._known, token)
        if goes_on:
            self.length, self._end = self.length + 1, self._end + 1
        if not goes_on or self._known > self.length:
            self.length, self._end = self._known, end


_SURETY = {1: 0.2, 2: 0.5}  # by the length of the match
AHEAD = 8
"""Tokens whose sureties are told before they are drafted."""


class LookupDrafter:
    """Drafts the continuation of the longest earlier match; a point mass on each token.

    Args:
        min_match: tokens that must match; shorter matches draft nothing.
    """

    name = "lookup"
    model = None

    def __init__(self, *, min_match: int = 2) -> None:
        if min_match < 1:
            raise UsageError(f"min_match must be 1 or more, not {min_match!r}")
        self._min_match = min_match
        self._indexes: dict[History, SuffixIndex] = {}

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """Tokens copied from behind the match; when it runs into the end, it goes round."""
        drafts = []
        asked = go_on or [always] * len(sequences)
        for sequence, gamma, more in zip(sequences, gammas, asked, strict=True):
            cursor = self.cursor(sequence)
            drawn: list[int] = []
            if cursor.length >= self._min_match:
                surety = [_surety(cursor.length + i) for i in range(gamma)]
                while (i := len(drawn)) < gamma and more(
                    surety[:i], surety[i : i + AHEAD], range(i)
                ):
                    drawn.append(cursor.following)
                    cursor.advance(drawn[-1])
            drafts.append(Draft(drawn))
        return drafts

    def cursor(self, sequence: History) -> Cursor:
        """Behind all that is committed of a request."""
        index = self._indexes.setdefault(sequence, SuffixIndex())
        for token in sequence.tokens[len(index.tokens) :]:
            index.append(token)
        return index.cursor()

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """Nothing to learn: the index reads the emitted tokens at the next proposal."""

    def release(self, sequence: History) -> None:
        """Forget the request's index."""
        self._indexes.pop(sequence, None)


def _surety(length: int) -> float:
    """A guess, in [0, 1], of the probability that what followed a match of that length follows."""
    return _SURETY.get(length, 0.85)
