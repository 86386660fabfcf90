"""`outrider bench`: plain against speculative decoding, measured and predicted."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    DeviceOption,
    DrafterDtypeOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    KvMemoryOption,
    TargetOption,
    TopKOption,
    TopPOption,
    check_output,
    duration,
    load_pair,
    parsed,
)
from outrider.cli.show_bench import print_rows
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.measure.benchmark import Benchmark
    from outrider.measure.grid import Grid, Row
    from outrider.measure.prompts import PromptItem
    from outrider.measure.unfinished import Unfinished
    from outrider.pair import Pair

__all__ = ["bench"]

_FULL = {"tokens": 128, "prompts_per_task": 10, "repeats": 3}
_QUICK = {"tokens": 24, "prompts_per_task": 2, "repeats": 2}


@app.command()
def bench(
    target: TargetOption = "default",
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="What proposes: lookup, ngram:FILE or a model; repeatable."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "--task", help="Only these, comma-separated.")
    ] = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", "--temperature", help="Comma-separated.")
    ] = "0,1",
    gammas: Annotated[
        str,
        typer.Option("--gammas", "--gamma", help="Draft lengths, comma-separated, or adaptive."),
    ] = "adaptive",
    rules: Annotated[
        str, typer.Option("--rules", "--rule", help="block, rejection, coupled; comma-separated.")
    ] = "block",
    batches: Annotated[
        str, typer.Option("--batches", "--batch", help="Requests at once, comma-separated.")
    ] = "1",
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts in Spec-Bench's question.jsonl form.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of each output. [128]")] = None,
    prompts_per_task: Annotated[int | None, typer.Option(help="Prompts of each task. [10]")] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns with each prompt. [3]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="24 tokens, 2 prompts a task, 2 turns each.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write rows and provenance here, over what was; an interrupted call can go on."
        ),
    ] = None,
    engine: EngineOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    kv_memory: KvMemoryOption = None,
    drafter_dtype: DrafterDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time speculative against plain decoding on prompts of six kinds, beside a prediction."""
    from outrider.measure.benchmark import Benchmark
    from outrider.measure.grid import Grid
    from outrider.measure.prompts import choose_tasks, read_prompts, shipped_prompts
    from outrider.measure.provenance import proposed_by, provenance

    given = {"tokens": tokens, "prompts_per_task": prompts_per_task, "repeats": repeats}
    amounts = (_QUICK if quick else _FULL) | {k: n for k, n in given.items() if n is not None}
    grid = Grid(
        temperatures=parsed(temperatures, "temperatures", float),
        gammas=parsed(gammas, "gammas", _gamma),
        rules=parsed(rules, "rules", str),
        batches=parsed(batches, "batches", int),
        num_tokens=amounts["tokens"],
        num_prompts=amounts["prompts_per_task"],
        repeats=amounts["repeats"],
        top_k=top_k,
        top_p=top_p,
    )
    grid.check()
    items = shipped_prompts() if prompts is None else read_prompts(prompts)
    items = choose_tasks(items, None if tasks is None else parsed(tasks, "tasks", str))
    names = list(dict.fromkeys(drafter or ["auto"]))
    if "none" in names:
        raise UsageError("plain decoding is timed beside every drafter; leave out --drafter none")
    if prompts_per_task is not None:
        _note_missing(items, prompts_per_task)
    models = {
        "target": target,
        "drafters": names,
        "engine": engine,
        "dtype": dtype,
        "device": device,
        "drafter_dtype": drafter_dtype,
        "kv_memory": kv_memory,
    }
    kept = None if out is None else _unfinished(out, models, grid, items)
    pairs = _load_pairs(names, target, engine, dtype, device, kv_memory, drafter_dtype)
    rows = _finished_rows(kept)
    try:
        _run(Benchmark(pairs, items, grid), rows, kept)
    except BaseException:  # whatever it is, what was measured is not lost
        terminal.print_unfinished(
            [row.as_dict() for row in rows],
            None if kept is None else (len(rows), kept.path),
            lambda: print_rows(rows),
            as_json=as_json,
        )
        raise
    facts: dict[str, object] = {
        "rows": [row.as_dict() for row in rows],
        "provenance": provenance(
            _arguments(models, grid, items),
            proposed_by=proposed_by({name: pair.drafter for name, pair in pairs.items()}),
        ),
    }
    if kept is not None:
        kept.finish(facts)
    if as_json:
        print(json.dumps(facts))
    else:
        if top_k or top_p != 1.0:
            terminal.out.print(f"all rows: top-k {top_k}, top-p {top_p:g}", style="dim")
        print_rows(rows)


