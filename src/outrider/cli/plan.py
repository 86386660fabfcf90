"""`outrider plan`: whether speculation pays, with which drafter and how many tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import JsonOption
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.measure.planning import Outlook, Plan

__all__ = ["plan"]


@app.command()
def plan(
    alpha: Annotated[
        float | None, typer.Option(help="Mean acceptance probability, from 0 to 1.")
    ] = None,
    c: Annotated[
        float | None, typer.Option("--c", help="Time of a drafter step over a target step.")
    ] = None,
    c_hat: Annotated[
        float | None, typer.Option("--c-hat", help="The same in operations; default: as --c.")
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(help="Tokens drafted per round; default: the best number.")
    ] = None,
    max_gamma: Annotated[
        int | None, typer.Option(help="The longest draft to consider; default: no limit.")
    ] = None,
    measurement: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="What `outrider measure` wrote.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="With --from: rows to take; default: the lowest.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="With --from: rows to take; default: the first policy.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="The only drafter to plan for, as the file names it.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The target's name in the settings for other engines.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether speculation pays, with which drafter and how many tokens."""
    from outrider.measure.candidates import candidates_from
    from outrider.measure.other_engines import settings_for
    from outrider.measure.planning import Candidate, pick, plan_for
    from outrider.measure.records import json_object

    if measurement is None:
        _refuse("reads a file", "with --from FILE", {"temperature": temperature, "policy": policy})
        if alpha is None or c is None:
            raise UsageError("nothing to plan with: pass --alpha and --c, or --from FILE")
        candidates = [Candidate(alpha, c, c if c_hat is None else c_hat, drafter or "")]
        notes: list[str] = []
        name = target or ""
    else:
        _refuse("comes from the file", "without --from", {"alpha": alpha, "c": c, "c-hat": c_hat})
        source = str(measurement)
        facts = json_object(terminal.read_file(measurement), source)
        candidates, notes = candidates_from(
            facts, source=source, temperature=temperature, policy=policy, drafter=drafter
        )
        name = target or str(facts.get("target", ""))
    plans = [plan_for(item, gamma=gamma, max_gamma=max_gamma) for item in candidates]
    best, why = pick(plans)
    chosen = best.candidate.drafter
    settings = settings_for(target=name, drafter=chosen, gamma=best.outlook.optimal_gamma)
    for note in [*notes, *filter(None, [best.end_of_search])]:
        terminal.err.print(f"note: {note}", style="dim")
    if as_json:
        facts = _facts(best, plans, why if measurement is not None else None)
        print(json.dumps(facts | {"settings": settings}))
        return
    if measurement is not None and len(plans) > 1:
        _print_drafters(plans, best)
    if measurement is not None:
        terminal.out.print(why + "\n")
    _print_plan(best)
    terminal.out.print(f"\n{best.sentence}\n", style="bold")
    _print_settings(settings, best)


def _refuse(what: str, how: str, options: dict[str, float | str | None]) -> None:
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"--{option} {what}; use it {how}")


def _facts(best: Plan, plans: Sequence[Plan], why: str | None) -> dict[str, object]:
    """The numbers to believe on top, both computations below them."""
    known = best.candidate
    facts: dict[str, object] = {
        **best.outlook.as_dict(),
        "sentence": best.sentence,
        "pays": best.pays,
        "alpha": known.alpha,
        "c": known.c,
        "c_hat": known.c_hat,
        "paper": best.paper.as_dict(),
        "measured": None if best.measured is None else best.measured.as_dict(),
    }
    if why is not None:
        facts["drafter"] = known.drafter
        facts["why"] = why
        facts["drafters"] = [
            {
                "drafter": item.candidate.drafter,
                "alpha": item.candidate.alpha,
                "low": item.candidate.low,
                "high": item.candidate.high,
                "c": item.candidate.c,
                **item.outlook.as_dict(),
            }
            for item in plans
        ]
    return facts


def _print_drafters(plans: Sequence[Plan], best: Plan) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("drafter", "alpha", "interval", "c", "draft", "factor"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for item in sorted(plans, key=lambda item: -item.outlook.walltime_factor):
        known, found = item.candidate, item.outlook
        table.add_row(
            known.drafter,
            f"{known.alpha:.2f}",
            f"{known.low:.2f} to {known.high:.2f}",
            f"{known.c:.3f}",
            str(found.gamma),
            f"{found.walltime_factor:.2f}x",
            style="bold" if item is best else "",
        )
    terminal.out.print(table)
    terminal.out.print()


def _print_plan(plan: Plan) -> None:
    known, columns = plan.candidate, [plan.paper]
    titles = ["paper's formula"]
    if plan.measured is not None:
        columns.append(plan.measured)
        titles.append("measured v(n), survival")
    table = Table(box=None, pad_edge=False)
    table.add_column(f"alpha {known.alpha:.2f}, c {known.c:.3f}, c_hat {known.c_hat:.3f}")
    for title in titles:
        table.add_column(title, justify="right")

    def row(name: str, show: Callable[[Outlook], str]) -> None:
        table.add_row(name, *(show(column) for column in columns))

    def threshold(alpha: float | None) -> str:
        return "never" if alpha is None else f"alpha {alpha:.2f}"

    gamma = columns[0].gamma
    row("tokens drafted per round", lambda item: str(item.gamma))
    row("expected tokens per round", lambda item: f"{item.expected_tokens:.2f}")
    row("walltime factor", lambda item: f"{item.walltime_factor:.2f}x")
    if plan.factor_interval is not None:
        low, high = plan.factor_interval
        rest = [""] * (len(columns) - 1)
        table.add_row("  over alpha's interval", f"{low:.2f}x to {high:.2f}x", *rest)
    row("operations factor", lambda item: f"{item.operations_factor:.2f}x")
    if any(item.gamma != item.optimal_gamma for item in columns):
        row("best draft length", lambda item: str(item.optimal_gamma))
        row("walltime factor there", lambda item: f"{item.best_factor:.2f}x")
    row("left to an oracle", lambda item: _gain(item))
    row("speculation pays above", lambda item: threshold(item.break_even_alpha))
    if gamma:
        row(
            f"  drafting {gamma} pays above", lambda item: threshold(item.break_even_alpha_at_gamma)
        )
    terminal.out.print(table)


def _gain(outlook: Outlook) -> str:
    if outlook.oracle_factor == float("inf"):
        return "no limit"
    return f"{100.0 * outlook.oracle_gain:.0f} %"


def _print_settings(settings: dict[str, str | None], plan: Plan) -> None:
    if not plan.pays:
        return
    if None in settings.values():
        terminal.err.print(
            f"vLLM, transformers and llama.cpp have no counterpart to {plan.candidate.drafter}",
            style="dim",
        )
        return
    for name, text in settings.items():
        terminal.out.print(Text(name, style="dim"))
        for line in str(text).splitlines():
            terminal.out.print(f"  {line}")
    terminal.err.print(
        "c, v(n) and so the best length are those of the engine they were measured with",
        style="dim",
    )
