"""The paper's formulas: what a drafter and a draft length are worth before anything is run.

Letters, as in Leviathan et al. 2023:

* p, q: the target's and the drafter's law of the next token, after the sampling policy.
* beta: the probability that one drafted token is accepted, sum_x min(p(x), q(x)).
* alpha: E[beta] over positions of target-generated text.
* gamma: the number of tokens drafted in a round; 0 is decoding without drafts.
* c, c_hat: one drafter step over one target step, in time (c) and in operations (c_hat).
* TV: total variation distance, which the paper writes D_LK.

Everything computed from alpha takes acceptance at each position as independent with the same
probability (the paper's iid assumption, Definition 3.1). On real text, easy and hard stretches
alternate; a single alpha then promises more tokens per round than come, and the best gamma may lie
on either side of `best_gamma`. Plan with these formulas, and measure before believing them.

What was measured goes into the formulas that take survival (S_i, the probability that the first i
drafts are all accepted) and the verify cost v(n), the time of a target pass over n positions over
the time of one over 1 position. `walltime_factor`, `best_gamma_measured` and `oracle_factor` assume
neither iid acceptance nor a pass that costs the same for every number of positions.
"""

from __future__ import annotations

import decimal
import math
import numbers
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

from outrider.errors import UsageError

__all__ = [
    "VerifyCost",
    "alpha_from_pairs",
    "best_gamma",
    "best_gamma_measured",
    "beta",
    "break_even_alpha",
    "d_lk",
    "expected_accepted_fraction",
    "expected_tokens_per_round",
    "geometric_survival",
    "guaranteed_improvement",
    "gumbel_match_lower_bound",
    "gumbel_match_probability",
    "interpolated",
    "memory_reads_factor",
    "operations_factor",
    "oracle_factor",
    "oracle_improvement",
    "oracle_tokens_per_round",
    "plain_rejection_keep_rate",
    "some_gamma_improves",
    "verify_cost_at",
    "walltime_factor",
    "walltime_improvement",
]

VerifyCost = Callable[[int], float] | Mapping[int, float]
"""v(n): a function of the number of positions, or measured values of it, see `verify_cost_at`."""

SUM_TOLERANCE = 1e-4
"""How far from 1 a row may sum: room for rows computed in float32, not for unnormalised ones."""


# Two laws at one position


def d_lk(p: Sequence[float], q: Sequence[float]) -> float:
    """The distance D_LK of p and q, in [0, 1]: sum_x |p(x) - M(x)| with M = (p + q) / 2.

    Leviathan et al. 2023, Definition 3.2. It equals TV(p, q) and 1 - sum_x min(p(x), q(x))
    (Lemma 3.3); 0 only for p = q, 1 only for laws that share no token (Corollary 3.4).

    Args:
        p: [V], the target's law; sums to 1.
        q: [V], the drafter's law; sums to 1.

    Raises:
        UsageError: p or q is not a law, or their lengths differ.
    """
    _check_laws(p, q)
    return min(1.0, math.fsum(abs(p_x - q_x) for p_x, q_x in zip(p, q, strict=True)) / 2)


def beta(p: Sequence[float], q: Sequence[float]) -> float:
    """The probability that a token drawn from q is accepted, in [0, 1]: sum_x min(p(x), q(x)).

    Leviathan et al. 2023, Theorem 3.5, beta = 1 - D_LK(p, q), summed by Lemma 3.3 so that a small
    beta keeps its digits.

    Args:
        p: [V], the target's law; sums to 1.
        q: [V], the law the drafted token was drawn from; sums to 1.

    Raises:
        UsageError: p or q is not a law, or their lengths differ.
    """
    _check_laws(p, q)
    return _overlap(p, q)


