"""What speculation is worth: which drafter, how many tokens, and when to leave it.

Two computations stand side by side. The *paper's* takes alpha and c alone: acceptance is iid and a
target pass costs the same over any number of positions (Leviathan et al. 2023, Theorems 3.8 and
3.11, section 3.5). The *measured* one takes survival, the verify cost v(n) and the time outside the
models as they were found on this machine, and is believed where it can be had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider import theory
from outrider.errors import UsageError

__all__ = ["MAX_GAMMA", "Candidate", "Outlook", "Plan", "pick", "plan_for"]

MAX_GAMMA = 32
"""The longest draft considered where nothing else ends the search."""


@dataclass(frozen=True)
class Candidate:
    """A drafter as far as it is known.

    Attributes:
        alpha: mean acceptance probability.
        c, c_hat: time and operations of a drafter step over those of a target step.
        drafter: its name.
        low, high: the interval of alpha, where it was measured.
        survival: S_1, S_2, ..., where they were measured.
        verify_cost: v(n) at measured n, 1 among them; None where it was not measured.
        outside: what is around the models' passes (laws, verification, bookkeeping), for every
            verified position, over a target step.
    """

    alpha: float
    c: float
    c_hat: float
    drafter: str = ""
    low: float | None = None
    high: float | None = None
    survival: tuple[float, ...] = ()
    verify_cost: Mapping[int, float] | None = None
    outside: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """What one computation says.

    Attributes:
        gamma: the draft length that the next three are for.
        expected_tokens: per round.
        walltime_factor: how much faster decoding gets; below 1 slower.
        operations_factor: how much more arithmetic there is.
        optimal_gamma: the draft length with the largest walltime factor; 0 where none helps.
        best_factor: the walltime factor there.
        oracle_factor: the same for an oracle that drafts just what will be accepted; no draft
            length, fixed or adaptive, is faster. Infinite for alpha = 1 and c = 0.
        break_even_alpha: where alpha is below, no draft length helps; None where none ever does.
        break_even_alpha_at_gamma: the same for drafts of `gamma` tokens; None for gamma = 0 too.
    """

    gamma: int
    expected_tokens: float
    walltime_factor: float
    operations_factor: float
    optimal_gamma: int
    best_factor: float
    oracle_factor: float
    break_even_alpha: float | None
    break_even_alpha_at_gamma: float | None

    @property
    def oracle_gain(self) -> float:
        """What is left to gain over the best fixed length: 0.2 is 20 % (section 3.5)."""
        return self.oracle_factor / self.best_factor - 1.0

    def as_dict(self) -> dict[str, float | int | None]:
        """Ready for JSON; what is infinite is null."""
        infinite = math.isinf(self.oracle_factor)
        return {
            "gamma": self.gamma,
            "expected_tokens": self.expected_tokens,
            "walltime_factor": self.walltime_factor,
            "operations_factor": self.operations_factor,
            "optimal_gamma": self.optimal_gamma,
            "best_factor": self.best_factor,
            "oracle_factor": None if infinite else self.oracle_factor,
            "oracle_gain": None if infinite else self.oracle_gain,
            "break_even_alpha": self.break_even_alpha,
            "break_even_alpha_at_gamma": self.break_even_alpha_at_gamma,
        }


@dataclass(frozen=True)
class Plan:
    """Advice on one drafter.

    Attributes:
        candidate: what it rests on.
        paper: from alpha and c.
        measured: from survival and v(n); None without a measurement.
    """

    candidate: Candidate
    paper: Outlook
    measured: Outlook | None = None

    @property
    def outlook(self) -> Outlook:
        """The one to believe."""
        return self.measured or self.paper

    @property
    def pays(self) -> bool:
        """Whether some draft length is faster than plain decoding."""
        return self.outlook.optimal_gamma > 0

    @property
    def factor_interval(self) -> tuple[float, float] | None:
        """Walltime factor at the ends of alpha's interval, by the paper's formula."""
        known = self.candidate
        if known.low is None or known.high is None:
            return None
        low, high = (
            theory.walltime_improvement(min(1.0, max(0.0, alpha)), self.paper.gamma, known.c)
            for alpha in (known.low, known.high)
        )
        return low, high

    @property
    def end_of_search(self) -> str | None:
        """Why a longer draft than the best one might be better still; None if none is."""
        best = self.outlook.optimal_gamma
        if self.measured is not None:
            if best and best == len(self.candidate.survival):
                return f"{best} is the longest draft measured; a longer one may be faster still"
        elif best and (self.candidate.c == 0.0 or self.candidate.alpha == 1.0):
            return f"with these numbers longer is always faster; {best} is the longest considered"
        return None

    @property
    def sentence(self) -> str:
        """The advice in plain words."""
        found, known = self.outlook, self.candidate
        limit = found.break_even_alpha
        if not self.pays:
            if limit is None:
                reason = f"with c = {known.c:.2f} not even a drafter that is always right would pay"
            elif known.alpha <= limit:
                reason = f"it pays above alpha {limit:.2f}, and alpha is {known.alpha:.2f}"
            else:
                reason = "too few drafts are accepted in a row to pay for any length"
            return f"Do not speculate: {reason}."
        told = limit is not None and 0.005 <= limit < known.alpha
        below = f"; below alpha {limit:.2f} do not speculate" if told else ""
        best = f"raft {_tokens(found.optimal_gamma)}; expect {found.best_factor:.2f}x{below}."
        if found.gamma == found.optimal_gamma:
            return f"D{best}"
        if not found.gamma:
            return f"Plain decoding leaves time unused. D{best}"
        slower = "slower than plain decoding: " if found.walltime_factor < 1.0 else ""
        asked = f"Drafting {_tokens(found.gamma)} is {slower}{found.walltime_factor:.2f}x."
        return f"{asked} Better d{best}"


def plan_for(
    candidate: Candidate, *, gamma: int | None = None, max_gamma: int | None = None
) -> Plan:
    """Advice on one drafter.

    Args:
        candidate: what is known of it.
        gamma: the draft length to look at; None takes the best one.
        max_gamma: the longest draft to consider; None for no limit but those of the measurement.

    Raises:
        UsageError: a number is out of range, or gamma is longer than what was measured.
    """
    if max_gamma is not None and max_gamma < 1:
        raise UsageError(f"max_gamma must be 1 or more, not {max_gamma!r}")
    measured = None
    if candidate.verify_cost is not None:
        measured = _measured_outlook(candidate, candidate.verify_cost, gamma, max_gamma)
        # Both computations look at the same draft length, so that they can be compared.
        gamma = measured.gamma
    return Plan(candidate, _paper_outlook(candidate, gamma, max_gamma), measured)


def _paper_outlook(known: Candidate, gamma: int | None, max_gamma: int | None) -> Outlook:
    alpha, c = known.alpha, known.c
    endless = theory.some_gamma_improves(alpha, c) and (c == 0.0 or alpha == 1.0)
    limit = MAX_GAMMA if endless and max_gamma is None else max_gamma
    best = theory.best_gamma(alpha, c, max_gamma=limit)
    gamma = best if gamma is None else gamma

    def flat(num_positions: int) -> float:
        return 1.0

    return Outlook(
        gamma=gamma,
        expected_tokens=theory.expected_tokens_per_round(alpha, gamma),
        walltime_factor=theory.walltime_improvement(alpha, gamma, c),
        operations_factor=theory.operations_factor(alpha, gamma, known.c_hat),
        optimal_gamma=best,
        best_factor=theory.walltime_improvement(alpha, best, c),
        oracle_factor=theory.oracle_improvement(alpha, c),
        # Corollary 3.9, and its converse.
        break_even_alpha=c if c < 1.0 else None,
        break_even_alpha_at_gamma=(
            theory.break_even_alpha(c, flat, min_gamma=gamma, max_gamma=gamma) if gamma else None
        ),
    )


def _measured_outlook(
    known: Candidate, v: Mapping[int, float], gamma: int | None, max_gamma: int | None
) -> Outlook:
    survival = known.survival
    # Plain decoding has its one position's share of it too: that is the unit now.
    unit = 1.0 + known.outside
    v = {n: (cost + n * known.outside) / unit for n, cost in v.items()}
    c = known.c / unit
    longest = len(survival) if max_gamma is None else min(len(survival), max_gamma)
    best = theory.best_gamma_measured(survival, c, v, max_gamma=longest)
    gamma = best if gamma is None else gamma
    # Raises where gamma is longer than the survival that was measured.
    factor = theory.walltime_factor(survival, gamma, c, v)
    tokens = 1.0 + math.fsum(survival[:gamma])
    return Outlook(
        gamma=gamma,
        expected_tokens=tokens,
        walltime_factor=factor,
        operations_factor=(gamma * known.c_hat + gamma + 1.0) / tokens,
        optimal_gamma=best,
        best_factor=theory.walltime_factor(survival, best, c, v),
        oracle_factor=theory.oracle_factor(survival, c, v, max_gamma=longest),
        break_even_alpha=theory.break_even_alpha(c, v, max_gamma=max(1, longest)),
        break_even_alpha_at_gamma=(
            theory.break_even_alpha(c, v, min_gamma=gamma, max_gamma=gamma) if gamma else None
        ),
    )


# Choosing among drafters


def pick(plans: Sequence[Plan]) -> tuple[Plan, str]:
    """The plan with the largest walltime factor, the cheaper drafter on ties, and why.

    Args:
        plans: at least one.
    """
    assert plans

    def order(plan: Plan) -> tuple[float, float]:
        return -plan.outlook.walltime_factor, plan.candidate.c

    best, *others = sorted(plans, key=order)
    name, factor = best.candidate.drafter, best.outlook.walltime_factor
    if not others:
        return best, f"The only drafter measured: {name}."
    second = others[0]
    facts = " against ".join(
        f"alpha {plan.candidate.alpha:.2f} at c {plan.candidate.c:.3f}" for plan in (best, second)
    )
    other, its_factor = second.candidate.drafter, second.outlook.walltime_factor
    if not any(plan.pays for plan in plans):
        return best, f"None of the {len(plans)} drafters is faster than plain decoding."
    why = f"Fastest: {name}, {factor:.2f}x against {its_factor:.2f}x for {other} ({facts})."
    if _overlap(best, second):
        why += " Their intervals overlap: measure more tokens to be sure."
    return best, why


def _overlap(best: Plan, second: Plan) -> bool:
    """Whether the uncertainty of alpha could turn the order."""
    ends, others = best.factor_interval, second.factor_interval
    if ends is None or others is None:
        return False
    least = best.outlook.walltime_factor * ends[0] / best.paper.walltime_factor
    most = second.outlook.walltime_factor * others[1] / second.paper.walltime_factor
    return most > least


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
