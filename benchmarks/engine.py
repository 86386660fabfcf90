"""What the CPU engine reaches on this machine, beside what the machine allows.

    python benchmarks/engine.py [--target REF] [--drafter REF] [--json] [--skip transformers batch]

* passes: milliseconds of a target pass over n positions behind 128 cached tokens.
* plain: milliseconds per token of plain decoding, the prompt's pass included; of transformers'
  `generate` with the same weights in the same turns; and of a plain step behind the prompt beside
  the time to read as many bytes as the weights have, once, in the seconds after it.
* rounds: how much of a speculative round is spent outside `score` of target and drafter.
* batch: tokens per second of eight requests at once and of the same requests one by one.
* memory: resident size, the weights, and the keys and values that were used.

Everything is run by turns and reported as medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from outrider import Engine, Pair, Request, load
from outrider.drafters import names_model
from outrider.drafters.model import ModelDrafter
from outrider.models import Feed, Prompt
from outrider.models.checkpoints import find_checkpoint
from outrider.models.paged import PagedModel
from outrider.models.reference import TransformersGenerate
from provenance import provenance
from timing import MemoryReader, TimedModel, read_weight_bytes, resident_mb

POSITIONS = (1, 2, 3, 5, 6, 8, 9, 17, 33)
CONTEXT = 128
GREEDY_GAMMA = 5
PROMPTS = [
    item["text"]
    for item in json.loads((Path(__file__).parent / "peer_systems" / "prompts.json").read_text())
]


class Figures:
    """Lists of measurements by name."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])


def time_passes(model: PagedModel, figures: Figures) -> None:
    """One turn over all numbers of positions."""
    ids = [(17 + 37 * i) % model.vocab_size for i in range(CONTEXT + max(POSITIONS))]
    table = model.start(Prompt(ids))
    model.score([Feed(table, ids[:CONTEXT], 1)])
    for count in POSITIONS:
        for _ in range(5):
            begun = time.perf_counter()
            model.score([Feed(table, ids[CONTEXT : CONTEXT + count], count)])
            figures.add(f"pass_{count}", 1e3 * (time.perf_counter() - begun))
            table.rollback(CONTEXT)
    table.close()
    model.forget()


def time_plain(pair: Pair, prompt: list[int], num_tokens: int) -> float:
    """Milliseconds per token of plain decoding, the prompt's pass included."""
    pair.forget()
    request = Request(prompt, max_new_tokens=num_tokens, gamma=0, ignore_eos=True)
    begun = time.perf_counter()
    Engine(pair.target).generate([request])
    return 1e3 * (time.perf_counter() - begun) / num_tokens


def time_plain_steps(
    pair: Pair, prompt: list[int], num_steps: int, weight_bytes: int, figures: Figures
) -> None:
    """Steps of plain decoding behind the prompt, each with a read of the weights' size after it.

    Both are one sample of the same seconds, so the ratio is taken step by step: the bandwidth of a
    shared machine moves within minutes, and the best of several reads is not what a step gets.
    """
    pair.forget()
    reader = MemoryReader()
    engine = Engine(pair.target)
    engine.add(Request(prompt, max_new_tokens=2 * num_steps + 1, gamma=0, ignore_eos=True))
    engine.step()
    while engine.has_work:
        # Other threads than the model's have just run; plain decoding has none in between.
        engine.step()
        begun = time.perf_counter()
        engine.step()
        step_s = time.perf_counter() - begun
        read_s = reader.read_s(weight_bytes)
        figures.add("plain_step_ms", 1e3 * step_s)
        figures.add("weights_read_ms", 1e3 * read_s)
        figures.add("bandwidth_gbs", weight_bytes / read_s / 1e9)
        figures.add("plain_step_over_weights_read", step_s / read_s)


