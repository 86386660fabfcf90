"""Runs that end anywhere and go on: what is on disk, and which call may continue."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.errors import UsageError
from outrider.training import distillation
from outrider.training.learning import Recipe
from outrider.training.shards import read_shard, shards_in
from training.tiny import PLAN, apart, digests, module, run, target


# Calls of `tell`: three shards of text, then steps of training.
@pytest.mark.parametrize("killed_after", [2, 5])
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


def test_a_run_killed_in_the_middle_of_a_write_goes_on_and_leaves_nothing_half_done(
    made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    assert apart(folder, killed_in_write=2) == -signal.SIGKILL
    assert len(digests(folder)) == 1
    # The negative control: there is something to clear away.
    [half] = [file for file in (folder / "making").iterdir() if file.name.startswith(".shard-")]
    running = half.with_suffix(f".{os.getpid()}")
    running.write_bytes(b"another process is writing this")
    assert apart(folder) == 0
    assert digests(folder) == digests(made)
    hidden = [file for file in (folder / "making").iterdir() if file.name.startswith(".")]
    assert hidden == [running]


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
        distillation.distil(target(), module, folder, PLAN, stop)
    again: list[int] = []
    begun_at = {0}

    def note(progress: distillation.Progress) -> None:
        if progress.stage == "training":
            again.append(progress.done)
            begun_at.add(progress.begun_at)

    distillation.distil(target(), module, folder, PLAN, note)
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


def test_text_of_other_runs_is_learnt_from_as_far_as_it_went_when_the_run_began(
    made: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    *_, last = shards_in(other / "making")
    later = last.rename(tmp_path / last.name)
    plan = replace(PLAN, tokens=600, also_from=(str(other),), recipe=Recipe(epochs=1.0), seed=1)
    stages: list[distillation.Progress] = []
    distillation.distil(target(), module, tmp_path / "drafter", plan, stages.append)
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
        distillation.distil(other, module, made, PLAN)
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
