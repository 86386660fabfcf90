"""Level 4: the real loop with real noise, its output counted against the known law.

A G-test (likelihood ratio) over the joint law of three neighbouring tokens, at the first position
and at a later one, where earlier rounds have left their traces. The seeds are fixed, so a verdict
never changes from run to run.

False alarms: each test rejects at P_FALSE = 1e-6 under the chi-square law. Sensitivity: with N =
NUM_SAMPLES the smallest total variation that is caught with 99 % is about `detectable_tv` below;
`test_the_stated_sensitivity_is_real` measures it with a mixture of exactly that distance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from exact.controls import WRONG_RULES
from exact.drafters import (
    DroppingDrafter,
    PeekingDrafter,
    SoftGreedyDrafter,
    UnfilteredDrafter,
    UniformDrafter,
)
from exact.exhaustive import Law, Target
from outrider import randomness, verification
from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel, hashed_law
from outrider.requests import Request
from outrider.sampling import History, SamplingPolicy

SIZE = 3
WINDOW = 3
NUM_SAMPLES = 4000  # of each control, and of the sensitivity stated above
NUM_FOLLOWING = 2500  # of each rule that must follow the law
P_FALSE = 1e-6
PROMPT = [0, 1, 2, 0, 1]
TARGET_LAW = hashed_law(SIZE, seed=41, order=2, sharpness=1.2)
DRAFT_LAW = hashed_law(SIZE, seed=42, order=2, sharpness=1.5)
POLICY = SamplingPolicy(temperature=1.0)


def known_law(start: int) -> Law:
    """The joint law of tokens start .. start + WINDOW - 1, summed over what came before."""
    joint = Target(TARGET_LAW, POLICY).plain_law(History(PROMPT), start + WINDOW)
    law: Law = Counter()
    for tokens, mass in joint.items():
        law[tokens[start:]] += mass
    return law


def sample(
    drafter: Drafter | None,
    *,
    start: int,
    rule: str,
    gamma: int | None = 2,
    num_samples: int = NUM_SAMPLES,
) -> Counter[tuple[int, ...]]:
    """Counts of tokens start .. start + WINDOW - 1 over seeds 0 .. num_samples - 1."""
    engine = Engine(ToyModel(TARGET_LAW, SIZE), drafter, max_batch=200)
    end = start + WINDOW
    requests = [
        # One token more than is counted, or the limit would shorten the first draft to gamma - 1.
        Request(PROMPT, POLICY, max_new_tokens=end + 1, gamma=gamma, rule=rule, seed=seed)
        for seed in range(num_samples)
    ]
    return Counter(tuple(result.token_ids[start:end]) for result in engine.generate(requests))


def g_test(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """The p-value of the counts under the law; cells expecting less than 5 are pooled."""
    total = sum(counts.values())
    impossible = [cell for cell in counts if law.get(cell, 0.0) == 0]
    if impossible:
        return 0.0
    cells = sorted(law, key=lambda cell: law[cell])
    observed, expected = [0.0], [0.0]
    for cell in cells:
        if expected[-1] >= 5:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts.get(cell, 0)
        expected[-1] += total * law[cell]
    g = 2 * sum(o * math.log(o / e) for o, e in zip(observed, expected, strict=True) if o)
    return float(stats.chi2.sf(g, len(observed) - 1))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(ToyModel(DRAFT_LAW, SIZE), target_vocab_size=SIZE),
    "lookup": lambda: LookupDrafter(min_match=1),
    "lookup first": lambda: LookupFirst(
        ModelDrafter(ToyModel(DRAFT_LAW, SIZE), target_vocab_size=SIZE), min_match=2
    ),
    "uniform": lambda: UniformDrafter(SIZE),
}


@pytest.mark.parametrize(
    ("drafter", "start"),
    [("model", 0), ("model", 3), ("lookup", 2), ("lookup first", 3), ("uniform", 2)],
)
@pytest.mark.parametrize("rule", verification.RULES)
def test_the_loop_follows_the_law(rule: str, drafter: str, start: int) -> None:
    counts = sample(DRAFTERS[drafter](), start=start, rule=rule, num_samples=NUM_FOLLOWING)
    assert g_test(counts, known_law(start)) > P_FALSE


@pytest.mark.parametrize("rule", verification.RULES)
def test_the_loop_follows_the_law_with_adaptive_lengths(rule: str) -> None:
    counts = sample(DRAFTERS["model"](), start=3, rule=rule, gamma=None, num_samples=NUM_FOLLOWING)
    assert g_test(counts, known_law(3)) > P_FALSE


def test_plain_decoding_follows_the_law() -> None:
    assert g_test(sample(None, start=0, rule="block"), known_law(0)) > P_FALSE


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_wrong_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verification.RULES, "wrong", WRONG_RULES[name])
    # A wrong bonus shows only when token gamma + 1 is inside the window; the others show sooner.
    gamma = 2 if name == "bonus from q" else 3
    counts = sample(DRAFTERS["model"](), start=0, rule="wrong", gamma=gamma)
    assert g_test(counts, known_law(0)) < P_FALSE


@pytest.mark.parametrize(
    "broken", [DroppingDrafter, PeekingDrafter, UnfilteredDrafter, SoftGreedyDrafter]
)
def test_every_drafter_that_breaks_the_contract_is_noticed(broken: Callable[..., Drafter]) -> None:
    counts = sample(broken(SIZE, DRAFT_LAW), start=0, rule="block")
    assert g_test(counts, known_law(0)) < P_FALSE


def test_one_stream_of_noise_for_drafting_and_correcting_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft's noise reused for the residual: allowed with keep-iff-equal only."""
    real = randomness.uniform

    def shared(seed: int, purpose: int, position: int, origin: int = 0) -> float:
        same = purpose == randomness.Purpose.RESIDUAL
        return real(seed, randomness.Purpose.DRAFT if same else purpose, position, origin)  # type: ignore[arg-type]

    monkeypatch.setattr(randomness, "uniform", shared)
    assert g_test(sample(DRAFTERS["model"](), start=0, rule="rejection"), known_law(0)) < P_FALSE


def detectable_tv(cells: int) -> float:
    """Smallest TV caught with 99 %, for a difference spread evenly over the cells.

    With d = TV, the noncentrality of an even difference is about 4 N d^2.
    """
    critical = stats.chi2.isf(P_FALSE, cells - 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        power = stats.ncx2.sf(critical, cells - 1, 4 * NUM_SAMPLES * middle**2)
        low, high = (middle, high) if power < 0.99 else (low, middle)
    return high


def test_the_stated_sensitivity_is_real() -> None:
    law = known_law(0)
    cells = sorted(law)
    distance = detectable_tv(len(cells))
    assert distance < 0.08
    p = np.array([law[cell] for cell in cells])
    sign = np.where(np.arange(len(cells)) % 2 == 0, 1.0, -1.0)
    tilt = p * (sign - (p * sign).sum())  # keeps the sum at 1
    bent = p + tilt * distance / (0.5 * np.abs(tilt).sum())
    assert 0.5 * np.abs(bent - p).sum() == pytest.approx(distance)
    random = np.random.default_rng(0)
    caught = 0
    for _ in range(200):
        drawn = random.multinomial(NUM_SAMPLES, bent)
        counts = Counter(dict(zip(cells, drawn.tolist(), strict=True)))
        caught += g_test(counts, law) < P_FALSE
    assert caught >= 192
