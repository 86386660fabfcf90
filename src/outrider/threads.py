"""Which work shares torch's CPU threads: models' passes do, everything between them does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["all_threads", "single_threaded"]


class _Outside(threading.local):
    """The number of threads outside all `single_threaded` blocks; 0 while in none."""

    number = 0


_OUTSIDE = _Outside()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch's CPU operations on this thread alone.

    Rows of a vocabulary are just long enough for torch to share an operation between threads, and
    short enough for the barrier to cost more than the sharing brings: milliseconds each, as soon
    as anything else runs on the machine. And the other threads look out for more work for a while,
    on cores that the next pass of an engine with threads of its own needs.
    """
    with _threads(1, outside=_OUTSIDE.number or torch.get_num_threads()):
        yield


@contextmanager
def all_threads() -> Iterator[None]:
    """Give a model's pass the threads that `single_threaded` around it takes away."""
    with _threads(_OUTSIDE.number or torch.get_num_threads(), outside=0):
        yield


@contextmanager
def _threads(number: int, *, outside: int) -> Iterator[None]:
    before = torch.get_num_threads(), _OUTSIDE.number
    torch.set_num_threads(number)
    _OUTSIDE.number = outside
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        _OUTSIDE.number = before[1]
