"""The cost curve: between and beyond measured points, measured on a model, kept on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from outrider import costs as costs_module
from outrider.costs import Costs, kept_costs, measure_context, measure_costs, time_passes
from outrider.errors import UsageError
from outrider.models import Feed
from outrider.models.toy import ToyModel, hashed_law

MODEL = ToyModel(hashed_law(5, seed=1), 5)


def test_between_measured_points_the_curve_is_linear_and_beyond_them_it_goes_on() -> None:
    costs = Costs((1, 3, 5), (10.0, 12.0, 16.0), drafter_ms=2.5)
    assert [costs.target(n) for n in (1, 2, 3, 4, 5, 7)] == [10, 11, 12, 14, 16, 20]
    assert costs.verify_cost(4) == pytest.approx(1.4)
    assert costs.c == 0.25
    assert Costs((1,), (7.0,)).target(9) == 7.0


def test_a_pass_may_be_as_wide_as_the_curve_is_level() -> None:
    costs = Costs((1, 2, 5, 9), (10.0, 12.0, 12.0, 13.0))
    assert [costs.widest(n) for n in (1, 2, 3, 5, 6, 9, 20)] == [1, 5, 5, 5, 6, 9, 20]


@pytest.mark.parametrize(
    ("positions", "target_ms", "drafter_ms", "change_ms"),
    [
        ((), (), 0.0, 0.0),
        ((2, 3), (1.0, 1.0), 0.0, 0.0),
        ((1, 1), (1.0, 1.0), 0.0, 0.0),
        ((1, 2), (1.0,), 0.0, 0.0),
        ((1, 2), (0.0, 1.0), 0.0, 0.0),
        ((1, 2), (1.0, 1.0), -0.1, 0.0),
        ((1, 2), (1.0, 1.0), 0.0, -0.1),
    ],
)
def test_what_is_no_curve_is_refused(
    positions: tuple[int, ...], target_ms: tuple[float, ...], drafter_ms: float, change_ms: float
) -> None:
    with pytest.raises(UsageError):
        Costs(positions, target_ms, drafter_ms=drafter_ms, change_ms=change_ms)


def test_a_model_is_timed_and_leaves_nothing_open() -> None:
    costs = measure_costs(MODEL, MODEL, positions=(1, 2, 4), context=8, repeats=2)
    assert costs.positions == (1, 2, 4)
    assert list(costs.target_ms) == sorted(costs.target_ms)
    assert costs.drafter_ms > 0
    assert measure_costs(MODEL, None, positions=(1,), repeats=1).drafter_ms == 0
    assert min(time_passes(MODEL, 2, context=0, num_sequences=3)) > 0


def test_a_pass_costs_no_more_than_a_wider_one_that_it_can_be_filled_up_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {1: 10.0, 2: 13.0, 3: 12.0, 4: 11.0}
    monkeypatch.setattr(costs_module, "time_passes", lambda _, n, **__: (times[n] + 4.0, times[n]))
    costs = measure_costs(MODEL, None, positions=(1, 2, 3, 4), context=8, repeats=2)
    assert costs.target_ms == (10.0, 11.0, 11.0, 11.0)
    assert costs.widest(2) == 4
    assert costs.change_ms == 4.0


class Noting(ToyModel):
    """Takes some milliseconds a position, and notes its name and the width of every pass."""

    def __init__(self, name: str, ms: float, passes: list[tuple[str, int]]) -> None:
        super().__init__(hashed_law(5, seed=1), 5)
        self.name, self._ms, self._passes = name, ms, passes

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        width = sum(len(feed.tokens) for feed in feeds)
        self._passes.append((self.name, width))
        time.sleep(1e-3 * self._ms * width)
        return super().score(feeds)


def test_the_first_step_of_a_draft_is_told_apart_from_those_behind_it() -> None:
    class Displaced(Noting):
        """Takes 4 ms more behind another model's pass."""

        def score(self, feeds: Sequence[Feed]) -> Tensor:
            time.sleep(0.004 * (self._passes[-1:] != [(self.name, 1)]))
            return super().score(feeds)

    passes: list[tuple[str, int]] = []
    drafter, target = Displaced("drafter", 1.0, passes), Noting("target", 3.0, passes)
    costs = measure_costs(target, drafter, positions=(1, 2), context=2, repeats=3)
    assert costs.drafter_ms == pytest.approx(1.0, rel=0.3)
    assert costs.drafter_begins_ms == pytest.approx(4.0, rel=0.2)
    assert measure_costs(target, None, positions=(1, 2), repeats=1).drafter_begins_ms == 0.0


