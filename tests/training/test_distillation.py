"""Runs that make a drafter: what they leave behind, and what they refuse."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.decoding import Engine
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import fit_ngrams
from outrider.errors import UsageError, VocabularyMismatch
from outrider.models import load_model
from outrider.models.toy import ByteTokenizer
from outrider.models.trimmed import TrimmedModel, Vocabulary, read_vocabulary
from outrider.requests import Request
from outrider.sampling import SamplingPolicy
from outrider.training import distillation
from outrider.training.card import PROVENANCE, earlier_provenance
from outrider.training.distillation import Plan
from outrider.training.learning import Recipe, lessons
from outrider.training.runs import written_text
from outrider.training.shards import read_shard, shards_in
from outrider.training.student import StudentShape
from outrider.training.writing import DrawPolicy
from training.tiny import PLAN, V, module, run, target


def test_the_drafter_is_a_checkpoint_that_transformers_loads(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made)
    vocabulary = read_vocabulary(made)
    assert vocabulary is not None
    assert model.config.vocab_size == len(vocabulary.kept) == PLAN.vocab_size
    assert model.lm_head.weight is model.model.embed_tokens.weight
    card = (made / "README.md").read_text()
    assert "200 of the\n  target's 257 ids" in card
    assert "loss kl" in card


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_both_engines_draft_with_it_and_the_text_is_the_targets(made: Path, engine: str) -> None:
    model = load_model(str(made), engine=engine, dtype="float32")  # type: ignore[arg-type]
    assert isinstance(model, TrimmedModel)
    assert model.vocab_size == V
    big = target()
    drafter = ModelDrafter(model, target_vocab_size=V)
    drafted = 0
    for policy in (SamplingPolicy(), SamplingPolicy(temperature=1.0)):
        for rule in ("block", "coupled"):
            request = Request(
                list(b"user: hello\nassistant:"),
                policy,
                max_new_tokens=30,
                gamma=3,
                rule=rule,
                seed=1,
            )
            [fast] = Engine(big, drafter).generate([request])
            drafted += fast.stats.drafted
            if policy.temperature == 0 or rule == "coupled":
                [plain] = Engine(big, None).generate([replace(request, gamma=0)])
                assert fast.token_ids == plain.token_ids
    assert drafted


def test_training_brings_it_closer_to_the_target(tmp_path: Path) -> None:
    longer = replace(PLAN, recipe=replace(PLAN.recipe, epochs=30.0))
    shorter = replace(PLAN, recipe=replace(PLAN.recipe, epochs=0.01))
    assert run(tmp_path / "long", longer).alpha > run(tmp_path / "short", shorter).alpha + 0.02


def test_n_grams_are_fitted_from_the_same_text(made: Path) -> None:
    texts = list(written_text(made, target()).conversations())
    shards = [read_shard(file) for file in shards_in(made / "making")]
    assert sum(map(len, texts)) == sum(len(shard.tokens) for shard in shards)
    assert len(texts) == sum(len(shard.begins) - 1 for shard in shards)
    table = fit_ngrams(texts, order=3, vocab_size=V, tokenizer=ByteTokenizer())
    pairs = [(text[i - 2 : i], text[i]) for text in texts for i in range(2, len(text))]
    right = sum(table.best(context) == token for context, token in pairs) / len(pairs)
    [unigram] = fit_ngrams(texts, order=1, vocab_size=V).tokens[0].tolist()
    assert right > sum(token == unigram for _, token in pairs) / len(pairs) + 0.1


def test_n_grams_of_no_run_or_another_targets_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        written_text(tmp_path, target())
    other = target()
    other.name = "someone else"
    with pytest.raises(UsageError, match="text of tiny, not of someone else"):
        written_text(made, other)
    shutil.copytree(made, tmp_path / "begun", ignore=shutil.ignore_patterns("shard-*"))
    with pytest.raises(UsageError, match="no text yet"):
        written_text(tmp_path / "begun", target())


def test_prompts_are_answered_by_the_policies_of_the_plan_and_the_card_counts_them(
    tmp_path: Path,
) -> None:
    plan = replace(
        PLAN,
        tokens=600,
        recipe=Recipe(epochs=0.1),
        prompts=(("hi",), ("yo", "and?"), ("hi",)),
        policies=(DrawPolicy(0.0), DrawPolicy(1.5)),
    )
    run(tmp_path / "drafter", plan)
    shards = [read_shard(file) for file in shards_in(tmp_path / "drafter" / "making")]
    texts = [
        bytes(token for token in text.ids.tolist() if token < 256)
        for shard in shards
        for text in shard.conversations()
    ]
    for opening in (b"user: hi\nassistant:", b"user: yo\nassistant:"):
        assert sum(text.startswith(opening) for text in texts) == 2
    assert {int(policy) for shard in shards for policy in shard.policies} == {0, 1}
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "answers to 2 given prompts and to users' turns of its own" in card
    assert "0, 1.5;" in card


def test_answers_to_questions_that_are_judged_by_are_not_learnt(tmp_path: Path) -> None:
    plan = replace(PLAN, tokens=600, recipe=Recipe(epochs=0.1), prompts=(("hi",), ("yo",)))
    run(tmp_path / "other", plan)
    run(tmp_path / "drafter", replace(plan, seed=1, also_from=(str(tmp_path / "other"),)))
    shards = [read_shard(file) for file in shards_in(tmp_path / "other" / "making")]
    kept, read_as = torch.arange(V), torch.arange(V)
    held_out, *others = shards
    all_ids = Vocabulary(kept, read_as, "")
    judged_by = ([held_out], PLAN.policies)
    both = distillation.prepare(target(), all_ids, judged_by, [(shards, PLAN.policies)])
    apart = distillation.prepare(target(), all_ids, judged_by, [(others, PLAN.policies)])
    questions = {tuple(item.ids[: item.places[0]].tolist()) for item in both.judges}
    assert len(both.taught) < len(lessons(shards, kept, read_as))
    assert len(both.taught) - len(apart.taught) < len(lessons([held_out], kept, read_as))
    for lesson in both.taught:
        ids = tuple(lesson.ids.tolist())
        assert not any(ids[: len(question)] == question for question in questions)


def test_prompts_the_target_cannot_be_asked_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="prompt 2 has 200 tokens; at most 128"):
        run(tmp_path / "new", replace(PLAN, prompts=(("hi",), ("a" * 200,))))
    base = target()
    base.tokenizer.has_chat_template = False  # type: ignore[union-attr]
    plan = replace(PLAN, prompts=(("hi", "and?"),))
    with pytest.raises(UsageError, match="prompt 1 has 2 turns, but tiny has no chat format"):
        distillation.distil(base, module, tmp_path / "new", plan)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"shape": StudentShape(2, 250)}, "width a multiple of 8.*got 2 and 250"),
        ({"shape": StudentShape(-1, 64)}, "layers must be 0 or more"),
        ({"policies": ()}, "each named once; got none"),
        ({"time_limit": 0.0}, "time limit must be above 0"),
        ({"time_limit": math.nan}, "time limit must be above 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"policies": (DrawPolicy(1.0), DrawPolicy(1.0))}, "got 1, 1"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(PLAN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "hinge"}, "loss must be one of"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"rate": math.inf}, "rate must be above 0 and finite"),
        ({"epochs": -1.0}, "epochs must be above 0"),
        ({"epochs": math.nan}, "epochs must be above 0"),
        ({"batch_tokens": 0}, "batch_tokens must be above 0"),
    ],
)
def test_recipes_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(PLAN.recipe, **changes)  # type: ignore[arg-type]


def test_a_vocabulary_without_room_for_special_ids_is_refused_before_text_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="special ids"):
        run(tmp_path / "drafter", replace(PLAN, vocab_size=2))
    assert not (tmp_path / "drafter").exists()


def going_on(earlier: Path) -> Plan:
    """One step of training more."""
    return Plan(
        tokens=600,
        recipe=replace(PLAN.recipe, epochs=0.01),
        rows=PLAN.rows,
        passes=PLAN.passes,
        seed=PLAN.seed + 1,
        begin_as=str(earlier),
    )


def test_a_drafter_goes_on_learning_from_more_text(made: Path, tmp_path: Path) -> None:
    plan = going_on(made)
    run(tmp_path / "drafter", plan)
    before, after = (read_vocabulary(folder) for folder in (made, tmp_path / "drafter"))
    assert before is not None
    assert after is not None
    assert torch.equal(before.kept, after.kept)
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (made, tmp_path / "drafter")
    )
    assert one.config.num_hidden_layers == other.config.num_hidden_layers
    far = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        far = max(far, float((a - b).detach().abs().max()))
    # One step of training away, and not begun anew.
    assert 0.0 < far < 10 * plan.recipe.rate
    assert "* Begun as drafter.\n" in (tmp_path / "drafter" / "README.md").read_text()


def test_a_drafter_that_was_not_begun_as_another_has_none_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PROVENANCE).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert earlier_provenance(str(tmp_path)) == {}
    assert earlier_provenance("") is None  # whatever lies in the current folder


def test_the_card_tells_of_all_drafters_that_one_goes_back_to(made: Path, tmp_path: Path) -> None:
    def told(tokens: int, begin_as: object) -> dict[str, object]:
        recipe = {"loss": "tv", "rate": 0.01, "epochs": 2.5}
        arguments = {"tokens": tokens, "recipe": recipe, "seed": 4, "begin_as": begin_as}
        return {"arguments": arguments}

    first = tmp_path / "first"
    shutil.copytree(made, first, ignore=shutil.ignore_patterns("making"))
    (first / PROVENANCE).write_text(json.dumps(told(7000, told(5000, ""))))
    run(tmp_path / "drafter", going_on(first))
    card = " ".join((tmp_path / "drafter" / "README.md").read_text().split())
    both = card[card.index("* Begun as") :]
    for tokens in (7000, 5000):
        assert (
            f"* Begun as a drafter made in the same way from {tokens} tokens: loss tv, learning "
            "rate 0.01, 2.5 epochs, seed 4."
        ) in both


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "leave them out"),
        ({"shape": StudentShape(3)}, "leave them out"),
        ({}, "holds no drafter that"),
    ],
)
def test_an_earlier_drafter_must_be_one_and_has_its_own_shape(
    made: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other, ignore=shutil.ignore_patterns("making"))
    (other / "vocabulary.safetensors").unlink()
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "drafter", replace(Plan(begin_as=str(other)), **changes))  # type: ignore[arg-type]
    assert not (tmp_path / "drafter").exists()


def test_an_earlier_drafter_of_another_tokenizer_is_refused(made: Path, tmp_path: Path) -> None:
    other = target()

    class Shouting(ByteTokenizer):
        def vocabulary(self) -> list[str | None]:
            return [str(token).upper() for token in super().vocabulary()]

    other.tokenizer = Shouting()
    with pytest.raises(VocabularyMismatch, match="made for another tokenizer"):
        distillation.distil(other, module, tmp_path / "drafter", Plan(begin_as=str(made)))
    assert not (tmp_path / "drafter").exists()


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    silent = target()
    silent.tokenizer = None
    with pytest.raises(UsageError, match="tiny has no tokenizer"):
        distillation.distil(silent, module, tmp_path / "drafter", PLAN)
    assert not (tmp_path / "drafter").exists()


def test_a_target_without_a_chat_format_is_distilled_from_texts(tmp_path: Path) -> None:
    base = target()
    base.tokenizer.has_chat_template = False  # type: ignore[union-attr]
    plan = replace(PLAN, tokens=600, recipe=replace(PLAN.recipe, epochs=0.2))
    judged = distillation.distil(base, module, tmp_path / "drafter", plan)
    assert judged.num_tokens == PLAN.rows * PLAN.passes
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"Data: {PLAN.rows * PLAN.passes} tokens" in card


def test_training_that_diverges_says_so_and_makes_no_drafter(tmp_path: Path) -> None:
    plan = replace(PLAN, recipe=replace(PLAN.recipe, rate=1e30, epochs=30.0))
    with pytest.raises(UsageError, match="begin in another folder with a lower one"):
        run(tmp_path / "drafter", plan)
    assert [item.name for item in (tmp_path / "drafter").iterdir()] == ["making"]


def test_too_little_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ask for more tokens"):
        run(tmp_path / "drafter", replace(PLAN, tokens=10))
