"""Every outcome of a round, each with its exact probability.

The production code asks its noise for decisions: which token, accept or not. The noise here answers
them all: it is driven down one path of the decision tree after another. A uniform is an interval
that every decision narrows; the share of the interval that a branch takes is its probability, given
all that was decided with the same uniform before. Two draws share a uniform when their keys agree,
so noise that is wrongly reused is walked as exactly as noise that is fresh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.randomness import Purpose
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Rule, Verdict

Law = dict[tuple[int, ...], float]


def total_variation(first: Law, second: Law) -> float:
    """Half the L1 distance of two laws over token tuples."""
    keys = set(first) | set(second)
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in keys)


@dataclass
class Walk:
    """One path: the branches to take, and what is known of every uniform along it."""

    script: list[int]
    weight: float = 1.0
    taken: list[tuple[int, int]] = field(default_factory=list)  # (branch, number of branches)
    intervals: dict[Hashable, tuple[float, float]] = field(default_factory=dict)
    races: dict[int, tuple[np.ndarray, int]] = field(default_factory=dict)

    def split(self, key: Hashable, borders: Sequence[float]) -> int:
        """The cell of [0, borders[0]), [borders[0], borders[1]), ... that the uniform is in."""
        low, high = self.intervals.get(key, (0.0, 1.0))
        edges = [0.0, *borders]
        cells = []
        for i in range(len(borders)):
            left, right = max(low, edges[i]), min(high, edges[i + 1])
            if right > left:
                cells.append((i, left, right))
        chosen = self.branch([right - left for _, left, right in cells], high - low)
        index, left, right = cells[chosen]
        self.intervals[key] = (left, right)
        return index

    def branch(self, masses: Sequence[float], total: float) -> int:
        """One of several branches with probability mass / total."""
        depth = len(self.taken)
        chosen = self.script[depth] if depth < len(self.script) else 0
        self.taken.append((chosen, len(masses)))
        self.weight *= masses[chosen] / total
        return chosen


class ExhaustiveNoise:
    """Stands in for `randomness.RoundNoise`; keyed like it unless `key` says otherwise."""

    def __init__(
        self,
        walk: Walk,
        origin: int,
        *,
        coupled: bool = False,
        key: Callable[[Purpose, int, int], Hashable] = lambda *place: place,
    ) -> None:
        self.walk = walk
        self.origin = origin
        self.coupled = coupled
        self._key = key

    def draft(self, offset: int, q: Tensor) -> int:
        if not self.coupled:
            return self._choose(Purpose.DRAFT, offset, q)
        row = _normalised(q)
        support = np.flatnonzero(row)
        token = int(support[self.walk.branch(row[support].tolist(), 1.0)])
        self.walk.races[self.origin + offset] = (row, token)
        return token

    def accepts(self, offset: int, p: float, q: float) -> bool:
        ratio = min(1.0, p / q) if q > 0 else float(p > 0)
        key = self._key(Purpose.ACCEPT, self.origin + offset, self.origin)
        return self.walk.split(key, [ratio, 1.0]) == 0

    def residual(self, offset: int, weights: Tensor) -> int:
        return self._choose(Purpose.RESIDUAL, offset, weights)

    def token(self, offset: int, p: Tensor) -> int:
        """The target's token, given what the drafter drew with the same exponentials."""
        row = _normalised(p)
        if self.origin + offset in self.walk.races:
            q, drafted = self.walk.races[self.origin + offset]
            row = np.array([race_joint(row, q, a, drafted) for a in range(len(row))])
        support = np.flatnonzero(row)
        masses = row[support].tolist()
        return int(support[self.walk.branch(masses, sum(masses))])

    def _choose(self, purpose: Purpose, offset: int, weights: Tensor) -> int:
        row = _normalised(weights)
        borders = np.cumsum(row)
        borders[row == 0] = np.concatenate([[0.0], borders[:-1]])[row == 0]
        borders[np.flatnonzero(row)[-1] :] = 1.0
        key = self._key(purpose, self.origin + offset, self.origin)
        return self.walk.split(key, borders.tolist())


def _normalised(row: Tensor) -> np.ndarray:
    values = row.double().numpy()
    return values / values.sum()


