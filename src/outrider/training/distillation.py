"""A drafter for a target, made in one run that may end anywhere and go on.

    folder/                 the drafter: a checkpoint as any other, beside it
      vocabulary.safetensors    which of the target's ids it knows (`models.trimmed`)
      README.md                 what it was made from, and how well it does
      making/                   everything it is made from; may be deleted afterwards
        run.json                  the settings: another call must have the same
        shard-00000.safetensors   the target's text and laws
        student.pt                weights and optimiser of the training so far

The stages are text, vocabulary, student, training, judgement. What a stage has finished is on disk,
whole; a call with the same settings goes on behind it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.errors import UsageError
from outrider.models import Model
from outrider.models.cache import written_whole
from outrider.models.checkpoints import quietly
from outrider.models.trimmed import Vocabulary, tokenizer_digest, write_vocabulary
from outrider.training.conversations import chat_frame
from outrider.training.learning import Evaluation, Point, Recipe, lessons, train
from outrider.training.losses import LOSSES
from outrider.training.shards import Shard, read_shard, shard_file, shards_in, write_shard
from outrider.training.student import (
    StudentShape,
    choose_vocabulary,
    make_student,
    read_as_closest,
)
from outrider.training.writing import Writer

__all__ = ["Plan", "Progress", "distil", "save_drafter", "written_texts"]

_MAKING = "making"
_SETTINGS = "run.json"
_HELD_OUT = 0.02
"""Share of the shards that is judged by and not learnt from; at least one."""


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on.

    Attributes:
        tokens: that the target shall write.
        shape: of the drafter.
        vocab_size: V', ids it knows.
        recipe: of the training.
        time_limit: seconds of training at most.
        prompts: users' turns, to be answered; empty lets the target write them too.
        rows: conversations written side by side.
        passes: of a shard.
        seed: of the text.
    """

    tokens: int = 1_000_000
    shape: StudentShape = field(default_factory=StudentShape)
    vocab_size: int = 8192
    recipe: Recipe = field(default_factory=Recipe)
    time_limit: float = math.inf
    prompts: tuple[str, ...] = ()
    rows: int = 48
    passes: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no run can be made of; UsageError."""
        if self.tokens < 1:
            raise UsageError(f"tokens must be at least 1, got {self.tokens}")
        if self.recipe.loss not in LOSSES:
            raise UsageError(f"loss must be one of {', '.join(LOSSES)}, not {self.recipe.loss!r}")
        shape = self.shape
        if min(shape.layers, shape.width, shape.mlp) < 0 or shape.width % 8:
            raise UsageError(
                "layers must be 0 or more, width a multiple of 8 (0: chosen for the target); got "
                f"{shape.layers} and {shape.width}"
            )
        for name in ("vocab_size", "rows", "passes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        stage: "text" or "training".
        done, total: tokens written, or steps.
        seconds: of this stage in this call.
        loss: of the last step.
        judged: on text held out, where that was looked at just now.
    """

    stage: str
    done: int
    total: int
    seconds: float
    loss: float | None = None
    judged: Evaluation | None = None


