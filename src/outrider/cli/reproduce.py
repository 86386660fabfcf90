"""`outrider reproduce`: the paper's tables and figures on one's own pair, as a report."""

from __future__ import annotations

import contextlib
import io
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Table

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    check_early,
    load_pair,
)
from outrider.cli.terminal import read_file, read_prompt
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.measure.evidence import Evidence
    from outrider.measure.records import BenchRecord, Measurement
    from outrider.pair import Pair, Settings
    from outrider.requests import Request

__all__ = ["reproduce"]

GAMMAS = (7, 3, 0)
"""The rows of the time line; the paper's Figure 5 has the same."""
NUM_TOKENS = 48
BENCH_GAMMAS = "1,3,5,7,adaptive"
BENCH_TOKENS, BENCH_PROMPTS, BENCH_REPEATS = 64, 2, 2
"""Of the full run: enough for a dot on every curve, minutes with a small target."""
MEASURED_TOKENS = 2000
"""Of the target's text at each temperature; the paper's Table 3 has 10,000."""
PROMPT = (
    "Correct the spelling of this text and change nothing else: The old lighthouse stod on a rock "
    "far from the shore. Every evening the keeper climed the stairs and lit the lamp. The lamp "
    "cold be seen from every ship in the bay."
)


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write.")] = Path(
        "outrider-report"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Formulas, curves, a few rounds; nothing else is run.")
    ] = False,
    measurement: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `outrider measure` wrote.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `outrider bench` wrote.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="For the rounds that are shown; as for generate.")
    ] = None,
    target: TargetOption = "default",
    drafter: DrafterOption = "auto",
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    engine: EngineOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write a report with the paper's tables and figures, on your own pair.

    --prompt, --temperature and --seed are of the rounds that are shown; what the tables tell of the
    pair is measured on the prompts that come with Outrider, at temperatures 0 and 1.
    """
    settings: Settings = {
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": NUM_TOKENS,
        "rule": "rejection",
    }
    check_early(settings)
    text = None if prompt is None else read_prompt(prompt)
    if drafter == "none":
        raise UsageError("a report on drafts needs a drafter; pass another --drafter than none")
    _read(measurement, bench)  # a file that cannot be used is better known before the work
    from outrider.measure.report import prepare_folder, write_report
    from outrider.measure.reproduction import build_report

    folder = prepare_folder(out)
    pair = load_pair(target, drafter, engine, dtype, device)
    request = _request(pair, text, settings)
    if not quick:
        models = _Models(target, drafter, engine, dtype, device)
        measurement, bench = _gather(models, folder, measurement, bench)
    measured, rows = _read(measurement, bench)
    evidence = _evidence(pair, request, text, measured, rows)
    markdown, page = write_report(build_report(evidence), folder)
    if as_json:
        print(json.dumps(_facts(evidence) | {"report": str(markdown), "html": str(page)}))
    else:
        _print_table_1()
        terminal.out.print(f"\nreport: {page} (for people), {markdown} (Markdown)")


def _read(
    measurement: Path | None, bench: Path | None
) -> tuple[Measurement | None, tuple[BenchRecord, ...] | None]:
    """The files' contents; None for a file that was not given."""
    from outrider.measure.records import bench_from, json_object, measurement_from

    measured, rows = None, None
    if measurement is not None:
        name = repr(str(measurement))
        measured = measurement_from(json_object(read_file(measurement), name), name)
    if bench is not None:
        name = repr(str(bench))
        rows = bench_from(json_object(read_file(bench), name), name)
    return measured, rows


def _request(pair: Pair, text: str | None, settings: Settings) -> Request:
    """What is decoded for the trace; a target without a tokenizer gets ids that repeat."""
    if text is None and pair.target.tokenizer is None:
        ids = [7 * i % pair.target.vocab_size for i in range(12)]
        return pair.request([*ids, *ids], **settings)
    return pair.request(PROMPT if text is None else text, **settings)


class _Models(NamedTuple):
    """The options that name a pair, for the commands that load it themselves."""

    target: str
    drafter: str
    engine: str
    dtype: str
    device: str