def race_joint(p: np.ndarray, q: np.ndarray, a: int, b: int) -> float:
    """P(argmin E/p = a and argmin E/q = b) for shared standard exponentials E.

    With E_a = s, E_b = r s: the integral of 1 / C(r)^2 over r from p_b/p_a to q_b/q_a, where C(r) =
    1 + r + sum over the others of max(p_j/p_a, r q_j/q_b); piecewise linear, so exact by pieces.
    """
    if p[a] == 0 or q[b] == 0:
        return 0.0
    if a == b:
        return 1.0 / float(np.maximum(p / p[a], q / q[a]).sum())
    low = p[b] / p[a]
    high = q[b] / q[a] if q[a] > 0 else np.inf
    if high <= low:
        return 0.0
    others = [j for j in range(len(p)) if j not in (a, b)]
    bends = [p[j] * q[b] / (p[a] * q[j]) for j in others if q[j] > 0]
    edges = [low, *sorted(bend for bend in bends if low < bend < high), high]
    joint = 0.0
    for left, right in pairwise(edges):
        middle = left + 1.0 if np.isinf(right) else 0.5 * (left + right)
        constant, slope = 1.0, 1.0
        for j in others:
            flat, rising = p[j] / p[a], q[j] / q[b]
            if flat >= middle * rising:
                constant += flat
            else:
                slope += rising
        at_left = constant + slope * left
        if np.isinf(right):
            joint += 1.0 / (slope * at_left)
        else:
            joint += (right - left) / (at_left * (constant + slope * right))
    return float(joint)


def walks(run: Callable[[Walk], object]) -> Iterator[tuple[object, Walk]]:
    """Every path of `run` with what it returned; the weights of all paths sum to 1."""
    script: list[int] = []
    while True:
        walk = Walk(list(script))
        yield run(walk), walk
        taken = walk.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [branch for branch, _ in taken[:-1]] + [taken[-1][0] + 1]


class Target:
    """The processed law of a toy target, remembered by prefix."""

    def __init__(self, law: Callable[[Sequence[int]], Tensor], policy: SamplingPolicy) -> None:
        self.law = law
        self.policy = policy
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def row(self, history: History, drafted: Sequence[int]) -> Tensor:
        """[V]: the law after the history and `drafted`."""
        key = (*history.tokens, *drafted)
        if key not in self._rows:
            logits = self.law(list(key))[None]
            self._rows[key] = self.policy.probs(logits, history, drafted)[0]
        return self._rows[key]

    def rows(self, history: History, drafted: Sequence[int]) -> Tensor:
        """[len(drafted) + 1, V], computed in one call as the loop does."""
        prefix = list(history.tokens)
        ends = range(len(prefix), len(prefix) + len(drafted) + 1)
        logits = [self.law([*prefix, *drafted][:end]) for end in ends]
        return self.policy.probs(torch.stack(logits), history, drafted)

    def plain_law(self, history: History, length: int) -> Law:
        """The joint law of the next `length` tokens under plain decoding."""
        law: Law = {(): 1.0}
        for _ in range(length):
            law = {
                (*tokens, token): mass * float(row[token])
                for tokens, mass in law.items()
                for row in [self.row(history, tokens)]
                for token in range(len(row))
                if row[token] > 0
            }
        return law


def round_law(
    target: Target,
    history: History,
    propose: Callable[[ExhaustiveNoise], Draft],
    rule: Rule,
    gamma: int,
    *,
    coupled: bool = False,
    key: Callable[[Purpose, int, int], Hashable] = lambda *place: place,
) -> Law:
    """The joint law of the next gamma + 1 tokens when the first round is speculative.

    Drafts and verdicts are enumerated; where a round emits fewer tokens, plain decoding follows.
    """
    emitted: Law = defaultdict(float)

    def run(walk: Walk) -> tuple[int, ...]:
        noise = ExhaustiveNoise(walk, len(history), coupled=coupled, key=key)
        draft = propose(noise)
        verdict: Verdict = rule(target.rows(history, draft.tokens), draft, noise)
        return (*draft.tokens[: verdict.accepted], verdict.token)

    mass = 0.0
    for tokens, walk in walks(run):
        emitted[tokens] += walk.weight  # type: ignore[index]
        mass += walk.weight
    assert abs(mass - 1) < 1e-9, mass
    law: Law = defaultdict(float)
    for tokens, weight in emitted.items():
        longer = History(history.tokens, history.end_ids)
        longer.prompt_length = history.prompt_length
        longer.tokens.extend(tokens)
        for rest, share in target.plain_law(longer, gamma + 1 - len(tokens)).items():
            law[(*tokens, *rest)] += weight * share
    return law
