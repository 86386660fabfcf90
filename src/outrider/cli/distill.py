"""`outrider distill`: a drafter made for a target, from what the target writes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    DeviceOption,
    EngineOption,
    JsonOption,
    KvMemoryOption,
    TargetOption,
    duration,
    kv_bytes,
)
from outrider.cli.terminal import read_file
from outrider.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.training.distillation import Plan, Progress
    from outrider.training.writing import DrawPolicy

__all__ = ["distill"]

_TOLD_EVERY_S = 10.0


def parse_count(text: str) -> int:
    """A number of tokens as people write it: 300000, 300k or 2.5M.

    Raises:
        UsageError: it is none.
    """
    units = {"k": 1e3, "m": 1e6}
    number, unit = (
        (text[:-1], units[text[-1:].lower()]) if text[-1:].lower() in units else (text, 1)
    )
    try:
        count = float(number.replace("_", "")) * unit
    except ValueError:
        count = math.nan
    if not (1 <= count < math.inf and count == int(count)):
        raise UsageError(f"tokens must be a whole number like 300000, 300k or 2.5M, not {text!r}")
    return int(count)


def parse_policies(text: str) -> tuple[DrawPolicy, ...]:
    """How answers are drawn, as in "0,0.7/0.9,1": temperatures, some with a top-p.

    Raises:
        UsageError: it cannot be read, or asks for what cannot be drawn by.
    """
    from outrider.training.writing import DrawPolicy

    found: list[DrawPolicy] = []
    for item in text.split(","):
        temperature, slash, top_p = item.partition("/")
        try:
            numbers = float(temperature), float(top_p) if slash else 1.0
        except ValueError as error:
            raise UsageError(
                "temperatures must be numbers, each with or without a top-p behind a slash, like "
                f"0,0.7/0.9,1; not {item.strip()!r}"
            ) from error
        found.append(DrawPolicy(*numbers))
    return tuple(found)


def _read_conversations(file: Path) -> tuple[tuple[str, ...], ...]:
    if file.suffix.lower() == ".jsonl":
        from outrider.measure.prompts import read_prompts

        return tuple(item.turns for item in read_prompts(file))
    turns = [line.strip() for line in read_file(file).splitlines()]
    asked = tuple((turn,) for turn in turns if turn)
    if not asked:
        raise UsageError(f"{file} is empty: expected a user's turn on every line")
    return asked


@app.command()
def distill(
    out: Annotated[Path, typer.Option(help="Folder of the drafter; a run that ended goes on.")],
    target: TargetOption = "default",
    tokens: Annotated[str, typer.Option(help="That the target writes: 300k, 2M.")] = "1M",
    layers: Annotated[
        int, typer.Option(min=0, help="Of the drafter; 0: 2 at the target's own width, else 4.")
    ] = 0,
    width: Annotated[
        int,
        typer.Option(
            min=0, help="Of its hidden states; 0: the target's own, up to 640, or else 256."
        ),
    ] = 0,
    vocab_size: Annotated[int, typer.Option(help="Ids it knows, the most frequent ones.")] = 8192,
    loss: Annotated[str, typer.Option(help="kl, reverse-kl, jsd, tv, nla or mix.")] = "nla",
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    epochs: Annotated[float, typer.Option(help="How often the text is read.")] = 3.0,
    temperatures: Annotated[
        str, typer.Option(help="Of the answers, each with its top-p behind a slash.")
    ] = "0,0.7/0.9,1",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Users' turns, one a line; in a .jsonl file, conversations in Spec-Bench's form. "
            "Each is answered once at every temperature, as many as the tokens allow; behind them "
            "the target writes turns of its own."
        ),
    ] = None,
    also_from: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Another run of this target, whose text is learnt from too.",
        ),
    ] = None,
    begin_as: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="An earlier drafter of this target to go on training, with its shape and ids; to "
            "give it more text, for one.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Of training.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of text, start and order.")] = 0,
    engine: EngineOption = "auto",
    device: DeviceOption = "auto",
    kv_memory: KvMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a small drafter for a target from the target's own text."""
    count = parse_count(tokens)
    asked = _read_conversations(prompts) if prompts else ()
    import torch

    from outrider.models import check_choices, load_model
    from outrider.models.checkpoints import find_checkpoint, load_weights
    from outrider.training.distillation import Plan, distil
    from outrider.training.learning import Recipe
    from outrider.training.student import StudentShape

    check_choices(engine, device=device)
    plan = Plan(
        tokens=count,
        shape=StudentShape(layers, width),
        vocab_size=vocab_size,
        recipe=Recipe(loss=loss, rate=rate, epochs=epochs, seed=seed),
        time_limit=math.inf if time_limit is None else 60.0 * time_limit,
        prompts=asked,
        policies=parse_policies(temperatures),
        also_from=tuple(map(str, also_from or ())),
        begin_as="" if begin_as is None else str(begin_as.resolve()),
        seed=seed,
    )
    if target.startswith("toy:"):
        raise UsageError(f"{target} has no weights to learn from; name a transformers model")
    model = load_model(
        target,
        engine=engine,  # type: ignore[arg-type]
        device=device,
        kv_memory=kv_bytes(kv_memory),
    )

    def module() -> PreTrainedModel:
        return load_weights(find_checkpoint(target, torch.float32), torch.float32)

    judged = distil(model, module, out, plan, _Teller())
    made = {"alpha": judged.alpha, "greedy": judged.greedy, "num_tokens": judged.num_tokens}
    _write_provenance(out, plan, made, target=target, engine=model.engine, dtype=model.dtype)
    facts = {"folder": str(out), **made}
    if as_json:
        print(json.dumps(facts))
    else:
        terminal.out.print(
            f"{out}: alpha {judged.alpha:.2f} at temperature 1, {judged.greedy:.2f} greedy, on "
            f"{judged.num_tokens} tokens held out; use it with --drafter lookup+{out}"
        )


def _write_provenance(out: Path, plan: Plan, made: Mapping[str, float], **model: str) -> None:
    """Keep where a drafter comes from beside it."""
    from outrider.measure.provenance import provenance
    from outrider.models.cache import written_whole
    from outrider.training.card import PROVENANCE, earlier_provenance

    arguments = {
        **model,
        **asdict(plan),
        "prompts": len(set(plan.prompts)),
        "also_from": len(plan.also_from),
        "begin_as": earlier_provenance(plan.begin_as) or Path(plan.begin_as).name,
        "time_limit": None if math.isinf(plan.time_limit) else plan.time_limit,
    }
    facts = provenance(arguments, finished=f"{datetime.now(UTC):%Y-%m-%d}", **made)
    try:
        with written_whole(out / PROVENANCE) as unfinished:
            unfinished.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out / PROVENANCE}: {error.strerror}") from error


class _Teller:
    """Prints progress now and then."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.judged is None and now - self._last < _TOLD_EVERY_S:
            return
        self._last = now
        done_now = max(1, progress.done - progress.begun_at)
        left = progress.seconds * (progress.total - progress.done) / done_now
        text = f"{progress.stage}: {progress.done} of {progress.total}"
        if progress.loss is not None:
            text += f", loss {progress.loss:.3f}"
        if progress.judged is not None:
            text += f", alpha {progress.judged.alpha:.3f}, greedy {progress.judged.greedy:.3f}"
        terminal.err.print(f"{text}; about {duration(left)} left", style="dim")
