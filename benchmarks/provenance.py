"""Where a benchmark's figure comes from, for scripts that parse their arguments with argparse."""

from __future__ import annotations

import argparse

from outrider.measure import provenance as shared


def provenance(arguments: argparse.Namespace, **facts: object) -> dict[str, object]:
    """Facts about this run that a reader needs to judge or repeat it.

    Args:
        arguments: the command line; of paths only the last part is kept.
        facts: anything the benchmark adds.
    """
    return shared.provenance(vars(arguments), **facts)
