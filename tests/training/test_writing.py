"""The target's text and laws on disk: drawn as they should be, and whole or not there."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outrider.errors import UsageError
from outrider.models import Feed, Prompt
from outrider.models.toy import ToyModel, load_toy
from outrider.training.conversations import Part
from outrider.training.shards import (
    Shard,
    read_shard,
    shard_file,
    shards_in,
    write_shard,
)
from outrider.training.writing import POLICIES, DrawPolicy, Writer, draw

PLAIN = DrawPolicy(1.0)


def logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(rows, vocab_size, generator=generator)


def test_what_is_kept_are_the_likeliest_ids_at_temperature_1_whatever_draws() -> None:
    rows = logits(3, 200)
    policies = [DrawPolicy(0.0), DrawPolicy(0.7, 0.9), PLAIN]
    _, ids, probs = draw(rows, policies, 8, torch.Generator())
    expected = rows.softmax(1).topk(8)
    assert torch.equal(ids.long(), expected.indices)
    torch.testing.assert_close(probs.float(), expected.values, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("vocab_size", [50, 400])
def test_plain_draws_follow_the_whole_law(vocab_size: int) -> None:
    """Also outside the candidates: 400 ids, of which 64 are looked at first."""
    row = logits(1, vocab_size).mul(0.3)
    law = row.softmax(1)[0]
    generator = torch.Generator().manual_seed(1)
    num_draws = 40_000
    drawn: Counter[int] = Counter()
    for _ in range(num_draws // 500):
        drawn.update(draw(row.expand(500, -1), [PLAIN] * 500, 4, generator)[0])
    counts = torch.tensor([drawn[token] for token in range(vocab_size)], dtype=torch.float64)
    expected = law.double() * num_draws
    chi = float(((counts - expected) ** 2 / expected).sum())
    # Mean V - 1, variance 2 (V - 1): six standard deviations.
    assert chi < vocab_size + 6 * (2 * vocab_size) ** 0.5
    biased = expected.roll(1)
    assert float(((counts - biased) ** 2 / biased).sum()) > 2 * vocab_size


def test_greedy_and_nucleus_draws_stay_where_they_belong() -> None:
    rows = logits(40, 100)
    generator = torch.Generator().manual_seed(2)
    greedy, _, _ = draw(rows, [DrawPolicy(0.0)] * 40, 4, generator)
    assert greedy == rows.argmax(1).tolist()
    law = (rows / 0.7).softmax(1).sort(descending=True)
    for _ in range(20):
        drawn, _, _ = draw(rows, [DrawPolicy(0.7, 0.5)] * 40, 4, generator)
        for row, token in enumerate(drawn):
            place = int((law.indices[row] == token).nonzero())
            assert float(law.values[row, :place].sum()) < 0.5 + 1e-6


def some_shard(seed: int = 0) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    return Shard(
        tokens=torch.randint(50, (12,), generator=generator, dtype=torch.int32),
        begins=torch.tensor([0, 5, 12], dtype=torch.int32),
        places=torch.tensor([3, 4, 10], dtype=torch.int32),
        parts=torch.tensor([1, 2, 2], dtype=torch.uint8),
        policies=torch.tensor([0, 0, 1], dtype=torch.uint8),
        top_ids=torch.randint(50, (3, 4), generator=generator, dtype=torch.int32),
        top_probs=torch.rand(3, 4, generator=generator).to(torch.float16),
    )


def same(one: Shard, other: Shard) -> bool:
    return all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Shard))


def test_a_shard_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    shard = some_shard()
    write_shard(shard_file(tmp_path / "new", 3), shard)
    assert shards_in(tmp_path / "new") == [shard_file(tmp_path / "new", 3)]
    assert same(read_shard(shard_file(tmp_path / "new", 3)), shard)
    assert shard.num_drawn == 3


def test_a_shard_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="goes on from there"):
        write_shard(shard_file(tmp_path / "file", 0), some_shard())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_half_a_shard_is_none(tmp_path: Path) -> None:
    file = shard_file(tmp_path, 0)
    write_shard(file, some_shard())
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UsageError, match="delete it"):
        read_shard(file)


TOY = load_toy("toy:target")
ROWS, PASSES = 6, 40


def writer(
    seed: int = 0,
    prompts: list[list[list[int]]] | None = None,
    model: ToyModel = TOY,
    num_shards: int = 1,
) -> Writer:
    return Writer(
        model,
        seed=seed,
        num_rows=ROWS,
        num_passes=PASSES,
        top_k=8,
        prompts=prompts or (),
        num_shards=num_shards,
        max_words=(9, 12),
    )


def test_every_pass_gives_every_row_a_token() -> None:
    shard = writer().shard(0)
    assert writer().tokens_per_shard == shard.num_drawn == ROWS * PASSES
    assert shard.top_ids.shape == shard.top_probs.shape == (ROWS * PASSES, 8)
    assert set(shard.parts.tolist()) == {int(Part.USER), int(Part.ANSWER)}
    assert set(shard.policies.tolist()) == set(range(len(POLICIES)))
    assert shard.begins[0] == 0
    assert shard.begins[-1] == len(shard.tokens)
    assert bool((shard.places.diff() > 0).all())


def test_the_kept_law_is_the_targets_at_that_very_place() -> None:
    shard = writer().shard(1)
    begins = shard.begins.tolist()
    checked = 0
    for first, last in list(pairwise(begins))[:6]:
        ids = shard.tokens[first:last].tolist()
        sequence = TOY.start(Prompt(ids))
        law = TOY.score([Feed(sequence, ids, len(ids))]).softmax(1)
        inside = (shard.places >= first) & (shard.places < last)
        for row in inside.nonzero()[:, 0].tolist():
            place = int(shard.places[row]) - first
            expected = law[place - 1].topk(8)
            assert shard.top_ids[row].tolist() == expected.indices.tolist()
            torch.testing.assert_close(
                shard.top_probs[row].double(), expected.values, atol=1e-3, rtol=1e-3
            )
            # A control: the law one place further on is another.
            assert shard.top_ids[row].tolist() != law[place].topk(8).indices.tolist()
            if int(shard.parts[row]) == Part.ANSWER and int(shard.policies[row]) == 0:
                assert ids[place] == int(shard.top_ids[row, 0])  # temperature 0
            checked += 1
    assert checked > 50


def test_a_shard_depends_on_its_seed_and_number_alone() -> None:
    one = writer()
    first, second = one.shard(0), one.shard(1)
    again = writer().shard(1)  # by itself, in another process as it were
    assert same(second, again)
    assert not torch.equal(first.tokens[:50], second.tokens[:50])
    assert not torch.equal(writer(seed=1).shard(0).tokens[:50], first.tokens[:50])


def texts(shard: Shard) -> list[bytes]:
    return [
        bytes(token for token in text.ids.tolist() if token < 256) for text in shard.conversations()
    ]


def test_conversations_are_cut_where_they_begin() -> None:
    found = list(some_shard().conversations())
    assert [len(text.ids) for text in found] == [5, 7]
    assert [text.drawn for text in found] == [slice(0, 2), slice(2, 3)]
    shard = some_shard()
    for text in found:
        drawn = shard.tokens[shard.places[text.drawn].long()]
        assert text.ids[text.places.long()].tolist() == drawn.tolist()


def test_given_prompts_are_answered_once_by_every_policy_and_own_turns_follow() -> None:
    prompts = [[list(b"hi")], [list(b"yo")], [list(b"ho")]]
    asked = {0: (b"user: hi\nassistant:", b"user: ho\nassistant:"), 1: (b"user: yo\nassistant:",)}
    for number, openings in asked.items():
        shard = writer(prompts=prompts, num_shards=2).shard(number)
        found = texts(shard)
        num_given = len(openings) * len(POLICIES)
        for opening in openings:
            answered = [
                shard.policies[kept.drawn.start].item()
                for text, kept in zip(found, shard.conversations(), strict=True)
                if text.startswith(opening)
            ]
            assert sorted(answered) == list(range(len(POLICIES)))
            assert sum(text.startswith(opening) for text in found) == len(POLICIES)
        assert len(found) > num_given
        first_parts = [int(shard.parts[text.drawn.start]) for text in shard.conversations()]
        for text, part in zip(found, first_parts, strict=True):
            assert part == Part.ANSWER or not text.startswith(openings)
        assert Part.USER in first_parts


def test_the_second_of_given_turns_stands_behind_the_first_answer() -> None:
    shard = writer(prompts=[[list(b"hi"), list(b"yo")]]).shard(0)
    found = [text for text in texts(shard) if text.startswith(b"user: hi\nassistant:")]
    assert len(found) == len(POLICIES)
    assert sum(b"user: yo\nassistant:" in text for text in found) >= 2