def distil(
    target: Model,
    module: Callable[[], PreTrainedModel],
    folder: Path,
    plan: Plan,
    tell: Callable[[Progress], None] = lambda _: None,
) -> Evaluation:
    """Make a drafter for `target` in `folder`, or go on making it.

    Args:
        target: writes the text; any engine.
        module: gives its weights, when they are needed.
        folder: of the drafter.
        plan: what to make.
        tell: called often.

    Returns:
        How the drafter does on text held out.

    Raises:
        UsageError: the folder holds another run or other files, cannot be written, or the plan does
            not fit the target. Whatever was written stays.
    """
    making = _open_run(folder, target, plan)
    shards = _text(target, making, plan, tell)
    num_held_out = max(1, round(_HELD_OUT * len(shards)))
    if num_held_out >= len(shards):
        raise UsageError(
            f"{plan.tokens} tokens are one shard of {plan.rows * plan.passes}; at least two are "
            "needed, one to learn from and one to judge by: ask for more tokens"
        )
    model = module()
    vocabulary = _vocabulary(target, model, shards[num_held_out:], plan)
    ends = target.eos_ids
    student = make_student(model, vocabulary.kept, plan.shape, eos_ids=ends, seed=plan.recipe.seed)
    del model
    held_out = lessons(
        shards[:num_held_out], vocabulary.kept, vocabulary.read_as, answers_only=True
    )
    taught = lessons(shards[num_held_out:], vocabulary.kept, vocabulary.read_as)
    begun = time.monotonic()

    def told(step: int, num_steps: int, loss: float, judged: Evaluation | None) -> None:
        tell(Progress("training", step, num_steps, time.monotonic() - begun, loss, judged))

    course = train(
        student,
        taught,
        held_out,
        plan.recipe,
        state=making / "student.pt",
        time_limit=plan.time_limit,
        tell=told,
    )
    save_drafter(student, vocabulary, folder)
    judged = course[-1].judged
    num_taught = sum(len(lesson.places) for lesson in taught)
    with written_whole(folder / "README.md") as unfinished:
        unfinished.write_text(
            _card(target, plan, student.config, course, num_taught), encoding="utf-8"
        )
    return judged


def written_texts(folder: Path, target: Model) -> list[list[int]]:
    """Every conversation that a target has written in a run so far, token ids; for n-gram tables.

    Args:
        folder: of the run, finished or not.
        target: whose run it should be.

    Raises:
        UsageError: the folder holds no run, no text yet, or another target's.
    """
    try:
        settings = json.loads((folder / _MAKING / _SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} holds no run of `outrider distill` with its {_MAKING} folder"
        ) from error
    if settings.get("target") != target.name:
        raise UsageError(
            f"{folder} holds text of {settings.get('target')}, not of {target.name}; name that "
            "target"
        )
    texts = [
        shard.tokens[first:last].tolist()
        for shard in map(read_shard, shards_in(folder / _MAKING))
        for first, last in pairwise(shard.begins.tolist())
    ]
    if not texts:
        raise UsageError(f"{folder} holds no text yet; let `outrider distill` write some")
    return texts


def save_drafter(student: LlamaForCausalLM, vocabulary: Vocabulary, folder: Path) -> None:
    """Write a student as a checkpoint, in bfloat16, with its vocabulary beside it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with quietly():
            student.to(torch.bfloat16).save_pretrained(folder)
        write_vocabulary(folder, vocabulary)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the drafter in {folder}: {reason}") from error


def _card(
    target: Model, plan: Plan, form: LlamaConfig, course: Sequence[Point], num_taught: int
) -> str:
    """What there is to know about a drafter."""
    judged = course[-1].judged
    turns = f"{len(plan.prompts)} given users' turns" if plan.prompts else "users' turns of its own"
    return f"""# A drafter for {target.name}

Made by `outrider distill`. It proposes tokens that {target.name} checks (speculative decoding), and
is no use by itself.

* Form: Llama, {form.num_hidden_layers} layers of width {form.hidden_size}, {form.vocab_size} of the
  target's {target.vocab_size} ids (`vocabulary.safetensors`); the others it reads as the closest of
  these and never proposes.
* Data: {num_taught} tokens of the target's own text: answers to {turns}, drawn greedily, at
  temperature 0.7 within 0.9 of the mass, and at temperature 1; no other text.
* Recipe: loss {plan.recipe.loss}, learning rate {plan.recipe.rate:g}, {plan.recipe.epochs:g}
  epochs, seed {plan.seed}.
* On {judged.num_tokens} tokens held out: alpha {judged.alpha:.3f} at temperature 1; its most likely
  id is the target's in {judged.greedy:.3f} of them.
