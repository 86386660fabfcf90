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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from outrider.errors import UsageError
from outrider.models import Model
from outrider.models.cache import written_whole
from outrider.models.checkpoints import quietly
from outrider.models.trimmed import Vocabulary, tokenizer_digest, write_vocabulary
from outrider.training.card import card_of
from outrider.training.conversations import Frame, chat_frame
from outrider.training.learning import Evaluation, Lesson, Recipe, lessons, train
from outrider.training.runs import open_run, written_text
from outrider.training.shards import Shard, read_shard, shard_file, shards_in, write_shard
from outrider.training.student import (
    StudentShape,
    choose_vocabulary,
    earlier_student,
    make_student,
    read_as_closest,
)
from outrider.training.writing import POLICIES, DrawPolicy, Writer

__all__ = ["Material", "Plan", "Progress", "cover", "distil", "prepare", "save_drafter"]

DrawnText = tuple[Sequence[Shard], Sequence[DrawPolicy]]
"""Shards, and the policies that their answers were drawn by."""


_VOCAB_SIZE = 8192
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
        prompts: conversations to hold, of each its users' turns. Behind them, or if there are none,
            the target writes the turns too.
        policies: how answers are drawn; every turn is answered by each.
        also_from: folders of other runs of this target, whose text so far is learnt from too.
        begin_as: the folder of an earlier drafter to begin as; shape and vocabulary are its own,
            and those above must be left as they are.
        rows: conversations written side by side.
        passes: of a shard.
        seed: of the text.
    """

    tokens: int = 1_000_000
    shape: StudentShape = field(default_factory=StudentShape)
    vocab_size: int = _VOCAB_SIZE
    recipe: Recipe = field(default_factory=Recipe)
    time_limit: float = math.inf
    prompts: tuple[tuple[str, ...], ...] = ()
    policies: tuple[DrawPolicy, ...] = POLICIES
    also_from: tuple[str, ...] = ()
    begin_as: str = ""
    rows: int = 48
    passes: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no run can be made of; UsageError."""
        if self.tokens < 1:
            raise UsageError(f"tokens must be at least 1, got {self.tokens}")
        shape = self.shape
        if min(shape.layers, shape.width, shape.mlp) < 0 or shape.width % 8:
            raise UsageError(
                "layers must be 0 or more, width a multiple of 8 (0: chosen for the target); got "
                f"{shape.layers} and {shape.width}"
            )
        for name in ("vocab_size", "rows", "passes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.time_limit > 0.0:
            raise UsageError(f"the time limit must be above 0, got {self.time_limit}")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"the seed must be at least 0 and below 2**31, got {self.seed}")
        if not self.policies or len(set(self.policies)) < len(self.policies):
            drawn = ", ".join(map(str, self.policies)) or "none"
            raise UsageError(f"answers must be drawn by policies, each named once; got {drawn}")
        if self.begin_as and (self.shape != StudentShape() or self.vocab_size != _VOCAB_SIZE):
            raise UsageError(
                "layers, width and vocabulary size are those of the drafter to begin as; leave "
                "them out"
            )


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        stage: "text" or "training".
        done, total: tokens written, or steps.
        seconds: of this stage in this call.
        begun_at: what was done of it when this call began.
        loss: of the last step.
        judged: on text held out, where that was looked at just now.
    """

    stage: str
    done: int
    total: int
    seconds: float
    begun_at: int = 0
    loss: float | None = None
    judged: Evaluation | None = None


@dataclass(frozen=True)
class Material:
    """What a student learns from.

    Attributes:
        judges: answers to judge it by.
        taught: conversations to learn from.
    """

    judges: list[Lesson]
    taught: list[Lesson]


def prepare(
    target: Model, vocabulary: Vocabulary, held_out: DrawnText, text: Sequence[DrawnText]
) -> Material:
    """Lessons from a target's text.

    Args:
        target: who wrote it.
        vocabulary: the ids that the student knows.
        held_out: to judge by.
        text: to learn from; answers to the questions that are judged by are left out.
    """
    kept, read_as = vocabulary.kept, vocabulary.read_as
    some, policies = held_out
    judges = lessons(some, kept, read_as, policies=policies, answers_only=True)
    # A target without a chat format begins every text alike, and that is no question.
    asked = _Beginnings(
        question
        for judge in judges
        if len(question := judge.ids[: judge.places[0]].tolist()) > len(_frame(target).opening)
    )
    taught = [
        lesson
        for some, policies in text
        for lesson in lessons(some, kept, read_as, policies=policies)
        # Another run may have been given the same questions.
        if not asked.of(lesson.ids)
    ]
    return Material(judges, taught)


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
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer, so it cannot write text to learn from")
    # What cannot be is refused before hours of text, not behind them.
    choose_vocabulary(torch.zeros(target.vocab_size), plan.vocab_size, _special_ids(target))
    earlier = earlier_student(Path(plan.begin_as), target) if plan.begin_as else None
    prompts = _encoded(target, plan)
    others = [written_text(Path(other), target) for other in plan.also_from]
    seeds = {plan.seed: "this run"}
    for other in others:
        if other.seed in seeds:
            raise UsageError(
                f"{other.folder} and {seeds[other.seed]} have the same seed {other.seed}, so they "
                "may have the same text; give this run another seed, or leave that one out"
            )
        seeds[other.seed] = str(other.folder)
    writer = {"target": target.name, "engine": target.engine, "dtype": target.dtype}
    settings = json.loads(json.dumps({**writer, **asdict(plan)}))
    del settings["time_limit"]  # how long to train may change between calls
    del settings["also_from"]  # kept with how much there was
    making, others = open_run(folder, settings, others)
    shards = _text(target, making, plan, prompts, tell)
    num_held_out = max(1, round(_HELD_OUT * len(shards)))
    if num_held_out >= len(shards):
        raise UsageError(
            f"{plan.tokens} tokens are one shard of {plan.rows * plan.passes}; at least two are "
            "needed, one to learn from and one to judge by: ask for more tokens"
        )
    text = [(shards[num_held_out:], plan.policies)]
    text += [(list(other.shards()), other.policies) for other in others]
    if earlier is not None:
        student, vocabulary = earlier
    else:
        model = module()
        learnt = [shard for some, _ in text for shard in some]
        vocabulary = cover(target, model, learnt, plan.vocab_size)
        student = make_student(
            model, vocabulary.kept, plan.shape, eos_ids=target.eos_ids, seed=plan.recipe.seed
        )
        del model
    material = prepare(target, vocabulary, (shards[:num_held_out], plan.policies), text)
    begun = time.monotonic()
    first: int | None = None

    def told(step: int, num_steps: int, loss: float, judged: Evaluation | None) -> None:
        nonlocal first
        first = step - 1 if first is None else first
        tell(Progress("training", step, num_steps, time.monotonic() - begun, first, loss, judged))

    course = train(
        # A target on a GPU has room beside it for a student, which learns there many times faster.
        student.to(getattr(target, "device", "cpu")),
        material.taught,
        material.judges,
        plan.recipe,
        state=making / "student.pt",
        time_limit=plan.time_limit,
        tell=told,
    )
    save_drafter(student, vocabulary, folder)
    judged = course[-1].judged
    asked = _num_asked(target, prompts, shards)
    num_taught = sum(len(lesson.places) for lesson in material.taught)
    card = card_of(target, plan, student.config, course, num_taught, others, asked)
    try:
        with written_whole(folder / "README.md") as unfinished:
            unfinished.write_text(card, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the card in {folder}: {error.strerror}") from error
    return judged


def save_drafter(student: LlamaForCausalLM, vocabulary: Vocabulary, folder: Path) -> None:
    """Write a student as a checkpoint, in bfloat16, with its vocabulary beside it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        # First the vocabulary: weights without it would pass for a model of all ids.
        write_vocabulary(folder, vocabulary)
        with quietly():
            student.to("cpu", torch.bfloat16).save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the drafter in {folder}: {reason}") from error


