"""Level 1: one position, in closed form. accepted mass + rejected mass x residual = p."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exact.controls import WRONG_RULES
from exact.exhaustive import ExhaustiveNoise, race_joint, walks
from outrider.theory import beta
from outrider.verification import (
    RULES,
    Draft,
    Rule,
    Verdict,
    block,
    coupled,
    greedy,
    rejection,
)


@st.composite
def laws(draw: st.DrawFn, size: int = 5) -> Tensor:
    """A law [size] in float64 with exact zeros in it."""
    weights = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()


def first_token_law(rule: Rule, p: Tensor, q: Tensor | None, drafted: int | None = None) -> Tensor:
    """The law of the first emitted token for gamma = 1, drafted from q (or the point `drafted`)."""
    law = torch.zeros_like(p)

    def run(walk: object) -> int:
        noise = ExhaustiveNoise(walk, 0)  # type: ignore[arg-type]
        token = noise.draft(0, q) if q is not None else drafted
        draft = Draft([token], None if q is None else q[None])  # type: ignore[list-item]
        verdict = rule(torch.stack([p, p]), draft, noise)
        return token if verdict.accepted else verdict.token  # type: ignore[return-value]

    for token, walk in walks(run):
        law[token] += walk.weight  # type: ignore[call-overload]
    return law


@pytest.mark.parametrize("rule", [rejection, block])
@settings(max_examples=150, deadline=None)
@given(p=laws(), q=laws())
def test_accepted_mass_and_residual_mass_add_up_to_p(rule: Rule, p: Tensor, q: Tensor) -> None:
    assert float((first_token_law(rule, p, q) - p).abs().max()) < 1e-15


@pytest.mark.parametrize("rule", [rejection, block])
@settings(max_examples=60, deadline=None)
@given(p=laws(), drafted=st.integers(0, 4))
def test_a_point_mass_draft_leaves_p_as_it_is(rule: Rule, p: Tensor, drafted: int) -> None:
    assert float((first_token_law(rule, p, None, drafted) - p).abs().max()) < 1e-15


@settings(max_examples=150, deadline=None)
@given(p=laws(), q=laws())
def test_the_chance_to_accept_one_token_is_beta(p: Tensor, q: Tensor) -> None:
    accepted = 0.0

    def run(walk: object) -> Verdict:
        noise = ExhaustiveNoise(walk, 0)  # type: ignore[arg-type]
        return rejection(torch.stack([p, p]), Draft([noise.draft(0, q)], q[None]), noise)

    for verdict, walk in walks(run):
        accepted += walk.weight * verdict.accepted  # type: ignore[attr-defined]
    assert accepted == pytest.approx(beta(p.tolist(), q.tolist()), abs=1e-14)


@settings(max_examples=150, deadline=None)
@given(p=laws(4), q=laws(4))
def test_the_race_that_target_and_drafter_share_has_their_laws_as_margins(
    p: Tensor, q: Tensor
) -> None:
    joint = np.array([[race_joint(p.numpy(), q.numpy(), a, b) for b in range(4)] for a in range(4)])
    assert np.abs(joint.sum(1) - p.numpy()).max() < 1e-13
    assert np.abs(joint.sum(0) - q.numpy()).max() < 1e-13


def test_the_race_formula_agrees_with_real_exponentials() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    noise = np.random.default_rng(1).exponential(size=(400_000, 3))
    counts = np.zeros((3, 3))
    np.add.at(counts, ((noise / p).argmin(1), (noise / q).argmin(1)), 1)
    joint = np.array([[race_joint(p, q, a, b) for b in range(3)] for a in range(3)])
    # Standard error at most 0.0008; 5 of them.
    assert np.abs(counts / len(noise) - joint).max() < 0.004


@pytest.mark.parametrize("name", ["accept all", "swapped ratio", "|p-q| residual", "residual is p"])
def test_a_wrong_rule_misses_p_already_at_one_position(name: str) -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0], dtype=torch.float64)
    assert float((first_token_law(WRONG_RULES[name], p, q) - p).abs().max()) > 0.01


class _FixedNoise:
    """Every uniform is `u`."""

    def __init__(self, u: float) -> None:
        self.u = u

    def accepts(self, offset: int, p: float, q: float) -> bool:
        return self.u * q < p

    def residual(self, offset: int, weights: Tensor) -> int:
        return int(weights.argmax())

    def token(self, offset: int, p: Tensor) -> int:
        return int(p.argmax())


class _NonStrictNoise(_FixedNoise):
    def accepts(self, offset: int, p: float, q: float) -> bool:
        return self.u * q <= p


def impossible_draft() -> tuple[Tensor, Draft]:
    """p, and a draft of a token that p excludes."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    return p, Draft([0], torch.tensor([[1.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("name", list(RULES))
def test_no_rule_accepts_an_impossible_token_when_u_is_zero(name: str) -> None:
    p, draft = impossible_draft()
    assert RULES[name](p, draft, _FixedNoise(0.0)) == Verdict(0, 1)


