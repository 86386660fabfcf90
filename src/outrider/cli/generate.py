"""`outrider generate`: one prompt, or the same with plain decoding beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    BiasOption,
    DeviceOption,
    DrafterDtypeOption,
    DrafterOption,
    DtypeOption,
    EngineOption,
    FrequencyOption,
    GammaOption,
    JsonOption,
    KvMemoryOption,
    MaxNewOption,
    MinNewOption,
    MinPOption,
    PresenceOption,
    RepetitionOption,
    RuleOption,
    SeedOption,
    StopOption,
    SystemOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TypicalPOption,
    check_early,
    load_pair,
    parse_bias,
)
from outrider.cli.show import print_comparison, print_logprobs, print_trace, result_object, summary
from outrider.cli.terminal import read_prompt, utf8
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.pair import Pair, Settings
    from outrider.requests import Request, Result

__all__ = ["generate"]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text; - reads stdin, @FILE a file, @@ is an @.")],
    target: TargetOption = "default",
    drafter: DrafterOption = "auto",
    gamma: GammaOption = None,
    rule: RuleOption = "block",
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    typical_p: TypicalPOption = 1.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    logit_bias: BiasOption = None,
    min_new_tokens: MinNewOption = 0,
    max_new_tokens: MaxNewOption = 256,
    seed: SeedOption = None,
    stop: StopOption = None,
    system: SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat format: continue the text.")] = False,
    engine: EngineOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    kv_memory: KvMemoryOption = None,
    drafter_dtype: DrafterDtypeOption = None,
    trace: Annotated[bool, typer.Option("--trace", help="Show every round in colour.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, with the K likeliest tokens.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain decoding beside it and compare.")
    ] = False,
    with_transformers: Annotated[
        bool, typer.Option("--with-transformers", help="In --compare, time its generate() too.")
    ] = False,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print text as it is decided.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text for a prompt."""
    text = read_prompt(prompt)
    settings: Settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": parse_bias(logit_bias or []),
        "min_new_tokens": min_new_tokens,
        "max_new_tokens": max_new_tokens,
        "gamma": gamma,
        "rule": rule,
        "seed": seed,
        "stop": tuple(utf8(item, "a stop string") for item in stop or ()),
        "logprobs": logprobs,
        "system": None if system is None else utf8(system, "the system message"),
        "raw": raw,
    }
    check_early(settings)
    if with_transformers and not compare:
        raise UsageError("--with-transformers adds a row to --compare; pass both")
    pair = load_pair(target, drafter, engine, dtype, device, kv_memory, drafter_dtype)
    request = pair.request(text, **settings)
    if compare:
        beside = target if with_transformers else None
        _compare(pair, request, beside=beside, trace=trace, as_json=as_json)
        return
    show = (not as_json) if stream is None else stream
    result = _run(pair, request, trace=trace, stream=show)
    if not show and not as_json and not trace:
        print(result.text)
    if logprobs is not None and not as_json:
        print_logprobs(result, pair.target.tokenizer)
    if as_json:
        print(json.dumps(result_object(result, trace=trace)))
    else:
        terminal.err.print(summary(result), style="dim")


def _run(pair: Pair, request: Request, *, trace: bool, stream: bool) -> Result:
    """Run one request, showing its rounds or its text as they come."""
    result: Result | None = None
    for event in pair.engine().stream(request):
        if stream and not trace:
            print(event.text, end="", flush=True)
        result = event.result
    assert result is not None
    if trace:
        print_trace(result.trace, pair.target.tokenizer)
    elif stream:
        print()
    return result


def _compare(
    pair: Pair, request: Request, *, beside: str | None, trace: bool, as_json: bool
) -> None:
    from outrider.measure.comparison import compare_with_plain

    reference = None
    if beside is not None:
        from outrider.models.reference import TransformersGenerate

        reference = TransformersGenerate(beside, pair.target.dtype)

    def progress(turn: int) -> None:
        terminal.err.print(f"turn {turn} of 3 done", style="dim")

    comparison = compare_with_plain(pair, request, beside=reference, progress=progress)
    speculative = comparison.speculative
    if trace:
        print_trace(speculative.trace, pair.target.tokenizer)
        terminal.out.print()
    if as_json:
        facts = result_object(speculative, trace=trace)
        facts["compare"] = {
            "agrees": comparison.agrees,
            "must_agree": comparison.must_agree,
            "speedup": comparison.speedup,
            "speedups": list(comparison.speedups),
            "transformers_ms_per_token": list(comparison.transformers_ms),
            "plain": result_object(comparison.plain, trace=False),
        }
        print(json.dumps(facts))
    else:
        if not trace:
            print(speculative.text + "\n", flush=True)
        if speculative.logprobs is not None:
            print_logprobs(speculative, pair.target.tokenizer)
        print_comparison(comparison)
    if comparison.must_agree and not comparison.agrees:
        terminal.err.print("the texts differ and must not: a near tie in low precision, or a fault")
        raise typer.Exit(1)