def test_what_a_cached_token_adds_to_a_pass_is_told_apart() -> None:
    class Remembering(ToyModel):
        """Takes 2 ms, and 20 microseconds more for every token cached."""

        def score(self, feeds: Sequence[Feed]) -> Tensor:
            time.sleep(0.002 + 2e-5 * sum(feed.sequence.length for feed in feeds))
            return super().score(feeds)

    model = Remembering(hashed_law(5, seed=1), 5)
    assert measure_context(model) == pytest.approx(0.02, rel=0.25)
    assert measure_context(MODEL) < 0.002
    # One that can hold no more has no longer contexts.
    assert measure_context(ToyModel(hashed_law(5, seed=1), 5, context_length=40)) == 0.0


class Preparing(ToyModel):
    """Takes 2 ms a position, and 6 ms more for another number of positions than the last."""

    width = 0

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        width = sum(len(feed.tokens) for feed in feeds)
        time.sleep(0.002 * width + 0.006 * (width != self.width))
        self.width = width
        return super().score(feeds)


def test_what_a_change_of_width_takes_is_told_apart() -> None:
    """By turns every pass is a changed one; plain decoding's passes never are."""
    model = Preparing(hashed_law(5, seed=1), 5)
    costs = measure_costs(model, None, positions=(1, 3, 6), context=4, repeats=3)
    assert costs.target_ms == pytest.approx((2.0, 6.0, 12.0), rel=0.25)
    assert costs.change_ms == pytest.approx(6.0, rel=0.25)
    only = measure_costs(model, None, positions=(1,), context=4, repeats=3)
    assert (only.target(1), only.change_ms) == (pytest.approx(2.0, rel=0.25), 0.0)


def test_drafter_steps_come_before_target_passes_over_several_positions() -> None:
    passes: list[tuple[str, int]] = []
    target, drafter = Noting("target", 3.0, passes), Noting("drafter", 1.0, passes)
    costs = measure_costs(target, drafter, positions=(1, 3, 7), context=2, repeats=2)
    before = {
        width: {passes[i - 1] for i, item in enumerate(passes) if item == ("target", width)}
        for width in (1, 3, 7)
    }
    assert before[3] == before[7] == {("drafter", 1)}
    assert ("drafter", 1) not in before[1]  # plain decoding has no drafter
    assert costs.drafter_ms == pytest.approx(1.0, rel=0.3)
    assert costs.drafter_reads == pytest.approx(1 / 3, rel=0.25)
    assert measure_costs(target, None, positions=(1, 3), repeats=1).drafter_reads == 0.0


def test_positions_beyond_the_context_are_left_out() -> None:
    short = ToyModel(hashed_law(5, seed=1), 5, context_length=20)
    costs = measure_costs(short, None, positions=(1, 4, 8), context=15, repeats=1)
    assert costs.positions == (1, 4)


def test_costs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    told: list[str] = []
    first = kept_costs(MODEL, None, told.append)
    assert kept_costs(MODEL, None, told.append) == first
    assert len(told) == 1
    kept_costs(MODEL, MODEL, told.append)  # another drafter, other costs
    assert len(told) == 2
    [file, _] = sorted(tmp_path.rglob("costs.json"), key=lambda path: path.stat().st_mtime)
    wrong = json.dumps(json.loads(file.read_text()) | {"positions": [2], "target_ms": [1]})
    for damage in ("", "{}", wrong):
        file.write_text(damage)
        again = kept_costs(MODEL, None, told.append)
        assert json.loads(file.read_text()) == json.loads(json.dumps(again.as_dict()))
    assert len(told) == 5


def test_another_model_under_the_same_name_is_timed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    told: list[str] = []
    model = ToyModel(hashed_law(5, seed=1), 5)
    for number, depth in enumerate((2, 3), start=1):
        model.form = f"llama-{depth}x64-5"  # type: ignore[attr-defined]
        kept_costs(model, None, told.append)
        kept_costs(model, None, told.append)
        assert len(told) == number


def test_a_cache_that_cannot_be_written_costs_a_measurement_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    told: list[str] = []
    assert kept_costs(MODEL, None, told.append).target_ms[0] > 0
    assert len(told) == 1
