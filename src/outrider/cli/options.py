"""What several commands take: their options, the settings made of them, the pair they name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outrider.cli import terminal
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.pair import Pair, Settings

__all__ = [
    "BiasOption",
    "DeviceOption",
    "DrafterDtypeOption",
    "DrafterOption",
    "DtypeOption",
    "EngineOption",
    "FrequencyOption",
    "GammaOption",
    "JsonOption",
    "KvMemoryOption",
    "MaxNewOption",
    "MinNewOption",
    "MinPOption",
    "PresenceOption",
    "RepetitionOption",
    "RuleOption",
    "SeedOption",
    "StopOption",
    "SystemOption",
    "TargetOption",
    "TemperatureOption",
    "TopKOption",
    "TopPOption",
    "TypicalPOption",
    "check_early",
    "check_output",
    "duration",
    "kv_bytes",
    "load_pair",
    "parse_bias",
    "parsed",
]

Value = TypeVar("Value")

TargetOption = Annotated[
    str,
    typer.Option(help="To speed up: default, a folder, a .gguf file, a hub id or toy:NAME."),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="What proposes: auto, lookup, ngram:FILE, none, a model as for --target, lookup+MODEL."
    ),
]
GammaOption = Annotated[
    int | None,
    typer.Option(help="Tokens drafted per round; 0 is plain. Default: as many as pay off."),
]
RuleOption = Annotated[str, typer.Option(help="Verification rule: block, rejection or coupled.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
TopPOption = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")]
TypicalPOption = Annotated[float, typer.Option(help="Locally typical sampling; 1 is off.")]
RepetitionOption = Annotated[float, typer.Option(help="Penalty for tokens seen; 1 is off.")]
PresenceOption = Annotated[float, typer.Option(help="Penalty for tokens in the output.")]
FrequencyOption = Annotated[float, typer.Option(help="Penalty per occurrence in the output.")]
BiasOption = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Add to a token's logit; repeatable.")
]
MaxNewOption = Annotated[int, typer.Option(help="Most tokens to emit.")]
MinNewOption = Annotated[int, typer.Option(help="No end before this many tokens.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes a sampled text repeatable.")]
StopOption = Annotated[list[str] | None, typer.Option(help="End before this string; repeatable.")]
SystemOption = Annotated[str | None, typer.Option(help="System message.")]
EngineOption = Annotated[str, typer.Option(help="auto, openvino or torch.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or int8 (openvino).")]
DrafterDtypeOption = Annotated[
    str | None, typer.Option(help="As --dtype, for a drafting model; default: the same.")
]
KvMemoryOption = Annotated[
    float | None, typer.Option(metavar="GIB", help="Memory for keys and values (openvino).")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Last line of stdout: one JSON object.")]


def check_early(settings: Settings) -> None:
    """Refuse what can be refused without reading a model, which takes seconds."""
    from outrider.pair import check_settings

    check_settings(settings)


def kv_bytes(kv_memory: float | None) -> int | None:
    """Of `--kv-memory` in GiB; UsageError for what is no amount."""
    if kv_memory is None:
        return None
    if not 0 < kv_memory < 1e6:
        raise UsageError(f"--kv-memory must be a positive number of GiB, not {kv_memory}")
    return int(kv_memory * 2**30)


def load_pair(
    target: str,
    drafter: str,
    engine: str,
    dtype: str,
    device: str,
    kv_memory: float | None = None,
    drafter_dtype: str | None = None,
) -> Pair:
    """The pair that a command names; notes about it go to stderr."""
    from outrider.drafters import names_model
    from outrider.models import check_choices
    from outrider.pair import load

    check_choices(engine, dtype, device)
    if drafter_dtype is not None:
        check_choices(dtype=drafter_dtype)
        if not names_model(drafter):
            raise UsageError(f"--drafter-dtype is for a drafting model, and {drafter} is none")
    pair = load(
        target,
        drafter,
        engine=engine,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        device=device,
        kv_memory=kv_bytes(kv_memory),
        drafter_dtype=drafter_dtype,  # type: ignore[arg-type]
    )
    if drafter_dtype is not None and pair.drafting_model is None:
        raise UsageError(
            f"--drafter-dtype is for a drafting model, and {drafter} is none for {target}"
        )
    for notice in getattr(pair.target, "notices", ()):
        terminal.err.print(f"note: {notice}", style="dim")
    return pair


def parsed(text: str, name: str, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of an option that takes several, with commas between them."""
    try:
        return tuple(read(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--{name} must be values with commas between them, not {text!r} ({error})"
        ) from error


def check_output(out: Path) -> None:
    """Refuse a file that could not be written, before the work; UsageError."""
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UsageError(
            f"cannot write {str(out)!r}: pass a file in a folder that exists and can be written to"
        )


def duration(seconds: float) -> str:
    """Seconds, or minutes where there are many."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def parse_bias(items: Sequence[str]) -> dict[int, float]:
    """Token id -> bias, from ID=BIAS."""
    biases = {}
    for item in items:
        token, separator, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise UsageError(
                f"logit_bias must be ID=BIAS, for example 42=-100, not {item!r}"
            ) from error
        assert separator
    return biases