def _encoded(target: Model, plan: Plan) -> list[list[list[int]]]:
    """Token ids of the given turns; UsageError for what this target cannot be asked."""
    assert target.tokenizer is not None
    encode = target.tokenizer.encode
    prompts = dict.fromkeys(plan.prompts)
    found = [[encode(turn, special=False) for turn in turns] for turns in prompts]
    most = target.context_length // 2
    for number, turns in enumerate(found, start=1):
        if len(turns) > 1 and not target.tokenizer.has_chat_template:
            raise UsageError(
                f"prompt {number} has {len(turns)} turns, but {target.name} has no chat format: "
                "give it prompts of one turn"
            )
        if (length := sum(map(len, turns))) > most:
            raise UsageError(
                f"prompt {number} has {length} tokens; at most {most}, half of what {target.name} "
                "can read, leave room for the answers"
            )
    return found


class _Beginnings:
    """Texts that others may begin with, found by their lengths rather than one by one."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._texts = set(map(tuple, texts))
        self._lengths = sorted(set(map(len, self._texts)))

    def of(self, ids: Tensor) -> list[tuple[int, ...]]:
        """Those that a text [n] begins with, the shortest first."""
        found = (tuple(ids[:length].tolist()) for length in self._lengths)
        return [begin for begin in found if begin in self._texts]


def _num_asked(
    target: Model, prompts: Sequence[Sequence[Sequence[int]]], shards: Sequence[Shard]
) -> int:
    """How many of the given prompts there was room for."""
    frame = _frame(target)
    asked = _Beginnings((*frame.opening, *turns[0], *frame.answer) for turns in prompts)
    texts = (text for shard in shards for text in shard.conversations())
    return len({begin for text in texts for begin in asked.of(text.ids)})


def _text(
    target: Model,
    making: Path,
    plan: Plan,
    prompts: Sequence[Sequence[Sequence[int]]],
    tell: Callable[[Progress], None],
) -> list[Shard]:
    """All shards, those that are missing written now."""
    num_shards = -(-plan.tokens // (plan.rows * plan.passes))
    have = {file.name for file in shards_in(making)}
    missing = [n for n in range(num_shards) if shard_file(making, n).name not in have]
    if missing:
        writer = Writer(
            target,
            seed=plan.seed,
            num_rows=plan.rows,
            num_passes=plan.passes,
            policies=plan.policies,
            prompts=prompts,
            num_shards=num_shards,
        )
        begun, first = time.monotonic(), (num_shards - len(missing)) * writer.tokens_per_shard
        done = first
        for number in missing:
            write_shard(shard_file(making, number), writer.shard(number))
            done += writer.tokens_per_shard
            total = num_shards * writer.tokens_per_shard
            tell(Progress("text", done, total, time.monotonic() - begun, first))
        target.forget()
    return [read_shard(shard_file(making, number)) for number in range(num_shards)]


def cover(
    target: Model, module: PreTrainedModel, shards: Sequence[Shard], vocab_size: int
) -> Vocabulary:
    """The vocabulary of a student that covers most of what is in the shards.

    Args:
        target: who wrote them.
        module: its weights; unknown ids are read as those whose embeddings are closest.
        shards: the text.
        vocab_size: V'.
    """
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for shard in shards:
        drawn = shard.tokens[shard.places.long()].long()
        counts += torch.bincount(drawn, minlength=target.vocab_size)
    kept = choose_vocabulary(counts, vocab_size, _special_ids(target))
    embeddings = module.get_input_embeddings().weight.detach()[: target.vocab_size]
    read_as = read_as_closest(embeddings, kept)
    return Vocabulary(kept, read_as, tokenizer_digest(target.tokenizer))


def _special_ids(target: Model) -> set[int]:
    """Ids that a drafter must know, however rarely they were drawn."""
    assert target.tokenizer is not None
    frame = _frame(target)
    return {
        *target.tokenizer.special_ids,
        *(*frame.opening, *frame.answer, *frame.turn, *frame.ends),
    }


def _frame(target: Model) -> Frame:
    assert target.tokenizer is not None
    return chat_frame(target.tokenizer, target.eos_ids)
