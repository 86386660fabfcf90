"""Draft lengths on recorded texts: rounds counted, not timed, and priced by measured costs.

    python benchmarks/lengths.py [--target REF] [--drafter REF] [--gammas adaptive,1,...,10]

The target writes every answer once, greedily and without drafts. Then each setting drafts for the
same answers: the real drafter against the recorded text, so all settings have the very same tokens
to win, and no machine's noise between them. Prints the speed-up over plain decoding that
the costs promise, per task and over all. `outrider bench` has the last word: by the clock.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider import Engine, Request, load
from outrider.measure.prediction import BatchCosts, modelled_ms, steps_of
from outrider.measure.prompts import TASKS, shipped_prompts
from outrider.models.toy import ToyModel
from outrider.pair import Pair
from provenance import provenance

_OUTSIDE_MS = 0.15
"""Per verified position: what the loop took around the models of the default pair."""

Texts = dict[str, list[tuple[list[int], list[int]]]]
"""(prompt, answer) by task."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="default")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--drafter-dtype", default="auto")
    parser.add_argument("--gammas", default="adaptive,1,2,3,4,5,6,7,8,9,10")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts-per-task", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pair = load(arguments.target, arguments.drafter, drafter_dtype=arguments.drafter_dtype)
    texts = recorded(pair, arguments.prompts_per_task, arguments.tokens)
    found: dict[str, dict[str, float]] = {}
    print(f"{'':10}" + "".join(f"{task[:9]:>10}" for task in (*texts, "all")))
    for name in arguments.gammas.split(","):
        found[name] = speedups(pair, texts, None if name == "adaptive" else int(name))
        print(
            f"{name:10}" + "".join(f"{value:10.3f}" for value in found[name].values()), flush=True
        )
    if arguments.json is not None:
        assert pair.costs is not None
        source = provenance(arguments, costs=pair.costs.as_dict())
        facts = {"speedups": found, "provenance": source}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


def recorded(pair: Pair, per_task: int, num_tokens: int) -> Texts:
    """(prompt, answer) of the first questions of every kind, the answers written side by side."""
    texts: Texts = {}
    for task in TASKS:
        items = [item for item in shipped_prompts() if item.task == task][:per_task]
        prompts = [pair.encode([{"role": "user", "content": item.turns[0]}]) for item in items]
        requests = [
            Request(ids, max_new_tokens=num_tokens, gamma=0, ignore_eos=True) for ids in prompts
        ]
        results = Engine(pair.target, max_batch=per_task).generate(requests)
        texts[task] = [
            (ids, result.token_ids) for ids, result in zip(prompts, results, strict=True)
        ]
    return texts


def speedups(pair: Pair, texts: Texts, gamma: int | None) -> dict[str, float]:
    """Plain time over speculative time by the pair's costs, per task and over all."""
    costs = pair.costs
    assert costs is not None
    alone = BatchCosts(costs, costs, 1)
    plain_ms: defaultdict[str, float] = defaultdict(float)
    fast_ms: defaultdict[str, float] = defaultdict(float)
    for task, answers in texts.items():
        for prompt, answer in answers:
            target = Recorded([*prompt, *answer], pair.target.vocab_size)
            engine = Engine(target, pair.drafter, costs=costs)
            [result] = engine.generate(
                [Request(prompt, max_new_tokens=len(answer), gamma=gamma, ignore_eos=True)]
            )
            assert result.token_ids == answer, "the recorded text is what must come out"
            rounds_ms = modelled_ms(steps_of([result]), alone, _OUTSIDE_MS, engine_costs=costs)
            for name in (task, "all"):
                fast_ms[name] += rounds_ms
                plain_ms[name] += len(answer) * (costs.target(1) + _OUTSIDE_MS)
    return {name: plain_ms[name] / fast_ms[name] for name in (*texts, "all")}


class Recorded(ToyModel):
    """A target that says again what was recorded, whatever it is asked."""

    def __init__(self, text: list[int], vocab_size: int) -> None:
        self._text = text
        super().__init__(self._next, vocab_size, context_length=2**20)

    def _next(self, prefix: Sequence[int]) -> Tensor:
        logits = torch.zeros(self.vocab_size)
        # Beyond the end are only drafts that nobody asked for.
        logits[self._text[min(len(prefix), len(self._text) - 1)]] = 1.0
        return logits


if __name__ == "__main__":
    main()
