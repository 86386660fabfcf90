"""Results as people and programs read them: text, tables, colours, JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from outrider.cli import terminal
from outrider.cli.terminal import number

if TYPE_CHECKING:
    from outrider.measure.comparison import Comparison
    from outrider.requests import Result, Round, TokenLogprob
    from outrider.text import Tokenizer

__all__ = [
    "print_comparison",
    "print_logprobs",
    "print_trace",
    "result_object",
    "summary",
]

_STYLES = {"accepted": "green", "rejected": "red strike", "correction": "bold blue"}
_MARKS = {"accepted": ("", ""), "rejected": ("[-", "-]"), "correction": ("[+", "+]")}


def print_comparison(comparison: Comparison) -> None:
    """Plain and speculative side by side, whether they agree, and the speed-up."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "ms per token", "tokens per target call", "alpha_hat"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in (("plain", comparison.plain), ("speculative", comparison.speculative)):
        stats = result.stats
        table.add_row(
            name,
            number(stats.ms_per_token, ".1f"),
            number(stats.tokens_per_call, ".2f"),
            number(stats.alpha_hat, ".2f"),
        )
    if comparison.transformers_ms:
        table.add_row(
            "transformers",
            number(statistics.median(comparison.transformers_ms), ".1f"),
            "1.00",
            "-",
        )
    terminal.out.print(table)
    num_tokens = comparison.plain.stats.num_tokens
    if comparison.agrees:
        terminal.out.print(f"the same text, token for token ({num_tokens} tokens)", style="green")
    elif comparison.must_agree:
        terminal.out.print("the texts DIFFER", style="bold red")
    else:
        terminal.out.print("two draws from the same law (a sampled text differs from run to run)")
    low, high = min(comparison.speedups), max(comparison.speedups)
    terminal.out.print(
        f"speed-up {comparison.speedup:.2f}x (median of {len(comparison.speedups)} turns, "
        f"{low:.2f} to {high:.2f})",
        style="bold",
    )


def print_trace(rounds: Sequence[Round], tokenizer: Tokenizer | None) -> None:
    """One line a round: accepted green, rejected red, the target's own token blue."""
    from outrider.measure.traces import round_pieces

    coloured = terminal.out.color_system is not None
    width = len(str(len(rounds)))
    legend = Text("round ", style="dim")
    for fate in ("accepted", "rejected", "correction"):
        legend.append(_marked(fate, fate, coloured))
        legend.append(" ")
    terminal.out.print(legend)
    for count, item in enumerate(rounds, start=1):
        line = Text(f"{count:>{width}} ", style="dim")
        for fate, text in round_pieces(item, tokenizer):
            line.append(_marked(fate, _visible(text), coloured))
        terminal.out.print(line)


def _visible(text: str) -> str:
    """Line ends and tabs as signs: a round is one line."""
    return text.replace("\n", "\u21b5").replace("\r", "\u240d").replace("\t", "\u21e5")


def _marked(fate: str, text: str, coloured: bool) -> Text:
    """Colour where there is colour, brackets where there is none."""
    before, after = ("", "") if coloured else _MARKS[fate]
    return Text(f"{before}{text}{after}", style=_STYLES[fate])


def print_logprobs(result: Result, tokenizer: Tokenizer | None) -> None:
    """A line a token: what it was, how likely, and what was likelier."""
    table = Table(box=None, pad_edge=False)
    for column in ("token", "logprob", "raw", "likeliest"):
        table.add_column(column)

    def show(token: int) -> str:
        return repr(tokenizer.decode([token])) if tokenizer is not None else str(token)

    for entry in result.logprobs or ():
        likeliest = "  ".join(f"{show(top.token_id)} {top.raw_logprob:.2f}" for top in entry.top)
        table.add_row(
            show(entry.token_id), f"{entry.logprob:.3f}", f"{entry.raw_logprob:.3f}", likeliest
        )
    terminal.out.print(table)


def summary(result: Result) -> str:
    """One line on how a result came about."""
    stats = result.stats
    parts = [
        f"{stats.num_tokens} tokens in {stats.rounds} target passes",
        f"{number(stats.tokens_per_call, '.2f')} tokens per target call",
    ]
    if stats.drafted:
        parts.append(f"alpha_hat {number(stats.alpha_hat, '.2f')}")
    parts.append(f"{number(stats.ms_per_token, '.1f')} ms per token")
    parts.append(f"{stats.engine} {stats.dtype}, rule {stats.rule}, seed {result.seed}")
    return "; ".join(parts)


def result_object(result: Result, *, trace: bool) -> dict[str, object]:
    """A result ready for JSON."""
    facts: dict[str, object] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "num_prompt_tokens": len(result.prompt_ids),
        "stats": result.stats.as_dict(),
    }
    if trace:
        facts["trace"] = [asdict(item) for item in result.trace]
    if result.logprobs is not None:
        facts["logprobs"] = [_logprob_object(entry) for entry in result.logprobs]
    return facts


def _logprob_object(entry: TokenLogprob, *, with_top: bool = True) -> dict[str, object]:
    facts: dict[str, object] = {
        "token_id": entry.token_id,
        "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
        "raw_logprob": entry.raw_logprob,
    }
    if with_top:
        facts["top"] = [_logprob_object(item, with_top=False) for item in entry.top]
    return facts
