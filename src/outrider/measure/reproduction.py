"""The paper's tables and figures on one's own pair: what the report of `outrider reproduce` says.

Numbers of the paper come from `measure.paper`, everything computed from `outrider.theory`, and
everything measured from what is passed in as `Evidence`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.measure import figures, paper
from outrider.measure.evidence import (
    Evidence,
    PairRow,
    best_gamma_points,
    fastest,
    own_costs,
    pair_rows,
    speed_points,
    tokens_points,
)
from outrider.measure.recording import time_row
from outrider.measure.report import Block, Picture, Report, Section, Table, Trace
from outrider.measure.traces import Piece, round_pieces
from outrider.requests import Result
from outrider.text import Tokenizer

__all__ = ["build_report"]

TIME_LINE_TOKENS = 20
MOST_OWN_CURVES = 2
CLOSE = 0.1
"""How near a prediction has to come to count as right."""


# The report


def build_report(evidence: Evidence) -> Report:
    """The whole report; parts that nothing was measured for say how to measure it."""
    return Report(
        "The paper's tables and figures on your own pair",
        "Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding "
        "(ICML 2023): formulas checked against the printed values, and the same quantities "
        "measured here.",
        (
            _in_short(evidence),
            _figure_1(evidence),
            _table_1_section(),
            _figure_2(evidence),
            _figure_3(evidence),
            _figure_4(evidence),
            _figure_5(evidence),
            _table_4_section(evidence),
            _table_3_section(evidence),
            Section("How this was made", (Table(("", ""), evidence.facts),)),
        ),
    )


def _in_short(evidence: Evidence) -> Section:
    right = sum(row.reproduces for row in paper.TABLE_1)
    rounded = [row for row in paper.TABLE_4 if not row.reproduces]
    explained = sum(row.could_reproduce for row in rounded)
    blocks: list[Block] = [
        f"The formulas give both printed values in {right} of the {len(paper.TABLE_1)} rows of "
        f"Table 1, and the printed expectation in {len(paper.TABLE_4) - len(rounded)} of the "
        f"{len(paper.TABLE_4)} rows of Table 4; {explained} of the other {len(rounded)} agree for "
        "an alpha and c that round to the printed ones."
    ]
    drafting = [item for item in evidence.recordings if item.gamma]
    if drafting:
        item = drafting[0]
        stats = item.result.stats
        text = (
            f"One request on this machine with gamma = {item.gamma}: {stats.num_tokens} tokens in "
            f"{stats.rounds} target passes, {_form(stats.tokens_per_call)} tokens per pass"
        )
        speedup = evidence.speedup(item)
        if speedup is not None:
            text += f"; per token {_form(speedup)}x as fast as plain decoding of the same prompt"
        blocks.append(f"{text}.")
    pairs = [item.row for item in pair_rows(evidence)]
    predicted = [row for row in pairs if row.predicted_speedup is not None]
    if predicted:
        near = sum(
            abs((row.predicted_speedup or 0) / row.speedup - 1) <= CLOSE for row in predicted
        )
        blocks.append(
            f"Of {len(predicted)} settings measured one by one, {near} took the predicted time "
            f"within {CLOSE:.0%}."
        )
    return Section("In short", tuple(blocks))


def _figure_1(evidence: Evidence) -> Section:
    rounds = _shown_rounds(evidence.recordings[0].result, evidence.tokenizer)
    return Section(
        "Figure 1: a generation, round by round",
        (
            "One line is one target pass: the drafted tokens that it accepted, those it rejected, "
            "and the token it put behind them itself.",
            f"Prompt: {evidence.prompt}",
            Trace(rounds),
        ),
    )


def _shown_rounds(result: Result, tokenizer: Tokenizer | None) -> tuple[tuple[Piece, ...], ...]:
    rounds = [tuple(round_pieces(item, tokenizer)) for item in result.trace]
    # The end token is no text: its round would look as if it had added nothing.
    if result.finish_reason == "eos" and all(piece.fate != "correction" for piece in rounds[-1]):
        rounds[-1] = (*rounds[-1], Piece("correction", "<end>"))
    return tuple(rounds)


def _table_1_section() -> Section:
    rows = tuple(
        (
            f"{row.alpha:g}",
            str(row.gamma),
            f"{row.printed_operations}x",
            f"{row.operations:.2f}x",
            f"{row.printed_speed}x",
            f"{row.speed:.2f}x",
        )
        for row in paper.TABLE_1
    )
    columns = ("alpha", "gamma", "operations, printed", "computed", "speed, printed", "computed")
    return Section(
        "Table 1: operations and speed by the formulas",
        ("A drafter that costs nothing (c = 0): Theorems 3.8 and 3.11.", Table(columns, rows)),
    )


def _figure_2(evidence: Evidence) -> Section:
    points, what = tokens_points(evidence)
    return Section(
        "Figure 2: tokens per round",
        (
            Picture(
                "figure-2",
                figures.tokens_per_round_svg(points),
                "Expected tokens per target pass by Equation (1), for an alpha that is the same "
                f"at every position. {what}",
            ),
        ),
    )


def _figure_3(evidence: Evidence) -> Section:
    points, costs = best_gamma_points(evidence), own_costs(evidence)
    what = "Where Theorem 3.8 is highest, for several costs c of a drafter step."
    if costs:
        what += " Dashed: the costs measured for your drafters"
        what += ", the highest of them." if len(costs) > MOST_OWN_CURVES else ", where they fit."
    if points:
        what += " Dots: the fastest of the draft lengths measured for a task."
    svg = figures.best_gamma_svg(points, own_c=costs[:MOST_OWN_CURVES])
    return Section("Figure 3: the best draft length", (Picture("figure-3", svg, what),))


def _figure_4(evidence: Evidence) -> Section:
    points, what = speed_points(evidence)
    return Section(
        "Figure 4: speed and operations",
        (
            Picture(
                "figure-4",
                figures.speed_and_operations_svg(points),
                "Time saved and operations added by Theorems 3.8 and 3.11 for a drafter that costs "
                "nothing and a target that verifies a draft in the time of one token; measured "
                f"speed-ups pay for both. {what}",
            ),
        ),
    )


def _figure_5(evidence: Evidence) -> Section:
    rows = [
        time_row(
            f"{figures.GAMMA} = {item.gamma}" if item.gamma else "no drafts",
            item.result,
            TIME_LINE_TOKENS,
        )
        for item in evidence.recordings
    ]
    cells = tuple(
        (
            str(item.gamma),
            str(item.result.stats.num_tokens),
            str(item.result.stats.rounds),
            _form(item.result.stats.tokens_per_call),
            _form(item.result.stats.alpha_hat),
            _form(item.ms_per_token),
            _factor(evidence.speedup(item)),
        )
        for item in evidence.recordings
    )
    columns = ("gamma", "tokens", "rounds", "tokens per pass", "alpha_hat", "ms per token", "speed")
    even = " The block of a drafting model is divided evenly into its steps."
    return Section(
        "Figure 5: rounds in time",
        (
            Picture(
                "figure-5",
                figures.time_line_svg(rows),
                f"Real rounds of one request, to scale: the first {TIME_LINE_TOKENS} tokens or a "
                "few more after the pass that read the prompt. +n: tokens the round added."
                + (even if evidence.runs_model else ""),
            ),
            Table(columns, cells),
        ),
    )


def _table_4_section(evidence: Evidence) -> Section:
    title = "Tables 2 and 4: expected and measured speed"
    printed = tuple(
        (
            row.task,
            row.drafter,
            f"{row.temperature:g}",
            str(row.gamma),
            f"{row.alpha:.2f}",
            f"{row.c:.2f}",
            f"{row.printed_expected}x",
            f"{row.expected:.3f}x",
            f"{row.printed_measured}x",
        )
        for row in paper.TABLE_4
    )
    columns = (
        *("task", "drafter", "temperature", "gamma", "alpha", "c"),
        *("expected, printed", "expected, computed", "measured"),
    )
    theirs: list[Block] = [
        "The paper's own, with T5-XXL as the target. Computed values start from the printed alpha "
        "and c, which are rounded.",
        Table(columns, printed),
    ]
    groups = fastest(pair_rows(evidence))
    if not groups:
        return Section(
            title,
            (
                "On your pair: not measured in this run. `outrider bench --json` measures it; pass "
                "what it wrote with `--bench FILE`.",
                *theirs,
            ),
        )
    cells = tuple(_pair_cells(group) for group in groups.values())
    own_columns = (
        *("task", "temperature", "drafter", "rule", "gamma", "alpha", "c"),
        *("Theorem 3.8", "predicted", "measured", "interval", "adaptive"),
    )
    return Section(
        title,
        (
            "On your pair, one request at a time, the fastest of the fixed draft lengths measured, "
            "and beside it what the adaptive one gave. "
            "Theorem 3.8 takes verifying as free and alpha as the same at every position; "
            "the prediction uses the measured cost of verifying and the measured survival. "
            "alpha here is accepted / examined in the rounds that were timed.",
            Table(own_columns, cells),
            *theirs,
        ),
    )


def _pair_cells(group: Sequence[PairRow]) -> tuple[str, ...]:
    """Of the fastest fixed length, of which formulas speak; without one, of the adaptive."""
    item = next((item for item in group if item.row.gamma is not None), group[0])
    adaptive = next((item.row.speedup for item in group if item.row.gamma is None), None)
    row = item.row
    return (
        row.task,
        f"{row.temperature:g}",
        row.drafter,
        row.rule,
        "adaptive" if row.gamma is None else str(row.gamma),
        _form(item.alpha),
        _form(item.c, ".3f"),
        _factor(item.expected),
        _factor(row.predicted_speedup),
        f"{row.speedup:.2f}x",
        f"{row.low:.2f} to {row.high:.2f}",
        _factor(adaptive),
    )


def _table_3_section(evidence: Evidence) -> Section:
    title = "Table 3: alpha"
    records = () if evidence.measurement is None else evidence.measurement.alpha
    if not records:
        return Section(
            title,
            (
                "Not measured in this run. `outrider measure --json` measures it; pass what it "
                "wrote with `--measurement FILE`.",
            ),
        )
    laws = sorted({(record.temperature, record.policy) for record in records})
    cells = {
        (
            record.drafter,
            (record.temperature, record.policy),
        ): f"{record.alpha:.2f} ({record.low:.2f} to {record.high:.2f})"
        for record in records
    }
    drafters = list(dict.fromkeys(record.drafter for record in records))
    rows = tuple((name, *(cells.get((name, law), "-") for law in laws)) for name in drafters)
    several = len({temperature for temperature, _ in laws}) < len(laws)
    columns = ("drafter", *(f"T = {t:g}" + (f", {name}" if several else "") for t, name in laws))
    num_tokens = [record.num_tokens for record in records]
    target = evidence.measurement.target if evidence.measurement is not None else ""
    return Section(
        title,
        (
            f"The mean of sum min(p, q) over {_span(num_tokens)} tokens generated by {target}, "
            "with its interval.",
            Table(columns, rows),
        ),
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _form(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