def time_rounds(pair: Pair, prompt: list[int], num_tokens: int, figures: Figures) -> None:
    """Share of every speculative round outside the models, after the prompt's own round."""
    pair.forget()
    target = TimedModel(pair.target)
    models = [target]
    drafter = pair.drafter
    if isinstance(drafter, ModelDrafter):
        inner = TimedModel(drafter.model)
        models.append(inner)
        drafter = ModelDrafter(inner, target_vocab_size=pair.target.vocab_size)  # type: ignore[arg-type]
    engine = Engine(target, drafter)  # type: ignore[arg-type]
    engine.add(Request(prompt, max_new_tokens=num_tokens, gamma=GREEDY_GAMMA, ignore_eos=True))
    engine.step()
    while engine.has_work:
        for model in models:
            model.score_s = 0.0
        begun = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begun
        outside = whole - sum(model.score_s for model in models)
        figures.add("outside_ms", 1e3 * outside)
        figures.add("outside_share", outside / whole)


def tokens_per_second(
    pair: Pair, prompts: list[list[int]], num_tokens: int, *, gamma: int | None, max_batch: int
) -> float:
    """Of all prompts at once, or one by one with max_batch=1; prompts read anew."""
    pair.forget()
    engine = pair.engine(max_batch=max_batch)
    requests = [
        Request(prompt, max_new_tokens=num_tokens, gamma=gamma, ignore_eos=True)
        for prompt in prompts
    ]
    begun = time.perf_counter()
    results = engine.generate(requests)
    return sum(result.stats.num_tokens for result in results) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="default")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=8, help="plain steps beside reads, per turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=Request([0]).max_new_tokens)
    parser.add_argument("--skip", nargs="*", default=[], choices=["transformers", "batch"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pair = load(arguments.target, arguments.drafter, engine="openvino", dtype=arguments.dtype)
    model = pair.target
    assert isinstance(model, PagedModel)
    precision = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    size, drafter_size = (
        read_weight_bytes(Path(find_checkpoint(name, precision).source)) if names_model(name) else 0
        for name in (arguments.target, arguments.drafter)
    )
    figures = Figures()
    prompts = [pair.encode(text) for text in PROMPTS[:8]]
    time_plain(pair, prompts[0], 4)
    memory_mb = resident_mb()  # before anything of transformers is loaded beside it
    peer = None
    if "transformers" not in arguments.skip:
        peer = TransformersGenerate(arguments.target, model.dtype)
        peer.generate(prompts[0], Request(prompts[0]).policy, 4)
    for turn in range(arguments.turns):
        prompt = prompts[turn % len(prompts)]
        time_passes(model, figures)
        time_plain_steps(pair, prompt, arguments.steps, size, figures)
        figures.add("plain_ms", time_plain(pair, prompt, arguments.tokens))
        if peer is not None:
            _, seconds = peer.generate(prompt, Request(prompt).policy, arguments.tokens)
            figures.add("transformers_ms", 1e3 * seconds / arguments.tokens)
            ratio = figures.values["plain_ms"][-1] / figures.values["transformers_ms"][-1]
            figures.add("plain_over_transformers", ratio)
        for prompt in prompts[:4]:
            time_rounds(pair, prompt, arguments.tokens, figures)
        if "batch" not in arguments.skip:
            for name, gamma in (("plain", 0), ("speculative", None)):
                alone = tokens_per_second(pair, prompts, arguments.tokens, gamma=gamma, max_batch=1)
                batch = tokens_per_second(pair, prompts, arguments.tokens, gamma=gamma, max_batch=8)
                figures.add(f"batch_{name}_tokens_per_s", batch)
                figures.add(f"batch_{name}_gain", batch / alone)
        print(f"turn {turn + 1} of {arguments.turns} done", file=sys.stderr)
    medians = {name: round(figures.median(name), 4) for name in figures.values}
    facts: dict[str, object] = {
        "target": Path(arguments.target).name,
        "drafter": Path(arguments.drafter).name,
        "dtype": model.dtype,
        **medians,
        "v_5": round(medians["pass_5"] / medians["pass_1"], 3),
        "weights_mb": round(size / 1e6, 1),
        "resident_mb": round(memory_mb, 1),
        "drafter_weights_mb": round(drafter_size / 1e6, 1),
        "resident_less_weights_mb": round(memory_mb - (size + drafter_size) / 1e6, 1),
    }
    if arguments.json:
        print(json.dumps(facts | {"provenance": provenance(arguments)}))
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
