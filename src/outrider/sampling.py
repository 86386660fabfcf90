"""From logits to the law a token is drawn from (Leviathan et al. 2023, section 2.2).

Whatever the user asks for (argmax, temperature, top-k, penalties, ...) becomes one row of
probabilities; drawing from that row is all that is left to do. The rules of `verification` see
only such rows, so one algorithm serves every setting.

The order is the one of Hugging Face transformers: logit bias, penalties, minimum length, bans,
custom processors, then temperature, top-k, top-p, min-p, typical-p, each filter on the renormalised
rest of the one before. Tokens that tie at a filter's border are kept together: the law must not
depend on the order in which a sort leaves equal values.

Letters: n rows, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import NothingToDraw, NumericalError, UsageError

__all__ = ["History", "LogitsProcessor", "SamplingPolicy"]

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Hugging Face's call form: `processor(input_ids [1, L], scores [1, V]) -> scores [1, V]`.

It must be a function of its two arguments alone: it is called for drafted positions too, and a
rejected draft is not announced to it.
"""

_SLICES = (2.0e-4, 2.0e-5, 1.0e-6, 0.0)
"""Top-p looks at the tokens above these probabilities in turn; see `_nucleus_border`."""


class History:
    """The tokens of one request: the prompt and what was emitted after it.

    Args:
        prompt: token ids, at least one.
        end_ids: ids that end the text (EOS and stop tokens); banned while fewer than
            `min_new_tokens` tokens are out.
    """

    __slots__ = ("end_ids", "prompt_length", "tokens")

    def __init__(self, prompt: Sequence[int], end_ids: frozenset[int] = frozenset()) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.end_ids = end_ids

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The tokens emitted so far."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class SamplingPolicy:
    """How a model's logits become the law that its tokens are drawn from.

    The defaults change nothing but the temperature: 0, which is greedy decoding.

    Attributes:
        temperature: 0 for greedy (a one-hot row), else the divisor of the logits.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass, (0, 1].
        min_p: drop tokens below this fraction of the likeliest one's probability, [0, 1].
        typical_p: keep the tokens closest to the expected information, up to this mass, (0, 1]
            (Meister et al. 2023).
        repetition_penalty: divide positive and multiply negative logits of tokens seen in prompt or
            output; 1 is off.
        presence_penalty: subtracted once from the logit of every token in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> number added to its logit.
        banned_tokens: ids that are never emitted.
        min_new_tokens: no end token before this many tokens are out.
        processors: functions in Hugging Face's `LogitsProcessor` form, called once per position.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, (int, float)):
                _require_number(item.name, value, whole=isinstance(item.default, int))
        _require(self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature)
        _require(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 is off)", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1", self.min_p)
        _require(
            0 < self.typical_p <= 1, "typical_p", "above 0 and at most 1 (1 is off)", self.typical_p
        )
        _require(
            self.repetition_penalty > 0,
            "repetition_penalty",
            "above 0 (1 is off)",
            self.repetition_penalty,
        )
        _require(self.min_new_tokens >= 0, "min_new_tokens", "0 or more", self.min_new_tokens)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must map ids to numbers, not {self.logit_bias!r}")
        _require_ids("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _require_number(f"logit_bias[{token}]", bias, whole=False)
            _require(abs(bias) < 1e30, f"logit_bias[{token}]", "within 1e30 of 0", bias)
        _require_ids("banned_tokens", self.banned_tokens)
        processors: object = self.processors
        if not isinstance(processors, Sequence) or not all(map(callable, processors)):
            raise UsageError(f"processors must be a sequence of functions, not {processors!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether every row is one-hot."""
        return self.temperature == 0

    @property
    def names_ids(self) -> bool:
        """Whether it matters which ids the logits are of: biases, penalties, bans, processors."""
        return self._names_ids(too_short=self.min_new_tokens > 0)

    def _names_ids(self, too_short: bool) -> bool:
        """The same where it is known whether the output is too short to end."""
        return bool(
            self.logit_bias
            or self.banned_tokens
            or self.processors
            or too_short
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids outside 0..vocab_size - 1 in `logit_bias` and `banned_tokens`."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned_tokens", self.banned_tokens)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise UsageError(
                        f"{name}: token id {token} is outside the vocabulary; "
                        f"ids of this model run from 0 to {vocab_size - 1}"
                    )

    def probs(self, logits: Tensor, history: History, drafted: Sequence[int] = ()) -> Tensor:
        """Rows that sum to 1: the law of the token at each of n neighbouring positions.

        Leviathan et al. 2023, section 2.2. The last row's prefix is `history` and all of `drafted`;
        each row before it has one drafted token less:

            history [a b], drafted [c d], three rows: laws after [a b], [a b c], [a b c d]
            history [a b], drafted [c d], one row:    the law after [a b c d]

        Args:
            logits: [n, V], any floating dtype, n at most len(drafted) + 1. Not modified.
            history: the request's tokens.
            drafted: tokens drafted after them.

        Returns:
            [n, V] in float32, or float64 for float64 logits. Exact zeros where a token is excluded.

        Raises:
            NumericalError: a row with NaN, +infinity, or nothing but -infinity.
            NothingToDraw: the policy leaves a row without any token.
        """
        scores, whose = self._processed(logits, history, drafted)
        if self.is_greedy:
            return _one_hot(scores, whose)
        peak = scores.amax(-1)
        _check_peaks(peak.tolist(), whose)
        if self.temperature != 1:
            # Subtracting the peak first keeps a tiny temperature from overflowing.
            # Beyond these bounds float32 has no finite quotient, and the law is at its limit.
            scores = (scores - peak[:, None]).div_(min(max(self.temperature, 1e-30), 1e30))
        return self._filter(scores.softmax(-1))

    def choices(self, logits: Tensor, history: History, drafted: Sequence[int] = ()) -> list[int]:
        """The token of each of n neighbouring positions under a greedy policy, without its rows.

        Where `probs` has its ones, and the same errors; a row of V zeros costs more to write and to
        read than the choice itself.

        Args:
            logits: [n, V], as for `probs`.
            history: the request's tokens.
            drafted: tokens drafted after them.

        Returns:
            n ids.
        """
        assert self.is_greedy, self
        return _best(*self._processed(logits, history, drafted))

    def _processed(
        self, logits: Tensor, history: History, drafted: Sequence[int]
    ) -> tuple[Tensor, str]:
        """Logits after all but temperature and filters, and what to call them in an error."""
        assert 0 < len(logits) <= len(drafted) + 1, (len(logits), len(drafted))
        scores = logits if logits.dtype == torch.float64 else logits.float()
        processed = self._process(scores, history, drafted)
        whose = "the model's logits"
        if processed is scores:
            return scores, whose
        _check_peaks(scores.amax(-1).tolist(), whose)
        if -math.inf in processed.amax(-1).tolist():
            raise NothingToDraw(
                "the sampling settings leave no token to draw: every one is banned; "
                "allow at least one token at each position"
            )
        return processed, "the processed logits"

    def _process(self, scores: Tensor, history: History, drafted: Sequence[int]) -> Tensor:
        """Logits after biases, penalties, bans and processors; `scores` itself if none apply."""
        num_rows, vocab_size = scores.shape
        first = len(drafted) - (num_rows - 1)  # drafted tokens in front of row 0
        num_emitted = len(history) - history.prompt_length
        too_short = bool(history.end_ids) and num_emitted + first < self.min_new_tokens
        if not self._names_ids(too_short):
            return scores
        counting = self.presence_penalty or self.frequency_penalty
        repeating = self.repetition_penalty != 1

        scores = scores.clone()
        if self.logit_bias:
            ids = [token for token in self.logit_bias if token < vocab_size]
            bias = [self.logit_bias[token] for token in ids]
            scores[:, ids] += torch.tensor(bias, dtype=scores.dtype, device=scores.device)
        for row in range(num_rows):
            prefix = drafted[: first + row]
            if repeating:
                seen = np.unique([*history.tokens, *prefix])
                _penalise_repetition(scores[row], seen, self.repetition_penalty)
            if counting:
                used, counts = np.unique([*history.output, *prefix], return_counts=True)
                penalty = self.presence_penalty + self.frequency_penalty * counts
                keep = used < vocab_size
                where = torch.as_tensor(used[keep].astype(np.int64), device=scores.device)
                scores[row, where] -= torch.as_tensor(penalty[keep]).to(scores)
            if num_emitted + len(prefix) < self.min_new_tokens:
                scores[row, [token for token in history.end_ids if token < vocab_size]] = -math.inf
        if self.banned_tokens:
            scores[:, [token for token in self.banned_tokens if token < vocab_size]] = -math.inf
        if self.processors:
            for row in range(num_rows):
                prefix_ids = torch.tensor(
                    [[*history.tokens, *drafted[: first + row]]], device=scores.device
                )
                for processor in self.processors:
                    scores[row] = processor(prefix_ids, scores[row : row + 1])[0]
        return scores

    def _filter(self, p: Tensor) -> Tensor:
        """`p` [n, V] with the filters applied, renormalised after each. `p` is overwritten."""
        if 0 < self.top_k < p.shape[-1]:
            p = _drop_below(p, p.topk(self.top_k, dim=-1).values[:, -1].tolist())
        if self.top_p < 1:
            p = _drop_below(p, [_nucleus_border(row, self.top_p) for row in _as_numpy(p)])
        if self.min_p > 0:
            p = _drop_below(p, (self.min_p * p.amax(-1)).tolist())
        if self.typical_p < 1:
            for row in p:
                row.masked_fill_(_atypical(row, self.typical_p), 0.0)
            p = _renormalised(p)
        return p


