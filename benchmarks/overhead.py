"""How long a round takes outside `score`: drafting, laws, verification, bookkeeping.

    python benchmarks/overhead.py [--json] [--target REF] [--rounds N]

One sequence, gamma 5, prompt lookup on a text that repeats itself, so that every round drafts five
tokens. `score` of the target is timed by a wrapper and taken off the time of `Engine.step`. Rounds
at temperature 0 and at temperature 1 with top-p 0.95 are run by turns; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
import transformers

from outrider import Engine, Model, Request, SamplingPolicy, load_model
from outrider.drafters.lookup import LookupDrafter
from outrider.models import CachedSequence, Feed, Prompt

GAMMA = 5
POLICIES = {
    "t0": SamplingPolicy(),
    "top_p": SamplingPolicy(temperature=1.0, top_p=0.95),
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


class TimedModel:
    """A model whose time in `score` is added up."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.score_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def start(self, prompt: Prompt) -> CachedSequence:
        return self._model.start(prompt)

    def score(self, feeds: Sequence[Feed]) -> torch.Tensor:
        begun = time.perf_counter()
        logits = self._model.score(feeds)
        self.score_s += time.perf_counter() - begun
        return logits


def round_times_ms(
    model: TimedModel, policy: SamplingPolicy, rounds: int, seed: int
) -> list[float]:
    """Milliseconds outside `score` of each of `rounds` rounds with a full draft."""
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode(TEXT)
    engine = Engine(model, LookupDrafter())  # type: ignore[arg-type]
    request = Request(
        prompt, policy, max_new_tokens=10 * rounds, gamma=GAMMA, seed=seed, ignore_eos=True
    )
    engine.add(request)
    engine.step()  # the prompt's own round: its index is built here, once
    times = []
    for _ in range(rounds):
        model.score_s = 0.0
        begun = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - begun - model.score_s))
    engine.cancel(0)
    return times


def provenance(model: Model, arguments: argparse.Namespace) -> dict[str, object]:
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "arguments": vars(arguments),
        "git": revision.stdout.strip(),
        "machine": platform.machine(),
        "processors": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vocab_size": model.vocab_size,
        "dtype": model.dtype,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="default")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in each turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    target = load_model(arguments.target)
    model = TimedModel(target)
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for turn in range(arguments.turns + 1):
        for name, policy in POLICIES.items():
            measured = round_times_ms(model, policy, arguments.rounds, seed=turn)
            if turn:  # the first turn warms up
                times[name] += measured
        print(f"turn {turn} of {arguments.turns} done", file=sys.stderr)
    facts: dict[str, object] = {
        f"ms_per_round_{name}": round(statistics.median(values), 3)
        for name, values in times.items()
    }
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        facts[f"quartiles_{name}"] = [round(low, 3), round(high, 3)]
    if arguments.json:
        print(json.dumps(facts | {"provenance": provenance(target, arguments)}))
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
