"""Runs that make a drafter: what they leave behind, where they end, how they go on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.decoding import Engine
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import fit_ngrams
from outrider.errors import UsageError
from outrider.models import load_model
from outrider.models.toy import ByteTokenizer
from outrider.models.trimmed import TrimmedModel, read_vocabulary
from outrider.requests import Request
from outrider.sampling import SamplingPolicy
from outrider.training import distillation
from outrider.training.learning import Recipe, lessons
from outrider.training.runs import written_text
from outrider.training.shards import read_shard, shards_in
from outrider.training.student import StudentShape
from outrider.training.writing import DrawPolicy
from training.tiny import PLAN, V, run, target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter made in one go."""
    folder = tmp_path_factory.mktemp("made") / "drafter"
    assert apart(folder) == 0
    return folder


def apart(folder: Path, *, killed_after: int = 0) -> int:
    """A run in a process of its own, whose number of threads is always the same; its exit code."""
    script = Path(__file__).with_name("tiny.py")
    path = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), str(folder), str(killed_after)]
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}).returncode


def digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in shards_in(folder / "making")
    }


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


# Calls of `tell`: three shards of text, then steps of training.
@pytest.mark.parametrize("killed_after", [1, 2, 5])
def test_a_killed_run_goes_on_with_the_same_text(
    made: Path, tmp_path: Path, killed_after: int
) -> None:
    folder = tmp_path / "drafter"
    assert apart(folder, killed_after=killed_after) == -signal.SIGKILL
    before = digests(folder)
    assert len(before) == min(killed_after, 3)
    assert apart(folder) == 0
    after = digests(folder)
    assert {name: after[name] for name in before} == before
    assert after == digests(made)
    assert [file.name for file in (folder / "making").iterdir() if file.name[0] == "."] == []


def test_training_goes_on_where_it_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.training import learning

    monkeypatch.setattr(learning, "_KEEP_EVERY_S", 0.0)
    folder = tmp_path / "drafter"

    class Stop(Exception):
        pass

    steps: list[int] = []

    def stop(progress: distillation.Progress) -> None:
        if progress.stage == "training":
            steps.append(progress.done)
            if progress.done == 4:
                raise Stop

    with pytest.raises(Stop):
        distillation.distil(target(), _module, folder, PLAN, stop)
    again: list[int] = []
    begun_at = {0}

    def note(progress: distillation.Progress) -> None:
        if progress.stage == "training":
            again.append(progress.done)
            begun_at.add(progress.begun_at)

    distillation.distil(target(), _module, folder, PLAN, note)
    assert steps == [1, 2, 3, 4]
    assert again[0] == 4  # the fourth step was not kept: `tell` came before
    assert begun_at == {0, 3}
    run(tmp_path / "straight")
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("drafter", "straight")
    )
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    cards = [(tmp_path / name / "README.md").read_text() for name in ("drafter", "straight")]
    assert cards[0] == cards[1]  # also what was learnt from before the stop


def _module() -> torch.nn.Module:
    from training.tiny import module

    return module()


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


