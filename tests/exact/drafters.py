"""Drafters for proofs only: random, hostile, and three that break the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.draft_length import GoOn
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

Law = Callable[[Sequence[int]], Tensor]


class TestDrafter:
    """Common ground: nothing to learn, nothing to forget."""

    name = "test"
    model = None
    __test__ = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        return [
            self.one(sequence, gamma, policy, dice)
            for sequence, gamma, policy, dice in zip(
                sequences, gammas, policies, noise, strict=True
            )
        ]

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        raise NotImplementedError

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None: ...

    def release(self, sequence: History) -> None: ...


class UniformDrafter(TestDrafter):
    """Every token is equally likely, whatever the text and the policy."""

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        q = torch.full((gamma, self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        return Draft([noise.draft(i, q[i]) for i in range(gamma)], q)


class LawDrafter(TestDrafter):
    """A drafter with a law of its own, or of the target."""

    def __init__(self, vocab_size: int, law: Law) -> None:
        super().__init__(vocab_size)
        self.law = law

    def each(
        self, sequence: History, gamma: int, choose: Callable[[int, Tensor], tuple[int, Tensor]]
    ) -> Draft:
        """gamma tokens and the laws reported, as `choose` has them for each place and its law."""
        tokens: list[int] = []
        rows: list[Tensor] = []
        for place in range(gamma):
            law = self.law([*sequence.tokens, *tokens]).double().softmax(-1)
            token, row = choose(place, law)
            tokens.append(token)
            rows.append(row)
        return Draft(tokens, torch.stack(rows))


class HostileDrafter(LawDrafter):
    """Always the token that the target thinks least of, as a point mass."""

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        tokens: list[int] = []
        for _ in range(gamma):
            tokens.append(int(self.law([*sequence.tokens, *tokens]).argmin()))
        return Draft(tokens)


class StoppingDrafter(LawDrafter):
    """Draws from a law of its own and stops after a token it finds odd, keeping that token.

    Whether it stops depends on the tokens drawn: allowed, because nothing drawn is dropped.
    """

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        while len(tokens) < gamma and not (tokens and tokens[-1] == 0):
            row = self.law([*sequence.tokens, *tokens]).double().softmax(-1)
            tokens.append(noise.draft(len(tokens), row))
            rows.append(row)
        return Draft(tokens, torch.stack(rows))


class DroppingDrafter(LawDrafter):
    """Breaks the contract: a drawn token of low confidence is thrown away."""

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        while len(tokens) < gamma:
            row = self.law([*sequence.tokens, *tokens]).double().softmax(-1)
            token = noise.draft(len(tokens), row)
            if row[token] < 0.4:
                break
            tokens.append(token)
            rows.append(row)
        return Draft(tokens, torch.stack(rows) if rows else None)


class AskingTooLateDrafter(LawDrafter):
    """Breaks the contract: asks whether to go on when it has drawn the token, and then drops it."""

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        drafts = []
        for sequence, gamma, dice, more in zip(sequences, gammas, noise, go_on, strict=True):
            tokens: list[int] = []
            rows: list[Tensor] = []
            sure: list[float] = []
            while len(tokens) < gamma:
                row = self.law([*sequence.tokens, *tokens]).double().softmax(-1)
                token = dice.draft(len(tokens), row)
                if not more(sure, [float(row[token])]):
                    break
                tokens.append(token)
                rows.append(row)
                sure.append(float(row[token]))
            drafts.append(Draft(tokens, torch.stack(rows) if rows else None))
        return drafts


class UnfilteredDrafter(LawDrafter):
    """Breaks the contract: draws from its filtered law, reports the unfiltered one as q."""

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        for i in range(gamma):
            logits = self.law([*sequence.tokens, *tokens])
            rows.append(logits.double().softmax(-1))
            filtered = SamplingPolicy(temperature=1, top_k=2).probs(logits[None], sequence, tokens)
            tokens.append(noise.draft(i, filtered[0]))
        return Draft(tokens, torch.stack(rows))


class PeekingDrafter(LawDrafter):
    """Breaks the contract: draws a token, and copies instead where it does not like that one.

    Which of two sources proposes must be settled before anything is drawn.
    """

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        def peek(place: int, law: Tensor) -> tuple[int, Tensor]:
            token = noise.draft(place, law)
            if law[token] >= 0.4:
                return token, law
            copy = sequence.tokens[0]
            return copy, torch.zeros_like(law).index_fill_(0, torch.tensor(copy), 1.0)

        return self.each(sequence, gamma, peek)


class SoftGreedyDrafter(LawDrafter):
    """Breaks the contract: drafts the likeliest token, reports the whole law as q."""

    def one(
        self, sequence: History, gamma: int, policy: SamplingPolicy, noise: RoundNoise
    ) -> Draft:
        return self.each(sequence, gamma, lambda _, law: (int(law.argmax()), law))
