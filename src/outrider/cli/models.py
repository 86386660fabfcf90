"""`outrider models`: what is here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import DtypeOption, JsonOption
from outrider.errors import UsageError

if TYPE_CHECKING:
    pass

__all__ = ["models"]


@app.command()
def models(
    prepare: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Read and time a model and its own drafter now, so that they start quickly.",
        ),
    ] = None,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Delete imported models and converted graphs.")
    ] = False,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """List the models that are here, where they are and what they can do."""
    from outrider.models import cache, catalog, check_choices

    check_choices(dtype=dtype)
    if dtype != "auto" and prepare is None:
        raise UsageError("--dtype says how --prepare stores a model; pass --prepare REF with it")
    if clear_cache:
        freed = cache.clear_cache()
        terminal.err.print(f"freed {freed / 1e6:.0f} MB in {cache.cache_folder()}")
    if prepare is not None:
        from outrider.pair import load

        load(prepare, dtype=dtype)  # type: ignore[arg-type]
    entries = catalog.available_models()
    if as_json:
        print(json.dumps({"models": [entry.as_dict() for entry in entries]}))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("reference", "kind", "state", "can", "context", "size", "where"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        size = "" if entry.size_bytes is None else f"{entry.size_bytes / 1e6:.0f} MB"
        context = "" if entry.context_length is None else str(entry.context_length)
        table.add_row(
            entry.reference, entry.kind, entry.state, entry.can, context, size, entry.where
        )
    terminal.out.print(table)
    terminal.err.print(
        "any folder, .gguf file or hub id of a decoder-only model works too", style="dim"
    )
