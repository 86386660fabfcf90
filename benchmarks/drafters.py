"""Students compared that learn from the text of one `outrider distill` run.

    python benchmarks/drafters.py RUN [--losses nla kl] [--layers 2] [--shares 0.25 0.5 1]
                                  [--seeds 0 1] [--steps 250] [--walltime] [--json]

Every combination is trained from the start, for about the same number of steps or for the same
number of epochs, on the run's text but for its first shards, and judged on these: alpha on answers
drawn at temperature 1, and how often the likeliest id is the target's on greedy ones. With several
shares of the text the last line tells what another million tokens would bring, by a straight line
through alpha against the logarithm of the tokens: with --steps from more text alone, with --epochs
from as much more training too. The vocabulary is chosen on all of the text.

With --walltime every shape of student is timed beside its target (int8 weights), and the factor
over plain decoding is told at the best draft length, as if a token were accepted with that
probability at every position (`theory.walltime_factor`): larger students are more often right and
take longer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from outrider.costs import Costs, measure_costs
from outrider.models import Model, load_model
from outrider.models.checkpoints import find_checkpoint, load_weights
from outrider.models.trimmed import Vocabulary
from outrider.theory import best_gamma_measured, walltime_factor
from outrider.training.distillation import cover, prepare, save_drafter
from outrider.training.learning import Evaluation, Recipe, train
from outrider.training.runs import written_text
from outrider.training.student import StudentShape, make_student
from provenance import provenance

VARIED = ("loss", "rate", "layers", "width", "vocab_size", "share", "seed")
Row = dict[str, str | int | float]


def another_million(rows: list[Row], name: str) -> float:
    """What a million tokens more than the most so far would add to a figure."""
    tokens = np.array([float(row["distinct_tokens"]) for row in rows])
    values = np.array([float(row[name]) for row in rows])
    slope = float(np.polyfit(np.log(tokens), values, 1)[0])
    return slope * math.log(1.0 + 1e6 / float(tokens.max()))


def timed(target: Model, student: LlamaForCausalLM, vocabulary: Vocabulary) -> Costs:
    """What passes of this pair cost on this machine; the student is rounded as it is saved."""
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(student, vocabulary, Path(folder))
        drafter = load_model(folder, dtype="int8" if target.engine == "openvino" else "auto")
        return measure_costs(target, drafter, context=256)


def factor(alpha: float, costs: Costs) -> float:
    """Walltime over plain decoding at the best draft length, acceptance being iid."""
    survival = [alpha**i for i in range(1, 17)]
    v = {n: costs.verify_cost(n) for n in costs.positions}
    best = best_gamma_measured(survival, costs.c, v, max_gamma=len(survival))
    return walltime_factor(survival, best, costs.c, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("run", type=Path)
    add("--target", default="default")
    add("--also-from", nargs="*", default=[])
    add("--held-out", type=int, default=1, help="shards")
    add("--losses", nargs="+", default=["nla"])
    add("--rates", type=float, nargs="+", default=[2e-3])
    add("--layers", type=int, nargs="+", default=[2])
    add("--widths", type=int, nargs="+", default=[576])
    add("--vocab-sizes", type=int, nargs="+", default=[6144])
    add("--shares", type=float, nargs="+", default=[1.0], help="of the text")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--steps", type=int, default=0, help="of every student; 0: as many as --epochs makes")
    add("--epochs", type=float, default=1.0)
    add("--walltime", action="store_true", help="time every shape of student too")
    add("--json", action="store_true")
    arguments = parser.parse_args()
    target = load_model(arguments.target)
    written = written_text(arguments.run, target)
    shards = list(written.shards())
    if not 0 < arguments.held_out < len(shards):
        parser.error(f"--held-out must be at least 1 and less than {len(shards)}, the run's shards")
    held_out = (shards[: arguments.held_out], written.policies)
    text = [(shards[arguments.held_out :], written.policies)]
    for folder in arguments.also_from:
        other = written_text(Path(folder), target)
        text.append((list(other.shards()), other.policies))
    module = load_weights(find_checkpoint(arguments.target, torch.float32), torch.float32)
    learnt = [shard for some, _ in text for shard in some]
    vocabularies = {size: cover(target, module, learnt, size) for size in arguments.vocab_sizes}
    materials = {
        size: prepare(target, vocabulary, held_out, text)
        for size, vocabulary in vocabularies.items()
    }
    rows: list[Row] = []
    costs: dict[tuple[int, int, int], Costs] = {}
    for values in product(
        arguments.losses,
        arguments.rates,
        arguments.layers,
        arguments.widths,
        arguments.vocab_sizes,
        arguments.shares,
        arguments.seeds,
    ):
        loss, rate, layers, width, vocab_size, share, seed = values
        material = materials[vocab_size]
        order = torch.randperm(
            len(material.taught), generator=torch.Generator().manual_seed(0)
        ).tolist()
        taught = [material.taught[i] for i in order[: max(1, round(share * len(order)))]]
        student = make_student(
            module,
            vocabularies[vocab_size].kept,
            StudentShape(layers, width),
            eos_ids=target.eos_ids,
            seed=seed,
        )
        recipe = Recipe(loss=loss, rate=rate, epochs=arguments.epochs, seed=seed)
        if arguments.steps:
            num_ids = sum(len(lesson.ids) for lesson in taught)
            epochs = arguments.steps * recipe.batch_tokens / num_ids
            recipe = replace(recipe, epochs=epochs)
        begun = time.monotonic()
        *_, last = train(student, taught, material.judges, recipe)
        judged: Evaluation = last.judged
        row: Row = dict(zip(VARIED, values, strict=True))
        row |= {
            "distinct_tokens": sum(len(lesson.places) for lesson in taught),
            "learnt_tokens": last.num_learnt,
            "seconds": round(time.monotonic() - begun, 1),
            "alpha": round(judged.alpha, 4),
            "greedy": round(judged.greedy, 4),
        }
        if arguments.walltime:
            shape = (layers, width, vocab_size)
            if shape not in costs:
                costs[shape] = timed(target, student, vocabularies[vocab_size])
            row |= {
                "c": round(costs[shape].c, 4),
                "walltime": round(factor(judged.alpha, costs[shape]), 3),
                "walltime_greedy": round(factor(judged.greedy, costs[shape]), 3),
            }
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    facts: dict[str, object] = {"rows": rows, "judged_tokens": judged.num_tokens}
    if len(arguments.shares) > 1:
        facts["another_million"] = {
            name: round(another_million(rows, name), 4) for name in ("alpha", "greedy")
        }
    if arguments.json:
        arguments.also_from = [Path(folder).name for folder in arguments.also_from]
        print(json.dumps({**facts, "provenance": provenance(arguments)}))
        return
    names = list(rows[0])
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    if "another_million" in facts:
        print(f"another million tokens would bring: {facts['another_million']}")


if __name__ == "__main__":
    main()
