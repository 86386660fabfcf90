"""What rounds bring under each verification rule: counted in real ones, and expected.

Counted rounds hold alpha against what decoding does. Expected ones compare two rules on the same
p and q, without the luck of single verdicts: the rules themselves are asked. They ask for decisions
only, so every sequence of answers to "accept?" can be walked with its probability; for a draft of
gamma tokens there are gamma + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.measure.estimates import Interval, estimate_rounds
from outrider.measure.texts import BATCH, Text
from outrider.models import Feed, Model, Prompt
from outrider.randomness import RoundNoise
from outrider.requests import Request
from outrider.sampling import History, SamplingPolicy
from outrider.threads import single_threaded
from outrider.verification import RULES, Draft, Rule, block, rejection

__all__ = ["BlockGain", "block_gain", "count_rounds", "expected_accepted"]


class _Answers:
    """Answers "accept?" as told, then always yes; what that path's probability is."""

    def __init__(self, script: Sequence[bool]) -> None:
        self.given: list[bool] = list(script)
        self.chances: list[float] = []
        self.probability = 1.0

    def accepts(self, offset: int, p: float, q: float) -> bool:
        chance = min(1.0, p / q) if q > 0 else float(p > 0)
        if len(self.chances) == len(self.given):
            self.given.append(True)
        answer = self.given[len(self.chances)]
        self.chances.append(chance)
        self.probability *= chance if answer else 1.0 - chance
        return answer

    def residual(self, offset: int, weights: Tensor) -> int:
        return 0

    def token(self, offset: int, p: Tensor) -> int:
        raise AssertionError("a rule that shares noise has no tests to walk")


def expected_accepted(rule: Rule, p: Tensor, draft: Draft) -> float:
    """The expected number of accepted tokens of a draft, over the rule's own draws.

    Args:
        rule: `rejection` or `block`.
        p: [gamma + 1, V], rows sum to 1.
        draft: gamma tokens and their laws.
    """
    total = 0.0
    scripts: list[list[bool]] = [[]]
    while scripts:
        script = scripts.pop()
        noise = _Answers(script)
        verdict = rule(p, draft, noise)
        total += noise.probability * verdict.accepted
        # Every yes that this path added of its own accord has a no beside it.
        for i in range(len(script), len(noise.given)):
            if noise.chances[i] < 1.0:
                scripts.append([*noise.given[:i], False])
    return total


@dataclass(frozen=True)
class BlockGain:
    """Expected tokens per round of both rules over the same drafts."""

    rejection: float
    block: float
    num_drafts: int

    def as_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return asdict(self) | {"factor": self.factor}

    @property
    def factor(self) -> float:
        """Tokens per round of `block` over those of `rejection`."""
        return self.block / self.rejection


def block_gain(
    target: Model,
    drafter: Drafter,
    texts: Sequence[Text],
    policy: SamplingPolicy,
    *,
    gamma: int,
    num_drafts: int,
) -> BlockGain | None:
    """Expected tokens per round with drafts made at positions spread evenly over the texts.

    None where the rules agree whatever is drafted: greedy laws, and point masses in every draft
    (the weights of `block` are then products of probabilities, and its tests those of `rejection`).

    Args:
        target: the model whose law is kept.
        drafter: what proposes.
        texts: what the target wrote under `policy`.
        policy: how both sample.
        gamma: tokens of every draft, at least 1.
        num_drafts: how many; fewer where the texts are short.
    """
    if policy.is_greedy:
        return None
    places = [(text, i) for text in texts for i in range(len(text.tokens))]
    spread = range(0, len(places), max(1, len(places) // num_drafts))
    sums, has_law = [0.0, 0.0], False
    copies: list[tuple[History, Draft]] = []  # looked at only if other drafts have laws

    def compare(history: History, draft: Draft) -> None:
        p = policy.probs(_verified(target, history.tokens, draft), history, draft.tokens)
        with single_threaded():
            for k, rule in enumerate((rejection, block)):
                sums[k] += expected_accepted(rule, p, draft)

    for number in spread:
        text, offset = places[number]
        prefix = [*text.prompt, *text.tokens[:offset]]
        history = History(prefix, target.eos_ids)
        history.prompt_length = len(text.prompt)
        length = min(gamma, target.context_length - len(prefix))
        draft = Draft([])
        if length > 0:
            noise = RoundNoise(number, len(prefix))
            with single_threaded():
                [draft] = drafter.propose([history], [length], [policy], [noise])
            drafter.release(history)
        if draft.q is not None:
            has_law = True
            compare(history, draft)
        elif draft.tokens:
            copies.append((history, draft))
    if not has_law:
        return None
    for history, draft in copies:
        compare(history, draft)
    return BlockGain(1.0 + sums[0] / len(spread), 1.0 + sums[1] / len(spread), len(spread))


def _verified(target: Model, prefix: Sequence[int], draft: Draft) -> Tensor:
    """The target's logits [gamma + 1, V] at the draft's positions."""
    sequence = target.start(Prompt(prefix))
    try:
        unseen = [*prefix[sequence.length :], *draft.tokens]
        return target.score([Feed(sequence, unseen, len(draft.tokens) + 1)])
    finally:
        sequence.close()


def count_rounds(
    target: Model,
    drafter: Drafter,
    texts: Sequence[Text],
    policy: SamplingPolicy,
    *,
    gamma: int,
    alpha_drafted: Mapping[str, object] | None,
) -> dict[str, object]:
    """What real rounds do under every rule, ready for JSON: to be held against alpha.

    Under a greedy policy all rules decide alike, and only `rejection` is run. `agrees` says whether
    the intervals of alpha_hat under `rejection` and of alpha where something is drafted overlap.

    Args:
        target, drafter: decode.
        texts: whose prompts are answered, by outputs as long as the longest of them: how easy text
            is changes with its length.
        policy: how both sample.
        gamma: tokens drafted in every round.
        alpha_drafted: see `alpha_row`.
    """
    facts: dict[str, object] = {}
    longest = max(len(text.tokens) for text in texts)
    for rule in ["rejection"] if policy.is_greedy else RULES:
        results = Engine(target, drafter, max_batch=BATCH).generate(
            [
                Request(
                    text.prompt,
                    policy,
                    max_new_tokens=longest,
                    gamma=gamma,
                    rule=rule,
                    seed=number,
                )
                for number, text in enumerate(texts)
            ]
        )
        found = estimate_rounds([result.trace for result in results])
        per_call, alpha_hat = found.tokens_per_call, found.alpha_hat
        facts[rule] = {
            "gamma": gamma,
            "num_rounds": found.num_rounds,
            "tokens_per_call": per_call.as_dict(),
            "alpha_hat": None if alpha_hat is None else alpha_hat.as_dict(),
            "accepted_counts": list(found.accepted_counts),
        }
        if rule == "rejection" and alpha_hat is not None and alpha_drafted is not None:
            facts["agrees"] = _overlap(alpha_hat, alpha_drafted)
    return facts


def _overlap(alpha_hat: Interval, alpha: Mapping[str, object]) -> bool:
    low, high = alpha["low"], alpha["high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    return alpha_hat.low <= high and low <= alpha_hat.high