def test_a_non_strict_comparison_would_accept_it() -> None:
    p, draft = impossible_draft()
    assert rejection(p, draft, _NonStrictNoise(0.0)).accepted == 1


def test_block_never_expects_fewer_tokens_than_rejection_and_often_more() -> None:
    third = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    p, q = third.expand(5, 2), (1 - third).expand(4, 2)
    expected = {1: (2 / 3, 2 / 3), 2: (10 / 9, 11 / 9), 3: (38 / 27, 5 / 3), 4: (1.605, 2.049)}

    def mean_accepted(rule: Rule, gamma: int) -> float:
        def run(walk: object) -> Verdict:
            noise = ExhaustiveNoise(walk, 0)  # type: ignore[arg-type]
            tokens = [noise.draft(i, q[i]) for i in range(gamma)]
            return rule(p[: gamma + 1], Draft(tokens, q[:gamma]), noise)

        return sum(walk.weight * verdict.accepted for verdict, walk in walks(run))  # type: ignore[attr-defined]

    for gamma, (token_rule, block_rule) in expected.items():
        assert mean_accepted(rejection, gamma) == pytest.approx(token_rule, abs=6e-4)
        assert mean_accepted(block, gamma) == pytest.approx(block_rule, abs=6e-4)


@settings(max_examples=60, deadline=None)
@given(p=laws(3), q=laws(3))
def test_coupled_emits_the_targets_own_draw(p: Tensor, q: Tensor) -> None:
    law = torch.zeros_like(p)

    def run(walk: object) -> int:
        noise = ExhaustiveNoise(walk, 0, coupled=True)  # type: ignore[arg-type]
        token = noise.draft(0, q)
        verdict = coupled(torch.stack([p, p]), Draft([token], q[None]), noise)
        return token if verdict.accepted else verdict.token

    for token, walk in walks(run):
        law[token] += walk.weight  # type: ignore[call-overload]
    assert float((law - p).abs().max()) < 1e-13


def greedy_differs(
    rule: Rule, choices: list[int], drawing: Tensor | None, tokens: list[int]
) -> bool:
    """Whether `rule` on one-hot rows says, for any noise, something else than `greedy`."""
    p = torch.eye(5, dtype=torch.float64)[choices]
    gamma = len(choices) - 1

    def run(walk: object) -> tuple[Verdict, Verdict]:
        noise = ExhaustiveNoise(walk, 0)  # type: ignore[arg-type]
        drawn = (
            [noise.draft(i, drawing[i]) for i in range(gamma)] if drawing is not None else tokens
        )
        draft = Draft(drawn, drawing)
        return rule(p, draft, noise), greedy(choices, draft)

    return any(one != other for (one, other), walk in walks(run) if walk.weight > 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(RULES))
@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    q=st.lists(laws(), min_size=2, max_size=2) | st.none(),
    tokens=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    agrees=st.integers(0, 2),
)
def test_all_rules_say_the_same_of_one_hot_rows(
    name: str, choices: list[int], q: list[Tensor] | None, tokens: list[int], agrees: int
) -> None:
    drawing = None if q is None else torch.stack(q)
    tokens = [*choices[:agrees], *tokens[agrees:]]
    assert not greedy_differs(RULES[name], choices, drawing, tokens)


@pytest.mark.parametrize("name", ["accept all", "target row off by one", "bonus from q"])
def test_a_wrong_rule_says_something_else_of_one_hot_rows(name: str) -> None:
    q = torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0.5, 0.5, 0, 0]], dtype=torch.float64)
    assert greedy_differs(WRONG_RULES[name], [0, 1, 2], q, [])


def test_verifying_leaves_the_laws_untouched() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4, 6, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.rand(3, 6, generator=generator, dtype=torch.float64).softmax(-1)
    before = p.clone(), q.clone()
    for rule in RULES.values():
        for laws_of_draft in (q, None):
            for u in (0.0, 0.5, 0.999):
                rule(p, Draft([1, 2, 3], laws_of_draft), _FixedNoise(u))
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


def test_identical_laws_accept_everything_even_in_float32() -> None:
    p = torch.rand(5, 1000, generator=torch.Generator().manual_seed(1)).softmax(-1)
    draft = Draft([1, 20, 300, 999], p[:4])
    for rule in (rejection, block):
        assert rule(p, draft, _FixedNoise(1 - 2**-53)).accepted == 4


def test_a_residual_that_rounding_has_emptied_falls_back_to_p() -> None:
    q = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    p = torch.stack([q[0] * (1 - 1e-16), q[0]])

    class Refuses(_FixedNoise):
        def accepts(self, offset: int, p: float, q: float) -> bool:
            return False

    for rule in (rejection, block):
        assert rule(p, Draft([0], q), Refuses(0.0)) == Verdict(0, 1)