def alpha_from_pairs(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """alpha, in [0, 1]: the mean of beta over the positions given.

    Leviathan et al. 2023, Corollary 3.6. It is the paper's alpha only when the positions are those
    of text that the target generated.

    Args:
        pairs: (p, q) of each position, [V] each, rows that sum to 1; read once, at least one.

    Raises:
        UsageError: there is no pair, or a pair is not two laws of one length.
    """
    betas = []
    for position, (p, q) in enumerate(pairs):
        _check_laws(p, q, where=f" at position {position}")
        betas.append(_overlap(p, q))
    if not betas:
        raise UsageError(
            "alpha is a mean over at least one (p, q) pair: got none; "
            "pass the laws at some positions of target-generated text"
        )
    return math.fsum(betas) / len(betas)


def plain_rejection_keep_rate(p: Sequence[float], q: Sequence[float]) -> float:
    """The probability that plain rejection sampling keeps a token drawn from q, in [0, 1].

    Leviathan et al. 2023, Appendix A.2: min over the support of p of q(x) / p(x). Plain (not
    iterative) rejection sampling draws from q again after a rejection, and must therefore scale
    its test by the worst ratio. Never above beta, the rate of Algorithm 1.

    Args:
        p: [V], the target's law; sums to 1.
        q: [V], the law drawn from; sums to 1.

    Raises:
        UsageError: p or q is not a law, or their lengths differ.
    """
    _check_laws(p, q)
    return min(1.0, min(q_x / p_x for p_x, q_x in zip(p, q, strict=True) if p_x > 0.0))


def gumbel_match_probability(p: Sequence[float], q: Sequence[float]) -> float:
    """The probability that target and drafter, sharing Gumbel noise, draw the same token.

    Exact for the coupling of Daliri, Musco & Suresh (arXiv 2408.07978), in which both take
    argmax_x(log law(x) + g(x)) with one g: the sum, over the tokens i that p and q share, of
    1 / sum_j max(p_j / p_i, q_j / q_i). Lies between `gumbel_match_lower_bound` and beta.

    Args:
        p: [V], the target's law; sums to 1.
        q: [V], the drafter's law; sums to 1.

    Raises:
        UsageError: p or q is not a law, or their lengths differ.
    """
    _check_laws(p, q)
    # p_j / p_i is the larger term exactly when p_j / q_j >= p_i / q_i. In falling order of p / q
    # the inner sum is a prefix of p plus a suffix of q: a sort instead of V * V terms.
    tokens = sorted(
        ((p_x, q_x) for p_x, q_x in zip(p, q, strict=True) if p_x > 0.0 or q_x > 0.0),
        key=lambda token: token[0] / token[1] if token[1] > 0.0 else math.inf,
        reverse=True,
    )
    p_before = 0.0
    q_after = math.fsum(q)
    matches = []
    for p_i, q_i in tokens:
        p_before += p_i
        q_after -= q_i
        if p_i > 0.0 and q_i > 0.0:
            matches.append(1.0 / (p_before / p_i + q_after / q_i))
    return min(1.0, math.fsum(matches))


def gumbel_match_lower_bound(p: Sequence[float], q: Sequence[float]) -> float:
    """The least that `gumbel_match_probability` can be, in [0, 1]: (1 - TV) / (1 + TV).

    Daliri, Musco & Suresh, arXiv 2408.07978; no coupling without communication promises more for
    every pair at this TV. Equals sum_x min(p, q) / sum_x max(p, q).

    Args:
        p: [V], the target's law; sums to 1.
        q: [V], the drafter's law; sums to 1.

    Raises:
        UsageError: p or q is not a law, or their lengths differ.
    """
    shared = beta(p, q)
    return shared / (2.0 - shared)


# Rounds, from alpha


def expected_tokens_per_round(alpha: float, gamma: int) -> float:
    """The expected number of tokens emitted in a round, in [1, gamma + 1].

    Leviathan et al. 2023, Equation (1): (1 - alpha^(gamma + 1)) / (1 - alpha), which is the sum of
    alpha^i for i = 0..gamma, and gamma + 1 for alpha = 1. Accurate to a few units in the last
    place for every alpha.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        gamma: tokens drafted in a round, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    alpha = _checked_alpha(alpha)
    gamma = _checked_count("gamma", gamma)
    if alpha == 0.0:
        return 1.0
    if alpha == 1.0:
        return gamma + 1.0
    # expm1 keeps the digits that 1 - alpha^(gamma + 1) loses near alpha = 1.
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1.0 - alpha)


def oracle_tokens_per_round(alpha: float) -> float:
    """The expected tokens per round of an oracle that always drafts the right length, from 1 up.

    Leviathan et al. 2023, section 3.5: 1 / (1 - alpha), infinite for alpha = 1. No draft length,
    fixed or adaptive, has more tokens per round.

    Args:
        alpha: mean acceptance probability, in [0, 1].

    Raises:
        UsageError: alpha is out of range.
    """
    alpha = _checked_alpha(alpha)
    return math.inf if alpha == 1.0 else 1.0 / (1.0 - alpha)


def expected_accepted_fraction(alpha: float, gamma: int) -> float:
    """The expected accepted / drafted, in [0, alpha]: (tokens per round - 1) / gamma.

    Follows from Leviathan et al. 2023, Equation (1), and so assumes iid acceptance. Drafted tokens
    that are never examined count against it, hence it is below alpha for gamma > 1. Accepted over
    examined (alpha_hat) estimates alpha itself.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        gamma: tokens drafted in a round, at least 1.

    Raises:
        UsageError: an argument is out of range.
    """
    alpha = _checked_alpha(alpha)
    gamma = _checked_count("gamma", gamma, least=1)
    # alpha + ... + alpha^gamma with alpha taken out: subtracting 1 would lose a small alpha.
    return alpha * expected_tokens_per_round(alpha, gamma - 1) / gamma


def walltime_improvement(alpha: float, gamma: int, c: float) -> float:
    """The expected factor by which decoding gets faster; below 1 it gets slower.

    Leviathan et al. 2023, Theorem 3.8: (1 - alpha^(gamma + 1)) / ((1 - alpha)(gamma * c + 1)).
    Assumes that a target pass over gamma + 1 positions takes the time of one over 1 position
    (verify cost v(gamma + 1) = 1), and long generations.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        gamma: tokens drafted in a round, at least 0; 0 gives 1.
        c: time of a drafter step over time of a target step, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    tokens = expected_tokens_per_round(alpha, gamma)
    return tokens / (int(gamma) * _checked_ratio("c", c) + 1.0)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """The expected factor by which the total number of arithmetic operations grows.

    Leviathan et al. 2023, Theorem 3.11:
    (1 - alpha)(gamma * c_hat + gamma + 1) / (1 - alpha^(gamma + 1)).

    Args:
        alpha: mean acceptance probability, in [0, 1].
        gamma: tokens drafted in a round, at least 0; 0 gives 1.
        c_hat: operations of a drafter step over operations of a target step, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    tokens = expected_tokens_per_round(alpha, gamma)
    return (int(gamma) * _checked_ratio("c_hat", c_hat) + int(gamma) + 1.0) / tokens


def memory_reads_factor(alpha: float, gamma: int) -> float:
    """The expected factor by which reads of the target's weights and KV cache fall, from 1 up.

    Leviathan et al. 2023, remark after Theorem 3.11: both are read once a round, so the factor is
    Equation (1). The drafter's own reads are not counted.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        gamma: tokens drafted in a round, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    return expected_tokens_per_round(alpha, gamma)


# Choosing gamma


def some_gamma_improves(alpha: float, c: float) -> bool:
    """True when some gamma makes decoding faster, that is when alpha > c.

    Leviathan et al. 2023, Corollary 3.9. The converse holds as well: with alpha <= c every gamma
    leaves Theorem 3.8 at 1 or below, see `best_gamma`.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        c: time of a drafter step over time of a target step, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    return _checked_alpha(alpha) > _checked_ratio("c", c)


def guaranteed_improvement(alpha: float, c: float) -> float:
    """The walltime improvement that the best gamma reaches at least: (1 + alpha) / (1 + c).

    Leviathan et al. 2023, Corollary 3.9; it is Theorem 3.8 at gamma = 1.

    Args:
        alpha: mean acceptance probability, in [0, 1], above c.
        c: time of a drafter step over time of a target step, at least 0.

    Raises:
        UsageError: an argument is out of range, or alpha <= c, where nothing is guaranteed.
    """
    if not some_gamma_improves(alpha, c):
        raise UsageError(
            f"Corollary 3.9 needs alpha > c: got alpha = {alpha!r}, c = {c!r}; "
            "use a cheaper or closer drafter, or decode without drafts (gamma = 0)"
        )
    return walltime_improvement(alpha, 1, c)


def best_gamma(alpha: float, c: float, *, max_gamma: int | None = None) -> int:
    """The gamma with the largest walltime improvement, the smallest of them on ties; 0 if none.

    Leviathan et al. 2023, section 3.5: Theorem 3.8 maximised over gamma. One more drafted token
    raises the theorem's value at gamma exactly when

        alpha^(gamma + 1) * ((1 - alpha)(1 + gamma * c) + c) > c.

    From gamma to gamma + 1 the left side changes by
    -(1 - alpha)^2 * alpha^(gamma + 1) * (1 + (gamma + 1) * c) <= 0: once drafting longer has
    stopped helping it never helps again, so the first gamma where the inequality fails is the
    maximum, and bisection finds it. The inequality is decided exactly, for the numbers that the
    floats alpha and c stand for.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        c: time of a drafter step over time of a target step, at least 0.
        max_gamma: the longest draft allowed, at least 0; None for no limit. Needed where the
            improvement grows with gamma for ever: c = 0 with alpha > 0, and alpha = 1 with c < 1.

    Raises:
        UsageError: an argument is out of range, or there is no largest improvement and no
            `max_gamma`.
    """
    alpha = _checked_alpha(alpha)
    c = _checked_ratio("c", c)
    limit = None if max_gamma is None else _checked_count("max_gamma", max_gamma)
    if not some_gamma_improves(alpha, c):
        return 0
    if c == 0.0 or alpha == 1.0:
        if limit is None:
            raise UsageError(
                "the best gamma is finite only for c > 0 and alpha < 1: "
                f"got alpha = {alpha!r}, c = {c!r}; pass max_gamma, the longest draft to consider"
            )
        return limit
    helps, fails = 0, 1
    while _longer_helps(alpha, fails, c):
        helps, fails = fails, 2 * fails
    while fails - helps > 1:
        middle = (helps + fails) // 2
        if _longer_helps(alpha, middle, c):
            helps = middle
        else:
            fails = middle
    return fails if limit is None else min(fails, limit)


def _longer_helps(alpha: float, gamma: int, c: float) -> bool:
    """True when gamma + 1 improves walltime more than gamma, for 0 < c < alpha < 1."""
    # More digits until the two sides differ beyond rounding. This ends: floats are fractions over
    # a power of two, and solving for c shows that no two of them make the sides equal but alpha = c
    # at gamma = 0.
    precision = 20
    while True:
        with decimal.localcontext(decimal.Context(prec=precision)):
            a, ratio = Decimal(alpha), Decimal(c)
            gain = a ** (gamma + 1) * ((1 - a) * (1 + gamma * ratio) + ratio)
            if abs(gain - ratio) > ratio.scaleb(5 - precision):
                return gain > ratio
        precision *= 2


# From measured survival and verify cost


def geometric_survival(alpha: float, gamma: int) -> list[float]:
    """S_1..S_gamma under iid acceptance: alpha, alpha^2, ..., alpha^gamma.

    Leviathan et al. 2023, Definition 3.1. With it, `walltime_factor` at a verify cost of 1
    throughout is Theorem 3.8.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        gamma: longest draft, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    alpha = _checked_alpha(alpha)
    return [alpha**i for i in range(1, _checked_count("gamma", gamma) + 1)]


def verify_cost_at(verify_cost: VerifyCost, num_positions: int) -> float:
    """v(num_positions), from a function, or linearly between measured values.

    {1: 1.0, 3: 1.2} gives 1.1 at 2. Beyond the last measured number the line goes on as its last
    piece rises; a single value stands for every number.

    Args:
        verify_cost: v, or a mapping from numbers of positions, 1 among them, to v.
        num_positions: at least 1.

    Raises:
        UsageError: the mapping lacks 1, or the cost there is not a finite number above 0.
    """
    num_positions = _checked_count("num_positions", num_positions, least=1)
    if isinstance(verify_cost, Mapping):
        value = _interpolated(verify_cost, num_positions)
    else:
        value = verify_cost(num_positions)
    if not 0.0 < value < math.inf:
        raise UsageError(
            f"verify cost at {num_positions} positions must be a finite number above 0: "
            f"got {value!r}; pass times divided by the time of one position"
        )
    return float(value)


def interpolated(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Between measured places linear; beyond the last, the line goes on as its last piece rises.

    ([1, 3], [1.0, 1.2]) gives 1.1 at 2 and 1.3 at 4; a single value stands for every place.

    Args:
        places: rising, at least one.
        values: at each of them.
        place: at least the first of them.
    """
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    (x_0, x_1), (y_0, y_1) = (known[right - 1 : right + 1] for known in (places, values))
    return y_0 + (y_1 - y_0) * (place - x_0) / (x_1 - x_0)


def walltime_factor(
    survival: Sequence[float], gamma: int, c: float, verify_cost: VerifyCost
) -> float:
    """The expected factor by which decoding gets faster, below 1 slower, from measured quantities.

    (1 + S_1 + ... + S_gamma) / (v(gamma + 1) + gamma * c): tokens over target steps, of a round.
    Leviathan et al. 2023, Theorem 3.8, without its two assumptions. It is the goodput of TurboSpec
    (arXiv 2406.14066) for one request.

    Args:
        survival: S_1, S_2, ..., each in [0, 1]; at least gamma of them.
        gamma: tokens drafted in a round, at least 0; 0 gives 1 / v(1).
        c: time of a drafter step over time of a target step, at least 0.
        verify_cost: v, see `verify_cost_at`.

    Raises:
        UsageError: an argument is out of range.
    """
    gamma = _checked_count("gamma", gamma)
    tokens = 1.0 + math.fsum(_checked_survival(survival, gamma))
    return tokens / (verify_cost_at(verify_cost, gamma + 1) + gamma * _checked_ratio("c", c))


def best_gamma_measured(
    survival: Sequence[float], c: float, verify_cost: VerifyCost, *, max_gamma: int
) -> int:
    """The gamma in 0..max_gamma with the largest `walltime_factor`, the smallest of them on ties.

    Every length is tried: with a measured curve, a longer draft can help again after a shorter one
    did not.

    Args:
        survival: S_1, S_2, ..., each in [0, 1]; at least max_gamma of them.
        c: time of a drafter step over time of a target step, at least 0.
        verify_cost: v, see `verify_cost_at`.
        max_gamma: longest draft to consider, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    lengths = range(_checked_count("max_gamma", max_gamma) + 1)
    return max(lengths, key=lambda gamma: walltime_factor(survival, gamma, c, verify_cost))


def break_even_alpha(
    c: float, verify_cost: VerifyCost, *, max_gamma: int, min_gamma: int = 1
) -> float | None:
    """The alpha above which some gamma in min_gamma..max_gamma makes decoding faster, in [0, 1].

    Under iid acceptance, so that one number can say it; for v = 1 throughout and min_gamma = 1 it
    is c (Leviathan et al. 2023, Corollary 3.9). Found by bisection, as the factor grows with alpha.

    Args:
        c: time of a drafter step over time of a target step, at least 0.
        verify_cost: v, see `verify_cost_at`.
        max_gamma: longest draft to consider.
        min_gamma: shortest; equal to max_gamma for the threshold of that one length.

    Returns:
        None if not even alpha = 1 is enough.

    Raises:
        UsageError: an argument is out of range.
    """
    least = _checked_count("min_gamma", min_gamma, least=1)
    lengths = range(least, _checked_count("max_gamma", max_gamma, least=least) + 1)
    v_1, c = verify_cost_at(verify_cost, 1), _checked_ratio("c", c)
    # A round of gamma drafts pays if it has more tokens than plain decoding in the same time.
    wanted = {n: (verify_cost_at(verify_cost, n + 1) + n * c) / v_1 for n in lengths}

    def pays(alpha: float) -> bool:
        return any(expected_tokens_per_round(alpha, n) > wanted[n] for n in lengths)

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if pays(middle) else (middle, high)
    # Below that the comparison is one of rounding errors.
    return low if low > 1e-12 else 0.0


def oracle_improvement(alpha: float, c: float) -> float:
    """The walltime improvement of an oracle that always drafts the right length, from 1 up.

    Leviathan et al. 2023, section 3.5, in our reading: 1 / (1 - alpha) tokens a round, for which
    alpha / (1 - alpha) drafter steps are paid, so 1 / (1 - alpha + c * alpha); it does not draft
    where c >= 1. Infinite for alpha = 1 and c = 0.

    Args:
        alpha: mean acceptance probability, in [0, 1].
        c: time of a drafter step over time of a target step, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    alpha, c = _checked_alpha(alpha), _checked_ratio("c", c)
    cost = 1.0 - alpha + min(c, 1.0) * alpha
    return 1.0 / cost if cost > 0.0 else math.inf


def oracle_factor(
    survival: Sequence[float], c: float, verify_cost: VerifyCost, *, max_gamma: int
) -> float:
    """`walltime_factor` of an oracle that drafts exactly the tokens that will be accepted.

    With drafts up to L it emits 1 + S_1 + ... + S_L tokens a round and pays
    v(1) + sum_{i<=L} S_i * (v(i + 1) - v(i) + c). The best L in 0..max_gamma is taken, so that it
    is at least as fast as every fixed length up to max_gamma.

    Args:
        survival: S_1, S_2, ..., each in [0, 1], not rising; at least max_gamma of them.
        c: time of a drafter step over time of a target step, at least 0.
        verify_cost: v, see `verify_cost_at`.
        max_gamma: longest draft to consider, at least 0.

    Raises:
        UsageError: an argument is out of range.
    """
    c = _checked_ratio("c", c)
    passed = _checked_survival(survival, _checked_count("max_gamma", max_gamma))
    tokens, cost = 1.0, verify_cost_at(verify_cost, 1)
    best = tokens / cost
    for i, s_i in enumerate(passed, start=1):
        tokens += s_i
        dearer = verify_cost_at(verify_cost, i + 1) - verify_cost_at(verify_cost, i)
        cost += s_i * (dearer + c)
        best = max(best, tokens / cost)
    return best


# Arguments


def _interpolated(verify_cost: Mapping[int, float], num_positions: int) -> float:
    known = sorted(verify_cost)
    if not known or known[0] != 1:
        raise UsageError(
            f"verify cost must be known at 1 position: got values at {known!r}; "
            "pass a mapping that begins at 1"
        )
    return interpolated(known, [verify_cost[n] for n in known], num_positions)


def _checked_survival(survival: Sequence[float], gamma: int) -> Sequence[float]:
    """S_1..S_gamma."""
    if len(survival) < gamma:
        raise UsageError(
            f"survival must reach to gamma = {gamma}: got {len(survival)} values; "
            "draft less, or measure longer drafts"
        )
    for i, s_i in enumerate(survival[:gamma], start=1):
        if not 0.0 <= s_i <= 1.0:
            raise UsageError(
                f"survival must hold probabilities: got {s_i!r} for {i} tokens; "
                "pass the shares of drafts of which the first i tokens were all accepted"
            )
    return survival[:gamma]


def _overlap(p: Sequence[float], q: Sequence[float]) -> float:
    """sum_x min(p(x), q(x)), at most 1 even where rows sum to a little more."""
    return min(1.0, math.fsum(min(p_x, q_x) for p_x, q_x in zip(p, q, strict=True)))


def _check_laws(p: Sequence[float], q: Sequence[float], *, where: str = "") -> None:
    if len(p) != len(q):
        raise UsageError(
            f"p and q{where} must cover the same tokens: got {len(p)!r} and {len(q)!r} entries; "
            "pass rows over one vocabulary"
        )
    for name, law in (("p", p), ("q", q)):
        for token, mass in enumerate(law):
            if not 0.0 <= mass <= 1.0 + SUM_TOLERANCE:
                raise UsageError(
                    f"{name}{where} must hold probabilities: got {mass!r} for token {token}; "
                    "pass probabilities, not logits"
                )
        total = math.fsum(law)
        if abs(total - 1.0) > SUM_TOLERANCE:
            raise UsageError(
                f"{name}{where} must sum to 1 within {SUM_TOLERANCE!r}: got a sum of {total!r}; "
                "normalise the row"
            )


def _checked_alpha(alpha: float) -> float:
    if not 0.0 <= alpha <= 1.0:
        raise UsageError(
            f"alpha must be in [0, 1]: got {alpha!r}; pass a probability, such as accepted/examined"
        )
    return float(alpha)


def _checked_count(name: str, count: int, *, least: int = 0) -> int:
    if not isinstance(count, numbers.Integral) or count < least:
        raise UsageError(
            f"{name} must be a whole number, at least {least}: got {count!r}; "
            "pass a number of tokens"
        )
    return int(count)


def _checked_ratio(name: str, ratio: float) -> float:
    if not 0.0 <= ratio < math.inf:
        raise UsageError(
            f"{name} must be a finite number, at least 0: got {ratio!r}; "
            "pass the cost of a drafter step divided by the cost of a target step"
        )
    return float(ratio)
