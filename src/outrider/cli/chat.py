"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    DeviceOption,
    DrafterDtypeOption,
    DrafterOption,
    DtypeOption,
    EngineOption,
    FrequencyOption,
    GammaOption,
    KvMemoryOption,
    MaxNewOption,
    MinPOption,
    PresenceOption,
    RepetitionOption,
    RuleOption,
    SeedOption,
    SystemOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TypicalPOption,
    check_early,
    load_pair,
)
from outrider.cli.terminal import one_line, utf8
from outrider.errors import OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.pair import Settings

__all__ = ["chat"]


@app.command()
def chat(
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
    check_early(settings)
    pair = load_pair(target, drafter, engine, dtype, device, kv_memory, drafter_dtype)
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": utf8(system, "the system message")})
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as error:
            raise UsageError("the input is not valid UTF-8") from error
        if not line.strip():
            return
        asked = [*messages, {"role": "user", "content": utf8(line, "the input")}]
        try:
            events = pair.stream(asked, **settings)
        except OutriderError as error:
            terminal.err.print(f"error: {one_line(error)}")
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
