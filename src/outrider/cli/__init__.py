"""The command line: parse, call one public function, print.

Text for people goes to stdout, notes and progress to stderr. With --json the last line of stdout is
one JSON object. Exit codes: 0 done, 1 a check failed, 2 wrong use.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from outrider.cli import (  # noqa: F401 - they add their commands
    bench,
    chat,
    distill,
    fit,
    generate,
    measure,
    models,
    plan,
    reproduce,
)
from outrider.cli.app import app
from outrider.cli.terminal import one_line
from outrider.errors import OutriderError

__all__ = ["main"]

# The base of everything typer says about a command line. It has no public name: some versions of
# typer bring their own copy of click, others use the installed one.
_BadCommandLine: type[Exception] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)


def main() -> NoReturn:
    """Run the command line; every error a user can cause is one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(
            stream, "reconfigure"
        ):  # a terminal that lacks a character shows a question mark
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
    except typer.Exit as leaving:
        code = leaving.exit_code
    except _BadCommandLine as error:
        _fail(one_line(error))
    except OutriderError as error:
        _fail(one_line(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    if message:  # none when no command was given: the help has been printed
        print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