def _gather(
    models: _Models, folder: Path, measurement: Path | None, bench: Path | None
) -> tuple[Path | None, Path | None]:
    """The files for the tables; what was not given is measured now and kept in `folder`."""
    from outrider.cli.bench import bench as run_bench
    from outrider.cli.measure import measure as run_measure

    # What they print is in the report; here only their progress is of interest.
    with contextlib.redirect_stdout(io.StringIO()):
        if measurement is None:
            measurement = folder / "measurement.json"
            run_measure(
                target=models.target,
                drafter=[models.drafter],
                tokens=MEASURED_TOKENS,
                rounds=False,
                contexts="256",
                batches="1",
                out=measurement,
                engine=models.engine,
                dtype=models.dtype,
                device=models.device,
            )
        if bench is None:
            bench = folder / "bench.json"
            run_bench(
                target=models.target,
                drafter=[models.drafter],
                gammas=BENCH_GAMMAS,
                rules="rejection",
                tokens=BENCH_TOKENS,
                prompts_per_task=BENCH_PROMPTS,
                repeats=BENCH_REPEATS,
                out=bench,
                engine=models.engine,
                dtype=models.dtype,
                device=models.device,
            )
    return measurement, bench


def _evidence(
    pair: Pair,
    request: Request,
    text: str | None,
    measured: Measurement | None,
    rows: tuple[BenchRecord, ...] | None,
) -> Evidence:
    from outrider.measure.evidence import Evidence
    from outrider.measure.recording import record

    assert pair.drafter is not None
    shown = PROMPT if text is None else text
    if pair.target.tokenizer is None and text is None:
        shown = " ".join(str(token) for token in request.prompt)

    def progress(turn: int) -> None:
        terminal.err.print(f"turn {turn} of 3 done", style="dim")

    recordings = record(pair, request, GAMMAS, progress=progress)
    return Evidence(
        recordings=tuple(recordings),
        tokenizer=pair.target.tokenizer,
        runs_model=pair.drafting_model is not None,
        prompt=shown,
        measurement=measured,
        bench=rows or (),
        facts=tuple(_provenance(pair, request)),
    )


def _provenance(pair: Pair, request: Request) -> list[tuple[str, str]]:
    from outrider.measure.provenance import provenance

    assert pair.drafter is not None
    facts = provenance({}, date=time.strftime("%Y-%m-%d"))
    policy = request.policy
    return [
        ("target", f"{pair.target.name} ({pair.target.engine}, {pair.target.dtype})"),
        ("drafter", pair.drafter.name),
        ("rounds shown", f"rule {request.rule}, temperature {policy.temperature:g}, one request"),
        ("timing", "the median of three turns, after one that warms up"),
        *((name, str(value)) for name, value in facts.items() if value and name != "arguments"),
    ]


def _facts(evidence: Evidence) -> dict[str, object]:
    """The report's numbers, ready for JSON."""
    from outrider.measure import paper
    from outrider.measure.evidence import pair_rows

    measurement = evidence.measurement
    return {
        "table1": [
            {
                "alpha": row.alpha,
                "gamma": row.gamma,
                "operations": row.operations,
                "speed": row.speed,
            }
            for row in paper.TABLE_1
        ],
        "table3": [asdict(item) for item in measurement.alpha] if measurement is not None else [],
        "table4": [
            asdict(item.row) | {"alpha": item.alpha, "c": item.c, "expected": item.expected}
            for item in pair_rows(evidence)
        ],
        "runs": [
            {
                "gamma": item.gamma,
                "num_tokens": item.result.stats.num_tokens,
                "rounds": item.result.stats.rounds,
                "tokens_per_call": item.result.stats.tokens_per_call,
                "alpha_hat": item.result.stats.alpha_hat,
                "ms_per_token": item.ms_per_token,
                "speedup": evidence.speedup(item),
            }
            for item in evidence.recordings
        ],
    }


def _print_table_1() -> None:
    from outrider.measure import paper

    table = Table(box=None, pad_edge=False)
    for column in ("alpha", "gamma", "operations", "printed", "speed", "printed"):
        table.add_column(column, justify="right")
    for row in paper.TABLE_1:
        table.add_row(
            f"{row.alpha:g}",
            str(row.gamma),
            f"{row.operations:.2f}x",
            f"{row.printed_operations}x",
            f"{row.speed:.2f}x",
            f"{row.printed_speed}x",
        )
    terminal.out.print(table)