def _drop_below(p: Tensor, borders: Sequence[float]) -> Tensor:
    """`p` [n, V] with zeros where row i is below borders[i], renormalised; in place."""
    kind = np.float64 if p.dtype == torch.float64 else np.float32
    for row, border in zip(p, borders, strict=True):
        # `threshold_` keeps what is strictly above: the number just below the border keeps ties.
        torch.threshold_(row, float(np.nextafter(kind(border), kind(0))), 0.0)
    return _renormalised(p)


def _renormalised(p: Tensor) -> Tensor:
    return p.div_(p.sum(-1, keepdim=True))


def _nucleus_border(p: NDArray[np.floating], mass: float) -> float:
    """The largest t such that the tokens with probability >= t have at least `mass`; `p` is [V].

    Sorting a large vocabulary costs more than a small model's pass. The likeliest tokens are cut
    off first, and when their mass is enough, only they are sorted.
    """
    for bound in _SLICES:
        slice_ = p[p >= bound]
        if slice_.sum(dtype=np.float64) >= mass:
            break
    slice_.sort()
    cumulative = np.cumsum(slice_[::-1], dtype=np.float64)
    last = int(np.searchsorted(cumulative, mass))
    # Rounding can leave the whole row's total a hair below `mass`.
    return float(slice_[::-1][min(last, len(slice_) - 1)])


