"""Training a student on a target's kept text.

Every step reads some whole conversations and compares the student's law with the target's at all
tokens that the target drew, on the K ids that were kept and the rest (`losses`). The learning rate
warms up and then falls along a cosine to a tenth. Progress is told in alpha on answers held out.

Where the device computes in bfloat16, matrix products of a step do; weights, their gradients and
the loss are float32 everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.errors import UsageError
from outrider.models.cache import written_whole
from outrider.models.devices import choose_dtype
from outrider.training.conversations import Part
from outrider.training.losses import LOSSES, acceptance, on_kept_ids
from outrider.training.shards import Shard
from outrider.training.writing import POLICIES, DrawPolicy

__all__ = ["Evaluation", "Lesson", "Point", "Recipe", "evaluate", "lessons", "train"]

_WARM_UP = 0.02
_LAST_RATE = 0.1
_KEEP_EVERY_S = 60.0
_GLANCE = 48
"""Conversations that are looked at on the way."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        loss: a name in `losses.LOSSES`.
        rate: learning rate at its highest.
        batch_tokens: of a step, frames included. Small: a student this size learns more from many
            steps than from exact ones.
        epochs: how often every conversation is read.
        seed: of their order.
    """

    loss: str = "nla"
    rate: float = 2e-3
    batch_tokens: int = 1024
    epochs: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained by; UsageError."""
        if self.loss not in LOSSES:
            raise UsageError(f"loss must be one of {', '.join(LOSSES)}, not {self.loss!r}")
        for name in ("rate", "epochs", "batch_tokens"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"{name} must be above 0 and finite, got {value}")


@dataclass(frozen=True)
class Lesson:
    """One conversation in the student's ids.

    Attributes:
        ids: int64 [n].
        places: int64 [A], indices of the tokens to learn, each at least 1.
        top_ids: int32 [A, K] in the student's ids, -1 for what it cannot propose.
        top_probs: float16 [A, K] of the target.
        policy: how the answers were drawn.
    """

    ids: Tensor
    places: Tensor
    top_ids: Tensor
    top_probs: Tensor
    policy: DrawPolicy


@dataclass(frozen=True)
class Evaluation:
    """How a student does on answers held out.

    Attributes:
        alpha: mean of sum min(p, q) at temperature 1, on the kept ids: a lower bound. On the
            answers drawn at temperature 1, if there are any.
        greedy: how often its most likely id is the target's; on the answers drawn greedily, if
            there are any.
        num_tokens: positions.
    """

    alpha: float
    greedy: float
    num_tokens: int


class Point(NamedTuple):
    """How far a student had come.

    Attributes:
        num_learnt: tokens it had learnt from by then, those of every epoch counted.
        judged: how it did.
    """

    num_learnt: int
    judged: Evaluation


def lessons(
    shards: Sequence[Shard],
    kept: Tensor,
    read_as: Tensor,
    *,
    policies: Sequence[DrawPolicy] = POLICIES,
    answers_only: bool = False,
) -> list[Lesson]:
    """What is to be learnt from shards, or judged by.

    Args:
        shards: of the target's text.
        kept: int64 [V'].
        read_as: int64 [V].
        policies: that the shards' answers were drawn by.
        answers_only: leave out what the target wrote in a user's place.
    """
    own = torch.full((len(read_as),), -1, dtype=torch.int32)
    own[kept] = torch.arange(len(kept), dtype=torch.int32)
    found = []
    for shard in shards:
        wanted = shard.parts == int(Part.ANSWER)
        if not answers_only:
            wanted = torch.ones_like(wanted)
        for ids, drawn, places in shard.conversations():
            chosen = torch.arange(drawn.start, drawn.stop)[wanted[drawn]]
            if len(chosen):
                found.append(
                    Lesson(
                        read_as[ids.long()],
                        places[wanted[drawn]].long(),
                        own[shard.top_ids[chosen].long()],
                        shard.top_probs[chosen],
                        policies[int(shard.policies[drawn.start])],
                    )
                )
    return found


