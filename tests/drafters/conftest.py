"""What the tests of the drafters share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.drafters import Drafter
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft

Propose = Callable[..., list[Draft]]


@pytest.fixture(scope="session")
def propose() -> Propose:
    """`drafter.propose`, with one policy for all requests and the noise of seed 0, 1, ..."""

    def propose(
        drafter: Drafter,
        histories: Sequence[History],
        gammas: int | Sequence[int],
        policy: SamplingPolicy | None = None,
    ) -> list[Draft]:
        number = len(histories)
        return drafter.propose(
            histories,
            [gammas] * number if isinstance(gammas, int) else gammas,
            [policy or SamplingPolicy()] * number,
            [RoundNoise(seed, len(history)) for seed, history in enumerate(histories)],
        )

    return propose
