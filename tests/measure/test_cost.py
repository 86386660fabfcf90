"""What passes cost: curves, drafter steps, what a model tells of itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.measure.alpha import RandomDrafter
from outrider.measure.cost import (
    FULL_POSITIONS,
    POSITIONS,
    cost_facts,
    curve_places,
    measure_curve,
    measure_drafter,
    num_parameters,
    usual_curve,
)
from outrider.measure.prediction import curve_positions
from outrider.measure.records import measurement_from
from outrider.models import Feed
from outrider.models.toy import ToyModel, hashed_law
from outrider.sampling import SamplingPolicy

V = 5
MODEL = ToyModel(hashed_law(V, seed=1), V)


class Slow(ToyModel):
    """Takes 1 ms for every row of logits of a pass, and 2 more."""

    def __init__(self, ms_per_row: float = 1.0) -> None:
        super().__init__(hashed_law(V, seed=1), V)
        self.ms_per_row = ms_per_row
        self.passes: list[list[int]] = []

    def score(self, feeds: Sequence[Feed]) -> object:
        self.passes.append([len(feed.tokens) for feed in feeds])
        time.sleep(1e-3 * (2.0 + self.ms_per_row * sum(feed.keep for feed in feeds)))
        return super().score(feeds)


def test_a_curve_has_the_cost_of_every_number_of_positions() -> None:
    curve = measure_curve(Slow(), None, 4, 1, positions=(1, 4, 10), repeats=3)
    assert (curve["context"], curve["batch"]) == (4, 1)
    assert curve["target_ms"] == pytest.approx(3.0, rel=0.4)
    assert list(curve["verify_cost"]) == ["1", "4", "10"]
    assert curve["verify_cost"]["1"] == 1.0
    assert curve["verify_cost"]["10"] == pytest.approx(4.0, rel=0.4)


def test_a_curve_of_a_batch_feeds_that_many_sequences_at_once() -> None:
    model = Slow(ms_per_row=4.0)
    curve = measure_curve(model, None, 4, 3, positions=(1, 4), repeats=1)
    assert {tuple(sizes) for sizes in model.passes if len(sizes) == 3} == {(1, 1, 1), (4, 4, 4)}
    assert curve["target_ms"] == pytest.approx(14.0, rel=0.4)


def test_a_curve_of_a_batch_has_every_number_of_positions_too() -> None:
    curve = measure_curve(Slow(ms_per_row=0.01), None, 4, 8, positions=POSITIONS, repeats=1)
    assert [int(n) for n in curve["verify_cost"]] == list(POSITIONS)


def test_for_predictions_a_large_batch_is_not_timed_over_many_positions_each() -> None:
    assert curve_positions(FULL_POSITIONS, 1) == list(range(1, 34))
    assert curve_positions(POSITIONS, 8) == [1, 2, 3, 5, 6, 9]
    assert curve_positions(POSITIONS, 64) == [1, 2]


def test_contexts_that_do_not_fit_are_left_out() -> None:
    short = ToyModel(hashed_law(V, seed=1), V, context_length=300)
    assert curve_places(short, (16, 256, 1024), (1, 4)) == [(16, 1), (256, 1), (16, 4), (256, 4)]
    assert curve_places(short, (1024,), (1,)) == [(150, 1)]


def test_a_drafting_models_step_is_one_pass_of_it() -> None:
    drafter = ModelDrafter(Slow(ms_per_row=4.0), target_vocab_size=V)
    found = measure_drafter(
        MODEL, drafter, (1, 2), SamplingPolicy(), context=8, repeats=3, num_tokens=6
    )
    assert found["drafter_ms"] == pytest.approx(6.0, rel=0.3)
    assert 0.0 <= found["outside_ms"] < 15.0


def test_another_drafters_step_is_what_a_drafted_token_takes() -> None:
    class Sleepy(RandomDrafter):
        def propose(self, sequences: object, gammas: Sequence[int], *rest: object) -> object:
            time.sleep(2e-3 * max(gammas))
            return super().propose(sequences, gammas, *rest)  # type: ignore[arg-type]

    found = measure_drafter(MODEL, Sleepy(V), (1, 2), SamplingPolicy(), context=8, repeats=1)
    assert found["drafter_ms"] == pytest.approx(2.3, rel=0.4)


def test_what_the_policy_takes_is_outside_the_models() -> None:
    def slow(ids: object, scores: object) -> object:
        time.sleep(1e-3)
        return scores

    policy = SamplingPolicy(processors=(slow,))  # type: ignore[arg-type]
    # A drafter that never matches: one row a round.
    found = measure_drafter(
        MODEL, LookupDrafter(min_match=99), (1, 2), policy, context=8, repeats=1
    )
    assert found["outside_ms"] == pytest.approx(1.4, rel=0.5)
    assert found["outside_ms_per_position"] == pytest.approx(found["outside_ms"])


def test_what_a_drafting_model_does_beside_its_passes_is_outside_and_shared_by_positions() -> None:
    class Late(ModelDrafter):
        def propose(self, *arguments: object) -> object:
            time.sleep(80e-3)
            return super().propose(*arguments)  # type: ignore[arg-type]

    drafter = Late(Slow(), target_vocab_size=V)
    found = measure_drafter(
        MODEL, drafter, (1, 2), SamplingPolicy(), context=8, repeats=3, num_tokens=13
    )
    # Two rounds count, one of five drafted tokens and the last one, of none.
    assert found["outside_ms"] == pytest.approx(40.0, abs=8.0)
    assert found["outside_ms"] / 6 <= found["outside_ms_per_position"] < found["outside_ms"] / 3


def curve(context: int, batch: int, target_ms: float) -> dict[str, object]:
    facts = {"context": context, "batch": batch, "target_ms": target_ms}
    return {**facts, "verify_cost": {"1": 1.0}, "change_ms": 0.5}


def test_the_usual_curve_is_that_of_one_sequence_and_a_middling_context() -> None:
    curves = [curve(16, 1, 1.0), curve(256, 4, 2.0), curve(1024, 1, 3.0), curve(200, 1, 4.0)]
    assert usual_curve(curves) == curves[3]


def test_facts_have_the_main_drafter_on_top_and_c_of_all() -> None:
    drafters = {"near": ModelDrafter(MODEL, target_vocab_size=V), "lookup": LookupDrafter()}
    measured = {
        "near": {"drafter_ms": 2.0, "outside_ms": 0.5},
        "lookup": {"drafter_ms": 0.1, "outside_ms": 0.3},
    }
    facts = cost_facts(MODEL, drafters, "near", [curve(256, 1, 10.0)], measured)
    assert (facts["c"], facts["drafter_ms"], facts["target_ms"]) == (0.2, 2.0, 10.0)
    assert (facts["outside_ms"], facts["change_ms"]) == (0.5, 0.5)
    assert facts["drafters"]["lookup"]["c"] == pytest.approx(0.01)
    # A table has no operations; what the toys have is not known.
    assert facts["drafters"]["lookup"]["c_hat"] == 0.0
    assert facts["c_hat"] is facts["weight_bytes"] is facts["bandwidth_gbs"] is None
    assert measurement_from({"cost": facts}).cost_of("lookup") == pytest.approx(0.01)


class Told(ToyModel):
    """Says how large it is."""

    def __init__(self, num_parameters: int, dtype: str = "float32") -> None:
        super().__init__(hashed_law(V, seed=1), V)
        self.num_parameters = num_parameters
        self.kv_bytes_per_token = 1000
        self.dtype = dtype


def test_operations_and_bytes_come_from_the_number_of_parameters() -> None:
    target, drafter = Told(3_000_000), ModelDrafter(Told(300_000), target_vocab_size=V)
    measured = {"small": {"drafter_ms": 2.0, "outside_ms": 0.5}}
    facts = cost_facts(target, {"small": drafter}, "small", [curve(200, 1, 10.0)], measured)
    assert facts["c_hat"] == pytest.approx(0.1)
    assert facts["operations_per_token"] == 6_000_000
    assert facts["weight_bytes"] == 12_000_000
    assert facts["bytes_read_per_token"] == 12_200_000
    assert facts["bandwidth_gbs"] == pytest.approx(1.22)
    half = cost_facts(
        Told(3_000_000, "bfloat16"), {"small": drafter}, "small", [curve(200, 1, 10.0)], measured
    )
    assert half["weight_bytes"] == 6_000_000


@pytest.mark.parametrize(("dtype", "count"), [("float32", 100), ("bfloat16", 100), ("int8", 400)])
def test_parameters_are_counted_in_the_file_of_weights(
    dtype: str, count: int, tmp_path: Path
) -> None:
    model = ToyModel(hashed_law(V, seed=1), V)
    assert num_parameters(model) is None
    model.dtype = dtype
    model.weights = tmp_path / "weights.bin"  # type: ignore[attr-defined]
    assert num_parameters(model) is None
    (tmp_path / "weights.bin").write_bytes(bytes(400))
    assert num_parameters(model) == count