* On the way there, epochs counted, on some of these tokens:

| tokens learnt from | alpha | greedy |
|---|---|---|
{_course_table(course)}

Its weights come from the target's, and what holds for their licence holds for these.
"""


def _course_table(course: Sequence[Point]) -> str:
    """Some of the points, each with about twice the tokens of the one before, and the last."""
    chosen: list[Point] = []
    for point in reversed(course):
        if not chosen or 1.9 * point.num_learnt <= chosen[-1].num_learnt:
            chosen.append(point)
    return "\n".join(
        f"| {point.num_learnt} | {point.judged.alpha:.3f} | {point.judged.greedy:.3f} |"
        for point in reversed(chosen)
    )


def _open_run(folder: Path, target: Model, plan: Plan) -> Path:
    """The folder of what the drafter is made from, its settings checked or written."""
    making = folder / _MAKING
    settings = json.loads(json.dumps({"target": target.name, **asdict(plan)}))
    # How long to train may change between calls.
    settings.pop("time_limit")
    file = making / _SETTINGS
    try:
        if file.is_file():
            found = json.loads(file.read_text())
            differing = sorted(name for name in settings if found.get(name) != settings[name])
            if differing:
                name = differing[0]
                raise UsageError(
                    f"{folder} holds a run with {name} {found.get(name)!r}, not "
                    f"{settings[name]!r}; repeat that call to go on with it, or choose another "
                    "folder"
                )
            return making
        if not _is_free(folder, making):
            raise UsageError(
                f"{folder} exists and holds no run to go on with; choose another folder"
            )
        making.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as unfinished:
            unfinished.write_text(json.dumps(settings, indent=1) + "\n")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot use {folder}: {reason}") from error
    return making


def _is_free(folder: Path, making: Path) -> bool:
    """Whether a run can begin here: nothing stands here but what a call cut short at once left."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    begun = making.iterdir() if making.is_dir() else iter(())
    return all(item == making for item in folder.iterdir()) and all(
        item.name.startswith(f".{_SETTINGS}.") for item in begun
    )


def _text(target: Model, making: Path, plan: Plan, tell: Callable[[Progress], None]) -> list[Shard]:
    """All shards, those that are missing written now."""
    num_shards = -(-plan.tokens // (plan.rows * plan.passes))
    have = {file.name for file in shards_in(making)}
    missing = [n for n in range(num_shards) if shard_file(making, n).name not in have]
    if missing:
        assert target.tokenizer is not None
        prompts = [target.tokenizer.encode(text, special=False) for text in plan.prompts]
        writer = Writer(
            target,
            seed=plan.seed,
            num_rows=plan.rows,
            num_passes=plan.passes,
            prompts=prompts or None,
        )
        begun, done = time.monotonic(), (num_shards - len(missing)) * writer.tokens_per_shard
        for number in missing:
            write_shard(shard_file(making, number), writer.shard(number))
            done += writer.tokens_per_shard
            total = num_shards * writer.tokens_per_shard
            tell(Progress("text", done, total, time.monotonic() - begun))
        target.forget()
    return [read_shard(shard_file(making, number)) for number in range(num_shards)]


def _vocabulary(
    target: Model, module: PreTrainedModel, shards: Sequence[Shard], plan: Plan
) -> Vocabulary:
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for shard in shards:
        drawn = shard.tokens[shard.places.long()].long()
        counts += torch.bincount(drawn, minlength=target.vocab_size)
    assert target.tokenizer is not None
    frame = chat_frame(target.tokenizer, target.eos_ids)
    always = {*frame.opening, *frame.answer, *frame.turn, *frame.ends}
    kept = choose_vocabulary(counts, plan.vocab_size, always)
    embeddings = module.get_input_embeddings().weight.detach()[: target.vocab_size]
    read_as = read_as_closest(embeddings, kept)
    return Vocabulary(kept, read_as, tokenizer_digest(target.tokenizer))
