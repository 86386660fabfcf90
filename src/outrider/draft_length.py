"""How many tokens to draft: a fixed number, or as many as are worth their time.

A drafter asks before every token it draws. The answer may depend on the tokens it has drawn in this
round and on everything before, never on the one it would draw: a token that was drawn is verified.
That keeps every rule exact, whatever the answers are.

The adaptive answer. Tokens per time are highest when drafting goes on exactly as long as a further
token brings more than the same time brings otherwise (optimal stopping of a renewal reward process;
for speculative decoding as goodput in Liu et al. 2024, arXiv 2406.14066). With S_j the probability
that the first j drafted tokens of this round are all accepted, draft token k if for some j >= k

    S_k + ... + S_j  >  rate * (cost(j) - cost(k - 1))

* cost(j): a round with j drafted tokens, from the costs measured on this machine: a target pass
  over j + 1 positions, with what the request's cached tokens add to it, and, but for copies, j
  drafter steps, the first of them dearer than the others; where that pass must be wider than the
  last one, a change of width and another one back. In a batch, a request's share of the passes over
  all, and for any draft one change of width, since all pay for the width that one of them changes.
* rate: tokens per millisecond of this request so far, by the same costs. Rounds by this rule raise
  the rate, and a higher rate asks more of a draft, until both agree (Dinkelbach's iteration).
* S_j: for every token already drawn, the acceptance so far of tokens the drafter was as sure of
  (a drafting model is as sure as its likeliest token is likely, whatever the policy makes of it);
  for the next one, the acceptance so far behind a token the drafter was as sure of (easy stretches
  last); beyond that, the acceptance of all. All begin at a guess, the first at nine tenths of the
  drafter's own, the second half way between that and the third; they fade, and belong to one
  request alone: nothing is carried over to another. A drafter that copies some tokens and draws
  others has these numbers twice.

Where no draft is worth it, none is made. But a first token is tried as long as it may be worth it,
chance allowed for (optimism in the face of uncertainty, Lai and Robbins 1985): a few unlucky rounds
at the beginning say little. What was seen fades in rounds without drafts as well, so now and then
one is tried, the more seldom the more it costs, and a text that becomes predictable is noticed.

Leviathan et al. 2023 leave a varying gamma open, in section 3.5 and section 6; the oracle of
section 3.5 is the most that it can bring.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

from outrider.costs import Costs
from outrider.pass_width import PassWidth

__all__ = ["Adaptive", "DraftLength", "Fixed", "GoOn", "Share", "always", "draft_length"]

LONGEST = 32
"""Most tokens an adaptive length drafts in a round."""

# Chosen on recorded texts of two real pairs, with and without a drafting model; docs/log.md has
# what else was tried.
_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)
_FIRST_GUESS = 0.3
_GUESS_WEIGHT = 6.0
_MEMORY = 0.98
_FADE = 0.98
_FADE_UNUSED = 0.998
_BELIEF = 0.9
_LEAST = 0.02
_MISSED_BY_GUESSES, _MISSED_BY_TRIES = 1.5, 1.0


class GoOn(Protocol):
    """Asked before every draw whether one more token shall be drafted."""

    def __call__(
        self,
        confidences: Sequence[float],
        upcoming: Sequence[float] = (),
        copied: Container[int] = (),
    ) -> bool:
        """The answer.

        Args:
            confidences: for every token drawn in this round, the drafter's own guess, in [0, 1], of
                the probability that it is accepted.
            upcoming: the same for tokens that would come next, each given the ones before it, from
                a drafter that knows them without drawing (a copy of earlier text).
            copied: places of those `confidences` that were not drawn either.
        """
        ...


class DraftLength(Protocol):
    """Decides one request's draft lengths, round by round."""

    @property
    def limit(self) -> int:
        """Most tokens of any round."""
        ...

    def begin(self, num_requests: int, context: int = 0) -> GoOn:
        """What to ask in this round.

        Args:
            num_requests: that share the passes.
            context: tokens of this request that are cached.
        """
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn how the round ended."""
        ...


def draft_length(gamma: int | None, costs: Costs) -> DraftLength:
    """Of a request's gamma: a fixed length, or adaptive for None."""
    return Adaptive(costs) if gamma is None else Fixed(gamma)


class Fixed:
    """Always as many as fit: the paper's gamma."""

    def __init__(self, gamma: int) -> None:
        self.limit = gamma

    def begin(self, num_requests: int, context: int = 0) -> GoOn:
        """Yes, up to the limit."""
        return always

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""


