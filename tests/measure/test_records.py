"""Measurement and bench files read back: what is taken, and what is refused by its name."""

from __future__ import annotations

import json

import pytest

from outrider.errors import UsageError
from outrider.measure.records import bench_from, json_object, measurement_from

ALPHA: dict[str, object] = {
    "drafter": "lookup",
    "temperature": 0.0,
    "policy": "greedy",
    "alpha": 0.5,
    "low": 0.45,
    "high": 0.55,
    "num_tokens": 10_000,
    "survival": [0.5, 0.3],
}
ROW: dict[str, object] = {
    "task": "chat",
    "temperature": 1.0,
    "gamma": 3,
    "rule": "block",
    "drafter": "lookup",
    "batch": 1,
    "plain_ms_per_token": 8.0,
    "ms_per_token": 5.0,
    "speedup": 1.6,
    "low": 1.5,
    "high": 1.7,
    "alpha_hat": 0.6,
    "tokens_per_call": 2.1,
    "predicted_speedup": 1.55,
}


def test_a_measurements_alphas_and_costs_are_read() -> None:
    cost = {"c": 0.2, "drafters": {"toy:near": {"c": 0.1, "drafter_ms": 1.0, "c_hat": None}}}
    found = measurement_from({"target": "t", "alpha": [ALPHA], "cost": cost})
    [record] = found.alpha
    assert (found.target, found.c, dict(found.costs)) == ("t", 0.2, {"toy:near": 0.1})
    assert (record.drafter, record.alpha, record.policy) == ("lookup", 0.5, "greedy")
    assert record.survival == (0.5, 0.3)


def test_a_drafter_not_timed_by_itself_has_the_pairs_cost_if_it_is_the_only_one() -> None:
    alone = measurement_from({"alpha": [ALPHA], "cost": {"c": 0.2}})
    assert alone.cost_of("lookup") == 0.2
    assert alone.cost_of("other") is None
    two = measurement_from({"alpha": [ALPHA, ALPHA | {"drafter": "other"}], "cost": {"c": 0.2}})
    assert two.cost_of("lookup") is None


@pytest.mark.parametrize("facts", [{"alpha": [ALPHA]}, {"cost": {}}])
def test_a_measurement_may_lack_costs_or_alphas(facts: dict[str, object]) -> None:
    assert measurement_from(facts).c is None


@pytest.mark.parametrize("gamma", [None, "adaptive"])
def test_an_adaptive_gamma_is_none(gamma: str | None) -> None:
    [row] = bench_from({"rows": [ROW | {"gamma": gamma}]})
    assert row.gamma is None


def test_a_benchs_rows_are_read_and_what_was_not_measured_may_be_null() -> None:
    absent = {"alpha_hat": None, "tokens_per_call": None, "predicted_speedup": None}
    first, second = bench_from({"rows": [ROW, ROW | absent]})
    assert (first.task, first.gamma, first.batch, first.speedup) == ("chat", 3, 1, 1.6)
    assert (first.alpha_hat, first.predicted_speedup) == (0.6, 1.55)
    assert (second.alpha_hat, second.tokens_per_call, second.predicted_speedup) == (None,) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.2}, r"M: alpha\[1\]: alpha must be a number from 0 to 1, not 1.2"),
        ({"alpha": float("nan")}, "alpha must be a number from 0 to 1, not nan"),
        ({"alpha": True}, "alpha must be a number from 0 to 1, not True"),
        ({"temperature": -1}, "temperature must be a number, at least 0, not -1"),
        ({"drafter": 3}, "drafter must be a string, not 3"),
        ({"low": None}, "low must be a number, not None"),
        ({"survival": [0.5, 2]}, r"survival must be a list of numbers in \[0, 1\]"),
    ],
)
def test_a_bad_alpha_is_refused_with_its_place(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measurement_from({"alpha": [ALPHA, ALPHA | change]}, "M")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, 'M has neither "alpha" nor "cost"; pass what `outrider measure --json` wrote'),
        ({"rows": [], "cost": 3}, "M: cost must be an object, not 3"),
        ({"alpha": {}}, "M: alpha must be a list of objects"),
        ({"alpha": [3]}, r"M: alpha\[0\] must be an object, not 3"),
        ({"cost": {"c": -0.1}}, "M: cost: c must be a number, at least 0, not -0.1"),
        ({"cost": {"drafters": {"x": {}}}}, r"cost.drafters\['x'\]: c must be a number"),
    ],
)
def test_a_measurement_of_another_form_is_refused(facts: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measurement_from(facts, "M")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.5}, r'B: rows\[0\]: gamma must be a whole number, null or "adaptive"'),
        ({"gamma": -1}, "gamma must be a number, at least 0, not -1"),
        ({"batch": 0}, "batch must be a number, at least 1, not 0"),
        ({"speedup": "2x"}, "speedup must be a number, at least 0, not '2x'"),
        ({"alpha_hat": 1.5}, "alpha_hat must be a number from 0 to 1, not 1.5"),
        ({"task": None}, "task must be a string, not None"),
    ],
)
def test_a_bad_bench_row_is_refused_with_its_place(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_from({"rows": [ROW | change]}, "B")


def test_a_bench_without_rows_is_refused() -> None:
    with pytest.raises(UsageError, match='B has no "rows"; pass what `outrider bench --json`'):
        bench_from({"alpha": []}, "B")


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{\n "a": 1\n}\n', 'a note\nmore\n{"a": 1}\n', '[1]\n{"a": 1}']
)
def test_an_object_is_read_from_a_file_or_from_the_last_line_of_saved_output(text: str) -> None:
    assert json_object(text, "F") == {"a": 1}


@pytest.mark.parametrize("text", ["", "words", "[1, 2]", '{"a": 1}\nwords', json.dumps("x")])
def test_a_file_without_an_object_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="F holds no JSON object"):
        json_object(text, "F")