def train(
    student: LlamaForCausalLM,
    taught: Sequence[Lesson],
    held_out: Sequence[Lesson],
    recipe: Recipe,
    *,
    state: Path | None = None,
    time_limit: float = math.inf,
    tell: Callable[[int, int, float, Evaluation | None], None] = lambda *_: None,
    evaluate_every: int = 200,
) -> list[Point]:
    """Train a student in place; how it did on the way, on some of `held_out`, and at last on all.

    Args:
        student: in float32; trained on the device where it is.
        taught: to learn from.
        held_out: to judge by.
        recipe: how.
        state: a file where weights and optimiser are kept every minute, and gone on from.
        time_limit: seconds; the learning rate falls in time for it.
        tell: called after every step with its number, their number, the mean loss and, now and
            then, an evaluation on some of `held_out`.
        evaluate_every: steps between evaluations.
    """
    loss_of = LOSSES[recipe.loss]
    batches = _batches(taught, recipe)
    num_steps = max(1, len(batches))
    optimiser = torch.optim.AdamW(
        student.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    begun, spent, step = time.monotonic(), 0.0, 0
    course: list[Point] = []
    num_learnt = 0
    some = held_out[:: max(1, len(held_out) // _GLANCE)]
    if state is not None and state.is_file():
        found = torch.load(state, weights_only=True, map_location=student.device)
        student.load_state_dict(found["student"])
        optimiser.load_state_dict(found["optimiser"])
        step, spent = int(found["step"]), float(found["seconds"])
        course = [Point(number, Evaluation(*values)) for number, values in found["course"]]
        num_learnt = int(found["num_learnt"])
    last_kept = begun

    def keep() -> None:
        if state is not None:
            content = {
                "student": student.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step,
                "seconds": spent + time.monotonic() - begun,
                "course": [(point.num_learnt, astuple(point.judged)) for point in course],
                "num_learnt": num_learnt,
            }
            _keep(state, content)

    student.train()
    while step < num_steps:
        now = time.monotonic()
        progress = max(step / num_steps, (spent + now - begun) / time_limit)
        if progress >= 1.0:
            break
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate * _rate_at(progress)
        batch = [taught[index] for index in batches[step]]
        loss = _loss(student, batch, loss_of)
        optimiser.zero_grad(set_to_none=True)
        if not math.isfinite(float(loss.detach())):
            raise UsageError(
                f"the loss is {float(loss.detach())} after {step} steps at a learning rate of "
                f"{recipe.rate:g}; begin in another folder with a lower one"
            )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        step += 1
        num_learnt += sum(len(lesson.places) for lesson in batch)
        judged = None
        if step % evaluate_every == 0:
            judged = evaluate(student, some)
            course.append(Point(num_learnt, judged))
        tell(step, num_steps, float(loss.detach()), judged)
        if time.monotonic() - last_kept > _KEEP_EVERY_S:
            keep()
            last_kept = time.monotonic()
    keep()
    return [*course, Point(num_learnt, evaluate(student, held_out))]


@torch.inference_mode()
def evaluate(
    student: LlamaForCausalLM, held_out: Sequence[Lesson], *, batch_tokens: int = 4096
) -> Evaluation:
    """How a student does on conversations it has not learnt from."""
    was_training = student.training
    student.eval()
    accepted, agreed, temperatures = [], [], []
    for batch in _grouped(held_out, range(len(held_out)), batch_tokens):
        chosen = [held_out[index] for index in batch]
        logits, top_ids, probs = _read(student, chosen)
        log_q, log_rest = on_kept_ids(logits, top_ids)
        rest = (1.0 - probs.sum(dim=-1)).clamp(min=0.0)
        accepted.append(acceptance(log_q, log_rest, probs, rest).cpu())
        agreed.append((logits.argmax(dim=-1) == top_ids[:, 0]).float().cpu())
        temperatures += [
            torch.full((len(lesson.places),), lesson.policy.temperature) for lesson in chosen
        ]
    student.train(was_training)
    drawn_at = torch.cat(temperatures)
    return Evaluation(
        _mean(torch.cat(accepted), drawn_at == 1.0),
        _mean(torch.cat(agreed), drawn_at == 0.0),
        len(drawn_at),
    )


def _mean(values: Tensor, chosen: Tensor) -> float:
    """Of the chosen values, or of all if none is."""
    return float((values[chosen] if chosen.any() else values).mean())


def _products(student: LlamaForCausalLM) -> torch.autocast:
    """Matrix products in the precision that the device is fastest in, while it is trained."""
    place = student.device
    half = student.training and choose_dtype("auto", place) is torch.bfloat16
    return torch.autocast(place.type, torch.bfloat16, enabled=half)


def _loss(
    student: LlamaForCausalLM,
    batch: Sequence[Lesson],
    loss_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    logits, top_ids, probs = _read(student, batch)
    log_q, log_rest = on_kept_ids(logits, top_ids)
    rest = (1.0 - probs.sum(dim=-1)).clamp(min=0.0)
    return loss_of(log_q, log_rest, probs, rest).mean()


def _read(student: LlamaForCausalLM, batch: Sequence[Lesson]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [A, V'] where answers are predicted, the target's ids and probabilities [A, K].

    All of them where the student is.
    """
    device = student.device
    longest = max(len(lesson.ids) for lesson in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    rows, places = [], []
    for row, lesson in enumerate(batch):
        ids[row, : len(lesson.ids)] = lesson.ids
        rows.append(torch.full((len(lesson.places),), row))
        places.append(lesson.places - 1)  # a token is predicted at the one before it
    # What fills a row up comes behind all that counts, where causal attention does not look.
    with _products(student):
        hidden = student.model(input_ids=ids.to(device), use_cache=False).last_hidden_state
        chosen = hidden[torch.cat(rows).to(device), torch.cat(places).to(device)]
        logits = student.lm_head(chosen).float()
    top_ids = torch.cat([lesson.top_ids for lesson in batch]).to(device).long()
    return logits, top_ids, torch.cat([lesson.top_probs for lesson in batch]).to(device).float()


def _batches(taught: Sequence[Lesson], recipe: Recipe) -> list[list[int]]:
    """Indices of the conversations of every step, every epoch in another order."""
    steps: list[list[int]] = []
    generator = torch.Generator().manual_seed(recipe.seed)
    for epoch in range(math.ceil(recipe.epochs)):
        order = torch.randperm(len(taught), generator=generator).tolist()
        share = min(1.0, recipe.epochs - epoch)
        # Conversations of like length together, so that little is filled up.
        part = order[: max(1, round(share * len(order)))]
        chunks = [part[first : first + 256] for first in range(0, len(part), 256)]
        made = []
        for chunk in chunks:
            chunk.sort(key=lambda index: len(taught[index].ids))
            made += list(_grouped(taught, chunk, recipe.batch_tokens))
        places = torch.randperm(len(made), generator=generator).tolist()
        steps += [made[place] for place in places]
    return steps


def _grouped(
    taught: Sequence[Lesson], order: Sequence[int], batch_tokens: int
) -> Iterator[list[int]]:
    """Indices in groups whose filled-up rows hold about `batch_tokens` tokens."""
    group: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, len(taught[index].ids))
        if group and longest * (len(group) + 1) > batch_tokens:
            yield group
            group, longest = [], len(taught[index].ids)
        group.append(index)
    if group:
        yield group


def _rate_at(progress: float) -> float:
    """The learning rate as a share of its highest."""
    if progress < _WARM_UP:
        return (progress + 1e-3) / (_WARM_UP + 1e-3)
    falling = (progress - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * falling)) / 2


def _keep(state: Path, content: dict[str, object]) -> None:
    """Keep the training so far; UsageError if it cannot be written."""
    try:
        with written_whole(state) as unfinished:
            torch.save(content, unfinished)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError where the disk is full
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot keep the training so far in {state}: {reason}; what was kept before is "
            "untouched, and the same call goes on from there"
        ) from error