def always(
    confidences: Sequence[float], upcoming: Sequence[float] = (), copied: Container[int] = ()
) -> bool:
    """Yes."""
    return True


class Share:
    """A share of successes with a memory: trials of earlier rounds count less and less.

    Args:
        successes, trials: to begin with.
    """

    def __init__(self, successes: float = 0.0, trials: float = 0.0) -> None:
        self.successes = successes
        self.trials = trials

    def fade(self, to: float) -> None:
        """All trials so far count less: `to` of what they did."""
        self.successes *= to
        self.trials *= to

    def add(self, success: bool, trials: float = 1.0) -> None:
        """One more trial, or what counts as that many."""
        self.successes = _MEMORY * self.successes + success
        self.trials = _MEMORY * self.trials + trials

    def mean(self, guess: float, weight: float = _GUESS_WEIGHT) -> float:
        """The share, with a guess counted as some trials."""
        return (self.successes + weight * guess) / (self.trials + weight)

    def at_most(self, missed: float) -> float:
        """What the share may be at most, chance allowed for.

        Args:
            missed: successes that may be expected where chance brought none.
        """
        most = self.successes + math.sqrt(self.successes) + missed
        return most / self.trials if self.trials > most else 1.0


class _Token(NamedTuple):
    """A drafted token, or one that is to come: how sure the drafter is, and whether it copied."""

    confidence: float
    copied: bool


class _Record:
    """The fate of examined tokens from one source, and what it lets expect."""

    def __init__(self) -> None:
        self._overall = Share()
        self._by_confidence = [Share() for _ in range(len(_EDGES) + 1)]
        self._by_previous = [Share() for _ in range(len(_EDGES) + 2)]
        # As trials, the drafter's own guesses; as successes, what came of them.
        self._guesses = Share()

    def fade(self, to: float) -> None:
        """A round has passed."""
        # All fade, also those that this round says nothing of: what was true of long drafts in an
        # easy stretch must not outlive it.
        for share in (self._overall, self._guesses, *self._by_confidence, *self._by_previous):
            share.fade(to)

    def add(self, confidence: float | None, previous: float | None, success: bool) -> None:
        """The fate of one examined token.

        Args:
            confidence: the drafter's guess; None where it was not asked for.
            previous: of the token before it in the draft; None for the first.
            success: whether it was accepted.
        """
        self._overall.add(success)
        self._after(previous).add(success)
        if confidence is not None:
            self._by_confidence[bisect_right(_EDGES, confidence)].add(success)
            self._guesses.add(success, confidence)

    def kept(self, confidence: float) -> float:
        """Probability that a token of that confidence is accepted."""
        share = self._by_confidence[bisect_right(_EDGES, confidence)]
        # Of a drafter that is never as sure as it is right, no trace of its own guess may stay.
        weight = _GUESS_WEIGHT / (1.0 + share.trials / _GUESS_WEIGHT)
        return share.mean(_BELIEF * self._trust() * confidence, weight)

    def _trust(self) -> float:
        """1, or how far the drafter's guesses must be off: by more than chance explains."""
        return self._guesses.at_most(_MISSED_BY_GUESSES)

    def next_kept(self, previous: float | None) -> float:
        """Probability that a token not drawn yet is accepted behind one of that confidence."""
        guess = self.any_kept()
        if previous is not None:
            guess = (guess + previous) / 2
        return self._after(previous).mean(guess)

    def first_kept_at_most(self) -> float:
        """What the probability that the first token is accepted may be after what was seen."""
        return self._after(None).at_most(_MISSED_BY_TRIES)

    def any_kept(self) -> float:
        """Probability that a token is accepted of which nothing is known."""
        return self._overall.mean(_FIRST_GUESS)

    def _after(self, previous: float | None) -> Share:
        """Of tokens that came behind one of the same confidence: easy stretches last."""
        if previous is None:
            return self._by_previous[-1]
        return self._by_previous[bisect_right(_EDGES, previous)]


