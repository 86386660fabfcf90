"""Prompt lookup: the index against a search by brute force, and what is drafted from it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.lookup import LookupDrafter, SuffixIndex
from outrider.errors import UsageError
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

Propose = Callable[..., list[Draft]]

small_texts = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.integers(0, size - 1), max_size=40)
)
repetitive_texts = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), small_texts).map(
    lambda parts: parts[0] * 4 + parts[1]
)
texts = small_texts | repetitive_texts


def index_of(tokens: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    for token in tokens:
        index.append(token)
    return index


def earlier_ends(tokens: Sequence[int], length: int) -> list[int]:
    """Where the suffix of `length` tokens ended before the end of the text."""
    suffix = tokens[len(tokens) - length :]
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]


def longest_earlier_suffix(tokens: Sequence[int]) -> int:
    return max((n for n in range(1, len(tokens)) if earlier_ends(tokens, n)), default=0)


# The index


@settings(deadline=None, max_examples=80)
@given(tokens=texts)
def test_the_match_is_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    index = SuffixIndex()
    for i, token in enumerate(tokens):
        index.append(token)
        seen = tokens[: i + 1]
        length, end = index.match()
        assert length == longest_earlier_suffix(seen)
        assert end in earlier_ends(seen, length) if length else end == 0


@settings(deadline=None, max_examples=50)
@given(tokens=texts)
def test_asking_for_the_match_changes_nothing(tokens: list[int]) -> None:
    asked, silent = SuffixIndex(), SuffixIndex()
    for token in tokens:
        asked.append(token)
        silent.append(token)
        assert asked.match() == asked.match()
    assert asked.match() == silent.match()
    assert asked.tokens == tokens


def test_the_example_of_the_docstring() -> None:
    index = index_of([5, 6, 7, 5, 6])
    assert index.match() == (2, 2)
    assert index.tokens[2] == 7


def test_an_empty_index_has_no_match() -> None:
    assert SuffixIndex().match() == (0, 0)


def test_a_token_never_seen_before_has_no_match() -> None:
    assert index_of([1, 2, 1, 2, 3]).match() == (0, 0)


def test_a_match_may_overlap_the_end() -> None:
    assert index_of([4, 4, 4, 4]).match() == (3, 3)


def test_a_suffix_seen_again_and_again_is_followed_from_its_last_occurrence() -> None:
    index = index_of([1, 2, 3, 1, 2, 4, 1, 2])
    assert index.match() == (2, 5)
    assert index.tokens[5] == 4


def test_ids_may_be_large() -> None:
    assert index_of([151_935, 2**40, 151_935]).match() == (1, 1)


# Its cost


TEXTS_OF_LENGTH: dict[str, Callable[[int], list[int]]] = {
    "all equal": lambda n: [0] * n,
    "all different": lambda n: list(range(n)),
    "abbb": lambda n: [0] + [1] * (n - 1),
    "abbbc": lambda n: [0] + [1] * (n - 2) + [2],
    "random": lambda n: random.Random(1).choices(range(3), k=n),
    "periodic": lambda n: [i % 7 for i in range(n)],
}


@pytest.mark.parametrize("name", TEXTS_OF_LENGTH)
def test_states_and_transitions_are_linear_in_the_length(name: str) -> None:
    # Blumer et al. 1985: at most 2n - 1 states and 3n - 4 transitions.
    for n in (3, 10, 300, 3000):
        index = index_of(TEXTS_OF_LENGTH[name](n))
        assert len(index._next) == len(index._link) == len(index._length) == len(index._end)
        assert len(index._next) <= 2 * n
        assert sum(map(len, index._next)) <= 3 * n


def seconds_to_append(tokens: Sequence[int], index: SuffixIndex) -> float:
    start = time.process_time()
    for token in tokens:
        index.append(token)
        index.match()
    return time.process_time() - start


def test_a_token_costs_about_the_same_after_a_long_text() -> None:
    tokens = TEXTS_OF_LENGTH["random"](40_000)
    index = SuffixIndex()
    early = seconds_to_append(tokens[:4000], index)
    seconds_to_append(tokens[4000:36_000], index)
    late = seconds_to_append(tokens[36_000:], index)
    # Ten times the text: a cost in proportion to it would show as a factor near 10.
    assert late < 6 * early + 0.02


# Drafts


def drafted(propose: Propose, tokens: Sequence[int], gamma: int, **options: int) -> list[int]:
    [draft] = propose(LookupDrafter(**options), [History(tokens)], gamma)
    assert draft.q is None
    return draft.tokens


def test_what_followed_the_match_is_drafted(propose: Propose) -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    assert drafted(propose, tokens, 3) == [9, 10, 11]


def test_a_draft_that_runs_into_the_end_goes_on_with_what_it_copied(propose: Propose) -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    assert drafted(propose, tokens, 9) == [9, 10, 11, 7, 8, 9, 10, 11, 7]


@pytest.mark.parametrize("period", [1, 2, 3, 7])
@pytest.mark.parametrize("gamma", [1, 5, 20])
def test_periodic_text_is_continued_periodically(period: int, gamma: int, propose: Propose) -> None:
    for length in range(2 * period + 2, 4 * period + 3):
        text = [i % period for i in range(length + gamma)]
        assert drafted(propose, text[:length], gamma) == text[length:]


@settings(deadline=None, max_examples=50)
@given(tokens=texts.filter(bool), gamma=st.integers(1, 12), min_match=st.integers(1, 4))
def test_a_draft_copies_from_behind_the_longest_match(
    tokens: list[int], gamma: int, min_match: int, propose: Propose
) -> None:
    draft = drafted(propose, tokens, gamma, min_match=min_match)
    length = longest_earlier_suffix(tokens)
    if length < min_match:
        assert draft == []
        return
    assert len(draft) == gamma
    whole = tokens + draft
    ends = earlier_ends(tokens, length)
    assert any(draft == [whole[end + i] for i in range(gamma)] for end in ends)


@pytest.mark.parametrize("min_match", [1, 2, 3, 4])
def test_matches_shorter_than_min_match_draft_nothing(min_match: int, propose: Propose) -> None:
    # The longest match is [2, 3]: two tokens.
    tokens = [1, 2, 3, 4, 2, 3]
    draft = drafted(propose, tokens, 2, min_match=min_match)
    assert draft == ([4, 2] if min_match <= 2 else [])


def test_two_tokens_must_match_by_default(propose: Propose) -> None:
    assert drafted(propose, [1, 2, 1], 3) == []
    assert drafted(propose, [1, 2, 1, 2], 3) == [1, 2, 1]


@pytest.mark.parametrize("min_match", [0, -3])
def test_a_min_match_below_1_is_refused(min_match: int) -> None:
    with pytest.raises(UsageError, match=rf"^min_match must be 1 or more, not {min_match}$"):
        LookupDrafter(min_match=min_match)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 2]])
def test_without_a_match_the_draft_is_empty(tokens: list[int], propose: Propose) -> None:
    assert drafted(propose, tokens, 5) == []


@pytest.mark.parametrize("gamma", range(1, 10))
def test_exactly_gamma_tokens_are_drafted_after_a_match(gamma: int, propose: Propose) -> None:
    assert len(drafted(propose, [1, 2, 3, 1, 2], gamma)) == gamma


def test_drafts_do_not_depend_on_policy_and_noise(propose: Propose) -> None:
    history = History([1, 2, 3, 1, 2])
    policies = [SamplingPolicy(), SamplingPolicy(temperature=1.0, top_p=0.5)]
    drafts = [propose(LookupDrafter(), [history], 4, policy)[0] for policy in policies]
    assert drafts[0] == drafts[1]


# Several rounds and requests


@settings(deadline=None, max_examples=50)
@given(tokens=texts.filter(bool), cuts=st.lists(st.integers(1, 5), max_size=12))
def test_a_growing_text_drafts_as_if_it_had_been_there_from_the_start(
    tokens: list[int], cuts: list[int], propose: Propose
) -> None:
    history, drafter = History(tokens[:1]), LookupDrafter(min_match=1)
    for cut in [1, *cuts]:
        history.tokens += tokens[len(history) : len(history) + cut]
        grown = propose(drafter, [history], 6)
        assert grown == propose(LookupDrafter(min_match=1), [History(history.tokens)], 6)
        drafter.observe([history], [Verdict(0, history.tokens[-1])])


def test_two_requests_do_not_mix(propose: Propose) -> None:
    first, second = History([1, 2, 3, 1, 2]), History([1, 2, 4, 1, 2])
    twin = History([1, 2, 3, 1, 2])
    drafter = LookupDrafter()
    drafts = propose(drafter, [first, second, twin], [1, 2, 3])
    assert [draft.tokens for draft in drafts] == [[3], [4, 1], [3, 1, 2]]
    twin.tokens += [9, 1, 2]
    drafts = propose(drafter, [second, first, twin], 1)
    assert [draft.tokens for draft in drafts] == [[4], [3], [9]]


def test_a_released_request_is_forgotten(propose: Propose) -> None:
    history, drafter = History([1, 2, 3, 1, 2]), LookupDrafter()
    propose(drafter, [history], 1)
    drafter.release(history)
    history.tokens[:] = [1, 2, 8, 8, 1, 2]
    assert propose(drafter, [history], 1)[0].tokens == [8]


def test_releasing_one_request_leaves_the_others(propose: Propose) -> None:
    first, second = History([1, 2, 3, 1, 2]), History([1, 2, 4, 1, 2])
    drafter = LookupDrafter()
    propose(drafter, [first, second], 1)
    drafter.release(first)
    assert list(drafter._indexes) == [second]


def test_releasing_an_unknown_request_is_harmless() -> None:
    LookupDrafter().release(History([1]))


def test_the_history_is_not_modified(propose: Propose) -> None:
    history = History([1, 2, 3, 1, 2])
    propose(LookupDrafter(), [history], 4)
    assert history.tokens == [1, 2, 3, 1, 2]


def test_it_is_called_lookup_and_runs_no_model() -> None:
    assert LookupDrafter().name == "lookup"
    assert LookupDrafter().model is None


# --- The cursor ---


def longest_in(text: list[int], drafted: list[int]) -> int:
    """Length of the longest suffix of text and draft that stands in the text, ended before."""
    whole = text + drafted
    for length in range(len(whole), 0, -1):
        suffix = whole[-length:]
        for end in range(length, len(text) + (0 if not drafted else 1)):
            if text[end - length : end] == suffix:
                return length
    return 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(0, 2), max_size=8),
)
@settings(max_examples=400, deadline=None)
def test_a_cursor_knows_the_longest_match_behind_a_draft(
    text: list[int], drafted: list[int]
) -> None:
    index = SuffixIndex()
    for token in text:
        index.append(token)
    cursor = index.cursor()
    assert cursor.length == index.match()[0]
    for place, token in enumerate(drafted):
        cursor.advance(token)
        done = drafted[: place + 1]
        whole = text + done
        # A copy may run on into the draft itself, so it can be longer than what the text has.
        assert cursor.length >= longest_in(text, done)
        if cursor.length:
            followed = cursor.following
            ends = [
                end
                for end in range(cursor.length, len(whole))
                if whole[end - cursor.length : end] == whole[-cursor.length :]
            ]
            assert followed in {whole[end] for end in ends}
    assert index.tokens == text


def test_a_cursor_leaves_a_copy_that_broke_off_for_another() -> None:
    index = SuffixIndex()
    for token in [1, 2, 3, 7, 2, 9, 8, 1, 2]:
        index.append(token)
    cursor = index.cursor()
    assert (cursor.length, cursor.following) == (2, 3)
    cursor.advance(9)  # not what followed 1 2, but what followed 2 alone
    assert (cursor.length, cursor.following) == (2, 8)
    cursor.advance(5)  # never seen
    assert cursor.length == 0
    cursor.advance(7)
    assert (cursor.length, cursor.following) == (1, 2)
