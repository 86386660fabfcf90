"""What a drafter is trained to minimise, position by position.

All losses compare the target's law p with the drafter's law q in the form in which p was kept: K
likely ids and the rest as one. Merging ids into one can only bring two laws closer, so every
divergence here is a lower bound of the one over all V ids, and equal to it for K = V. The rest
stands for ids the drafter often cannot even propose (its vocabulary is trimmed); that its mass
should be small is something all losses see, none asks where it lies.

Shapes: log_q and p are [..., K], log_q_rest and p_rest [...]; a loss is [...], one value for a
position, in nats where it has a unit. p and its rest sum to 1, q and its rest too.

What verification cares for is alpha = sum_x min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023,
Corollary 3.6). Total variation has no gradient where q is far from p and is slow to begin with;
the KL divergences learn the law as a whole, and alpha as a consequence. The mixed losses go from
one to the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "LOSSES",
    "Loss",
    "acceptance",
    "adaptive_mix",
    "forward_kl",
    "jsd",
    "negative_log_acceptance",
    "on_kept_ids",
    "reverse_kl",
    "total_variation",
]

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_TINY = 1e-12
_LEAST_REST = 1e-7
_MIX_RATE = 3.0


def on_kept_ids(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """log q on some ids, and on all others together.

    Args:
        logits: [..., V'] of the drafter.
        ids: [..., K] into V', different in each row; -1 for an id the drafter cannot propose.

    Returns:
        log_q [..., K], minus infinity at -1; log_q_rest [...], of a mass of at least 1e-7.
    """
    known = ids >= 0
    log_q = logits.log_softmax(dim=-1).gather(-1, ids.clamp(min=0))
    log_q = log_q.masked_fill(~known, -torch.inf)
    # A sum over the other V' - K would be exact where the rest is tiny, and cost as much as all.
    log_q_rest = (1.0 - log_q.exp().sum(dim=-1)).clamp(min=_LEAST_REST).log()
    return log_q, log_q_rest


def acceptance(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) over the kept ids: the probability that a draft is accepted.

    Leviathan et al. 2023, Corollary 3.6. The rest counts as never accepted, so this is a lower
    bound for K < V.
    """
    return torch.minimum(p, log_q.exp()).sum(dim=-1)


def forward_kl(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """KL(p || q) = sum_x p log(p / q), the usual distillation loss (Hinton et al. 2015).

    q must cover all of p; where it is too small to, it spreads. Steady gradients from the start.
    An id that the drafter cannot propose would cost infinitely much: its p counts with the rest.
    """
    p, p_rest = _proposable(log_q, p, p_rest)
    kept = torch.where(p > 0, p * (_log(p) - _finite(log_q)), 0.0).sum(dim=-1)
    return kept + torch.where(p_rest > 0, p_rest * (_log(p_rest) - _finite(log_q_rest)), 0.0)


def reverse_kl(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """KL(q || p) = sum_x q log(q / p) (Gu et al. 2024, "MiniLLM", arXiv 2306.08543).

    q must stay within p, and may leave some of p out: it goes for the likely ids.
    """
    q, q_rest = log_q.exp(), log_q_rest.exp()
    kept = torch.where(q > 0, q * (_finite(log_q) - _log(p)), 0.0).sum(dim=-1)
    return kept + torch.where(q_rest > 0, q_rest * (_finite(log_q_rest) - _log(p_rest)), 0.0)


def jsd(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, the Jensen-Shannon divergence.

    Lin 1991; for drafters in Zhou et al. 2024, "DistillSpec", arXiv 2310.08461. Between the two
    KL divergences, bounded by log 2.
    """

    def half(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (_log(a) - _log((a + b) / 2)), 0.0) / 2

    q, q_rest = log_q.exp(), log_q_rest.exp()
    kept = (half(p, q) + half(q, p)).sum(dim=-1)
    return kept + half(p_rest, q_rest) + half(q_rest, p_rest)


def total_variation(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """sum_x |p - q| / 2 = 1 - sum_x min(p, q): the probability that a draft is rejected.

    Leviathan et al. 2023, Definition 3.2 and Lemma 3.3 (there D_LK). The quantity itself; but an id
    gets a gradient only in proportion to its q, so what is not proposed yet is hardly learnt.
    """
    kept = (p - log_q.exp()).abs().sum(dim=-1)
    return (kept + (p_rest - log_q_rest.exp()).abs()) / 2


def negative_log_acceptance(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """-log sum_x min(p, q): total variation with its gradient divided by the acceptance.

    LK losses, arXiv 2602.23881. Positions where nearly nothing is accepted pull hardest.
    """
    return -acceptance(log_q, log_q_rest, p, p_rest).clamp(min=_TINY).log()


def adaptive_mix(log_q: Tensor, log_q_rest: Tensor, p: Tensor, p_rest: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q) with w = exp(-3 alpha), alpha the acceptance at the position.

    LK losses, arXiv 2602.23881: the divergence leads while little is accepted, the total variation
    refines afterwards. No gradient flows through w.
    """
    weight = (-_MIX_RATE * acceptance(log_q, log_q_rest, p, p_rest)).exp().detach()
    divergence = forward_kl(log_q, log_q_rest, p, p_rest)
    return weight * divergence + (1 - weight) * total_variation(log_q, log_q_rest, p, p_rest)


LOSSES: dict[str, Loss] = {
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jsd,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "mix": adaptive_mix,
}
"""By the names the command line knows them by."""


def _proposable(log_q: Tensor, p: Tensor, p_rest: Tensor) -> tuple[Tensor, Tensor]:
    """p with what the drafter cannot propose moved into the rest."""
    known = log_q > -torch.inf
    return torch.where(known, p, 0.0), p_rest + torch.where(known, 0.0, p).sum(dim=-1)


def _log(mass: Tensor) -> Tensor:
    return mass.clamp(min=_TINY).log()


def _finite(log_mass: Tensor) -> Tensor:
    """Of an id that cannot be proposed the term is 0, and its gradient must not be NaN."""
    return log_mass.clamp(min=-1e4)
