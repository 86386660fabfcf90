"""`outrider fit`: an n-gram drafter from text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    DtypeOption,
    JsonOption,
    MaxNewOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    check_early,
    load_pair,
)
from outrider.cli.terminal import read_file
from outrider.errors import UsageError

__all__ = ["fit"]


@app.command()
def fit(
    output: Annotated[Path, typer.Argument(help="The table to write, for --drafter ngram:FILE.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Count n-grams of this text file; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Count n-grams of the target's answers, a prompt a line.")
    ] = None,
    distilled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Count n-grams of what the target wrote for `outrider distill`; repeatable.",
        ),
    ] = None,
    order: Annotated[int, typer.Option(help="n: 1 unigram, 2 bigram, ...")] = 4,
    target: TargetOption = "default",
    temperature: TemperatureOption = 0.0,
    max_new_tokens: MaxNewOption = 256,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Fit an n-gram drafter from text files or from the target's own text."""
    if not text and prompts is None and not distilled:
        raise UsageError("nothing to count: pass --text FILE, --prompts FILE or --distilled FOLDER")
    if not output.parent.is_dir():
        raise UsageError(f"cannot write {str(output)!r}: its folder does not exist")
    texts = [read_file(path) for path in text or ()]
    lines = [line for line in read_file(prompts).splitlines() if line] if prompts else []
    if prompts and not lines:
        raise UsageError(f"{prompts} is empty: expected a prompt on every line")
    check_early({"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed})
    if prompts is None and (temperature, max_new_tokens, seed) != (0.0, 256, None):
        raise UsageError(
            "--temperature, --max-new-tokens and --seed are for answers to --prompts; pass "
            "prompts, or leave them out"
        )
    from outrider.drafters.ngram import fit_ngrams

    pair = load_pair(target, "none", "auto", dtype, "auto")
    tokenizer = pair.target.tokenizer
    if tokenizer is None:
        raise UsageError(f"{target} has no tokenizer, so text cannot be counted")
    counted: list[Sequence[int]] = [tokenizer.encode(item) for item in texts]
    if distilled:
        from outrider.training.runs import written_text

        for folder in distilled:
            counted.extend(written_text(folder, pair.target).conversations())
    if lines:
        terminal.err.print(f"generating {len(lines)} answers", style="dim")
        results = pair.generate(
            lines, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
        )
        counted.extend([*result.prompt_ids, *result.token_ids] for result in results)
    table = fit_ngrams(counted, order=order, vocab_size=pair.target.vocab_size, tokenizer=tokenizer)
    try:
        table.save(output)
    except OSError as error:
        raise UsageError(f"cannot write {str(output)!r}: {error.strerror}") from error
    facts: dict[str, str | int] = {
        "file": str(output),
        "order": table.order,
        "num_tokens": sum(len(item) for item in counted),
        "num_contexts": sum(len(item) for item in table.contexts),
        "size_bytes": (size_bytes := output.stat().st_size),
    }
    if as_json:
        print(json.dumps(facts))
    else:
        terminal.out.print(
            f"{output}: {facts['num_contexts']} contexts from {facts['num_tokens']} tokens, "
            f"{size_bytes / 1e3:.0f} kB; use it with --drafter ngram:{output}"
        )
