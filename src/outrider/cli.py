"""The command line: parse, call one public function, print.

Text for people goes to stdout, notes and progress to stderr. With --json the last line of stdout is
one JSON object. Exit codes: 0 done, 1 a check failed, 2 wrong use.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.errors import OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.measure.comparison import Comparison
    from outrider.pair import Pair, Settings
    from outrider.requests import Request, Result, Round, TokenLogprob
    from outrider.text import Tokenizer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding: faster answers with exactly the same output law.",
)
_out = Console(highlight=False, markup=False, soft_wrap=True)
_err = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
_STYLES = {"accepted": "green", "rejected": "red strike", "correction": "bold blue"}
_MARKS = {"accepted": ("", ""), "rejected": ("[-", "-]"), "correction": ("[+", "+]")}

# The base of everything typer says about a command line. It has no public name: some versions of
# typer bring their own copy of click, others use the installed one.
_BadCommandLine: type[Exception] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

TargetOption = Annotated[
    str,
    typer.Option(help="To speed up: default, a folder, a .gguf file, a hub id or toy:NAME."),
]
DrafterOption = Annotated[
    str, typer.Option(help="What proposes: lookup, ngram:FILE, none, or a model as for --target.")
]
GammaOption = Annotated[int, typer.Option(help="Tokens drafted per round; 0 is plain decoding.")]
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


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text; - reads stdin, @FILE a file, @@ is an @.")],
    target: TargetOption = "default",
    drafter: DrafterOption = "lookup",
    gamma: GammaOption = 5,
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
    text = _read_prompt(prompt)
    settings: Settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": _parse_bias(logit_bias or []),
        "min_new_tokens": min_new_tokens,
        "max_new_tokens": max_new_tokens,
        "gamma": gamma,
        "rule": rule,
        "seed": seed,
        "stop": tuple(_utf8(item, "a stop string") for item in stop or ()),
        "logprobs": logprobs,
        "system": None if system is None else _utf8(system, "the system message"),
        "raw": raw,
    }
    _check_early(settings)
    if with_transformers and not compare:
        raise UsageError("--with-transformers adds a row to --compare; pass both")
    pair = _load(target, drafter, engine, dtype, device, kv_memory, drafter_dtype)
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
        _print_logprobs(result, pair.target.tokenizer)
    if as_json:
        print(json.dumps(_result_object(result, trace=trace)))
    else:
        _err.print(_summary(result), style="dim")


@app.command()
def chat(
    target: TargetOption = "default",
    drafter: DrafterOption = "lookup",
    gamma: GammaOption = 5,
    rule: RuleOption = "block",
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    typical_p: TypicalPOption = 1.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    max_new_tokens: MaxNewOption = 512,
    seed: SeedOption = None,
    system: SystemOption = None,
    engine: EngineOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    kv_memory: KvMemoryOption = None,
    drafter_dtype: DrafterDtypeOption = None,
) -> None:
    """Hold a conversation in the terminal. An empty line or Ctrl-D ends it, Ctrl-C an answer."""
    settings: Settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "max_new_tokens": max_new_tokens,
        "gamma": gamma,
        "rule": rule,
        "seed": seed,
    }
    _check_early(settings)
    pair = _load(target, drafter, engine, dtype, device, kv_memory, drafter_dtype)
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": _utf8(system, "the system message")})
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as error:
            raise UsageError("the input is not valid UTF-8") from error
        if not line.strip():
            return
        asked = [*messages, {"role": "user", "content": _utf8(line, "the input")}]
        try:
            events = pair.stream(asked, **settings)
        except OutriderError as error:
            _err.print(f"error: {_one_line(error)}")
            continue
        answer = ""
        try:
            for event in events:
                answer += event.text
                print(event.text, end="", flush=True)
        except KeyboardInterrupt:
            events.close()  # type: ignore[attr-defined]
        print("\n")
        messages = [*asked, {"role": "assistant", "content": answer}]


@app.command()
def models(
    prepare: Annotated[
        str | None, typer.Option(metavar="REF", help="Read a model now, so that it starts quickly.")
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
        _err.print(f"freed {freed / 1e6:.0f} MB in {cache.cache_folder()}")
    if prepare is not None:
        from outrider.models import load_model

        load_model(prepare, dtype=dtype)  # type: ignore[arg-type]
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
    _out.print(table)
    _err.print("any folder, .gguf file or hub id of a decoder-only model works too", style="dim")


@app.command()
def fit(
    output: Annotated[Path, typer.Argument(help="The table to write, for --drafter ngram:FILE.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Count n-grams of this text file; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Count n-grams of the target's answers, a prompt a line.")
    ] = None,
    order: Annotated[int, typer.Option(help="n: 1 unigram, 2 bigram, ...")] = 4,
    target: TargetOption = "default",
    temperature: TemperatureOption = 0.0,
    max_new_tokens: MaxNewOption = 256,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Fit an n-gram drafter from text files or from the target's own output."""
    if not text and prompts is None:
        raise UsageError("nothing to count: pass --text FILE or --prompts FILE")
    if not output.parent.is_dir():
        raise UsageError(f"cannot write {str(output)!r}: its folder does not exist")
    texts = [_read_file(path) for path in text or ()]
    lines = [line for line in _read_file(prompts).splitlines() if line] if prompts else []
    _check_early({"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed})
    from outrider.drafters.ngram import fit_ngrams

    pair = _load(target, "none", "auto", dtype, "auto")
    tokenizer = pair.target.tokenizer
    if tokenizer is None:
        raise UsageError(f"{target} has no tokenizer, so text cannot be counted")
    counted: list[Sequence[int]] = [tokenizer.encode(item) for item in texts]
    if lines:
        _err.print(f"generating {len(lines)} answers", style="dim")
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
        _out.print(
            f"{output}: {facts['num_contexts']} contexts from {facts['num_tokens']} tokens, "
            f"{size_bytes / 1e3:.0f} kB; use it with --drafter ngram:{output}"
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
        _fail(_one_line(error))
    except OutriderError as error:
        _fail(_one_line(error))
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


def _one_line(error: BaseException) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(message.split())


def _check_early(settings: Settings) -> None:
    """Refuse what can be refused without reading a model, which takes seconds."""
    from outrider.pair import check_settings

    check_settings(settings)


def _load(
    target: str,
    drafter: str,
    engine: str,
    dtype: str,
    device: str,
    kv_memory: float | None = None,
    drafter_dtype: str | None = None,
) -> Pair:
    from outrider.models import check_choices
    from outrider.pair import load

    check_choices(engine, dtype, device)
    if drafter_dtype is not None:
        check_choices(dtype=drafter_dtype)
        if drafter in ("none", "lookup") or drafter.startswith("ngram:"):
            raise UsageError(f"--drafter-dtype is for a drafting model, and {drafter} is none")
    if kv_memory is not None and not 0 < kv_memory < 1e6:
        raise UsageError(f"--kv-memory must be a positive number of GiB, not {kv_memory}")
    pair = load(
        target,
        drafter,
        engine=engine,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        device=device,
        kv_memory=None if kv_memory is None else int(kv_memory * 2**30),
        drafter_dtype=drafter_dtype,  # type: ignore[arg-type]
    )
    for notice in getattr(pair.target, "notices", ()):
        _err.print(f"note: {notice}", style="dim")
    return pair


def _read_prompt(argument: str) -> str:
    if argument == "-":
        if sys.stdin is None:
            raise UsageError("there is no stdin to read the prompt from; pass text or @FILE")
        data = sys.stdin.buffer.read()
        return _decoded(data, "stdin")
    if argument.startswith("@@"):
        argument = argument[1:]
    elif argument.startswith("@"):
        return _read_file(Path(argument[1:]))
    return _utf8(argument, "the prompt")


def _utf8(text: str, what: str) -> str:
    """`text`, unless it carries bytes that are not UTF-8 (kept by Python as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid UTF-8; check the terminal's encoding") from error
    return text


def _read_file(path: Path) -> str:
    try:
        data = path.expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {str(path)!r}: {reason}") from error
    return _decoded(data, repr(str(path)))


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not valid UTF-8: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it first"
        ) from error


def _parse_bias(items: Sequence[str]) -> dict[int, float]:
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


def _run(pair: Pair, request: Request, *, trace: bool, stream: bool) -> Result:
    """Run one request, showing its rounds or its text as they come."""
    from outrider.decoding import Engine

    result: Result | None = None
    for event in Engine(pair.target, pair.drafter).stream(request):
        if stream and not trace:
            print(event.text, end="", flush=True)
        result = event.result
    assert result is not None
    if trace:
        _print_trace(result.trace, pair.target.tokenizer)
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
        _err.print(f"turn {turn} of 3 done", style="dim")

    comparison = compare_with_plain(pair, request, beside=reference, progress=progress)
    speculative = comparison.speculative
    if trace:
        _print_trace(speculative.trace, pair.target.tokenizer)
        _out.print()
    if as_json:
        facts = _result_object(speculative, trace=trace)
        facts["compare"] = {
            "agrees": comparison.agrees,
            "must_agree": comparison.must_agree,
            "speedup": comparison.speedup,
            "speedups": list(comparison.speedups),
            "transformers_ms_per_token": list(comparison.transformers_ms),
            "plain": _result_object(comparison.plain, trace=False),
        }
        print(json.dumps(facts))
    else:
        if not trace:
            print(speculative.text + "\n", flush=True)
        if speculative.logprobs is not None:
            _print_logprobs(speculative, pair.target.tokenizer)
        _print_comparison(comparison)
    if comparison.must_agree and not comparison.agrees:
        _err.print("the texts differ and must not: a near tie in low precision, or a fault")
        raise typer.Exit(1)


def _print_comparison(comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "ms per token", "tokens per target call", "alpha_hat"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in (("plain", comparison.plain), ("speculative", comparison.speculative)):
        stats = result.stats
        table.add_row(
            name,
            _number(stats.ms_per_token, ".1f"),
            _number(stats.tokens_per_call, ".2f"),
            _number(stats.alpha_hat, ".2f"),
        )
    if comparison.transformers_ms:
        table.add_row(
            "transformers",
            _number(statistics.median(comparison.transformers_ms), ".1f"),
            "1.00",
            "-",
        )
    _out.print(table)
    num_tokens = comparison.plain.stats.num_tokens
    if comparison.agrees:
        _out.print(f"the same text, token for token ({num_tokens} tokens)", style="green")
    elif comparison.must_agree:
        _out.print("the texts DIFFER", style="bold red")
    else:
        _out.print("two draws from the same law (a sampled text differs from run to run)")
    low, high = min(comparison.speedups), max(comparison.speedups)
    _out.print(
        f"speed-up {comparison.speedup:.2f}x (median of {len(comparison.speedups)} turns, "
        f"{low:.2f} to {high:.2f})",
        style="bold",
    )


def _print_trace(rounds: Sequence[Round], tokenizer: Tokenizer | None) -> None:
    """One line a round: accepted green, rejected red, the target's own token blue."""
    from outrider.measure.traces import round_pieces

    coloured = _out.color_system is not None
    width = len(str(len(rounds)))
    legend = Text("round ", style="dim")
    for fate in ("accepted", "rejected", "correction"):
        legend.append(_marked(fate, fate, coloured))
        legend.append(" ")
    _out.print(legend)
    for number, item in enumerate(rounds, start=1):
        line = Text(f"{number:>{width}} ", style="dim")
        for fate, text in round_pieces(item, tokenizer):
            line.append(_marked(fate, _visible(text), coloured))
        _out.print(line)


def _visible(text: str) -> str:
    """Line ends and tabs as signs: a round is one line."""
    return text.replace("\n", "\u21b5").replace("\r", "\u240d").replace("\t", "\u21e5")


def _marked(fate: str, text: str, coloured: bool) -> Text:
    """Colour where there is colour, brackets where there is none."""
    before, after = ("", "") if coloured else _MARKS[fate]
    return Text(f"{before}{text}{after}", style=_STYLES[fate])


def _print_logprobs(result: Result, tokenizer: Tokenizer | None) -> None:
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
    _out.print(table)


def _summary(result: Result) -> str:
    stats = result.stats
    parts = [
        f"{stats.num_tokens} tokens in {stats.rounds} target passes",
        f"{_number(stats.tokens_per_call, '.2f')} tokens per target call",
    ]
    if stats.drafted:
        parts.append(f"alpha_hat {_number(stats.alpha_hat, '.2f')}")
    parts.append(f"{_number(stats.ms_per_token, '.1f')} ms per token")
    parts.append(f"{stats.engine} {stats.dtype}, rule {stats.rule}, seed {result.seed}")
    return "; ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _result_object(result: Result, *, trace: bool) -> dict[str, object]:
    facts: dict[str, object] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "num_prompt_tokens": len(result.prompt_ids),
        "stats": result.stats.as_dict(),
    }
    if trace:
        facts["trace"] = [item._asdict() for item in result.trace]
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


if __name__ == "__main__":
    main()
