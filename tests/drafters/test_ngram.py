"""N-gram tables: against counting by brute force, and files that are not what they should be."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.drafters.ngram import (
    NgramDrafter,
    NgramTable,
    fit_ngrams,
    load_ngrams,
    tokenizer_fingerprint,
)
from outrider.errors import ModelNotFound, OutriderError, UsageError, VocabularyMismatch
from outrider.models.toy import ByteTokenizer
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

Propose = Callable[..., list[Draft]]
Texts = list[list[int]]


def best_by_counting(
    texts: Sequence[Sequence[int]], prefix: Sequence[int], order: int, min_count: int = 1
) -> int | None:
    """The most frequent follower of the longest context seen `min_count` times; lowest id first."""
    for length in range(min(order - 1, len(prefix)), -1, -1):
        context = list(prefix[len(prefix) - length :])
        followers = Counter(
            text[i + length]
            for text in texts
            for i in range(len(text) - length)
            if list(text[i : i + length]) == context
        )
        if followers and followers.total() >= min_count:
            return min(followers, key=lambda token: (-followers[token], token))
    return None


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, Texts, list[int]]:
    """A vocabulary size, texts, and a prefix."""
    vocab_size = draw(st.integers(1, 5))
    ids = st.integers(0, vocab_size - 1)
    texts = draw(st.lists(st.lists(ids, max_size=25), max_size=4))
    return vocab_size, texts, draw(st.lists(ids, max_size=6))


# What is proposed


@settings(deadline=None, max_examples=100)
@given(corpus=corpora(), order=st.integers(1, 5), min_count=st.integers(0, 4))
@example(corpus=(2, [], [1]), order=3, min_count=1)
@example(corpus=(2, [[]], []), order=1, min_count=1)
def test_the_best_token_is_that_of_counting_with_back_off(
    corpus: tuple[int, Texts, list[int]], order: int, min_count: int
) -> None:
    vocab_size, texts, prefix = corpus
    table = fit_ngrams(texts, order=order, vocab_size=vocab_size, min_count=min_count)
    for end in range(len(prefix) + 1):
        wanted = best_by_counting(texts, prefix[:end], order, min_count)
        assert table.best(prefix[:end]) == wanted


def test_the_longest_known_context_decides() -> None:
    texts = [[1, 2, 3], [4, 2, 5], [4, 2, 5]]
    table = fit_ngrams(texts, order=3, vocab_size=6)
    assert table.best([1, 2]) == 3
    assert table.best([4, 2]) == 5
    assert table.best([0, 2]) == 5
    assert table.best([0, 0]) == 2


def test_an_order_of_1_always_proposes_the_most_frequent_token() -> None:
    table = fit_ngrams([[3, 1, 3, 2]], order=1, vocab_size=4)
    assert [table.best(prefix) for prefix in ([], [1], [3, 1, 3])] == [3, 3, 3]


@pytest.mark.parametrize("texts", [[[0, 2, 0, 1]], [[0, 1, 0, 2]], [[0, 2], [0, 1]]])
def test_of_equally_frequent_tokens_the_lowest_id_is_proposed(texts: Texts) -> None:
    assert fit_ngrams(texts, order=2, vocab_size=3).best([0]) == 1


def test_ngrams_do_not_run_across_two_texts() -> None:
    table = fit_ngrams([[1, 2], [3, 1, 2]], order=2, vocab_size=4)
    assert table.best([2]) == best_by_counting([[1, 2], [3, 1, 2]], [], 1) == 1


def test_contexts_seen_less_often_than_min_count_are_left_out() -> None:
    texts = [[1, 2, 1, 2, 3, 0, 0, 0, 0]]
    # [1] was followed twice, [2] twice, [3] once; 0 is the most frequent token.
    tables = [fit_ngrams(texts, order=2, vocab_size=4, min_count=n) for n in (1, 2, 3)]
    assert [table.best([1]) for table in tables] == [2, 2, 0]
    assert [table.best([3]) for table in tables] == [0, 0, 0]
    assert [len(table.contexts[1]) for table in tables] == [4, 3, 1]


def test_every_context_counts_by_default() -> None:
    assert fit_ngrams([[1, 2]], order=2, vocab_size=4).best([1]) == 2


def test_nothing_is_proposed_from_an_empty_table() -> None:
    for texts in ([], [[]]):
        assert fit_ngrams(texts, order=3, vocab_size=4).best([1, 2]) is None
    assert fit_ngrams([[1, 2]], order=2, vocab_size=4, min_count=3).best([1]) is None


def test_texts_may_come_from_an_iterator_and_be_arrays() -> None:
    table = fit_ngrams(iter([np.array([1, 2]), (1, 2)]), order=2, vocab_size=4)
    assert table.best([1]) == 2


def test_contexts_are_sorted_and_distinct() -> None:
    tokens = np.random.default_rng(1).integers(0, 9, 500).tolist()
    table = fit_ngrams([tokens], order=3, vocab_size=9)
    for contexts, following in zip(table.contexts, table.tokens, strict=True):
        assert (np.diff(contexts.astype(object)) > 0).all()
        assert len(contexts) == len(following)


# How long a context may be


@pytest.mark.parametrize(
    ("vocab_size", "largest"),
    [(2, 65), (4, 33), (257, 8), (2**16, 5), (151_936, 4), (2**32, 3), (1, 65)],
)
def test_contexts_may_fill_64_bits_and_no_more(vocab_size: int, largest: int) -> None:
    top = vocab_size - 1
    text = [top] * (largest - 1) + [0] + [top] * largest
    table = fit_ngrams([text], order=largest, vocab_size=vocab_size)
    prefix = [top] * (largest - 1)
    assert table.best(prefix) == best_by_counting([text], prefix, largest)
    with pytest.raises(UsageError, match=f"from 1 to {largest} ") as error:
        fit_ngrams([text], order=largest + 1, vocab_size=vocab_size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("order", [0, -1])
def test_an_order_below_1_is_refused(order: int) -> None:
    with pytest.raises(UsageError, match=f"^order must be from 1 to .*, not {order}$"):
        fit_ngrams([[1]], order=order, vocab_size=4)


@settings(deadline=None, max_examples=50)
@given(
    text=st.lists(st.sampled_from([0, 1, 2**21 - 1, 2**20]), min_size=1, max_size=30),
    prefix=st.lists(st.sampled_from([0, 1, 2**21 - 1, 2**20]), max_size=4),
)
def test_large_ids_in_long_contexts_are_kept_apart(text: list[int], prefix: list[int]) -> None:
    table = fit_ngrams([text], order=4, vocab_size=2**21)
    assert table.best(prefix) == best_by_counting([text], prefix, 4)


# Ids outside the vocabulary


def test_a_context_with_a_foreign_id_backs_off_to_what_follows_it() -> None:
    table = fit_ngrams([[1, 2, 3, 1, 2]], order=3, vocab_size=4)
    assert table.best([4, 2]) == table.best([2]) == 3
    assert table.best([2, 4]) == table.best([]) == 1
    # Side by side in one number, the bits of [0, 4] would be those of [1, 0].
    table = fit_ngrams([[1, 0, 3], [2, 2, 2]], order=3, vocab_size=4)
    assert table.best([1, 0]) == 3
    assert table.best([0, 4]) == table.best([]) == 2


@pytest.mark.parametrize(
    ("texts", "vocab_size"),
    [
        ([[7, 7, 7]], 5),
        ([[0, 1], [1, 5]], 5),
        ([[0, -1]], 5),
    ],
)
def test_texts_with_ids_outside_the_vocabulary_are_refused(texts: Texts, vocab_size: int) -> None:
    with pytest.raises(UsageError):
        fit_ngrams(texts, order=2, vocab_size=vocab_size)


# Files


TEXT = [[1, 2, 3, 1, 2, 4, 1, 2, 3], [0, 4]]


def small_table(**options: object) -> NgramTable:
    return fit_ngrams(TEXT, **{"order": 3, "vocab_size": 5, **options})


def same_tables(one: NgramTable, other: NgramTable) -> bool:
    return (
        (one.order, one.vocab_size, one.fingerprint)
        == (other.order, other.vocab_size, other.fingerprint)
        and all(map(np.array_equal, one.contexts, other.contexts))
        and all(map(np.array_equal, one.tokens, other.tokens))
    )


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer()])
@pytest.mark.parametrize("texts", [TEXT, [], [[1]]])
def test_a_saved_table_is_the_same_when_loaded(
    texts: Texts, tokenizer: ByteTokenizer | None, tmp_path: Path
) -> None:
    table = fit_ngrams(texts, order=4, vocab_size=257, tokenizer=tokenizer)
    table.save(tmp_path / "table.ngrams")
    loaded = load_ngrams(tmp_path / "table.ngrams", tokenizer)
    assert same_tables(loaded, table)
    assert [a.dtype for a in loaded.contexts] == [np.dtype("uint64")] * 4
    assert loaded.best([1, 2]) == table.best([1, 2])


def test_the_file_has_the_name_it_was_given_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    small_table().save(tmp_path / "plain")
    small_table().save(str(tmp_path / "name.npz"))
    small_table().save(tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name.npz", "plain"]


def test_a_table_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "table"
    small_table().save(place)
    before = place.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        small_table(order=2).save(place)
    assert place.read_bytes() == before


def test_a_table_that_cannot_be_written_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        small_table().save(tmp_path / "table")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
def test_a_saved_table_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    small_table().save(tmp_path / "table")
    assert (tmp_path / "table").stat().st_mode == (tmp_path / "usual").stat().st_mode


def refusal(path: Path, kind: type[OutriderError] = ModelNotFound) -> str:
    """The message with which a file is refused: one line that names it."""
    with pytest.raises(kind) as error:
        load_ngrams(path, None)
    message = str(error.value)
    assert path.name in message
    assert "\n" not in message
    return message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no n-gram table at" in refusal(tmp_path / "missing")
    assert "no n-gram table at" in refusal(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        b"hello, this is no table",
        b"PK\x03\x04",
        b"\x00" * 500,
        b"",
    ],
)
def test_a_file_that_is_no_table_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)
    refusal(tmp_path / "file")


def test_an_array_is_not_taken_for_a_table(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    refusal(tmp_path / "array.npy")


@pytest.mark.parametrize("missing", ["header", "fingerprint", "contexts2", "tokens0"])
def test_an_archive_without_all_its_parts_is_refused(missing: str, tmp_path: Path) -> None:
    small_table().save(tmp_path / "table")
    with np.load(tmp_path / "table") as data:
        parts = {name: data[name] for name in data.files if name != missing}
    np.savez(tmp_path / "part.npz", **parts)
    refusal(tmp_path / "part.npz")


@pytest.mark.parametrize("header", [[1, 3], [1, 3, 5, 7], [1, 9, 5], ["a", "b", "c"]])
def test_a_header_that_does_not_fit_is_refused(header: list[object], tmp_path: Path) -> None:
    small_table().save(tmp_path / "table")
    with np.load(tmp_path / "table") as data:
        parts = {**data, "header": np.array(header)}
    np.savez(tmp_path / "changed.npz", **parts)
    refusal(tmp_path / "changed.npz")


def test_a_table_of_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    small_table().save(tmp_path / "table")
    with np.load(tmp_path / "table") as data:
        parts = {**data, "header": np.array([2, 3, 5])}
    np.savez(tmp_path / "newer.npz", **parts)
    assert "format 2, expected 1" in refusal(tmp_path / "newer.npz")


def test_a_file_cut_short_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    small_table().save(tmp_path / "table")
    raw = (tmp_path / "table").read_bytes()
    for length in range(1, len(raw), 29):
        (tmp_path / "short").write_bytes(raw[:length])
        refusal(tmp_path / "short")


def test_a_damaged_file_is_refused_or_read_as_it_was(tmp_path: Path) -> None:
    table = small_table()
    table.save(tmp_path / "table")
    raw = (tmp_path / "table").read_bytes()
    for place in range(0, len(raw), 3):
        damaged = bytearray(raw)
        damaged[place] ^= 0xFF
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            loaded = load_ngrams(tmp_path / "damaged", None)
        except ModelNotFound:
            continue
        assert same_tables(loaded, table)


class Shouting(ByteTokenizer):
    """Another tokenizer of the same size."""

    def vocabulary(self) -> list[str | None]:
        """Upper case."""
        return [string and string.upper() for string in super().vocabulary()]


def test_a_table_for_another_tokenizer_is_refused(tmp_path: Path) -> None:
    small_table(vocab_size=257, tokenizer=ByteTokenizer()).save(tmp_path / "table")
    with pytest.raises(VocabularyMismatch) as error:
        load_ngrams(tmp_path / "table", Shouting())
    assert "table was counted with another tokenizer" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_is_taken_when_one_side_knows_no_tokenizer(tmp_path: Path) -> None:
    small_table(vocab_size=257).save(tmp_path / "anonymous")
    small_table(vocab_size=257, tokenizer=ByteTokenizer()).save(tmp_path / "bytes")
    assert load_ngrams(tmp_path / "anonymous", Shouting()).fingerprint == ""
    assert load_ngrams(tmp_path / "bytes", None).fingerprint


def test_a_fingerprint_tells_tokenizers_apart() -> None:
    assert tokenizer_fingerprint(ByteTokenizer()) == tokenizer_fingerprint(ByteTokenizer())
    assert tokenizer_fingerprint(ByteTokenizer()) != tokenizer_fingerprint(Shouting())
    assert tokenizer_fingerprint(None) == ""
    assert fit_ngrams([], order=1, vocab_size=2).fingerprint == ""


# Drafts


def draft_by_counting(
    texts: Sequence[Sequence[int]], prefix: list[int], order: int, gamma: int
) -> list[int]:
    whole = list(prefix)
    while len(whole) < len(prefix) + gamma:
        token = best_by_counting(texts, whole, order)
        if token is None:
            break
        whole.append(token)
    return whole[len(prefix) :]


@settings(deadline=None, max_examples=50)
@given(corpus=corpora(), order=st.integers(1, 5), gamma=st.integers(1, 7))
def test_a_draft_is_the_best_token_again_and_again(
    corpus: tuple[int, Texts, list[int]], order: int, gamma: int, propose: Propose
) -> None:
    vocab_size, texts, prefix = corpus
    drafter = NgramDrafter(fit_ngrams(texts, order=order, vocab_size=vocab_size))
    [draft] = propose(drafter, [History([0, *prefix])], gamma)
    assert draft == Draft(draft_by_counting(texts, [0, *prefix], order, gamma), None)


@settings(deadline=None, max_examples=50)
@given(
    corpus=corpora(),
    order=st.integers(1, 4),
    prompt=st.lists(st.integers(0, 300), min_size=1, max_size=6),
)
def test_drafts_never_leave_the_vocabulary_whatever_the_prompt(
    corpus: tuple[int, Texts, list[int]], order: int, prompt: list[int], propose: Propose
) -> None:
    vocab_size, texts, _ = corpus
    drafter = NgramDrafter(fit_ngrams(texts, order=order, vocab_size=vocab_size))
    [draft] = propose(drafter, [History(prompt)], 6)
    assert all(0 <= token < vocab_size for token in draft.tokens)
    assert all(type(token) is int for token in draft.tokens)
    assert len(draft.tokens) == (6 if any(texts) else 0)


def test_every_request_gets_its_own_gamma(propose: Propose) -> None:
    drafter = NgramDrafter(small_table())
    histories = [History([1]), History([1, 2]), History([1])]
    drafts = propose(drafter, histories, [1, 3, 2])
    wanted = [
        draft_by_counting(TEXT, h.tokens, 3, n) for h, n in zip(histories, [1, 3, 2], strict=True)
    ]
    assert [draft.tokens for draft in drafts] == wanted


def test_drafts_do_not_depend_on_the_policy_or_on_what_was_observed(propose: Propose) -> None:
    drafter, history = NgramDrafter(small_table()), History([1, 2])
    before = propose(drafter, [history], 4)
    drafter.observe([history], [Verdict(0, 1)])
    drafter.release(history)
    assert propose(drafter, [history], 4, SamplingPolicy(temperature=1.0)) == before
    assert history.tokens == [1, 2]


def test_it_is_called_by_its_order_and_runs_no_model() -> None:
    drafter = NgramDrafter(small_table())
    assert drafter.name == "ngram (order 3)"
    assert drafter.model is None
