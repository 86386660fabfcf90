"""Noise as a pure function of (seed, purpose, position, origin). There is no global state.

The key of every draw is a keyed BLAKE2b digest of those four numbers (a counter-based generator);
a single uniform is the digest's first 53 bits, a vector of uniforms is the Philox stream that the
digest keys.

*Position* is the absolute index of the token a draw is for: 0 is the prompt's first token.
*Origin* is the number of committed tokens when the round began. A later round drafts some of the
same positions again, and under `block` the number of tokens accepted in the earlier round depends
on every token drafted in it, the discarded ones too. Noise spent on discarded drafts is therefore
no longer independent of the text, and must not be used again: the origin, different in every
round, keeps the rounds apart. Only `Purpose.TOKEN` leaves the origin out, because `coupled` wants
one and the same noise for a position whatever round it falls in.
"""

from __future__ import annotations

import hashlib
import os
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MAX_SEED", "Noise", "Purpose", "RoundNoise", "fresh_seed"]

MAX_SEED = 2**64 - 1


class Purpose(IntEnum):
    """What a draw decides. Draws of different purposes share no noise."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    TOKEN = 4


def fresh_seed() -> int:
    """A seed from the operating system, 0 to `MAX_SEED`."""
    return int.from_bytes(os.urandom(8), "little")


def _digest(seed: int, purpose: Purpose, position: int, origin: int) -> bytes:
    numbers = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return hashlib.blake2b(
        numbers + origin.to_bytes(8, "little"), digest_size=16, salt=bytes([purpose])
    ).digest()


def uniform(seed: int, purpose: Purpose, position: int, origin: int = 0) -> float:
    """One uniform in [0, 1), with 53 bits."""
    bits = int.from_bytes(_digest(seed, purpose, position, origin)[:8], "little")
    return (bits >> 11) * 2.0**-53


def exponentials(seed: int, purpose: Purpose, position: int, size: int) -> NDArray[np.float64]:
    """Standard exponentials [size], float64, keyed by token id: entry x never depends on `size`.

    `-log` of them is Gumbel noise: argmax(log p + g) equals argmin(exponential / p).
    """
    key = int.from_bytes(_digest(seed, purpose, position, 0), "little")
    stream = np.random.Generator(np.random.Philox(key=key, counter=0))
    noise = stream.random(size)
    np.subtract(1.0, noise, out=noise)  # (0, 1]: the logarithm stays finite
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


class RoundNoise:
    """The draws of one request in one round.

    `offset` counts positions from the round's first new token: 0 is the first drafted token and
    gamma is the bonus. Rules and drafters ask this object for decisions, not for numbers, so that a
    proof can put in its place one that walks every outcome with its exact probability.

    Args:
        seed: the request's seed, 0 to `MAX_SEED`.
        origin: committed tokens when the round began (prompt and output).
        coupled: True when drafter and target share noise (the `coupled` rule).
    """

    def __init__(self, seed: int, origin: int, *, coupled: bool = False) -> None:
        self.seed = seed
        self.origin = origin
        self.coupled = coupled

    def draft(self, offset: int, q: Tensor) -> int:
        """A token drawn from the row `q` [V], for a drafter."""
        if self.coupled:
            return self.token(offset, q)
        return self._choose(Purpose.DRAFT, offset, q)

    def accepts(self, offset: int, p: float, q: float) -> bool:
        """True with probability min(1, p / q): `u * q < p`, strict and division-free.

        Strict, because u can be 0 and a token with p = 0 must never pass.
        """
        return uniform(self.seed, Purpose.ACCEPT, self.origin + offset, self.origin) * q < p

    def residual(self, offset: int, weights: Tensor) -> int:
        """A token drawn in proportion to `weights` [V], for the correction or the bonus."""
        return self._choose(Purpose.RESIDUAL, offset, weights)

    def token(self, offset: int, p: Tensor) -> int:
        """The token that the noise shared by drafter and target picks under the row `p` [V].

        The Gumbel-max draw argmax(log p + g), written as argmin(exponential / p)
        (Daliri, Musco & Suresh, 2408.07978); exact: P(token = x) = p(x).
        """
        _require_law_dtype(p)
        row = _as_numpy(p)
        support = np.flatnonzero(row > 0)
        position = self.origin + offset
        noise = exponentials(self.seed, Purpose.TOKEN, position, int(support[-1]) + 1)
        return int(support[np.argmin(noise[support] / row[support])])

    def _choose(self, purpose: Purpose, offset: int, weights: Tensor) -> int:
        _require_law_dtype(weights)
        weights = weights.cpu()  # one draw, one order of summation, on every device
        # torch's cumulative sum into float64 is three times as fast as numpy's.
        cumulative = _as_numpy(weights.cumsum(-1, dtype=torch.float64))
        total = cumulative[-1]
        assert total > 0.0, "nothing to draw from"
        u = uniform(self.seed, purpose, self.origin + offset, self.origin)
        # The first sum beyond the target is at a token with weight: the others add nothing.
        index = int(np.searchsorted(cumulative, u * total, side="right"))
        if index == len(cumulative):  # u times the total can round up to the total
            index = int(np.searchsorted(cumulative, total, side="left"))
        return index


class Noise:
    """All the noise of one request.

    Args:
        seed: 0 to `MAX_SEED`.
        coupled: whether the request's rule is `coupled`.
    """

    def __init__(self, seed: int, *, coupled: bool = False) -> None:
        self.seed = seed
        self.coupled = coupled

    def at(self, origin: int) -> RoundNoise:
        """The noise of the round that begins with `origin` committed tokens."""
        return RoundNoise(self.seed, origin, coupled=self.coupled)


def _as_numpy(row: Tensor) -> NDArray[np.float64]:
    array = row.detach()
    if array.device.type != "cpu":
        array = array.to("cpu")
    return array.numpy()


def _require_law_dtype(row: Tensor) -> None:
    if row.dtype not in (torch.float32, torch.float64):
        raise AssertionError(f"a law must be float32 or float64, not {row.dtype}")
