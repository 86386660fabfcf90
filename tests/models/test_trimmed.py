"""A model of few ids behind the seam of its target's."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafters.model import ModelDrafter
from outrider.errors import UnsupportedModel, VocabularyMismatch
from outrider.measure.cost import num_parameters
from outrider.models import Feed, Prompt, check_same_tokenizer
from outrider.models.toy import ByteTokenizer, ToyModel, hashed_law
from outrider.models.trimmed import (
    TrimmedModel,
    Vocabulary,
    read_vocabulary,
    tokenizer_digest,
    write_vocabulary,
)

KEPT = torch.tensor([1, 4, 5])
READ_AS = torch.tensor([0, 0, 2, 2, 1, 2])
SMALL = ToyModel(hashed_law(3, seed=4, order=3), 3, eos_ids=frozenset({2}))


def trimmed(digest: str = "") -> TrimmedModel:
    return TrimmedModel(SMALL, Vocabulary(KEPT, READ_AS, digest))


def test_it_reads_every_id_and_speaks_its_own() -> None:
    model = trimmed()
    assert (model.vocab_size, model.eos_ids, model.tokenizer) == (6, {5}, None)
    ids = [1, 2, 0, 4]
    sequence = model.start(Prompt(ids))
    logits = model.score([Feed(sequence, ids, 2)])
    own = SMALL.start(Prompt([0, 2, 0, 1]))
    expected = SMALL.score([Feed(own, [0, 2, 0, 1], 2)])
    assert torch.equal(logits[:, KEPT], expected)
    others = [token for token in range(6) if token not in KEPT.tolist()]
    assert bool((logits[:, others] == -math.inf).all())
    sequence.rollback(1)
    again = model.score([Feed(sequence, [2, 0, 4], 1)])
    assert torch.equal(again, logits[1:])


def test_it_drafts_only_what_it_keeps() -> None:
    from outrider.randomness import RoundNoise
    from outrider.sampling import History, SamplingPolicy

    drafter = ModelDrafter(trimmed(), target_vocab_size=8)
    history = History([1, 3, 3, 0])
    policy = SamplingPolicy(temperature=2.0)
    seen = set()
    for seed in range(50):
        noise = RoundNoise(seed, 4)
        [draft] = drafter.propose([history], [3], [policy], [noise])
        assert draft.q is not None
        assert draft.q.shape == (3, 8)
        seen |= set(draft.tokens)
        drafter.release(history)
    assert seen == {1, 4, 5}


def test_a_vocabulary_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None
    write_vocabulary(tmp_path, Vocabulary(KEPT, READ_AS, "abc"))
    found = read_vocabulary(tmp_path)
    assert found is not None
    assert torch.equal(found.kept, KEPT)
    assert torch.equal(found.read_as, READ_AS)
    assert found.digest == "abc"


@pytest.mark.parametrize(
    ("kept", "read_as", "message"),
    [
        ([4, 1, 5], [0, 0, 2, 2, 1, 2], "rising"),
        ([1, 1, 5], [0, 0, 2, 2, 1, 2], "rising"),
        ([1, 4, 6], [0, 0, 2, 2, 1, 2], "below its target's vocabulary"),
        ([1, 4, 5], [0, 0, 3, 2, 1, 2], "beyond the 3"),
        ([1, 4, 5], [0, 0, -1, 2, 1, 2], "beyond the 3"),
        ([], [0], "rising"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(
    kept: list[int], read_as: list[int], message: str, tmp_path: Path
) -> None:
    tensors = {"kept": torch.tensor(kept), "read_as": torch.tensor(read_as)}
    save_file(tensors, tmp_path / "vocabulary.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        read_vocabulary(tmp_path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.safetensors").write_bytes(b"no")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        read_vocabulary(tmp_path)
    save_file({"kept": torch.tensor([1])}, tmp_path / "vocabulary.safetensors")
    with pytest.raises(UnsupportedModel):
        read_vocabulary(tmp_path)


def test_what_the_small_model_tells_beside_the_seam_is_told_on() -> None:
    small = copy.copy(SMALL)
    small.form, small.num_parameters = "llama-2x64-3", 12345  # type: ignore[attr-defined]
    found = TrimmedModel(small, Vocabulary(KEPT, READ_AS, ""))
    assert found.form == "llama-2x64-3"  # type: ignore[attr-defined]
    assert num_parameters(found) == 12345


def test_a_model_of_another_size_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="logits for 3 ids, its vocabulary keeps 2"):
        TrimmedModel(SMALL, Vocabulary(torch.tensor([1, 4]), READ_AS.clamp(max=1), ""))


def test_a_target_with_another_tokenizer_is_refused() -> None:
    class Other(ByteTokenizer):
        def vocabulary(self) -> list[str | None]:
            return [*super().vocabulary()[:-1], "<stop>"]

    digest = tokenizer_digest(ByteTokenizer())
    law = hashed_law(257, seed=1)
    same, other, none = (
        ToyModel(law, 257, tokenizer=tokenizer) for tokenizer in (ByteTokenizer(), Other(), None)
    )
    check_same_tokenizer(same, trimmed(digest))
    check_same_tokenizer(none, trimmed(digest))
    check_same_tokenizer(other, trimmed())
    with pytest.raises(VocabularyMismatch, match="outrider distill"):
        check_same_tokenizer(other, trimmed(digest))