def test_text_of_other_runs_is_learnt_from_as_far_as_it_went_when_the_run_began(
    made: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    *_, last = shards_in(other / "making")
    later = last.rename(tmp_path / last.name)
    plan = replace(PLAN, tokens=600, also_from=(str(other),), recipe=Recipe(epochs=1.0), seed=1)
    stages: list[distillation.Progress] = []
    distillation.distil(target(), _module, tmp_path / "drafter", plan, stages.append)
    assert [item.total for item in stages if item.stage == "text"] == [600, 600]
    own = sum(
        len(shard.places)
        for shard in map(read_shard, shards_in(tmp_path / "drafter" / "making")[1:])
    )
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"Data: {own + 600} tokens" in card
    # The other run goes on; this one is what it was.
    later.rename(last)
    (tmp_path / "drafter" / "README.md").unlink()
    run(tmp_path / "drafter", plan)
    assert (tmp_path / "drafter" / "README.md").read_text() == card
    last.unlink()
    shards_in(other / "making")[-1].unlink()
    with pytest.raises(UsageError, match=r"held 2 shards .* and holds 1 now"):
        run(tmp_path / "drafter", plan)
    with pytest.raises(UsageError, match="also_from"):
        run(tmp_path / "drafter", replace(plan, also_from=()))
    with pytest.raises(UsageError, match="holds no run"):
        run(tmp_path / "new", replace(plan, also_from=(str(tmp_path),)))
    with pytest.raises(UsageError, match=f"{other} and {other} have the same seed"):
        run(tmp_path / "new", replace(plan, also_from=(str(other), f"{other}/.")))
    with pytest.raises(UsageError, match="and this run have the same seed 0"):
        run(tmp_path / "new", replace(plan, seed=PLAN.seed))
    with pytest.raises(UsageError, match=f"and {other} have the same seed 0"):
        run(tmp_path / "new", replace(plan, also_from=(str(other), str(made))))
    assert not (tmp_path / "new").exists()


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
        bytes(token for token in ids.tolist() if token < 256)
        for shard in shards
        for ids, _ in shard.conversations()
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
    both = distillation.prepare(
        target(), _module(), ([held_out], PLAN.policies), [(shards, PLAN.policies)], V
    )
    apart = distillation.prepare(
        target(), _module(), ([held_out], PLAN.policies), [(others, PLAN.policies)], V
    )
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
        distillation.distil(base, _module, tmp_path / "new", plan)
    assert not (tmp_path / "new").exists()


def test_a_folder_with_another_run_is_left_alone(made: Path) -> None:
    before = digests(made)
    with pytest.raises(UsageError, match="vocab_size 200, not 100"):
        run(made, replace(PLAN, vocab_size=100))
    with pytest.raises(UsageError, match=r"recipe\.loss 'kl', not 'tv'"):
        run(made, replace(PLAN, recipe=replace(PLAN.recipe, loss="tv")))
    with pytest.raises(UsageError, match="other prompts"):
        run(made, replace(PLAN, prompts=(("a question " * 9,),) * 3))
    other = target()
    other.dtype = "bfloat16"
    with pytest.raises(UsageError, match="dtype 'float32', not 'bfloat16'"):
        distillation.distil(other, _module, made, PLAN)
    assert digests(made) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="choose another folder"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(UsageError):
        run(tmp_path / "precious.txt" / "below")


def test_a_call_cut_short_before_its_settings_does_not_block_the_folder(tmp_path: Path) -> None:
    making = tmp_path / "drafter" / "making"
    making.mkdir(parents=True)
    (making / ".run.json.123").write_text("{")
    run(tmp_path / "drafter")
    assert (tmp_path / "drafter" / "vocabulary.safetensors").is_file()
    other = tmp_path / "other" / "making"
    other.mkdir(parents=True)
    (other / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="choose another folder"):
        run(tmp_path / "other")


def test_a_damaged_settings_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "making").mkdir()
    (tmp_path / "making" / "run.json").write_text("{")
    with pytest.raises(UsageError, match="cannot use"):
        run(tmp_path)


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


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    silent = target()
    silent.tokenizer = None
    with pytest.raises(UsageError, match="tiny has no tokenizer"):
        distillation.distil(silent, _module, tmp_path / "drafter", PLAN)
    assert not (tmp_path / "drafter").exists()


def test_a_target_without_a_chat_format_is_distilled_from_texts(tmp_path: Path) -> None:
    base = target()
    base.tokenizer.has_chat_template = False  # type: ignore[union-attr]
    plan = replace(PLAN, tokens=600, recipe=replace(PLAN.recipe, epochs=0.2))
    judged = distillation.distil(base, _module, tmp_path / "drafter", plan)
    assert judged.num_tokens == PLAN.rows * PLAN.passes
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"Data: {PLAN.rows * PLAN.passes} tokens" in card


def test_training_that_diverges_says_so_and_makes_no_drafter(tmp_path: Path) -> None:
    plan = replace(PLAN, recipe=replace(PLAN.recipe, rate=1e30, epochs=30.0))
    with pytest.raises(UsageError, match="begin in another folder with a lower one"):
        run(tmp_path / "drafter", plan)
    assert [item.name for item in (tmp_path / "drafter").iterdir()] == ["making"]


def test_a_full_disk_keeps_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.training import shards

    written = 0
    save = shards.save_file

    def full(tensors: object, file: Path) -> None:
        nonlocal written
        written += 1
        if written == 2:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, file)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(UsageError, match="No space left on device"):
        run(tmp_path / "drafter")
    names = [path.name for path in (tmp_path / "drafter" / "making").iterdir()]
    assert sorted(names) == ["run.json", "shard-00000.safetensors"]
    settings = json.loads((tmp_path / "drafter" / "making" / "run.json").read_text())
    assert settings["tokens"] == PLAN.tokens
    run(tmp_path / "drafter")


@pytest.mark.parametrize("raised", [OSError(28, "No space left on device"), RuntimeError("28")])
def test_a_full_disk_in_training_keeps_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    from outrider.training import learning

    monkeypatch.setattr(learning, "_KEEP_EVERY_S", 0.0)
    save = torch.save
    kept = 0

    def full(content: object, file: Path) -> None:
        nonlocal kept
        kept += 1
        if kept == 3:
            file.write_bytes(b"half")
            raise raised
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    folder = tmp_path / "drafter"
    with pytest.raises(UsageError, match="cannot keep the training so far"):
        run(folder)
    assert torch.load(folder / "making" / "student.pt", weights_only=True)["step"] == 2
    assert [file for file in (folder / "making").iterdir() if file.name[0] == "."] == []


def test_too_little_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ask for more tokens"):
        run(tmp_path / "drafter", replace(PLAN, tokens=10))
