"""The paper's printed values, each beside what its formulas give."""

from __future__ import annotations

import pytest

from outrider.measure.paper import FIGURE_3, TABLE_1, TABLE_4, Table4Row

DIFFERENT = {
    ("EnDe", "T5-base", 1.0, "2.347"),
    ("EnDe", "T5-large", 1.0, "1.934"),
    ("CNN/DM", "T5-large", 1.0, "1.541"),
}


def test_every_printed_number_of_table_1_follows_from_the_formulas() -> None:
    assert len(TABLE_1) == 6
    assert all(row.reproduces for row in TABLE_1)


def test_a_wrong_number_in_table_1_would_be_seen() -> None:
    assert not TABLE_1[0]._replace(printed_speed="1.97").reproduces
    assert not TABLE_1[0]._replace(printed_operations="1.54").reproduces


def test_all_expected_speeds_of_table_4_but_three_follow_from_the_printed_alpha_and_c() -> None:
    assert len(TABLE_4) == 12
    different = {
        (row.task, row.drafter, row.temperature, f"{row.expected:.3f}")
        for row in TABLE_4
        if not row.reproduces
    }
    assert different == DIFFERENT


@pytest.mark.parametrize("row", TABLE_4, ids=str)
def test_alpha_and_c_before_rounding_explain_every_row_of_table_4(row: Table4Row) -> None:
    assert row.could_reproduce


def test_rounding_does_not_explain_every_number() -> None:
    assert not any(row._replace(printed_expected="4.4").could_reproduce for row in TABLE_4)


def test_the_drafters_of_table_4_are_one_per_task_temperature_and_size() -> None:
    keys = {(row.task, row.drafter, row.temperature) for row in TABLE_4}
    assert len(keys) == len(TABLE_4)
    assert {row.temperature for row in TABLE_4} == {0.0, 1.0}


def test_the_optima_of_figure_3_are_those_of_the_plot() -> None:
    assert {row.c: row.optima for row in FIGURE_3} == {
        0.01: (5, 9, 14, 24),
        0.02: (4, 8, 11, 19),
        0.05: (3, 6, 8, 13),
        0.10: (2, 4, 6, 10),
    }
