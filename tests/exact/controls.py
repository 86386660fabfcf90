"""Wrong rules, each a mistake that was really made somewhere (wrong drafters: `drafters`).

A proof that does not catch these proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.verification import Draft, Rule, RuleNoise, Verdict


def _laws(draft: Draft, size: int) -> Tensor:
    if draft.q is not None:
        return draft.q
    return torch.eye(size, dtype=torch.float64)[draft.tokens].reshape(len(draft.tokens), size)


def _token_by_token(
    ratio: Callable[[float, float], tuple[float, float]] = lambda p, q: (p, q),
    residual: Callable[[Tensor, Tensor], Tensor] = lambda p, q: (p - q).clamp(min=0),
    *,
    shift: int = 0,
    bonus_from_q: bool = False,
    one_uniform: bool = False,
) -> Rule:
    """Algorithm 1 with one part replaced."""

    def broken(p: Tensor, draft: Draft, noise: RuleNoise) -> Verdict:
        q = _laws(draft, p.shape[1])
        gamma = len(draft.tokens)
        for i, token in enumerate(draft.tokens):
            row = p[min(i + shift, gamma)]
            if not noise.accepts(
                0 if one_uniform else i, *ratio(float(row[token]), float(q[i, token]))
            ):
                rest = residual(row, q[i])
                return Verdict(i, noise.residual(i, rest if rest.any() else row))
        if bonus_from_q and gamma:
            return Verdict(gamma, noise.residual(gamma, q[-1]))
        return Verdict(gamma, noise.residual(gamma, p[gamma]))

    return broken


WRONG_RULES: dict[str, Rule] = {
    "accept all": _token_by_token(lambda p, q: (1.0, 1.0)),
    "swapped ratio": _token_by_token(lambda p, q: (q, p)),
    "|p-q| residual": _token_by_token(residual=lambda p, q: (p - q).abs()),
    "residual is p": _token_by_token(residual=lambda p, q: p),
    "target row off by one": _token_by_token(shift=1),
    "bonus from q": _token_by_token(bonus_from_q=True),
    "lenience 0.9": _token_by_token(lambda p, q: (p, 0.9 * q)),
    "one uniform for all positions": _token_by_token(one_uniform=True),
}
