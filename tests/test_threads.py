"""Models' passes have torch's threads, and nothing between them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from outrider.decoding import Engine
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.model import ModelDrafter
from outrider.models import Feed
from outrider.models.toy import ToyModel
from outrider.requests import Request
from outrider.sampling import SamplingPolicy
from outrider.threads import all_threads, single_threaded

USUAL = 2


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(USUAL)
    yield
    torch.set_num_threads(before)


def test_single_threaded_work_gives_the_threads_back_even_after_an_error() -> None:
    inside: list[int] = []

    def fail() -> None:
        with single_threaded():
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (inside, torch.get_num_threads()) == ([1], USUAL)


def test_a_pass_has_all_threads_however_deep_it_is_called() -> None:
    seen = []
    with single_threaded(), single_threaded():
        with all_threads():
            seen.append(torch.get_num_threads())
            with single_threaded():
                seen.append(torch.get_num_threads())
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    with all_threads():
        seen.append(torch.get_num_threads())
    assert seen == [USUAL, 1, USUAL, 1, USUAL]


class Watched(ToyModel):
    """A model of three ids that notes how many threads its passes have."""

    running = False

    def __init__(self) -> None:
        self.seen: set[int] = set()
        super().__init__(lambda prefix: torch.zeros(3), 3, context_length=100)

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        self.seen.add(torch.get_num_threads())
        Watched.running = True
        try:
            return super().score(feeds)
        finally:
            Watched.running = False


@pytest.mark.parametrize(
    "make", [ModelDrafter, lambda model, **kind: LookupFirst(ModelDrafter(model, **kind))]
)
def test_in_a_round_only_passes_share_threads(
    make: Callable[..., ModelDrafter | LookupFirst], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked laws of a large vocabulary once woke threads that then got in the target's way."""
    target, model = Watched(), Watched()
    drafter = make(model, target_vocab_size=3)
    between: set[int] = set()
    watched = ("softmax", "stack", "zeros_like", "cumsum", "minimum", "argmax")
    for name in watched:
        for owner in (torch, Tensor):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, _noting(getattr(owner, name), between))
    requests = [
        Request([1, 2], max_new_tokens=20, gamma=3, policy=SamplingPolicy(temperature=t), seed=5)
        for t in (0.0, 1.0)
    ]
    for request in requests:
        Engine(target, drafter).generate([request])
    assert target.seen == model.seen == {USUAL}
    assert between == {1}
    assert torch.get_num_threads() == USUAL


def _noting(operation: Callable[..., Tensor], seen: set[int]) -> Callable[..., Tensor]:
    def noted(*args: object, **options: object) -> Tensor:
        if not Watched.running:
            seen.add(torch.get_num_threads())
        return operation(*args, **options)

    return noted
