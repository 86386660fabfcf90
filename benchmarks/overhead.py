"""How long a round takes outside `score`: drafting, laws, verification, bookkeeping.

    python benchmarks/overhead.py [--json] [--target REF] [--rounds N]

One sequence, gamma 5, prompt lookup on a text that repeats itself, so that every round drafts five
tokens. `score` of the target is timed by a wrapper and taken off the time of `Engine.step`. Rounds
at temperature 0 and at temperature 1 with top-p 0.95 are run by turns; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from outrider import Engine, Request, SamplingPolicy, load_model
from outrider.drafters.lookup import LookupDrafter
from provenance import provenance
from timing import TimedModel

GAMMA = 5
POLICIES = {
    "t0": SamplingPolicy(),
    "top_p": SamplingPolicy(temperature=1.0, top_p=0.95),
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


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
        source = provenance(arguments, vocab_size=target.vocab_size, dtype=target.dtype)
        print(json.dumps(facts | {"provenance": source}))
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
