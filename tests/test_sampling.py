"""Logits to laws: against transformers' own processors, and rows written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider import sampling
from outrider.errors import NumericalError, UsageError
from outrider.sampling import History, SamplingPolicy

Processor = Callable[[Tensor, Tensor], Tensor]
Settings = dict[str, object]

FOUR = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
PROMPT = [1, 3, 3]
END = frozenset({2})


def spread_logits(vocab_size: int, seed: int, spread: float) -> Tensor:
    """[1, V] float64 evenly spaced from -spread / 2 to spread / 2 in random order: no two equal."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return ((order.double() + 0.25) / vocab_size - 0.5)[None] * spread


def history_of(prompt: Sequence[int], output: Sequence[int], end_ids: frozenset[int]) -> History:
    history = History(prompt, end_ids)
    history.tokens += output
    return history


def transformers_law(
    logits: Tensor, ids: Sequence[int], num_prompt: int, end_ids: frozenset[int], chosen: Settings
) -> Tensor:
    """The law [1, V] that transformers' `generate` would sample from, in float64 and its order."""
    makers: dict[str, Callable[[object], Processor]] = {
        "logit_bias": lambda bias: SequenceBiasLogitsProcessor(
            [[[token], value] for token, value in bias.items()]
        ),
        "repetition_penalty": lambda penalty: RepetitionPenaltyLogitsProcessor(penalty),
        "min_new_tokens": lambda least: MinNewTokensLengthLogitsProcessor(
            num_prompt, least, sorted(end_ids)
        ),
        "banned_tokens": lambda banned: SuppressTokensLogitsProcessor(list(banned)),
        "temperature": lambda temperature: TemperatureLogitsWarper(temperature),
        "top_k": lambda k: TopKLogitsWarper(k),
        "top_p": lambda mass: TopPLogitsWarper(mass),
        "min_p": lambda fraction: MinPLogitsWarper(fraction),
        "typical_p": lambda mass: TypicalLogitsWarper(mass),
    }
    scores = logits.double()
    for name, make in makers.items():
        if name in chosen:
            scores = make(chosen[name])(torch.tensor([list(ids)]), scores)
    return scores.softmax(-1)


def assert_same_law(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert torch.equal(ours == 0, theirs == 0)
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=0.0)


SINGLE: list[Settings] = [
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.15},
    {"top_p": 0.8},
    {"min_p": 0.02},
    {"min_p": 0.6},
    {"typical_p": 0.2},
    {"typical_p": 0.85},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
    {"min_new_tokens": 3},
    {"banned_tokens": (0, 3)},
    {"logit_bias": {0: -1.5, 2: 2.25}},
]
COMBINED: list[Settings] = [
    {"temperature": 0.6, "top_k": 3, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 3, "typical_p": 0.7},
    {"repetition_penalty": 1.2, "temperature": 0.8, "top_p": 0.95},
    {"logit_bias": {1: 3.0}, "repetition_penalty": 1.5, "banned_tokens": (0,), "top_k": 2},
    {
        "logit_bias": {2: 1.0, 3: -0.5},
        "repetition_penalty": 1.1,
        "min_new_tokens": 9,
        "temperature": 0.9,
        "top_k": 3,
        "top_p": 0.97,
        "min_p": 0.01,
        "typical_p": 0.95,
    },
]


