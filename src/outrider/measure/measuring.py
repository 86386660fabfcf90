"""A whole measurement of a target and its drafters, piece by piece, so that it can be interrupted.

Every piece (a batch of texts, the betas along one text, the rounds of one drafter, one curve) is
kept as soon as it is known, and taken from there when the same measurement is made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.measure.alpha import (
    BASELINES,
    Betas,
    RandomDrafter,
    alpha_row,
    fitted_drafters,
    text_betas,
)
from outrider.measure.cost import (
    cost_facts,
    curve_places,
    measure_curve,
    measure_drafter,
    usual_context,
)
from outrider.measure.rounds import block_gain, count_rounds
from outrider.measure.texts import BATCH, Question, Text, choose_questions, next_texts
from outrider.measure.unfinished import Unfinished
from outrider.models import Model
from outrider.sampling import SamplingPolicy

__all__ = ["Amounts", "Measuring", "policy_words"]

FITTED = ("unigram", "bigram")

Progress = Callable[[str, float, float], None]
"""Told what has just been done, the work made so far by this call, and the work left."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        num_tokens: of target-generated text, for every policy.
        gamma: of counted rounds and of the drafts that rules are compared on.
        counted: drafters whose real rounds are counted.
        positions: of the verify-cost curve.
        contexts, batches: of the curves.
        repeats: turns of timed passes.
    """

    num_tokens: int = 10_000
    gamma: int = 5
    counted: tuple[str, ...] = ()
    positions: tuple[int, ...] = (1, 2)
    contexts: tuple[int, ...] = (256,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 5

    @property
    def fitted_tokens(self) -> int:
        """Of other text, which n-grams are counted in."""
        return max(1, self.num_tokens // 2)

    @property
    def num_drafts(self) -> int:
        """Drafts that rules are compared on."""
        return min(400, max(24, self.num_tokens // 25))

    @property
    def num_counted_texts(self) -> int:
        """Prompts whose rounds are counted, at least as many as an interval over prompts needs."""
        return min(16, max(BATCH, self.num_tokens // 400))


class Measuring:
    """A measurement that can be made, or gone on with.

    Args:
        target: the model whose law is kept.
        named: drafters by name, the main one first; may be empty.
        baselines: whether `alpha.BASELINES` are measured beside them.
        questions: prompts, encoded.
        policies: how target and drafters sample; at least one.
        amounts: how much.
        kept: what an earlier call measured; None keeps nothing.
        progress: told after every piece.

    Raises:
        UsageError: the prompts are too few.
    """

    def __init__(
        self,
        target: Model,
        named: Mapping[str, Drafter],
        questions: Sequence[Question],
        policies: Sequence[SamplingPolicy],
        amounts: Amounts,
        *,
        baselines: bool = True,
        kept: Unfinished | None = None,
        progress: Progress = lambda what, made, left: None,
    ) -> None:
        self._target = target
        self._policies = list(policies)
        self._amounts = amounts
        self._questions = list(questions)
        self._kept = kept
        self._progress = progress
        self._pieces: dict[str, object] = {}
        for record in kept.records if kept is not None else ():
            self._pieces[json.dumps(record["piece"])] = record["value"]
        self.drafters: dict[str, Drafter] = dict(named)
        self.names = list(named)
        if baselines:
            self.names += [name for name in BASELINES if name not in self.names]
        self.main = next(iter(named), "lookup")
        if "lookup" in self.names:
            self.drafters.setdefault("lookup", LookupDrafter())
        if "random" in self.names:
            self.drafters.setdefault("random", RandomDrafter(target.vocab_size))
        self._fits = any(name in FITTED for name in self.names)
        self.measured, self._fitting = choose_questions(
            questions, amounts.num_tokens, fitting=self._fits
        )
        self._left = self._made = 0.0

    @property
    def num_kept(self) -> int:
        """Pieces that need not be measured."""
        return len(self._pieces)

    # alpha

    def expect(self, *, alpha: bool, cost: bool) -> None:
        """Say what is going to be measured, so that progress knows how much work that is.

        The unit is a token of a batch of texts; the rest is guessed in it.
        """
        amounts, models = self._amounts, sum(map(self._is_model, self.names))
        self._left = 0.0
        if alpha:
            each = amounts.num_tokens * (1.5 + 0.5 * models)
            each += amounts.fitted_tokens if self._fits else 0
            counted = sum(name in self.names for name in amounts.counted)
            each += self._round_work * 3 * counted + 5.0 * amounts.num_drafts * models
            self._left += each * len(self._policies)
        if cost:
            self._left += sum(self._curve_work(*place) for place in self._places)
            self._left += 60.0 * len(self.names)

    def alpha_rows(self, policy: SamplingPolicy) -> list[dict[str, object]]:
        """A row for every drafter under one policy."""
        label = policy_words(policy)
        texts = self._texts(label, policy, "measured", self.measured, self._amounts.num_tokens)
        drafters = dict(self.drafters)
        if self._fits:
            counted = self._texts(
                label, policy, "counted", self._fitting, self._amounts.fitted_tokens
            )
            drafters |= fitted_drafters(self.names, counted, self._target)
        betas: dict[str, list[Betas]] = {name: [] for name in self.names}
        used = {name: drafters[name] for name in self.names}
        for number, text in enumerate(texts):
            found = cast(
                "dict[str, list[object]]",
                self._piece(
                    ("betas", label, number),
                    f"{label}: {number + 1} of {len(texts)} texts read",
                    0.5 * len(text.tokens) * (1 + sum(map(self._is_model, self.names))),
                    partial(self._read, used, text, policy),
                ),
            )
            for name in self.names:
                beta, match = found[name]
                betas[name].append(
                    Betas(tuple(cast("list[float | None]", beta)), cast(float, match))
                )
        return [
            self._row(name, drafters[name], label, policy, texts, betas[name])
            for name in self.names
        ]

    def _read(
        self, drafters: Mapping[str, Drafter], text: Text, policy: SamplingPolicy
    ) -> dict[str, list[object]]:
        found = text_betas(self._target, drafters, text, policy)
        return {name: [list(item.beta), item.match] for name, item in found.items()}

    def _row(
        self,
        name: str,
        drafter: Drafter,
        label: str,
        policy: SamplingPolicy,
        texts: Sequence[Text],
        betas: Sequence[Betas],
    ) -> dict[str, object]:
        gamma = self._amounts.gamma
        row: dict[str, object] = {
            "drafter": name,
            "temperature": policy.temperature,
            "policy": label,
            **alpha_row(texts, betas),
        }

        def gain() -> object:
            found = block_gain(
                self._target,
                drafter,
                texts,
                policy,
                gamma=gamma,
                num_drafts=self._amounts.num_drafts,
            )
            return None if found is None else found.as_dict() | {"gamma": gamma}

        work = 5.0 * self._amounts.num_drafts if self._is_model(name) else 0.0
        found = self._piece(
            ("gain", label, name), f"{label}: rules compared on drafts of {name}", work, gain
        )
        expected = cast("dict[str, float] | None", found)
        # Where there is nothing to compare, the rules agree.
        row["block_gain"] = 1.0 if expected is None else expected["factor"]
        row["expected_rounds"] = expected
        if name in self._amounts.counted:
            row["rounds"] = self._piece(
                ("rounds", label, name),
                f"{label}: rounds of {name} counted",
                3 * self._round_work,
                lambda: count_rounds(
                    self._target,
                    drafter,
                    texts[: self._amounts.num_counted_texts],
                    policy,
                    gamma=gamma,
                    alpha_drafted=cast("dict[str, object] | None", row["alpha_drafted"]),
                ),
            )
        return row

    def _texts(
        self,
        label: str,
        policy: SamplingPolicy,
        purpose: str,
        questions: Sequence[Question],
        num_tokens: int,
    ) -> list[Text]:
        """Texts to measure on, or to count n-grams in."""
        batches: list[list[Text]] = []
        have = 0
        while True:
            kept = self._piece(
                ("texts", label, purpose, len(batches)),
                f"{label}: {len(batches) + 1} batches of texts written",
                0.0 if have >= num_tokens else num_tokens * BATCH / max(BATCH, len(questions)),
                lambda: [
                    text.as_dict()
                    for text in next_texts(self._target, questions, policy, num_tokens, batches)
                ],
            )
            batch = [Text.from_dict(item) for item in cast("list[dict[str, object]]", kept)]
            if not batch:
                return [text for batch in batches for text in batch]
            batches.append(batch)
            have += sum(len(text.tokens) for text in batch)

    # Cost

    def cost(self) -> dict[str, object]:
        """The costs of all drafters and of the target's passes."""
        amounts = self._amounts
        main = self.drafters.get(self.main)
        context = usual_context([context for context, _ in self._places])
        curves = [
            cast(
                "dict[str, object]",
                self._piece(
                    ("curve", behind, batch),
                    f"passes behind {behind} tokens timed, batch {batch}",
                    self._curve_work(behind, batch),
                    partial(
                        measure_curve,
                        self._target,
                        None if main is None else main.model,
                        behind,
                        batch,
                        positions=amounts.positions,
                        repeats=amounts.repeats,
                    ),
                ),
            )
            for behind, batch in self._places
        ]
        question = self.measured[0]
        # What is counted is of no interest here: looking it up takes as long.
        text = Text(question.place, question.ids, question.ids)
        drafters = self.drafters | fitted_drafters(self.names, [text], self._target)
        hottest = max(self._policies, key=lambda policy: policy.temperature)
        measured = {
            name: cast(
                "dict[str, object]",
                self._piece(
                    ("drafter", name),
                    f"{name} timed",
                    60.0,
                    partial(
                        measure_drafter,
                        self._target,
                        drafters[name],
                        question.ids,
                        hottest,
                        context=context,
                        repeats=amounts.repeats,
                    ),
                ),
            )
            for name in self.names
        }
        used = {name: drafters[name] for name in self.names}
        return cost_facts(self._target, used, self.main, curves, measured)

    @property
    def _places(self) -> list[tuple[int, int]]:
        return curve_places(self._target, self._amounts.contexts, self._amounts.batches)

    def _curve_work(self, context: int, batch: int) -> float:
        rows = sum(batch * n + 4 for n in self._amounts.positions)
        return 0.6 * rows * (self._amounts.repeats + 1) + 0.6 * context * batch

    @property
    def _round_work(self) -> float:
        share = min(1.0, self._amounts.num_counted_texts / len(self.measured))
        return share * self._amounts.num_tokens

    def _is_model(self, name: str) -> bool:
        drafter = self.drafters.get(name)
        return drafter is not None and drafter.model is not None

    def _piece(
        self, key: tuple[object, ...], what: str, work: float, make: Callable[[], object]
    ) -> object:
        """What is known under `key`, or is made now and kept."""
        name = json.dumps(key)
        self._left = max(0.0, self._left - work)
        if name not in self._pieces:
            # As it comes back from a file, so that going on gives the very same.
            value = json.loads(json.dumps(make()))
            if self._kept is not None:
                self._kept.add({"piece": list(key), "value": value})
            self._pieces[name] = value
            self._made += work
            self._progress(what, self._made, self._left)
        return self._pieces[name]


def policy_words(policy: SamplingPolicy) -> str:
    """The settings that shape the law, in words."""
    if policy.is_greedy:
        return "greedy"
    words = [f"temperature {policy.temperature:g}"]
    words += [f"top-k {policy.top_k}"] if policy.top_k else []
    words += [f"top-p {policy.top_p:g}"] if policy.top_p < 1 else []
    return ", ".join(words)
