"""A student before and while it learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.errors import UsageError
from outrider.training import learning
from outrider.training.conversations import Part
from outrider.training.learning import (
    Lesson,
    Recipe,
    _batches,
    _rate_at,
    evaluate,
    lessons,
    train,
)
from outrider.training.losses import LOSSES
from outrider.training.shards import Shard
from outrider.training.student import (
    StudentShape,
    choose_vocabulary,
    make_student,
    read_as_closest,
)
from outrider.training.writing import POLICIES, DrawPolicy
from training.tiny import module


def test_the_most_frequent_ids_are_kept_and_special_ones_always() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert choose_vocabulary(counts, 3, ()).tolist() == [0, 2, 4]
    assert choose_vocabulary(counts, 3, {1}).tolist() == [1, 2, 4]
    assert choose_vocabulary(counts, 5, ()).tolist() == [0, 1, 2, 3, 4]  # of rare ones, lower ids
    assert choose_vocabulary(counts, 99, ()).tolist() == list(range(6))
    with pytest.raises(UsageError, match="2 special ids"):
        choose_vocabulary(counts, 2, {1, 5})


def test_other_ids_are_read_as_the_one_that_points_the_same_way() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 1.0], [-0.1, 0.2], [1.0, 0.9]])
    assert read_as_closest(embeddings, torch.tensor([0, 1])).tolist() == [0, 1, 0, 1, 0]
    # A kept id is itself, even where another kept one is as close.
    twins = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    assert read_as_closest(twins, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]


def test_at_the_targets_width_it_begins_as_the_target() -> None:
    target = module()
    kept = torch.arange(0, 257, 2)
    shape = StudentShape(3, 64)
    student = make_student(target, kept, shape, eos_ids=[256], seed=0)
    assert torch.equal(student.model.embed_tokens.weight, target.model.embed_tokens.weight[kept])
    ids = torch.tensor([[3, 5, 8]])
    own = student.model(input_ids=ids).last_hidden_state
    theirs = target.model(input_ids=kept[ids]).last_hidden_state
    torch.testing.assert_close(own, theirs)  # all three layers are there
    assert student.config.eos_token_id == [128]
    two = make_student(target, kept, StudentShape(2, 64), eos_ids=[256], seed=0)
    for index, source in ((0, 0), (1, 1)):
        one, other = two.model.layers[index], target.model.layers[source]
        assert torch.equal(one.mlp.up_proj.weight, other.mlp.up_proj.weight)


def test_what_is_not_said_of_a_shape_fits_the_target() -> None:
    target = module()  # of Llama form, width 64
    assert StudentShape().fitted(target) == StudentShape(2, 64)
    assert StudentShape(width=32).fitted(target) == StudentShape(4, 32)
    assert StudentShape(layers=1).fitted(target) == StudentShape(1, 64)
    assert StudentShape(2, 128, 5).fitted(target) == StudentShape(2, 128, 5)
    target.config.model_type = "opt"  # whose layers a Llama-form student cannot take
    assert StudentShape().fitted(target) == StudentShape(4, 256)
    wide = module()
    wide.set_input_embeddings(torch.nn.Embedding(5, 768))
    assert StudentShape().fitted(wide) == StudentShape(4, 256)
    assert StudentShape(width=768).fitted(wide) == StudentShape(2, 768)


def test_a_narrower_one_keeps_how_embeddings_lie() -> None:
    target = module()
    kept = torch.arange(257)
    student = make_student(target, kept, StudentShape(1, 32), eos_ids=[256], seed=0)
    assert student.config.hidden_size == 32
    theirs = target.model.embed_tokens.weight
    theirs = theirs - theirs.mean(0)
    own = student.model.embed_tokens.weight
    pairs = torch.corrcoef(torch.stack([(theirs @ theirs.T).flatten(), (own @ own.T).flatten()]))
    assert float(pairs[0, 1].detach()) > 0.7
    again = make_student(target, kept, StudentShape(1, 32), eos_ids=[256], seed=0)
    for one, other in zip(student.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("width", "heads"), [(128, (2, 1)), (320, (5, 1)), (448, (7, 1)), (576, (9, 3))]
)
def test_key_value_heads_divide_the_heads(width: int, heads: tuple[int, int]) -> None:
    model = make_student(module(), torch.arange(50), StudentShape(1, width), eos_ids=[], seed=0)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == heads
    assert model(input_ids=torch.arange(5)[None]).logits.shape == (1, 5, 50)


def test_an_mlp_of_another_width_than_the_targets_own_is_refused() -> None:
    own = module().config.hidden_size
    make_student(module(), torch.arange(50), StudentShape(1, own, 96), eos_ids=[], seed=0)
    with pytest.raises(UsageError, match="an MLP of 96; 100 needs another width"):
        make_student(module(), torch.arange(50), StudentShape(1, own, 100), eos_ids=[], seed=0)


def some_lessons(
    number: int = 12,
    seed: int = 0,
    *,
    peaked: bool = False,
    policy: DrawPolicy = POLICIES[2],
) -> list[Lesson]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        length = int(torch.randint(6, 20, (), generator=generator))
        ids = torch.randint(50, (length,), generator=generator)
        places = torch.arange(3, length)
        probs = torch.rand(len(places), 4, generator=generator).sort(descending=True).values
        probs = 0.8 * probs / probs.sum(1, keepdim=True)
        top = torch.stack([torch.randperm(50, generator=generator)[:4] for _ in places])
        if peaked:  # what follows is the id itself
            probs = torch.tensor([[0.9, 0.0, 0.0, 0.0]]).expand(len(places), -1)
            top = torch.cat(
                [ids[places - 1][:, None], (ids[places - 1][:, None] + torch.arange(1, 4)) % 50], 1
            )
        found.append(Lesson(ids, places, top, probs.half(), policy))
    return found


def student() -> LlamaForCausalLM:
    return make_student(module(), torch.arange(50), StudentShape(1, 64), eos_ids=[], seed=0)


def test_lessons_are_what_the_target_drew_in_the_students_ids() -> None:
    shard = Shard(
        tokens=torch.tensor([9, 1, 2, 3, 9, 4, 1], dtype=torch.int32),
        begins=torch.tensor([0, 4, 7], dtype=torch.int32),
        places=torch.tensor([1, 2, 3, 5], dtype=torch.int32),
        parts=torch.tensor([Part.USER, Part.ANSWER, Part.ANSWER, Part.USER], dtype=torch.uint8),
        policies=torch.tensor([2, 2, 2, 1], dtype=torch.uint8),
        top_ids=torch.tensor([[1, 2], [2, 4], [3, 9], [4, 1]], dtype=torch.int32),
        top_probs=torch.tensor([[0.5, 0.2]] * 4).to(torch.float16),
    )
    kept = torch.tensor([2, 3, 9])
    read_as = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    # The second conversation has no answer.
    [answer] = lessons([shard], kept, read_as, answers_only=True)
    assert answer.ids.tolist() == [2, 0, 0, 1]
    assert answer.places.tolist() == [2, 3]
    assert answer.top_ids.tolist() == [[0, -1], [1, 2]]
    assert answer.policy == POLICIES[2]
    first, second = lessons([shard], kept, read_as)
    assert first.places.tolist() == [1, 2, 3]
    assert first.top_ids.tolist() == [[-1, 0], [0, -1], [1, 2]]
    assert (second.ids.tolist(), second.places.tolist()) == ([2, 1, 0], [1])
    assert second.policy == POLICIES[1]
    others = [DrawPolicy(0.5), DrawPolicy(0.6), DrawPolicy(2.0)]
    [answer] = lessons([shard], kept, read_as, policies=others, answers_only=True)
    assert answer.policy == DrawPolicy(2.0)


def test_alpha_is_that_of_one_conversation_after_another() -> None:
    model, taught = student().eval(), some_lessons()
    accepted, agreed, number = 0.0, 0, 0
    with torch.inference_mode():
        for lesson in taught:
            q = model(input_ids=lesson.ids[None]).logits[0].softmax(-1)
            for row, place in enumerate(lesson.places.tolist()):
                law = q[place - 1]
                accepted += float(
                    torch.minimum(law[lesson.top_ids[row]], lesson.top_probs[row].float()).sum()
                )
                agreed += int(law.argmax()) == int(lesson.top_ids[row, 0])
                number += 1
    found = evaluate(model, taught, batch_tokens=40)
    assert found.num_tokens == number
    assert found.alpha == pytest.approx(accepted / number, abs=1e-5)
    assert found.greedy == pytest.approx(agreed / number)
    assert evaluate(model, taught, batch_tokens=4000).alpha == pytest.approx(found.alpha, abs=1e-5)


def test_alpha_is_judged_on_sampled_answers_and_the_likeliest_id_on_greedy_ones() -> None:
    model = student().eval()
    by_policy = [some_lessons(4, seed=seed, policy=policy) for seed, policy in enumerate(POLICIES)]
    greedy, _, sampled = (evaluate(model, part) for part in by_policy)
    found = evaluate(model, [lesson for part in by_policy for lesson in part])
    assert found.alpha == pytest.approx(sampled.alpha, abs=1e-5)
    assert found.greedy == pytest.approx(greedy.greedy)
    assert found.num_tokens == sum(len(item.places) for part in by_policy for item in part)


@pytest.mark.parametrize("loss", ["kl", "reverse-kl", "jsd", "tv", "nla", "mix"])
def test_every_loss_teaches(loss: str) -> None:
    model, taught = student(), some_lessons(40, peaked=True)
    before = evaluate(model, taught)
    recipe = Recipe(loss=loss, rate=3e-3, epochs=40, batch_tokens=200)
    *way, (num_learnt, after) = train(model, taught, taught, recipe, evaluate_every=20)
    assert after.alpha > before.alpha + 0.2
    assert way[0].judged.alpha < after.alpha
    assert [point.num_learnt for point in way] == sorted({point.num_learnt for point in way})
    assert num_learnt == 40 * sum(len(lesson.places) for lesson in taught)


def test_every_conversation_is_read_once_an_epoch_in_batches_of_a_size() -> None:
    taught = some_lessons(30)
    one = _batches(taught, Recipe(epochs=1.0, batch_tokens=100, seed=3))
    assert sorted(index for batch in one for index in batch) == list(range(30))
    for batch in one:
        assert len(batch) == 1 or len(batch) * max(len(taught[i].ids) for i in batch) <= 100
    two = _batches(taught, Recipe(epochs=2.0, batch_tokens=100, seed=3))
    assert two[: len(one)] == one
    assert two[len(one) :] != one
    assert _batches(taught, Recipe(epochs=1.0, batch_tokens=100, seed=4)) != one
    half = _batches(taught, Recipe(epochs=0.5, batch_tokens=100, seed=3))
    assert len({index for batch in half for index in batch}) == 15


def test_the_rate_rises_and_falls() -> None:
    rates = [_rate_at(progress) for progress in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] == pytest.approx(1.0)
    assert rates[3] == pytest.approx(0.55, abs=0.03)
    assert rates[4] == pytest.approx(0.1)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_products_have_the_devices_precision_and_weights_and_loss_float32(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "choose_dtype", lambda *_: precision)
    model, seen = student(), set()
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.add(logits.dtype))

    def loss(log_q: Tensor, *laws: Tensor) -> Tensor:
        seen.add(("loss", log_q.dtype))
        return nla(log_q, *laws)

    nla = LOSSES["nla"]
    monkeypatch.setitem(LOSSES, "nla", loss)
    train(model, some_lessons(8), some_lessons(2, 1), Recipe(epochs=1, batch_tokens=100))
    # Judged in float32 always.
    assert seen == {precision, torch.float32, ("loss", torch.float32)}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_a_time_limit_ends_the_training() -> None:
    steps: list[int] = []
    train(
        student(),
        some_lessons(30),
        some_lessons(3, 1),
        Recipe(epochs=2000, batch_tokens=100),
        time_limit=0.5,
        tell=lambda step, *_: steps.append(step),
    )
    assert 0 < len(steps) < 1e4
    assert math.isfinite(len(steps))