# Against transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chosen", SINGLE + COMBINED, ids=str)
@pytest.mark.parametrize("spread", [0.5, 8.0, 40.0])
@pytest.mark.parametrize("vocab_size", [4, 5000])
def test_settings_mean_what_they_mean_in_transformers(
    vocab_size: int, spread: float, chosen: Settings, dtype: torch.dtype
) -> None:
    history = history_of(PROMPT, [0, 0], END)
    policy = SamplingPolicy(**{"temperature": 1.0, **chosen})
    for seed in range(2):
        logits = spread_logits(vocab_size, seed, spread).to(dtype)
        ours = policy.probs(logits, history)
        theirs = transformers_law(logits, history.tokens, len(PROMPT), END, chosen)
        assert ours.dtype == dtype
        assert_same_law(ours, theirs, 3e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize(
    ("spread", "top_p", "needs_all"),
    [
        (0.1, 0.3, False),
        (0.1, 0.9, True),
        (0.01, 0.95, True),
        (4.0, 0.5, False),
        (60.0, 0.9, False),
    ],
)
def test_top_p_is_the_same_from_the_first_slice_and_from_the_whole_vocabulary(
    spread: float, top_p: float, needs_all: bool
) -> None:
    logits = spread_logits(5000, 11, spread)
    p = logits.softmax(-1)
    first = p >= sampling._SLICES[0]
    assert (float(p[first].sum()) < top_p) == needs_all
    law = SamplingPolicy(temperature=1.0, top_p=top_p).probs(logits, History(PROMPT))
    chosen: Settings = {"top_p": top_p}
    assert_same_law(law, transformers_law(logits, PROMPT, 3, END, chosen), 1e-12)


@pytest.mark.parametrize(
    ("spread", "typical_p", "needs_all"),
    [(0.1, 0.9, False), (2.0, 0.5, False), (60.0, 0.6, False), (60.0, 0.99, True)],
)
def test_typical_p_is_the_same_from_the_first_slice_and_from_the_whole_vocabulary(
    spread: float, typical_p: float, needs_all: bool
) -> None:
    logits = spread_logits(5000, 12, spread)
    p = logits.softmax(-1)
    information = -p.log()
    near = (information - (p * information).sum()).abs() <= 1.0
    assert (float(p[near].sum()) < typical_p) == needs_all
    law = SamplingPolicy(temperature=1.0, typical_p=typical_p).probs(logits, History(PROMPT))
    chosen: Settings = {"typical_p": typical_p}
    assert_same_law(law, transformers_law(logits, PROMPT, 3, END, chosen), 1e-12)


def flat_below_a_peak(vocab_size: int, peak: float) -> Tensor:
    """One token with most of the mass above a flat tail."""
    logits = spread_logits(vocab_size, 13, 0.1)
    logits[0, 17] = math.log(peak / (1 - peak) * vocab_size)
    return logits


LARGE_ROWS = {
    "flat": spread_logits(5000, 11, 0.1),
    "sloping": spread_logits(5000, 11, 4.0),
    "steep": spread_logits(5000, 11, 16.0),
    "peaked": spread_logits(5000, 11, 60.0),
    "half a peak": flat_below_a_peak(5000, 0.5),
    "a peak": flat_below_a_peak(5000, 0.997),
    "flat and larger": spread_logits(100_000, 11, 1.0),
}


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("row", LARGE_ROWS)
def test_filters_by_mass_do_not_depend_on_how_much_of_a_row_they_must_look_at(
    row: str, name: str
) -> None:
    for mass in (0.02, 0.3, 0.9, 0.99, 0.998, 0.9999):
        law = SamplingPolicy(temperature=1.0, **{name: mass}).probs(LARGE_ROWS[row], History([0]))
        theirs = transformers_law(LARGE_ROWS[row], [0], 1, END, {name: mass})
        assert_same_law(law, theirs, 1e-11)


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    mass=st.floats(0.01, 1.0),
    bound=st.floats(0.0, 1.0),
)
def test_the_nucleus_does_not_depend_on_the_slice_that_is_looked_at_first(
    weights: list[int], mass: float, bound: float
) -> None:
    p = np.array(weights) / sum(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_SLICES", (bound, 0.0))
        border = sampling._nucleus_border(p, mass)
    # A hair of room: 0.1 + 0.2 may or may not reach a mass of 0.3.
    assert p[p >= border].sum() >= mass - 1e-12
    assert p[p > border].sum() < mass + 1e-12
    assert border in p


def test_the_nucleus_is_reached_by_exactly_the_mass_asked_for() -> None:
    p = np.array([0.25, 0.5, 0.125, 0.125])
    borders = [sampling._nucleus_border(p, mass) for mass in (0.5, 0.51, 0.75, 0.76, 1.0)]
    assert borders == [0.5, 0.25, 0.25, 0.125, 0.125]


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_mass_just_below_one_is_reached_whatever_the_rounding(name: str) -> None:
    policy = SamplingPolicy(temperature=1.0, **{name: 1 - 1e-12})
    for seed in range(20):
        logits = spread_logits(1000, seed, 5.0).float()
        torch.testing.assert_close(policy.probs(logits, History([0])), logits.softmax(-1))


def test_a_transformers_processor_can_be_passed_as_it_is() -> None:
    no_repeats = NoRepeatNGramLogitsProcessor(2)
    policy = SamplingPolicy(temperature=1.0, processors=(no_repeats,))
    history = History([0, 1, 2, 0])
    law = policy.probs(FOUR, history)
    torch.testing.assert_close(law, no_repeats(torch.tensor([[0, 1, 2, 0]]), FOUR).softmax(-1))
    assert law[0, 1] == 0


# Rows written out: the model's law is [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("chosen", "row"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 4}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.41}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.91}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_p": 0.24}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_p": 0.26}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # Information 0.92, 1.20, 1.61, 2.30 against an entropy of 1.28.
        ({"typical_p": 0.29}, [0, 1, 0, 0]),
        ({"typical_p": 0.31}, [0, 0.6, 0.4, 0]),
        ({"typical_p": 0.51}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"typical_p": 0.91}, [0.4, 0.3, 0.2, 0.1]),
        ({"logit_bias": {3: math.log(2)}}, [4 / 11, 3 / 11, 2 / 11, 2 / 11]),
        ({"banned_tokens": (2,)}, [0.5, 0.375, 0, 0.125]),
        # top-p sees 4/9 + 3/9 of what top-k left, not 0.4 + 0.3.
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_k": 2, "min_p": 0.8}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_the_row_of_four_tokens_is_exactly_the_one_written_out(
    chosen: Settings, row: list[float]
) -> None:
    law = SamplingPolicy(**{"temperature": 1.0, **chosen}).probs(FOUR, History([0]))
    wanted = torch.tensor([row], dtype=torch.float64)
    assert_same_law(law, wanted, 1e-14)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.0]], dtype=torch.float64)
    history = history_of([0, 0], [1, 3], frozenset())
    law = SamplingPolicy(temperature=1.0, repetition_penalty=2.0).probs(logits, history)
    wanted = torch.tensor([[1.0, -2.0, 1.0, 0.0]], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(law, wanted)


def test_presence_penalty_counts_every_token_of_the_output_once() -> None:
    history = history_of([2, 2, 2], [0, 0, 1], frozenset())
    law = SamplingPolicy(temperature=1.0, presence_penalty=0.5).probs(FOUR, history)
    wanted = (FOUR - torch.tensor([[0.5, 0.5, 0, 0]], dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(law, wanted)


def test_frequency_penalty_counts_every_occurrence_in_the_output() -> None:
    history = history_of([2, 2, 2], [0, 0, 1], frozenset())
    law = SamplingPolicy(temperature=1.0, frequency_penalty=0.5).probs(FOUR, history)
    wanted = (FOUR - torch.tensor([[1.0, 0.5, 0, 0]], dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(law, wanted)


def test_presence_and_frequency_penalties_add_up() -> None:
    history = history_of([3], [0, 0, 1], frozenset())
    policy = SamplingPolicy(temperature=1.0, presence_penalty=0.25, frequency_penalty=-1.0)
    wanted = (FOUR - torch.tensor([[-1.75, -0.75, 0, 0]], dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(policy.probs(FOUR, history), wanted)


def test_negative_and_positive_frequency_penalties_differ_for_greedy_decoding() -> None:
    history = history_of([3], [1, 1], frozenset())
    rows = [
        SamplingPolicy(frequency_penalty=penalty).probs(FOUR, history).argmax().item()
        for penalty in (-2.0, 2.0)
    ]
    assert rows == [1, 0]


def test_penalties_come_before_the_temperature() -> None:
    history = history_of([3], [0], frozenset())
    policy = SamplingPolicy(temperature=0.5, presence_penalty=1.0)
    wanted = ((FOUR - torch.tensor([[1.0, 0, 0, 0]])) / 0.5).softmax(-1)
    torch.testing.assert_close(policy.probs(FOUR, history), wanted)


# Ties


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"typical_p": 0.2}, [1, 2]),
    ],
    ids=str,
)
def test_tokens_that_tie_at_the_border_are_kept_together(chosen: Settings, kept: list[int]) -> None:
    # 1/2, 1/4, 1/4 and a last one too small to matter, exact in binary up to that last one.
    logits = torch.tensor([[1.0, 0.5, 0.5, 2.0**-30]], dtype=torch.float64).log()
    for order in ([0, 1, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0]):
        law = SamplingPolicy(temperature=1.0, **chosen).probs(logits[:, order], History([0]))
        assert sorted(order[i] for i in law[0].nonzero()[:, 0].tolist()) == kept


@pytest.mark.parametrize("chosen", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 1.0}], ids=str)
def test_a_hair_below_the_border_is_not_a_tie(chosen: Settings) -> None:
    logits = torch.tensor([[1.0, 1.0 - 1e-12, 0.0]], dtype=torch.float64)
    law = SamplingPolicy(temperature=1.0, **chosen).probs(logits, History([0]))
    assert law.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("chosen", [{"top_k": 7}, {"top_p": 0.3}, {"typical_p": 0.3}], ids=str)
def test_a_uniform_row_of_5000_stays_uniform(chosen: Settings) -> None:
    law = SamplingPolicy(temperature=1.0, **chosen).probs(torch.zeros(1, 5000), History([0]))
    torch.testing.assert_close(law, torch.full((1, 5000), 1 / 5000))


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    law = SamplingPolicy().probs(logits, History([0]), [0])
    assert law.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


# Positions of a draft


class Recorder:
    """A processor that notes every prefix it is called with and changes nothing."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == 1
        assert input_ids.dtype == torch.int64
        assert scores.shape[0] == 1
        self.prefixes.append(input_ids[0].tolist())
        self.scores.append(scores.clone())
        return scores


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_processor_sees_prompt_output_and_the_drafts_before_each_position(num_rows: int) -> None:
    seen = Recorder()
    policy = SamplingPolicy(temperature=1.0, processors=(seen,))
    policy.probs(FOUR.repeat(num_rows, 1), history_of([0, 1], [2], frozenset()), [3, 1])
    every = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 1]]
    assert seen.prefixes == every[3 - num_rows :]


def test_processors_run_in_order_after_bans_and_before_the_temperature() -> None:
    seen = Recorder()

    def halve(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2

    policy = SamplingPolicy(temperature=0.1, banned_tokens=(3,), processors=(halve, seen))
    policy.probs(FOUR, History([0]))
    assert seen.scores[0][0, 3] == -math.inf
    torch.testing.assert_close(seen.scores[0][0, :3], FOUR[0, :3] / 2)


def test_a_processor_sees_and_changes_the_scores_of_its_own_position() -> None:
    def add_length(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * input_ids.shape[1]

    logits = torch.stack([FOUR[0], FOUR[0].flip(0), FOUR[0].roll(1)])
    law = SamplingPolicy(temperature=1.0, processors=(add_length,)).probs(
        logits, History([0]), [1, 2]
    )
    wanted = (logits * torch.tensor([[1.0], [2.0], [3.0]])).softmax(-1)
    torch.testing.assert_close(law, wanted)


def test_min_new_tokens_bans_end_ids_by_the_index_inside_the_draft() -> None:
    history = history_of([0], [1], frozenset({2, 3}))
    law = SamplingPolicy(temperature=1.0, min_new_tokens=3).probs(
        FOUR.repeat(4, 1), history, [0, 0, 1]
    )
    banned = (law[:, 2:] == 0).all(-1).tolist()
    free = (law[:, 2:] > 0).all(-1).tolist()
    assert banned == [True, True, False, False]
    assert free == [False, False, True, True]


def test_min_new_tokens_without_end_ids_changes_nothing() -> None:
    law = SamplingPolicy(temperature=1.0, min_new_tokens=5).probs(FOUR, History([0]))
    assert torch.equal(law, FOUR.softmax(-1))


@pytest.mark.parametrize(
    ("chosen", "logits"),
    [
        ({"repetition_penalty": 4.0}, [[1.0, 1.0, 4 / 4, 1.0]]),
        ({"presence_penalty": 1.0}, [[1.0, 1.0, 3.0, 1.0]]),
        ({"frequency_penalty": 1.0}, [[1.0, 1.0, 2.0, 1.0]]),
    ],
    ids=str,
)
def test_penalties_count_the_drafts_before_a_position(
    chosen: Settings, logits: list[list[float]]
) -> None:
    model = torch.tensor([[1.0, 1.0, 4.0, 1.0]] * 3, dtype=torch.float64)
    law = SamplingPolicy(temperature=1.0, **chosen).probs(model, History([9]), [2, 2])
    torch.testing.assert_close(law[0], model[0].softmax(-1))
    torch.testing.assert_close(law[2], torch.tensor(logits[0], dtype=torch.float64).softmax(-1))


def test_a_banned_token_has_no_mass_at_any_position_of_a_draft() -> None:
    policy = SamplingPolicy(temperature=1.0, banned_tokens=(1,), logit_bias={2: -100.0})
    law = policy.probs(FOUR.repeat(5, 1), History([1, 1, 1]), [1, 1, 1, 1])
    assert (law[:, 1] == 0).all()
    assert (law[:, 2] < 1e-40).all()


@st.composite
def policies(draw: st.DrawFn, vocab_size: int = 6, *, greedy: bool = True) -> SamplingPolicy:
    """A policy with a random choice of settings on, ids 0 and 5 never banned."""
    ids = st.integers(1, vocab_size - 2)

    def maybe(values: st.SearchStrategy, off: object) -> object:
        return draw(values) if draw(st.booleans()) else off

    return SamplingPolicy(
        temperature=draw(st.sampled_from([0.0] * greedy + [1.0, 0.3, 1.7])),
        top_k=maybe(st.integers(1, vocab_size), 0),
        top_p=maybe(st.floats(0.01, 1.0), 1.0),
        min_p=maybe(st.floats(0.0, 1.0), 0.0),
        typical_p=maybe(st.floats(0.01, 1.0), 1.0),
        repetition_penalty=maybe(st.floats(0.5, 2.0), 1.0),
        presence_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        logit_bias=maybe(st.dictionaries(ids, st.floats(-5.0, 5.0), max_size=2), {}),
        banned_tokens=tuple(maybe(st.lists(ids, max_size=2), [])),
        min_new_tokens=maybe(st.integers(1, 6), 0),
    )


cells = st.floats(-12.0, 12.0, width=32) | st.just(-math.inf)
rows_of_six = st.lists(st.lists(cells, min_size=6, max_size=6), min_size=1, max_size=4)
some_ids = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """Logits [n, 6] with token 0 always possible, emitted ids, and drafted ids for n rows."""
    logits = torch.tensor(draw(rows_of_six), dtype=torch.float64)
    logits[:, 0] = draw(st.floats(-3.0, 3.0))
    drafted = draw(st.lists(st.integers(0, 5), min_size=len(logits) - 1, max_size=5))
    return logits, draw(some_ids), drafted


@pytest.mark.parametrize("chosen", SINGLE + COMBINED, ids=str)
def test_every_row_of_a_draft_is_processed(chosen: Settings) -> None:
    logits = torch.cat([spread_logits(40, seed, 6.0 + seed) for seed in range(3)])
    policy = SamplingPolicy(**{"temperature": 1.0, **chosen})
    law = policy.probs(logits, history_of(PROMPT, [0], END), [2, 1])
    for i, row in enumerate(logits):
        alone = policy.probs(row[None], history_of(PROMPT, [0, 2, 1][: i + 1], END))
        assert torch.equal(law[i], alone[0])


@settings(max_examples=40, deadline=None)
@given(policy=policies(), situation=situations())
def test_a_row_in_a_draft_is_the_row_after_the_same_tokens_committed(
    policy: SamplingPolicy, situation: tuple[Tensor, list[int], list[int]]
) -> None:
    logits, output, drafted = situation
    law = policy.probs(logits, history_of([4, 0], output, frozenset({5})), drafted)
    for i, row in enumerate(logits):
        before = drafted[: len(drafted) - (len(logits) - 1) + i]
        committed = history_of([4, 0], output + before, frozenset({5}))
        assert torch.equal(law[i], policy.probs(row[None], committed)[0])


@settings(max_examples=40, deadline=None)
@given(policy=policies(), situation=situations(), single=st.booleans())
def test_rows_sum_to_one_and_impossible_tokens_have_exactly_no_mass(
    policy: SamplingPolicy, situation: tuple[Tensor, list[int], list[int]], single: bool
) -> None:
    logits, output, drafted = situation
    logits = logits.float() if single else logits
    law = policy.probs(logits, history_of([4, 0], output, frozenset({5})), drafted)
    assert law.shape == logits.shape
    assert law.dtype == logits.dtype
    assert (law >= 0).all()
    tolerance = 1e-6 if single else 1e-14
    torch.testing.assert_close(law.sum(-1), torch.ones_like(law[:, 0]), rtol=0, atol=tolerance)
    assert (law[logits == -math.inf] == 0).all()
    assert (law[:, list(policy.banned_tokens)] == 0).all()


@pytest.mark.parametrize("spread", [0.01, 5.0, 50.0])
@pytest.mark.parametrize(
    "chosen", [{"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.2}, {"typical_p": 0.7}], ids=str
)
def test_every_filter_leaves_exact_zeros_and_a_law_in_a_large_vocabulary(
    chosen: Settings, spread: float
) -> None:
    logits = spread_logits(5000, 5, spread).float()
    law = SamplingPolicy(temperature=1.0, **chosen).probs(logits, History([0]))
    assert float(law.double().sum()) == pytest.approx(1.0, abs=1e-6)
    filters_nothing = chosen == {"min_p": 0.2} and spread == 0.01
    assert bool((law == 0).any()) != filters_nothing


# Temperature


def test_temperature_zero_is_a_one_hot_row_whatever_the_filters() -> None:
    policy = SamplingPolicy(top_k=2, top_p=0.9, min_p=0.1, typical_p=0.5)
    assert policy.is_greedy
    assert policy.probs(FOUR, History([0])).tolist() == [[1, 0, 0, 0]]


@settings(max_examples=80, deadline=None)
@given(policy=policies(), situation=situations(), single=st.booleans(), ties=st.booleans())
def test_choices_are_where_greedy_rows_have_their_ones(
    policy: SamplingPolicy,
    situation: tuple[Tensor, list[int], list[int]],
    single: bool,
    ties: bool,
) -> None:
    logits, output, drafted = situation
    logits = logits.float() if single else logits
    logits = logits.round() if ties else logits
    policy, history = replace(policy, temperature=0.0), history_of([4, 0], output, frozenset({5}))
    choices = policy.choices(logits, history, drafted)
    law = policy.probs(logits, history, drafted)
    assert choices == [row.index(1.0) for row in law.tolist()]


def test_choices_of_a_policy_that_draws_are_refused() -> None:
    with pytest.raises(AssertionError):
        SamplingPolicy(temperature=0.5).choices(FOUR, History([0]))


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(banned_tokens=(0, 1, 2, 3))])
def test_choices_raise_what_rows_raise(policy: SamplingPolicy) -> None:
    logits = torch.cat([FOUR, FOUR])
    if not policy.banned_tokens:
        logits[1, 2] = math.nan
    errors = []
    for ask in (policy.choices, policy.probs):
        with pytest.raises((NumericalError, UsageError)) as error:
            ask(logits, History([0]), [1])
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-37])
def test_a_tiny_temperature_is_the_greedy_row(temperature: float, dtype: torch.dtype) -> None:
    logits = spread_logits(5000, 3, 200.0).to(dtype) + 1000
    policy = SamplingPolicy(temperature=temperature)
    assert not policy.is_greedy
    law = policy.probs(logits, History([0]))
    greedy = SamplingPolicy().probs(logits, History([0]))
    torch.testing.assert_close(law, greedy, rtol=0, atol=1e-100)


def test_a_tiny_temperature_does_not_overflow_with_huge_logits() -> None:
    law = SamplingPolicy(temperature=1e-30).probs(torch.tensor([[2e9, 3e9, -1e9]]), History([0]))
    assert law.tolist() == [[0, 1, 0]]


def test_a_temperature_of_1e_4_still_tells_close_logits_apart_by_their_difference() -> None:
    logits = torch.tensor([[500.0, 500.0 - 1e-4, 0.0, -500.0]], dtype=torch.float64)
    law = SamplingPolicy(temperature=1e-4).probs(logits, History([0]))
    wanted = torch.tensor([[0.0, -1.0, -math.inf, -math.inf]], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(law, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("temperature", "banned"),
    [
        (1e-60, ()),
        (5e-324, (1,)),
        (1e60, ()),
        (1e60, (1,)),
    ],
)
def test_a_temperature_beyond_the_range_of_float32_still_gives_a_law(
    temperature: float, banned: tuple[int, ...]
) -> None:
    policy = SamplingPolicy(temperature=temperature, banned_tokens=banned)
    law = policy.probs(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), History([0]))
    assert float(law.sum()) == pytest.approx(1.0)
    assert (law[:, list(banned)] == 0).all()


# Faults


def on_one_line(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    message = str(error.value)
    assert message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([0.0, math.nan, 1.0, 2.0], "nan"),
        ([math.nan] * 4, "nan"),
        ([-math.inf, math.nan, -math.inf, -math.inf], "nan"),
        ([0.0, math.inf, 1.0, 2.0], "inf"),
        ([math.inf, -math.inf, math.nan, 0.0], "nan"),
        ([-math.inf] * 4, "nothing but -infinity"),
    ],
)
def test_logits_that_are_no_law_are_an_error_that_names_the_row(
    row: list[float], found: str, temperature: float
) -> None:
    logits = torch.cat([FOUR, torch.tensor([row], dtype=torch.float64), FOUR])
    with pytest.raises(NumericalError) as error:
        SamplingPolicy(temperature=temperature).probs(logits, History([0]), [1, 2])
    on_one_line(error, "row 1 of 3", found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fault_of_the_model_is_not_hidden_by_a_ban(value: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, value, 2.0]])
    with pytest.raises(NumericalError) as error:
        SamplingPolicy(temperature=temperature, banned_tokens=(2,)).probs(logits, History([0]))
    on_one_line(error, "the model's logits", "row 0 of 1")


def test_a_model_that_excludes_every_token_is_at_fault_whatever_the_policy() -> None:
    logits = torch.full((1, 4), -math.inf)
    with pytest.raises(NumericalError) as error:
        SamplingPolicy(temperature=1.0, banned_tokens=(2,)).probs(logits, History([0]))
    on_one_line(error, "nothing but -infinity")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_one_row_without_a_token_is_enough_for_a_usage_error(row: int, temperature: float) -> None:
    logits = FOUR.repeat(3, 1)
    logits[row, :3] = -math.inf
    with pytest.raises(UsageError) as error:
        SamplingPolicy(temperature=temperature, banned_tokens=(3,)).probs(
            logits, History([0]), [1, 2]
        )
    on_one_line(error, "no token")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_with_nan_are_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(NumericalError):
        SamplingPolicy().probs(torch.tensor([[1.0, math.nan]], dtype=dtype), History([0]))


def test_one_finite_token_is_a_law() -> None:
    logits = torch.tensor([[-math.inf, -math.inf, 7.0, -math.inf]])
    for temperature in (0.0, 0.3, 1.0):
        policy = SamplingPolicy(temperature=temperature, top_p=0.9, typical_p=0.9, min_p=0.1)
        assert policy.probs(logits, History([0])).tolist() == [[0, 0, 1, 0]]


def nothing_left(input_ids: Tensor, scores: Tensor) -> Tensor:
    return torch.full_like(scores, -math.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("chosen", "logits"),
    [
        ({"banned_tokens": (0, 1, 2, 3)}, FOUR),
        ({"processors": (nothing_left,)}, FOUR),
        ({"banned_tokens": (2,)}, torch.tensor([[-math.inf, -math.inf, 1.0, -math.inf]])),
        ({"min_new_tokens": 2}, torch.tensor([[-math.inf, -math.inf, 1.0, -math.inf]])),
    ],
    ids=["all banned", "processor", "the only one banned", "only an end token"],
)
def test_a_policy_that_leaves_no_token_is_a_usage_error(
    chosen: Settings, logits: Tensor, temperature: float
) -> None:
    policy = SamplingPolicy(temperature=temperature, **chosen)
    with pytest.raises(UsageError) as error:
        policy.probs(logits, History([0], frozenset({2})))
    on_one_line(error, "no token")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_processor_that_returns_no_law_is_a_numerical_error(value: float) -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, value)

    with pytest.raises(NumericalError) as error:
        SamplingPolicy(temperature=1.0, processors=(broken,)).probs(FOUR, History([0]))
    on_one_line(error, "processed logits")


# Types, and what must not be touched


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chosen", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_half_precision_logits_are_computed_in_float32(
    chosen: Settings, dtype: torch.dtype
) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    policy = SamplingPolicy(temperature=0.8, **chosen)
    law = policy.probs(logits, History([1, 2]), [3])
    assert law.dtype == torch.float32
    assert torch.equal(law, policy.probs(logits.float(), History([1, 2]), [3]))


def in_place(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, 1] = -5.0
    input_ids[:, 0] = 3
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "chosen",
    [{}, *SINGLE, *COMBINED, {"frequency_penalty": 1.0}, {"processors": (in_place,)}],
    ids=lambda chosen: str(sorted(chosen)),
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logits_history_and_draft_are_not_modified(
    temperature: float, chosen: Settings, dtype: torch.dtype
) -> None:
    logits = spread_logits(8, 2, 6.0).repeat(3, 1).to(dtype)
    before = logits.clone()
    history, drafted = history_of([1, 3], [0], END), [3, 0]
    SamplingPolicy(**{"temperature": temperature, **chosen}).probs(logits, history, drafted)
    assert torch.equal(logits, before)
    assert history.tokens == [1, 3, 0]
    assert drafted == [3, 0]


def test_two_calls_do_not_share_memory() -> None:
    policy = SamplingPolicy(temperature=1.0)
    first = policy.probs(FOUR, History([0]))
    first.zero_()
    assert float(policy.probs(FOUR, History([0])).sum()) == pytest.approx(1.0)


# Ids beyond a smaller vocabulary: the drafter goes through the target's policy


@pytest.mark.parametrize(
    ("chosen", "same_as"),
    [
        ({"logit_bias": {7: 9.0, 1: 1.0}}, {"logit_bias": {1: 1.0}}),
        ({"logit_bias": {7: 9.0}}, {}),
        ({"banned_tokens": (4, 2)}, {"banned_tokens": (2,)}),
        ({"banned_tokens": (4,)}, {}),
    ],
    ids=str,
)
def test_settings_for_ids_beyond_a_smaller_vocabulary_are_ignored(
    chosen: Settings, same_as: Settings
) -> None:
    ours = SamplingPolicy(temperature=1.0, **chosen).probs(FOUR, History([0]))
    plain = SamplingPolicy(temperature=1.0, **same_as).probs(FOUR, History([0]))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    "chosen",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"min_new_tokens": 9},
    ],
    ids=str,
)
def test_tokens_beyond_a_smaller_vocabulary_are_ignored_by_penalties(chosen: Settings) -> None:
    policy = SamplingPolicy(temperature=1.0, **chosen)
    law = policy.probs(FOUR.repeat(2, 1), history_of([0, 9], [1, 4], frozenset({3, 8})), [4])
    plain = policy.probs(FOUR, history_of([0], [1], frozenset({3})))
    torch.testing.assert_close(law[1], plain[0])


# Validation


WRONG: list[tuple[str, object]] = [
    *((name, value) for name in ("temperature", "min_p") for value in (-0.5, -1e-9)),
    *((name, value) for name in ("top_p", "typical_p") for value in (0.0, -0.1, 1.0001, 2)),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_k", True),
    ("min_new_tokens", -1),
    ("min_new_tokens", 1.5),
]
NUMBERS = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_setting_out_of_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        SamplingPolicy(**{name: value})
    on_one_line(error, f"{name} must be", repr(value))


@pytest.mark.parametrize("value", ["1", None, True, [1], math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_setting_that_is_no_finite_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        SamplingPolicy(**{name: value})
    on_one_line(error, f"{name} must be", repr(value))


@pytest.mark.parametrize("value", ["1", None, True, math.nan, math.inf, -math.inf])
def test_a_logit_bias_that_is_no_finite_number_is_refused_by_its_id(value: object) -> None:
    with pytest.raises(UsageError) as error:
        SamplingPolicy(logit_bias={3: 1.0, 12: value})
    on_one_line(error, "logit_bias[12] must be", repr(value))


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_too_large_for_a_float_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingPolicy(**{name: 10**400})
    on_one_line(error, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", None),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("banned_tokens", 3),
        ("banned_tokens", ("5",)),
        ("banned_tokens", (-1,)),
        ("banned_tokens", (2.5,)),
        ("processors", len),
        ("processors", ("top_k",)),
    ],
)
def test_a_container_of_the_wrong_things_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        SamplingPolicy(**{name: value})
    on_one_line(error, name)


@pytest.mark.parametrize("token", [4, 100])
@pytest.mark.parametrize("name", ["logit_bias", "banned_tokens"])
def test_ids_outside_the_vocabulary_are_refused_by_name(name: str, token: int) -> None:
    value: Mapping[int, float] | tuple[int, ...]
    value = {0: 1.0, token: 1.0} if name == "logit_bias" else (0, token)
    with pytest.raises(UsageError) as error:
        SamplingPolicy(**{name: value}).check_vocabulary(4)
    on_one_line(error, name, str(token), "0 to 3")


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {0: 1.0, -1: 1.0}), ("banned_tokens", (0, -1))]
)
def test_a_negative_id_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        SamplingPolicy(**{name: value}).check_vocabulary(4)
    on_one_line(error, name, "-1")


def test_every_id_of_the_vocabulary_passes_the_check() -> None:
    SamplingPolicy(logit_bias={0: 1.0, 3: 1.0}, banned_tokens=(0, 3)).check_vocabulary(4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1),
        ("temperature", np.float32(0.5)),
        ("top_k", np.int64(3)),
        ("top_p", 1),
        ("min_p", 1),
        ("min_p", 0),
        ("typical_p", 1e-9),
        ("repetition_penalty", 1e-3),
        ("presence_penalty", -2),
    ],
)
def test_values_at_the_edge_of_a_range_and_numpy_numbers_are_taken(
    name: str, value: object
) -> None:
    assert getattr(SamplingPolicy(**{name: value}), name) == value


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingPolicy().temperature = 1.0  # type: ignore[misc]


# Defaults


def test_the_default_temperature_is_greedy() -> None:
    assert SamplingPolicy().temperature == 0
    assert SamplingPolicy().is_greedy
    assert not SamplingPolicy(temperature=1e-9).is_greedy


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("top_k", 0),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("typical_p", 1.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("logit_bias", {}),
        ("banned_tokens", ()),
        ("min_new_tokens", 0),
        ("processors", ()),
    ],
)
def test_the_default_of_every_other_setting_changes_nothing(name: str, default: object) -> None:
    assert getattr(SamplingPolicy(), name) == default
    history = history_of([0, 1, 0], [0, 0, 1], frozenset({0, 1}))
    logits = torch.tensor([[3.0, -2.0, 0.5, -40.0]])
    law = SamplingPolicy(temperature=1.0, **{name: default}).probs(logits, history)
    assert torch.equal(law, logits.softmax(-1))


def test_every_setting_has_its_default_tested() -> None:
    names = {item.name for item in fields(SamplingPolicy)}
    assert names == {*NUMBERS, "logit_bias", "banned_tokens", "processors"}


def test_two_policies_do_not_share_their_default_bias() -> None:
    assert SamplingPolicy().logit_bias is not SamplingPolicy().logit_bias


def test_a_history_has_no_end_ids_by_default() -> None:
    assert History([1, 2]).end_ids == frozenset()


def test_probs_expects_no_drafted_tokens_by_default() -> None:
    seen = Recorder()
    SamplingPolicy(processors=(seen,)).probs(FOUR, History([1, 2]))
    assert seen.prefixes == [[1, 2]]


# History


def test_a_history_is_prompt_and_output() -> None:
    prompt = [4, 5]
    history = History(prompt)
    history.tokens.append(6)
    assert (len(history), history.prompt_length, history.output) == (3, 2, [6])
    assert prompt == [4, 5]


def test_histories_with_equal_tokens_are_two_different_keys() -> None:
    assert len({History([1]): 0, History([1]): 1}) == 2
