"""Level 2: every draft and verdict of a round, with exact probabilities, against plain decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch

from exact.blocks import BlockModel
from exact.controls import WRONG_RULES
from exact.drafters import (
    AskingTooLateDrafter,
    DroppingDrafter,
    HostileDrafter,
    PeekingDrafter,
    SoftGreedyDrafter,
    StoppingDrafter,
    UnfilteredDrafter,
    UniformDrafter,
)
from exact.exhaustive import (
    ExhaustiveNoise,
    Law,
    Target,
    Walk,
    round_law,
    total_variation,
    walks,
)
from outrider import decoding
from outrider.costs import Costs
from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter, fit_ngrams
from outrider.models import Feed
from outrider.models.toy import ToyModel, hashed_law
from outrider.models.trimmed import TrimmedModel, Vocabulary
from outrider.pass_width import PassWidth
from outrider.randomness import Purpose
from outrider.requests import Request
from outrider.sampling import History, SamplingPolicy
from outrider.verification import RULES, Draft

SIZE = 3
TARGET = hashed_law(SIZE, seed=11, order=3, sharpness=1.5)
OTHER = hashed_law(SIZE, seed=12, order=2, sharpness=1.5)
PROMPT = [0, 1, 2, 0, 1]
EXACT = 1e-12


def favour_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the length of the text."""
    return scores + torch.tensor([0.7, -0.4, 0.1], dtype=scores.dtype) * (ids.shape[1] % 2)


POLICIES = {
    "greedy": SamplingPolicy(),
    "temperature": SamplingPolicy(temperature=0.7),
    "hot": SamplingPolicy(temperature=3.0),
    "top_k": SamplingPolicy(temperature=1.0, top_k=2),
    "top_p": SamplingPolicy(temperature=1.0, top_p=0.8),
    "min_p": SamplingPolicy(temperature=1.0, min_p=0.3),
    "typical_p": SamplingPolicy(temperature=1.0, typical_p=0.7),
    "penalties": SamplingPolicy(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "bias_and_ban": SamplingPolicy(temperature=1.0, logit_bias={0: 1.1}, banned_tokens=(1,)),
    "minimum": SamplingPolicy(temperature=1.0, min_new_tokens=2),
    "processor": SamplingPolicy(temperature=1.0, processors=(favour_even,)),
    "everything": SamplingPolicy(
        temperature=0.8,
        top_k=2,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.2,
        min_new_tokens=1,
        processors=(favour_even,),
    ),
}


def trimmed() -> TrimmedModel:
    """Knows ids 0 and 2, and reads 1 as 2."""
    vocabulary = Vocabulary(torch.tensor([0, 2]), torch.tensor([0, 1, 1]), "")
    return TrimmedModel(ToyModel(hashed_law(2, seed=5), 2), vocabulary)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(ToyModel(OTHER, SIZE), target_vocab_size=SIZE),
    "small_vocabulary": lambda: ModelDrafter(
        ToyModel(hashed_law(2, seed=5), 2), target_vocab_size=SIZE
    ),
    "itself": lambda: ModelDrafter(ToyModel(TARGET, SIZE), target_vocab_size=SIZE),
    "trimmed": lambda: ModelDrafter(trimmed(), target_vocab_size=SIZE),
    "lookup": LookupDrafter,
    "lookup_first": lambda: LookupFirst(
        ModelDrafter(ToyModel(OTHER, SIZE), target_vocab_size=SIZE), min_match=1
    ),
    "model_behind_lookup": lambda: LookupFirst(
        ModelDrafter(ToyModel(OTHER, SIZE), target_vocab_size=SIZE), min_match=9
    ),
    "ngram": lambda: NgramDrafter(fit_ngrams([[0, 1, 2, 2, 1, 0, 0, 2]], order=3, vocab_size=SIZE)),
    "uniform": lambda: UniformDrafter(SIZE),
    "hostile": lambda: HostileDrafter(SIZE, TARGET),
    "stopping": lambda: StoppingDrafter(SIZE, OTHER),
}