def _atypical(p: Tensor, mass: float) -> Tensor:
    """Which tokens of the row `p` [V] typical-p drops (Meister et al. 2023); bool [V].

    Kept are the tokens whose information is closest to the entropy, up to `mass`.
    """
    distance = (-p.log() - torch.special.entr(p).sum()).abs_()
    key, weights = _as_numpy(distance), _as_numpy(p)
    near = np.flatnonzero(key <= 1.0)
    if weights[near].sum(dtype=np.float64) < mass:
        near = np.flatnonzero(weights)
    near = near[np.argsort(key[near], kind="stable")]
    cumulative = np.cumsum(weights[near], dtype=np.float64)
    last = int(np.searchsorted(cumulative, mass))
    dropped: Tensor = distance > float(key[near[min(last, len(near) - 1)]])
    return dropped


def _as_numpy(rows: Tensor) -> NDArray[np.floating]:
    array: NDArray[np.floating] = rows.cpu().numpy()
    return array


def _penalise_repetition(row: Tensor, ids: np.ndarray, penalty: float) -> None:
    where = torch.as_tensor(ids[ids < len(row)].astype(np.int64), device=row.device)
    values = row[where]
    row[where] = torch.where(values > 0, values / penalty, values * penalty)


def _best(scores: Tensor, whose: str) -> list[int]:
    """The first of the largest values of each row of `scores` [n, V]; refuses rows without one."""
    # NaN comes before any number, so the value found tells of every fault in the row.
    if scores.device.type != "cpu":
        best = scores.argmax(-1, keepdim=True)
        _check_peaks(scores.gather(1, best)[:, 0].tolist(), whose)
        return [int(token) for token in best[:, 0].tolist()]
    array = scores.numpy()  # its argmax is ten times as fast as torch's
    found = array.argmax(-1)
    _check_peaks(array[np.arange(len(array)), found].tolist(), whose)
    return [int(token) for token in found]


def _one_hot(scores: Tensor, whose: str) -> Tensor:
    best = _best(scores, whose)
    if scores.device.type != "cpu":
        where = torch.tensor(best, device=scores.device)[:, None]
        return torch.zeros_like(scores).scatter_(1, where, 1.0)
    hot = np.zeros_like(scores.numpy())  # pages never written to
    hot[np.arange(len(best)), best] = 1.0
    return torch.from_numpy(hot)


def _check_peaks(values: list[float], whose: str) -> None:
    """Refuse rows whose maximum is not finite; NaN anywhere in a row makes its maximum NaN."""
    if all(map(math.isfinite, values)):
        return
    row, found = next(item for item in enumerate(values) if not math.isfinite(item[1]))
    what = "nothing but -infinity" if found == -math.inf else f"{found}"
    raise NumericalError(
        f"{whose} are not a law: row {row} of {len(values)} holds {what}; "
        "the model's weights, its dtype or a custom processor are at fault"
    )


def _require_number(name: str, value: object, *, whole: bool) -> None:
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UsageError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        raise UsageError(f"{name} must fit a floating-point number") from None
    if not is_finite:
        raise UsageError(f"{name} must be finite, not {value!r}")


def _require_ids(name: str, ids: object) -> None:
    whole = (int, np.integer)
    if not isinstance(ids, (Sequence, Mapping)) or isinstance(ids, str):
        raise UsageError(f"{name} must hold token ids, not {ids!r}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, whole) or token < 0:
            raise UsageError(f"{name} must hold token ids (0 or more), not {token!r}")


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise UsageError(f"{name} must be {expected}, not {value!r}")
