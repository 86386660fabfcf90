"""The application that every command adds itself to."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding: faster answers with exactly the same output law.",
)