class Adaptive:
    """As many as are worth their time; see the module's text.

    Args:
        costs: of the passes of this target and drafter.
        limit: most tokens of any round.
    """

    def __init__(self, costs: Costs, *, limit: int = LONGEST) -> None:
        self.limit = limit
        self._costs = costs
        self._drawn, self._copied = _Record(), _Record()
        self._emitted = self._spent = 0.0
        self._width = PassWidth(costs)
        self._narrowest = costs.widest(1)  # asked for at every length that is weighed
        self._num_requests = 1
        self._context_ms = 0.0
        self._tokens: list[_Token] = []
        self._standing, self._num_counted = 1.0, 0
        self._declined = False

    def begin(self, num_requests: int, context: int = 0) -> GoOn:
        """Decides this round, in which the request pays its share of the passes over all."""
        self._num_requests = num_requests
        self._context_ms = self._costs.context_ms * max(0, context - self._costs.context)
        self._tokens = []
        self._standing, self._num_counted = 1.0, 0
        self._declined = False
        return self._go_on

    def observe(self, drafted: int, accepted: int) -> None:
        """Count the round: its time by the costs, its tokens, and the fate of examined drafts."""
        known = self._tokens[:drafted]
        num_copied = sum(token.copied for token in known)
        self._emitted = _MEMORY * self._emitted + accepted + 1
        self._spent = _MEMORY * self._spent + self._cost(drafted, drafted - num_copied)
        self._width.padding(drafted + 1)
        for source, used in ((self._copied, num_copied), (self._drawn, drafted - num_copied)):
            if used:
                source.fade(_FADE)
            elif self._declined:
                source.fade(_FADE_UNUSED)
        for place in range(min(accepted + 1, drafted)):
            # Of the last token nothing was asked any more if it was drawn.
            token = known[place] if place < len(known) else None
            previous = known[min(place, len(known)) - 1].confidence if place and known else None
            confidence = None if token is None else token.confidence
            self._source(token).add(confidence, previous, place < accepted)

    def _source(self, token: _Token | None) -> _Record:
        return self._copied if token is not None and token.copied else self._drawn

    def _go_on(
        self,
        confidences: Sequence[float],
        upcoming: Sequence[float] = (),
        copied: Container[int] = (),
    ) -> bool:
        self._tokens = [
            *(_Token(confidence, place in copied) for place, confidence in enumerate(confidences)),
            *(_Token(confidence, True) for confidence in upcoming[:1]),
        ]
        included = len(confidences)
        if included >= self.limit:
            return False
        for token in self._tokens[self._num_counted : included]:
            self._standing *= self._source(token).kept(token.confidence)
        self._num_counted = included
        answer = self._is_worth_it(included, self._standing, upcoming)
        if included == 0:
            answer = answer or self._is_worth_a_try(bool(upcoming))
            self._declined = not answer
        return answer

    def _is_worth_it(self, included: int, standing: float, upcoming: Sequence[float]) -> bool:
        """Whether some number of further tokens brings more than their time does otherwise."""
        rate = self._rate()
        steps = sum(not token.copied for token in self._tokens[:included])
        spent = self._cost(included, steps)
        source = self._copied if upcoming else self._drawn
        gain = 0.0
        for length in range(included + 1, self.limit + 1):
            ahead = length - included - 1
            steps += 0 if upcoming else 1
            if ahead < len(upcoming):
                standing *= source.kept(upcoming[ahead])
            elif not ahead:
                previous = self._tokens[included - 1].confidence if included else None
                standing *= source.next_kept(previous)
            else:
                standing *= source.any_kept()
            if standing < _LEAST:  # even where it costs nothing, somebody has to look at it
                return False
            gain += standing
            if gain > rate * (self._cost(length, steps) - spent):
                return True
        return False

    def _is_worth_a_try(self, copied: bool) -> bool:
        """Whether a first token may bring more than its time does, as far as is known."""
        source, steps = (self._copied, 0) if copied else (self._drawn, 1)
        time = self._cost(1, steps) - self._cost(0, 0)
        return source.first_kept_at_most() > self._rate() * time

    def _rate(self) -> float:
        """Tokens per millisecond; never below those of plain decoding, which can always be had."""
        plain = self._cost(0, 0)
        so_far = (self._emitted + _GUESS_WEIGHT) / (self._spent + _GUESS_WEIGHT * plain)
        return max(so_far, 1.0 / plain)

    def _cost(self, length: int, steps: int) -> float:
        """Milliseconds of this request's share of a round with that draft for all.

        Args:
            length: of the draft.
            steps: tokens of it that were not copied.
        """
        n = self._num_requests
        step = self._costs.drafter_ms * self._costs.verify_cost(n) if steps else 0.0
        if n > 1:
            changes = 1 if length else 0
        else:  # to a width that no usual pass has, and back
            changes = 2 if length + 1 > max(self._width.last, self._narrowest) else 0
        change = changes * self._costs.change_ms
        begins = self._costs.drafter_begins_ms if steps else 0.0
        passes = self._costs.target(n * (length + 1)) + begins + steps * step
        return passes / n + change + self._context_ms