def prompt_for(name: str) -> list[int]:
    # A token that the small drafter does not know would end its drafting.
    return [0, 1, 1, 0, 1] if name == "small_vocabulary" else PROMPT


def proposal(
    make: Callable[[], Drafter], history: History, gamma: int, policy: SamplingPolicy
) -> Callable[[ExhaustiveNoise], object]:
    def propose(noise: ExhaustiveNoise) -> object:
        drafter = make()
        [draft] = drafter.propose([history], [gamma], [policy], [noise])  # type: ignore[list-item]
        return draft

    return propose


def distance(rule: str, policy: str, drafter: str, gamma: int) -> float:
    history = History(prompt_for(drafter), frozenset({2}))
    target = Target(TARGET, POLICIES[policy])
    propose = proposal(DRAFTERS[drafter], history, gamma, POLICIES[policy])
    law = round_law(target, history, propose, RULES[rule], gamma, coupled=rule == "coupled")  # type: ignore[arg-type]
    return total_variation(law, target.plain_law(history, gamma + 1))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_keeps_the_joint_law(rule: str, policy: str, drafter: str) -> None:
    for gamma in (1, 2):
        assert distance(rule, policy, drafter, gamma) < EXACT


@pytest.mark.parametrize(
    "drafter", ["model", "trimmed", "lookup", "lookup_first", "stopping", "uniform"]
)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_keeps_the_joint_law_for_long_drafts(rule: str, drafter: str) -> None:
    assert distance(rule, "everything", drafter, 4) < EXACT
    assert distance(rule, "temperature", drafter, 3) < EXACT


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_another_law_of_all_ids_than_that_of_the_few_drawn_from_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    spread = TrimmedModel.spread

    def flatter(self: TrimmedModel, few: torch.Tensor, rest: float) -> torch.Tensor:
        return spread(self, few.sqrt() / few.sqrt().sum(), rest)

    monkeypatch.setattr(TrimmedModel, "spread", flatter)
    assert distance(rule, "temperature", "trimmed", 2) > 1e-3


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_wrong_rule_is_caught(name: str) -> None:
    gamma, policy = 2, POLICIES["temperature"]
    history, target = History(PROMPT), Target(TARGET, policy)
    propose = proposal(DRAFTERS["model"], history, gamma, policy)
    law = round_law(target, history, propose, WRONG_RULES[name], gamma)  # type: ignore[arg-type]
    assert total_variation(law, target.plain_law(history, gamma + 1)) > 1e-3


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "broken", [DroppingDrafter, PeekingDrafter, UnfilteredDrafter, SoftGreedyDrafter]
)
def test_every_drafter_that_breaks_the_contract_is_caught(
    rule: str, broken: Callable[..., Drafter]
) -> None:
    gamma, policy = 2, SamplingPolicy(temperature=1.0)
    history, target = History(PROMPT), Target(TARGET, policy)
    propose = proposal(lambda: broken(SIZE, OTHER), history, gamma, policy)
    law = round_law(target, history, propose, RULES[rule], gamma)  # type: ignore[arg-type]
    assert total_variation(law, target.plain_law(history, gamma + 1)) > 1e-3


