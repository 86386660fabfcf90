"""The target writes: many conversations side by side, one token of each in every pass.

All rows of a shard grow in step for a fixed number of passes, so no pass runs with few rows at the
end; a row whose conversation is over begins another. Drawing is done for all rows at once on the K
most likely ids of each; a full row of V is looked at only where the draw falls outside them.

A user's turn is answered once by every policy: where the target has written it, the others read it
from the cache. Turns that are given are shared out over the shards and answered first; what room is
left is filled with turns that the target writes. So no greedy answer is drawn twice.

A shard is a function of the settings and its number alone. Who interrupts a shard loses that one,
and gets the same again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.errors import UsageError
from outrider.models import CachedSequence, Feed, Model, Prompt
from outrider.training.conversations import OPENERS, Conversation, Frame, Part, chat_frame
from outrider.training.shards import Shard

__all__ = ["POLICIES", "DrawPolicy", "Writer", "draw"]

_CANDIDATES = 64
"""Ids that are drawn from without looking at the whole row."""
_OPENED = 0.5
"""Share of conversations whose first words are given."""
_SECOND_TURN = 0.3
_COLDEST = 0.01


@dataclass(frozen=True)
class DrawPolicy:
    """How answers are drawn: temperature (0: the most likely id) and top-p, written 0.7/0.9.

    Raises:
        UsageError: a temperature below 0 or so low that it is 0, a top-p outside (0, 1], or one
            beside temperature 0, where it changes nothing.
    """

    temperature: float
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn by."""
        is_greedy = self.temperature == 0.0
        if not (is_greedy or _COLDEST <= self.temperature < math.inf):
            raise UsageError(
                f"temperatures must be 0 or at least {_COLDEST}, not {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0 or (is_greedy and self.top_p < 1.0):
            raise UsageError(
                "top-p must be above 0 and at most 1, and has no meaning at temperature 0; got "
                f"{self.top_p:g} at temperature {self.temperature:g}"
            )

    def __str__(self) -> str:
        """As the command line takes it."""
        return f"{self.temperature:g}" + (f"/{self.top_p:g}" if self.top_p < 1.0 else "")


POLICIES = (DrawPolicy(0.0), DrawPolicy(0.7, 0.9), DrawPolicy(1.0))


_USERS = DrawPolicy(1.0)


@dataclass
class _Row:
    """A conversation being written: its place in the cache, and the law at every drawn token."""

    text: Conversation
    table: CachedSequence
    places: list[int] = field(default_factory=list)
    laws: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Writer:
    """Writes shards.

    Args:
        target: the model.
        seed: of everything drawn.
        num_rows: conversations side by side.
        num_passes: of every shard; each row gets one token in each.
        top_k: K, the ids of which probabilities are kept.
        policies: every turn of a user is answered by each of them.
        prompts: conversations to hold first: of each, the token ids of its users' turns.
        num_shards: over which the prompts are shared out; each answers as many of its own as fit.
        max_words: most tokens of a user's turn, and of an answer.
    """

    def __init__(
        self,
        target: Model,
        *,
        seed: int = 0,
        num_rows: int = 48,
        num_passes: int = 400,
        top_k: int = 64,
        policies: Sequence[DrawPolicy] = POLICIES,
        prompts: Sequence[Sequence[Sequence[int]]] = (),
        num_shards: int = 1,
        max_words: tuple[int, int] = (160, 320),
    ) -> None:
        assert target.tokenizer is not None, "a target without text writes none"
        self._target = target
        self._seed = seed
        self._num_rows = num_rows
        self._num_passes = num_passes
        self._top_k = top_k
        self._policies = tuple(policies)
        self._prompts = [tuple(tuple(turn) for turn in turns) for turns in prompts]
        self._num_shards = num_shards
        self._max_words = max_words
        self._frame: Frame = chat_frame(target.tokenizer, target.eos_ids)
        self._openers = [target.tokenizer.encode(text, special=False) for text in OPENERS]

    @property
    def tokens_per_shard(self) -> int:
        """Tokens that the target draws for a shard."""
        return self._num_rows * self._num_passes

    @torch.inference_mode()
    def shard(self, number: int) -> Shard:
        """Write shard `number`."""
        # What is cached already would make other passes of this shard, with other roundings.
        self._target.forget()
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        waiting = deque(self._asked(number))
        rows = [self._open(waiting, generator) for _ in range(self._num_rows)]
        done: list[_Row] = []
        for _ in range(self._num_passes):
            for index, row in enumerate(rows):
                if row.text.is_over or len(row.text.ids) >= self._target.context_length - 1:
                    row.table.close()
                    done.append(row)
                    rows[index] = self._open(waiting, generator)
            logits = self._target.score(
                [Feed(row.table, row.text.ids[row.table.length :], 1) for row in rows]
            )
            policies = [self._policy(row.text) for row in rows]
            tokens, top_ids, top_probs = draw(logits, policies, self._top_k, generator)
            for index, row in enumerate(rows):
                row.places.append(len(row.text.ids))
                row.laws.append((top_ids[index], top_probs[index]))
                was_asking = row.text.speaker is Part.USER
                row.text.add(tokens[index])
                if was_asking and row.text.speaker is Part.ANSWER:
                    waiting.extend(self._others(row.text))
        for row in rows:
            row.table.close()
        return _packed([*done, *rows])

    def _open(self, waiting: deque[Conversation], generator: torch.Generator) -> _Row:
        """A conversation that waits for an answer, or else a new one."""
        if waiting:
            text = waiting.popleft()
        else:
            text = self._begun(generator)
        return _Row(text, self._target.start(Prompt(text.ids)))

    def _asked(self, number: int) -> list[Conversation]:
        """The conversations that shard `number` begins with."""
        asked = []
        for turns in self._prompts[number :: self._num_shards]:
            for policy in range(len(self._policies)):
                text = Conversation(self._frame, policy, len(turns), self._max_words, turns)
                text.begin()
                asked.append(text)
        return asked

    def _others(self, text: Conversation) -> list[Conversation]:
        """The same question for each of the other policies; its words were drawn only once."""
        return [
            replace(
                text,
                policy=(text.policy + step) % len(self._policies),
                ids=list(text.ids),
                parts=[Part.FRAME] * len(text.ids),
            )
            for step in range(1, len(self._policies))
        ]

    def _begun(self, generator: torch.Generator) -> Conversation:
        def chance() -> float:
            return float(torch.rand((), generator=generator))

        def choose(number: int) -> int:
            return int(torch.randint(number, (), generator=generator))

        text = Conversation(
            self._frame,
            policy=choose(len(self._policies)),
            num_turns=2 if chance() < _SECOND_TURN else 1,
            max_words=self._max_words,
        )
        if self._frame.is_chat and chance() < _OPENED:
            text.begin(self._openers[choose(len(self._openers))])
        else:
            text.begin()
        return text

    def _policy(self, text: Conversation) -> DrawPolicy:
        return self._policies[text.policy] if text.speaker is Part.ANSWER else _USERS


def draw(
    logits: Tensor, policies: Sequence[DrawPolicy], top_k: int, generator: torch.Generator
) -> tuple[list[int], Tensor, Tensor]:
    """One token of each row by its policy, and the rows' most likely ids.

    A nucleus (top-p) that is not within the most likely 64 ids ends there: what is drawn here is
    text to learn from, under no promise.

    Args:
        logits: [R, V].
        policies: R of them.
        top_k: K.
        generator: of the draws; every row uses one uniform, and a second one where the first falls
            outside the candidates.

    Returns:
        R tokens; ids int32 [R, K] and probabilities float16 [R, K] at temperature 1, falling.
    """
    logits = logits.float()
    num_candidates = min(max(_CANDIDATES, top_k), logits.shape[1])
    # Where the model runs, only what is over whole rows is done.
    values, ids = (item.cpu() for item in logits.topk(num_candidates))
    probs = (values - logits.logsumexp(dim=1, keepdim=True).cpu()).exp()
    temperatures = torch.tensor([policy.temperature for policy in policies])[:, None]
    top_ps = torch.tensor([policy.top_p for policy in policies])[:, None]
    # Without a filter the rest of the row counts too; otherwise candidates only.
    is_plain = (temperatures > 0.0) & (top_ps == 1.0)
    temperatures = temperatures.clamp(min=1e-4)
    tempered = (values / temperatures).softmax(dim=1)
    nucleus = tempered.cumsum(dim=1) - tempered < top_ps
    tempered = tempered * nucleus
    laws = tempered / tempered.sum(dim=1, keepdim=True)
    laws = torch.where(is_plain & (temperatures == 1.0), probs, laws)
    for temperature in set(temperatures[is_plain & (temperatures != 1.0)].tolist()):
        chosen = (is_plain & (temperatures == temperature))[:, 0]
        rows = logits[chosen.to(logits.device)]
        whole = (rows / temperature).logsumexp(dim=1, keepdim=True).cpu()
        laws[chosen] = (values[chosen] / temperature - whole).exp()
    uniforms = torch.rand(len(policies), 1, generator=generator)
    places = torch.searchsorted(laws.cumsum(dim=1), uniforms, right=True)[:, 0]
    tokens = []
    for row, place in enumerate(places.tolist()):
        if place < num_candidates:
            tokens.append(int(ids[row, place]))
        elif is_plain[row] and num_candidates < logits.shape[1]:
            law = (logits[row].cpu() / temperatures[row]).softmax(dim=0)
            rest = law.index_fill(0, ids[row], 0.0)
            tokens.append(int(torch.multinomial(rest, 1, generator=generator)))
        else:  # rounding: the law's sum fell short of the uniform
            tokens.append(int(ids[row, int(laws[row].nonzero()[-1])]))
    return tokens, ids[:, :top_k].to(torch.int32), probs[:, :top_k].to(torch.float16)


def _packed(rows: Sequence[_Row]) -> Shard:
    begins = [0]
    places, parts, policies = [], [], []
    for row in rows:
        places += [begins[-1] + place for place in row.places]
        parts += [int(row.text.parts[place]) for place in row.places]
        policies += [row.text.policy] * len(row.places)
        begins.append(begins[-1] + len(row.text.ids))
    laws = [law for row in rows for law in row.laws]
    return Shard(
        tokens=torch.tensor([token for row in rows for token in row.text.ids], dtype=torch.int32),
        begins=torch.tensor(begins, dtype=torch.int32),
        places=torch.tensor(places, dtype=torch.int32),
        parts=torch.tensor(parts, dtype=torch.uint8),
        policies=torch.tensor(policies, dtype=torch.uint8),
        top_ids=torch.stack([ids for ids, _ in laws]),
        top_probs=torch.stack([probs for _, probs in laws]),
    )
