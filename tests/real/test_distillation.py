"""A drafter made for the default target on a small budget, against what costs nothing to make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from outrider import Drafter, Model
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter, fit_ngrams
from outrider.measure.alpha import text_betas
from outrider.measure.texts import Text
from outrider.models import load_model
from outrider.sampling import SamplingPolicy
from outrider.training.conversations import Part
from outrider.training.distillation import Plan, distil
from outrider.training.learning import Recipe
from outrider.training.shards import Shard, read_shard, shards_in
from outrider.training.student import StudentShape
from outrider.training.writing import POLICIES

pytestmark = pytest.mark.real

PLAN = Plan(
    tokens=9_600,
    shape=StudentShape(2, 576),
    vocab_size=4096,
    recipe=Recipe(epochs=8.0),
    rows=16,
    passes=200,
)
NUM_TEXTS, NUM_TOKENS = 6, 48


def answers(shard: Shard, policy: int) -> list[Text]:
    """The beginnings of some first answers that were drawn by a policy, behind their questions."""
    is_answer = (shard.parts == int(Part.ANSWER)) & (shard.policies == policy)
    found = []
    for ids, drawn, drawn_at in shard.conversations():
        places = drawn_at[is_answer[drawn]].tolist()
        run = [place for i, place in enumerate(places) if place == places[0] + i][:NUM_TOKENS]
        if len(run) >= NUM_TOKENS // 2:
            prompt, answer = ids[: run[0]], ids[run[0] : run[-1] + 1]
            found.append(Text(len(found), tuple(prompt.tolist()), tuple(answer.tolist())))
    return found[:NUM_TEXTS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_beats_bigram_and_lookup_on_answers_held_out(
    made: Path, target: Model, temperature: float
) -> None:
    first, *others = map(read_shard, shards_in(made / "making"))
    written = [text.ids.tolist() for shard in others for text in shard.conversations()]
    student = load_model(str(made), engine="openvino", dtype="int8")
    size = target.vocab_size
    drafters: dict[str, Drafter] = {
        "distilled": ModelDrafter(student, target_vocab_size=size),
        "behind lookup": LookupFirst(ModelDrafter(student, target_vocab_size=size)),
        "bigram": NgramDrafter(fit_ngrams(written, order=2, vocab_size=size)),
        "lookup": LookupDrafter(),
    }
    sums = dict.fromkeys(drafters, 0.0)
    [policy] = [i for i, item in enumerate(POLICIES) if item.temperature == temperature]
    texts = answers(first, policy)
    assert len(texts) == NUM_TEXTS
    for text in texts:
        found = text_betas(target, drafters, text, SamplingPolicy(temperature=temperature))
        for name, betas in found.items():
            sums[name] += sum(beta or 0.0 for beta in betas.beta)
    alpha = {name: value / sum(len(text.tokens) for text in texts) for name, value in sums.items()}
    assert alpha["distilled"] > alpha["bigram"], alpha
    assert alpha["behind lookup"] > alpha["lookup"] + 0.02, alpha
    if temperature:  # greedy answers repeat themselves: against copies, 6,400 tokens are too few
        assert alpha["distilled"] > alpha["lookup"] + 0.02, alpha


@pytest.fixture(scope="module")
def made(target: Model, module: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "drafter"
    distil(target, lambda: module, folder, PLAN)
    return folder


def test_students_of_a_runs_text_are_compared_by_alpha_and_walltime(made: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "drafters.py"
    options = ("--vocab-sizes", "4096", "--shares", "0.5", "1", "--steps", "3", "--walltime")
    done = subprocess.run(
        [sys.executable, str(script), str(made), *options, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    half, whole = facts["rows"]
    assert (half["share"], whole["share"]) == (0.5, 1.0)
    assert 0.4 < half["distinct_tokens"] / whole["distinct_tokens"] < 0.6
    assert half["c"] == whole["c"]  # of one shape, timed once
    for row in facts["rows"]:
        assert 0.0 < row["c"] < 0.5
        assert 0.9 < row["walltime"] < 1.2 > row["walltime_greedy"]
    assert set(facts["another_million"]) == {"alpha", "greedy"}
    assert str(made.parent) not in done.stdout