def loop_law(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    drafter: Callable[[], Drafter],
    *,
    num_tokens: int,
    gamma: int | None,
    size: int,
    key: Callable[[Purpose, int, int], Hashable] = lambda *place: place,
    policy: SamplingPolicy,
    num_blocks: int | None = None,
    num_expected: int | None = None,
    costs: Costs | None = None,
    lengths: set[int] | None = None,
) -> tuple[Law, Law]:
    """The law of the real loop's output over several rounds, and that of plain decoding.

    With `num_blocks` the target's memory ends there, and the output after `num_expected` tokens.
    `lengths` collects how many tokens were drafted in any round.
    """
    target = hashed_law(size, seed=21, order=2, sharpness=1.2)
    prompt = [0, 1, 0]
    law: Law = defaultdict(float)

    def run(walk: Walk) -> tuple[int, ...]:
        class WalkedNoise:
            def __init__(self, seed: int, *, coupled: bool = False) -> None:
                self.coupled = coupled

            def at(self, origin: int) -> ExhaustiveNoise:
                return ExhaustiveNoise(walk, origin, coupled=self.coupled, key=key)

        monkeypatch.setattr(decoding, "Noise", WalkedNoise)
        model = ToyModel(target, size)
        if num_blocks is not None:
            model = BlockModel(target, size, num_blocks=num_blocks)
        engine = decoding.Engine(model, drafter(), costs=costs)
        engine.add(Request(prompt, policy, max_new_tokens=num_tokens, gamma=gamma, rule=rule))
        results = [event.result for _ in range(9 * engine.has_work) for event in engine.step()]
        [result] = [result for result in results if result is not None]
        if lengths is not None:
            lengths.update(len(item.drafted) for item in result.trace)
        return tuple(result.token_ids)

    for tokens, walk in walks(run):
        law[tokens] += walk.weight  # type: ignore[index]
    return law, Target(target, policy).plain_law(History(prompt), num_expected or num_tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["model", "lookup", "stopping"])
def test_the_loop_keeps_the_law_over_several_rounds(
    monkeypatch: pytest.MonkeyPatch, rule: str, kind: str
) -> None:
    drafter_law = hashed_law(2, seed=22, sharpness=1.0)
    drafter = {
        "model": lambda: ModelDrafter(ToyModel(drafter_law, 2), target_vocab_size=2),
        "lookup": lambda: LookupDrafter(min_match=1),
        "stopping": lambda: StoppingDrafter(2, drafter_law),
    }[kind]
    found, wanted = loop_law(
        monkeypatch,
        rule,
        drafter,
        num_tokens=4,
        gamma=2,
        size=2,
        policy=SamplingPolicy(temperature=1.0, frequency_penalty=0.3),
    )
    assert total_variation(found, wanted) < EXACT


ADAPTIVE_COSTS = {
    # Every length from none to three comes up under each of them.
    "model": Costs((1, 2, 4), (1.0, 1.1, 1.5), drafter_ms=0.1, drafter_begins_ms=0.04),
    "lookup": Costs((1, 2, 4), (1.0, 1.3, 1.9)),
    # A step costs much and a position nothing: copies go where no token is drawn.
    "lookup_first": Costs((1, 4), (1.0, 1.0), drafter_ms=0.4),
    "dropping": Costs((1, 2, 4), (1.0, 1.1, 1.5), drafter_ms=0.12),
}


def adaptive_law(
    monkeypatch: pytest.MonkeyPatch, rule: str, kind: str, lengths: set[int]
) -> tuple[Law, Law]:
    drafter_law = hashed_law(2, seed=22, sharpness=1.0)
    drafter = {
        "model": lambda: ModelDrafter(ToyModel(drafter_law, 2), target_vocab_size=2),
        "lookup": LookupDrafter,
        "lookup_first": lambda: LookupFirst(
            ModelDrafter(ToyModel(drafter_law, 2), target_vocab_size=2)
        ),
        "dropping": lambda: AskingTooLateDrafter(2, drafter_law),
    }[kind]
    return loop_law(
        monkeypatch,
        rule,
        drafter,
        num_tokens=5,
        gamma=None,
        size=2,
        policy=SamplingPolicy(temperature=1.0),
        costs=ADAPTIVE_COSTS[kind],
        lengths=lengths,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["model", "lookup", "lookup_first"])
def test_adaptive_lengths_keep_the_law_over_several_rounds(
    monkeypatch: pytest.MonkeyPatch, rule: str, kind: str
) -> None:
    lengths: set[int] = set()
    found, wanted = adaptive_law(monkeypatch, rule, kind, lengths)
    assert total_variation(found, wanted) < EXACT
    assert len(lengths) >= 3


