"""The verification rules: what is kept of a draft, and the token that follows it.

A rule is a pure function of the target's laws, the draft and the noise; no model is in sight.
Each keeps the target's law exactly, whatever was drafted, so long as q is the law that every
drafted token was really drawn from.

* `rejection`: Algorithm 1 of Leviathan et al. 2023, token by token.
* `block`: block verification (Sun et al., ICLR 2025), which decides over the whole draft and never
  accepts fewer tokens in expectation.
* `coupled`: drafter and target share Gumbel noise (Daliri, Musco & Suresh, 2408.07978); the
  target's own draw is emitted, so the text is that of plain decoding, token for token.

Greedy decoding has no rule of its own. Its rows are one-hot, and of such rows all rules say the
same: `greedy` says it without the rows.

Letters: gamma drafted tokens, V vocabulary size. Row i of p is the target's law for the token at
offset i, given the draft's first i tokens; row gamma is the law of the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.errors import UsageError

__all__ = [
    "RULES",
    "Draft",
    "Rule",
    "RuleNoise",
    "Verdict",
    "block",
    "coupled",
    "greedy",
    "rejection",
    "rule",
]


class Draft(NamedTuple):
    """Tokens proposed after the committed ones, with the laws they were drawn from.

    Attributes:
        tokens: gamma ids, every token that was drawn.
        q: [gamma, V] with rows that sum to 1; None means a point mass on each token.
        steps: passes of a drafting model that it took; 0 for what was copied or counted.
    """

    tokens: list[int]
    q: Tensor | None = None
    steps: int = 0


class Verdict(NamedTuple):
    """How many drafted tokens stand, and the token emitted after them."""

    accepted: int
    token: int


class RuleNoise(Protocol):
    """The decisions a rule may ask for; `randomness.RoundNoise` is the real one."""

    def accepts(self, offset: int, p: float, q: float) -> bool:
        """True with probability min(1, p / q)."""
        ...

    def residual(self, offset: int, weights: Tensor) -> int:
        """A token in proportion to `weights` [V]."""
        ...

    def token(self, offset: int, p: Tensor) -> int:
        """The target's own token under the noise it shares with the drafter."""
        ...


Rule = Callable[[Tensor, Draft, RuleNoise], Verdict]


def rejection(p: Tensor, draft: Draft, noise: RuleNoise) -> Verdict:
    """The verdict of Algorithm 1 (Leviathan et al. 2023): keep token i with min(1, p/q).

    The first token refused ends the draft and is replaced by one from norm(max(0, p - q)); a draft
    kept whole is followed by a token from the last row of p.

    Example:
        gamma = 2, token 0 kept, token 1 refused: `Verdict(accepted=1, token=...)` with the token
        drawn at offset 1 from the residual of row 1.

    Args:
        p: [gamma + 1, V], rows sum to 1. Not modified.
        draft: gamma tokens and their laws.
        noise: accept and residual draws, by offset.
    """
    drafted = _at(p, draft.tokens)
    proposed = _at(draft.q, draft.tokens)
    for i in range(len(draft.tokens)):
        if not noise.accepts(i, drafted[i], proposed[i]):
            return Verdict(i, noise.residual(i, _residual(p[i], draft, i)))
    return _bonus(p, draft, noise)


def block(p: Tensor, draft: Draft, noise: RuleNoise) -> Verdict:
    """The verdict of block verification (Sun et al., ICLR 2025, Algorithm 2).

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the draft is cut after the largest i
    whose own test passes: with probability w_gamma for i = gamma, and else with probability
    Z_i / (Z_i + 1 - w_i), where Z_i = sum_x max(0, w_i p(x) - q(x)) over the laws at offset i.
    The next token comes from norm(max(0, w_i p - q)). Never fewer tokens than `rejection` in
    expectation; the same for gamma = 1 and for greedy rows.

    Example:
        gamma = 3 and the tests of i = 3, 2, 1 come out False, True, (not asked):
        `Verdict(accepted=2, token=...)`, the token drawn at offset 2.

    Args:
        p: [gamma + 1, V], rows sum to 1. Not modified.
        draft: gamma tokens and their laws.
        noise: accept and residual draws, by offset.
    """
    gamma = len(draft.tokens)
    drafted = _at(p, draft.tokens)
    proposed = _at(draft.q, draft.tokens)
    weights = [1.0]
    for i in range(gamma):
        # The drafter drew this token, so q > 0; a product instead of the quotient would underflow.
        weights.append(min(1.0, weights[-1] * drafted[i] / proposed[i]))

    if noise.accepts(gamma - 1, weights[gamma], 1.0) if gamma else True:
        return _bonus(p, draft, noise)
    # From the back, so that the first test to pass is the largest i: the rest need not be asked.
    for i in range(gamma - 1, 0, -1):
        if weights[i] == 0:
            continue
        mass = _residual_mass(p[i], draft, i, weights[i], drafted[i])
        if noise.accepts(i - 1, mass, mass + (1 - weights[i])):  # exactly 1 where w is
            return Verdict(i, noise.residual(i, _residual(p[i], draft, i, weights[i])))
    return Verdict(0, noise.residual(0, _residual(p[0], draft, 0)))