def _note_missing(items: Sequence[PromptItem], wanted: int) -> None:
    """Say which tasks have fewer prompts than asked for."""
    have = Counter(item.task for item in items for _ in item.turns)
    if few := [f"{task} has {number}" for task, number in have.items() if number < wanted]:
        terminal.err.print(f"note: of {wanted} prompts a task, {', '.join(few)}", style="dim")


def _gamma(text: str) -> int | None:
    return None if text == "adaptive" else int(text)


def _load_pairs(
    names: Sequence[str],
    target: str,
    engine: str,
    dtype: str,
    device: str,
    kv_memory: float | None,
    drafter_dtype: str | None,
) -> dict[str, Pair]:
    """A pair for each drafter, all with one target in memory."""
    from outrider.drafters import names_model
    from outrider.pair import pair_with

    # Models first: an option that is for them alone is checked against the first.
    by_kind = sorted(names, key=names_model, reverse=True)
    first = load_pair(target, by_kind[0], engine, dtype, device, kv_memory, drafter_dtype)
    pairs = {by_kind[0]: first}
    for name in by_kind[1:]:
        pairs[name] = pair_with(
            first.target,
            name,
            engine=engine,  # type: ignore[arg-type]
            dtype=drafter_dtype or dtype,  # type: ignore[arg-type]
            device=device,
        )
    return {name: pairs[name] for name in names}


def _unfinished(
    out: Path, models: Mapping[str, object], grid: Grid, items: Sequence[PromptItem]
) -> Unfinished:
    """What an earlier call with the same arguments measured."""
    from outrider.measure.provenance import source_digest
    from outrider.measure.unfinished import Unfinished

    check_output(out)
    return Unfinished(out, _arguments(models, grid, items) | {"source": source_digest()})


def _arguments(
    models: Mapping[str, object], grid: Grid, items: Sequence[PromptItem]
) -> dict[str, object]:
    from outrider.measure.prompts import digest

    tasks = list(dict.fromkeys(item.task for item in items))
    return {**models, **asdict(grid), "tasks": tasks, "prompts": digest(items)}


def _finished_rows(kept: Unfinished | None) -> list[Row]:
    from outrider.measure.grid import Row

    rows = [] if kept is None else [Row.from_dict(record) for record in kept.records]
    if rows:
        terminal.err.print(f"going on after {len(rows)} rows that are measured", style="dim")
    return rows


def _run(benchmark: Benchmark, rows: list[Row], kept: Unfinished | None) -> None:
    """Measure what is not in `rows` yet, and add it there and to the file as it comes."""
    have = {(row.cell, row.setting) for row in rows}
    todo = [
        cell
        for cell in benchmark.cells
        if not all((cell, setting) in have for setting in benchmark.settings)
    ]
    # A larger batch takes longer, but by far not so many times.
    work = {cell: benchmark.num_runs(cell) * math.sqrt(cell.batch) for cell in todo}
    begun = time.perf_counter()
    done_work = 0.0
    for number, cell in enumerate(todo, start=1):
        measured = benchmark.measure(cell)
        for row in measured:
            if (row.cell, row.setting) not in have:
                rows.append(row)
                if kept is not None:
                    kept.add(row.as_dict())
        done_work += work[cell]
        left_s = (time.perf_counter() - begun) * (sum(work.values()) / done_work - 1.0)
        best = max(row.speedup for row in measured)
        terminal.err.print(
            f"{number} of {len(todo)}: {cell.task}, temperature {cell.temperature:g}, "
            f"batch {cell.batch}: {best:.2f}x{' at best' if len(measured) > 1 else ''}"
            + (f"; about {duration(left_s)} left" if number < len(todo) else ""),
            style="dim",
        )