def law_of_wide_passes(monkeypatch: pytest.MonkeyPatch, rule: str) -> tuple[float, int]:
    """Distance from the law where passes stay wide, and how many of them did."""
    num_wider = 0
    padding = PassWidth.padding

    def counted(self: PassWidth, needed: int) -> int:
        nonlocal num_wider
        more = padding(self, needed)
        num_wider += more > 0
        return more

    monkeypatch.setattr(PassWidth, "padding", counted)
    monkeypatch.setitem(ADAPTIVE_COSTS, "model", replace(ADAPTIVE_COSTS["model"], change_ms=10.0))
    found, wanted = adaptive_law(monkeypatch, rule, "model", set())
    return total_variation(found, wanted), num_wider


@pytest.mark.parametrize("rule", RULES)
def test_passes_that_stay_wide_keep_the_law(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    distance, num_wider = law_of_wide_passes(monkeypatch, rule)
    assert distance < EXACT
    assert num_wider > 0


@pytest.mark.parametrize("rule", RULES)
def test_reading_the_rows_of_what_a_pass_was_filled_up_with_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    made = decoding.Engine._pass

    def last_rows(self: decoding.Engine, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = made(self, feeds)
        return rows[len(rows) - sum(feed.keep for feed in feeds) :]

    monkeypatch.setattr(decoding.Engine, "_pass", last_rows)
    distance, num_wider = law_of_wide_passes(monkeypatch, rule)
    assert distance > 1e-3
    assert num_wider > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_deciding_by_the_token_that_would_be_dropped_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    found, wanted = adaptive_law(monkeypatch, rule, "dropping", set())
    assert total_variation(found, wanted) > 1e-3


def law_in_a_full_memory(monkeypatch: pytest.MonkeyPatch, rule: str) -> float:
    """Four places, three of them for the prompt; the drafts are longer than one, some of them."""
    found, wanted = loop_law(
        monkeypatch,
        rule,
        lambda: StoppingDrafter(2, hashed_law(2, seed=22, sharpness=1.0)),
        num_tokens=4,
        gamma=2,
        size=2,
        policy=SamplingPolicy(temperature=1.0),
        num_blocks=1,
        num_expected=2,
    )
    return total_variation(found, wanted)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_cut_short_by_the_memory_keeps_the_law(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    assert law_in_a_full_memory(monkeypatch, rule) < EXACT


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_leaving_out_the_drafts_that_do_not_fit_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """How long a draft is may depend on what was drawn, and then so does what is left out."""
    monkeypatch.setattr(decoding, "_shortened", lambda draft, length: Draft([]))
    assert law_in_a_full_memory(monkeypatch, rule) > 1e-3


@pytest.mark.parametrize(("rule", "is_exact"), [("rejection", True), ("block", False)])
def test_noise_keyed_by_position_alone_would_bend_the_law_under_block(
    monkeypatch: pytest.MonkeyPatch, rule: str, is_exact: bool
) -> None:
    """Why noise has an origin: under `block` a cut depends on the drafts behind it.

    The noise of those discarded drafts is not fresh any more when their positions come up again.
    """
    found, wanted = loop_law(
        monkeypatch,
        rule,
        lambda: ModelDrafter(ToyModel(hashed_law(2, seed=22), 2), target_vocab_size=2),
        num_tokens=4,
        gamma=2,
        size=2,
        key=lambda purpose, position, origin: (purpose, position),
        policy=SamplingPolicy(temperature=1.0),
    )
    if is_exact:
        assert total_variation(found, wanted) < EXACT
    else:
        assert total_variation(found, wanted) > 1e-4


def test_the_enumeration_itself_visits_every_path_once() -> None:
    fresh = count()

    def run(walk: Walk) -> tuple[int, int]:
        next(fresh)
        first = walk.split("a", [0.25, 1.0])
        again = walk.split("a", [0.5, 1.0])
        return first, again

    masses = {outcome: walk.weight for outcome, walk in walks(run)}
    # The first answer narrows the uniform to [0, .25) or [.25, 1); the second respects it.
    assert masses == pytest.approx({(0, 0): 0.25, (1, 0): 0.25, (1, 1): 0.5})
    assert next(fresh) == 3