def coupled(p: Tensor, draft: Draft, noise: RuleNoise) -> Verdict:
    """The verdict of keep-iff-equal coupling (Daliri, Musco & Suresh, 2408.07978).

    The target's own draw under the shared noise is emitted at every offset; the draft is kept while
    it agrees. Drafter, gamma and q have no influence on the text.

    Example:
        draft [7, 4], target draws 7 then 5: `Verdict(accepted=1, token=5)`.

    Args:
        p: [gamma + 1, V], rows sum to 1. Not modified.
        draft: gamma tokens; q is not used.
        noise: the token noise of each offset.
    """
    for i, drafted in enumerate(draft.tokens):
        token = noise.token(i, p[i])
        if token != drafted:
            return Verdict(i, token)
    gamma = len(draft.tokens)
    return Verdict(gamma, noise.token(gamma, p[gamma]))


def greedy(choices: Sequence[int], draft: Draft) -> Verdict:
    """The verdict of every rule where all rows of p are one-hot.

    Token i has p = 1 if it is the one chosen, and is kept whatever q was; else p = 0, it is refused
    and only the chosen one is left of the residual. No noise has a part in it.

    Example:
        draft [7, 4], choices [7, 5, 9]: `Verdict(accepted=1, token=5)`.

    Args:
        choices: gamma + 1 ids, where the rows of p have their ones.
        draft: gamma tokens; q is not used.
    """
    accepted = 0
    while accepted < len(draft.tokens) and draft.tokens[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


RULES: dict[str, Rule] = {"rejection": rejection, "block": block, "coupled": coupled}


def rule(name: str) -> Rule:
    """The rule called `name`; raises UsageError for an unknown one."""
    if name not in RULES:
        raise UsageError(f"rule must be one of {', '.join(RULES)}, not {name!r}")
    return RULES[name]


def _bonus(p: Tensor, draft: Draft, noise: RuleNoise) -> Verdict:
    gamma = len(draft.tokens)
    return Verdict(gamma, noise.residual(gamma, p[gamma]))


def _at(rows: Tensor | None, tokens: list[int]) -> list[float]:
    """The probability of tokens[i] in row i; 1 where the rows are point masses (None)."""
    if rows is None or not tokens:
        return [1.0] * len(tokens)
    ids = torch.tensor(tokens, device=rows.device)
    values: list[float] = rows[: len(tokens)].gather(1, ids[:, None])[:, 0].tolist()
    return values


def _residual(p: Tensor, draft: Draft, i: int, weight: float = 1.0) -> Tensor:
    """The unnormalised residual max(0, weight p - q) at offset i; [V].

    In exact arithmetic it has mass whenever it is needed. When rounding leaves none (p and q agree
    to the last bit but one), p itself is the right law to that accuracy.
    """
    if draft.q is None:
        rest = p.clone()
        # The point mass of q is at least weight * p(x): nothing is left of that token.
        rest[draft.tokens[i]] = 0.0
        return rest if bool(rest.any()) else p
    rest = (p * weight if weight != 1.0 else p) - draft.q[i]
    rest.clamp_(min=0.0)
    return rest if bool(rest.any()) else p


def _residual_mass(p: Tensor, draft: Draft, i: int, weight: float, drafted: float) -> float:
    """sum_x max(0, weight p(x) - q(x)) at offset i, where the draft's token has p = `drafted`."""
    if draft.q is None:
        return weight * max(0.0, 1.0 - drafted)
    return float((p * weight).sub_(draft.q[i]).clamp_(min=0.0).sum())
