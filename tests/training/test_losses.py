"""Losses against their definitions over whole laws, and their gradients against differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.training.losses import (
    LOSSES,
    acceptance,
    adaptive_mix,
    forward_kl,
    jsd,
    negative_log_acceptance,
    on_kept_ids,
    reverse_kl,
    total_variation,
)

V, K = 12, 5


def laws(seed: int, *, zeros: int = 0) -> tuple[Tensor, Tensor]:
    """p [V] falling, with some exact zeros at its end, and logits of q [V]; float64."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(V, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        p[-zeros:] = 0.0
    p = (p / p.sum()).sort(descending=True).values
    return p, torch.randn(V, generator=generator, dtype=torch.float64)


def compared(p: Tensor, logits: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the losses take, for p's `kept` likeliest ids."""
    log_q, log_rest = on_kept_ids(logits, torch.arange(kept))
    return log_q, log_rest, p[:kept], 1.0 - p[:kept].sum()


def merged(values: Tensor, kept: int) -> Tensor:
    return torch.cat([values[:kept], values[kept:].sum()[None]])


def entropy_terms(a: Tensor, b: Tensor) -> float:
    """sum a log(a / b), plainly."""
    return sum(float(x) * math.log(float(x) / float(y)) for x, y in zip(a, b, strict=True) if x > 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kept", [K, V - 1])
def test_values_are_those_of_the_definitions(seed: int, kept: int) -> None:
    p, logits = laws(seed, zeros=1)
    given_laws = compared(p, logits, kept)
    a, b = merged(p, kept), merged(logits.softmax(0), kept)
    middle = (a + b) / 2
    expected = {
        forward_kl: entropy_terms(a, b),
        jsd: (entropy_terms(a, middle) + entropy_terms(b, middle)) / 2,
        total_variation: float((a - b).abs().sum()) / 2,
    }
    if bool((a > 0).all()):
        expected[reverse_kl] = entropy_terms(b, a)
    for loss, value in expected.items():
        assert float(loss(*given_laws)) == pytest.approx(value, abs=1e-9), loss.__name__
    accepted = float(torch.minimum(a, b)[:-1].sum())
    assert float(acceptance(*given_laws)) == pytest.approx(accepted, abs=1e-12)
    assert float(negative_log_acceptance(*given_laws)) == pytest.approx(-math.log(accepted))
    weight = math.exp(-3.0 * accepted)
    mixed = weight * expected[forward_kl] + (1 - weight) * expected[total_variation]
    assert float(adaptive_mix(*given_laws)) == pytest.approx(mixed, abs=1e-9)


@given(st.integers(0, 10**6), st.integers(1, V - 1))
def test_merging_ids_never_makes_two_laws_more_different(seed: int, kept: int) -> None:
    p, logits = laws(seed)
    whole = compared(p, logits, V - 1)
    few = compared(p, logits, kept)
    for loss in (forward_kl, reverse_kl, jsd, total_variation):
        assert float(loss(*few)) <= float(loss(*whole)) + 1e-9
    assert float(acceptance(*few)) <= float(acceptance(*whole)) + 1e-12
    # The exact one, over all ids, is bounded from below by what is counted.
    exact = float(torch.minimum(p, logits.softmax(0)).sum())
    assert float(acceptance(*few)) <= exact + 1e-12


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mix"])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_differences(name: str, seed: int) -> None:
    p, logits = laws(seed)
    ids = torch.tensor([3, 0, 7, 1, -1])
    probs = p[ids.clamp(min=0)].clone()
    probs[-1] = 0.02
    probs = 0.9 * probs / probs.sum()

    def value(z: Tensor) -> Tensor:
        return LOSSES[name](*on_kept_ids(z, ids), probs, 1.0 - probs.sum())

    assert torch.autograd.gradcheck(value, logits.requires_grad_(), eps=1e-6, atol=1e-5)


def test_no_gradient_flows_through_the_weight_of_the_mix() -> None:
    p, logits = laws(1)
    weight = math.exp(-3.0 * float(acceptance(*compared(p, logits, K))))
    logits.requires_grad_()
    [mixed] = torch.autograd.grad(adaptive_mix(*compared(p, logits, K)), logits)
    [divergence] = torch.autograd.grad(forward_kl(*compared(p, logits, K)), logits)
    [variation] = torch.autograd.grad(total_variation(*compared(p, logits, K)), logits)
    torch.testing.assert_close(mixed, weight * divergence + (1 - weight) * variation)


def test_the_gradient_of_total_variation_is_the_closed_one() -> None:
    """On logit j: -q_j ([q_j <= p_j] - S), S the q of all ids with q <= p (arXiv 2606.12370)."""
    p, logits = laws(2)
    logits.requires_grad_()
    q = logits.detach().softmax(0)
    below = (q <= p).double()
    [found] = torch.autograd.grad(total_variation(*compared(p, logits, V - 1)), logits)
    torch.testing.assert_close(found, -q * (below - (q * below).sum()), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_equal_laws_cost_nothing_and_descending_leads_there(
    loss: object,
) -> None:
    assert callable(loss)
    p, logits = laws(3)
    same = loss(*compared(p, p.log(), V - 1))
    assert float(same) == pytest.approx(-math.log(1 - float(p[-1])), abs=1e-9) or abs(same) < 1e-9
    z = logits.clone().requires_grad_()
    optimiser = torch.optim.Adam([z], lr=0.05)
    before = float(acceptance(*compared(p, logits, V - 1)))
    for _ in range(400):
        optimiser.zero_grad()
        loss(*compared(p, z, V - 1)).backward()
        optimiser.step()
    after = float(acceptance(*compared(p, z.detach(), V - 1)))
    assert after > max(0.95, before)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_ids_that_cannot_be_proposed_give_finite_values_and_gradients(loss: object) -> None:
    assert callable(loss)
    logits = torch.randn(3, V, requires_grad=True)
    ids = torch.tensor([[0, -1, 2], [-1, -1, -1], [4, 5, 0]])
    p = torch.tensor([[0.5, 0.3, 0.1], [0.6, 0.3, 0.1], [1.0, 0.0, 0.0]])
    value = loss(*on_kept_ids(logits, ids), p, (1 - p.sum(-1)).clamp(min=0))
    assert bool(value.isfinite().all())
    value.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_the_rest_is_what_the_kept_ids_leave() -> None:
    logits = torch.randn(4, V, dtype=torch.float64)
    ids = torch.tensor([[0, 3], [-1, 0], [5, -1], [-1, -1]])
    q = logits.softmax(-1)
    log_q, log_rest = on_kept_ids(logits, ids)
    for row in range(4):
        kept = [int(token) for token in ids[row] if token >= 0]
        assert float(log_rest[row].exp()) == pytest.approx(1 - float(q[row, kept].sum()), abs=1e-6)
        for place, token in enumerate(ids[row].tolist()):
            expected = float(q[row, token]) if token >= 0 else 0.0
            assert float(log_q[row, place].exp()) == pytest.approx(expected)
