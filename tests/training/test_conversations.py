"""Conversations grow turn by turn, and every id knows whose word it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.text import Message
from outrider.training.conversations import OPENERS, Conversation, Frame, Part, chat_frame

BEGIN, END, NEWLINE, SYSTEM = 0, 1, 2, 3
ROLES = {"system": 4, "user": 5, "assistant": 6}
WORD = 10  # of the digit 0; other words follow


class Letters:
    """A chat format like ChatML: <begin> role newline words <end> newline ..."""

    has_chat_template = True

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [WORD + ord(letter) - ord("0") for letter in text]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        ids = [BEGIN, ROLES["system"], NEWLINE, SYSTEM, END, NEWLINE]
        for message in messages:
            ids += [BEGIN, ROLES[message["role"]], NEWLINE, *self.encode(message["content"])]
            ids += [END, NEWLINE]
        return [*ids, BEGIN, ROLES["assistant"], NEWLINE]

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def vocabulary(self) -> list[str | None]:
        return []


class Base(Letters):
    has_chat_template = False

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [BEGIN] if special else []


FRAME = chat_frame(Letters(), frozenset([END]))
ANSWER = [END, NEWLINE, BEGIN, ROLES["assistant"], NEWLINE]
TURN = [END, NEWLINE, BEGIN, ROLES["user"], NEWLINE]


def test_the_frame_is_what_conversations_have_in_common() -> None:
    opening = [BEGIN, ROLES["system"], NEWLINE, SYSTEM, END, NEWLINE, BEGIN, ROLES["user"], NEWLINE]
    assert Frame(tuple(opening), tuple(ANSWER), tuple(TURN), frozenset([END])) == FRAME
    assert FRAME.is_chat


def test_a_model_without_a_chat_format_only_begins() -> None:
    frame = chat_frame(Base(), frozenset([END]))
    assert frame == Frame((BEGIN,), (), (), frozenset([END]))
    text = Conversation(frame, 0, 3, (5, 4))
    text.begin()
    assert text.speaker is Part.ANSWER
    for token in (11, 12, 13):
        text.add(token)
        assert not text.is_over
    text.add(14)
    assert text.is_over


def rendered(*words: Sequence[int]) -> list[int]:
    """The same conversation in one piece, its last answer ended."""
    ids = list(FRAME.opening)
    for index, part in enumerate(words):
        ids += part
        ids += [END] if index == len(words) - 1 else (ANSWER if index % 2 == 0 else TURN)
    return ids


def test_a_conversation_is_what_the_chat_format_would_make_of_its_words() -> None:
    words = [[11, 12], [13], [14], [15, 16]]
    text = Conversation(FRAME, 0, 2, (9, 9))
    text.begin()
    for part in words:
        for token in [*part, END]:
            assert not text.is_over
            text.add(token)
    assert text.is_over
    assert text.ids == rendered(*words)
    drawn = [(part, token) for part, token in zip(text.parts, text.ids, strict=True) if part]
    assert drawn == [
        (part, token)
        for part, spoken in zip([Part.USER, Part.ANSWER] * 2, words, strict=True)
        for token in [*spoken, END]
    ]


def test_a_turn_that_grows_too_long_is_cut_and_the_frame_ends_it() -> None:
    text = Conversation(FRAME, 0, 1, (2, 3))
    text.begin()
    for token in (11, 12, 13, 14, 15):
        text.add(token)
    assert text.is_over
    assert text.ids == [*FRAME.opening, 11, 12, *ANSWER, 13, 14, 15]


def test_what_opens_an_answer_ends_a_users_turn_and_no_answer() -> None:
    frame = Frame((BEGIN,), (NEWLINE, 90), (NEWLINE, 91), frozenset([END]))
    text = Conversation(frame, 0, 1, (9, 9))
    text.begin()
    for token in (11, NEWLINE):
        text.add(token)
    assert text.speaker is Part.ANSWER
    assert text.ids == [BEGIN, 11, NEWLINE, 90]
    for token in (12, NEWLINE, 13):
        text.add(token)
        assert not text.is_over
    text.add(END)
    assert text.is_over


def test_given_words_are_not_the_targets() -> None:
    text = Conversation(FRAME, 0, 1, (9, 9))
    text.begin([11, 12])
    text.add(13)
    assert text.speaker is Part.USER
    assert text.parts[-3:] == [Part.FRAME, Part.FRAME, Part.USER]
    whole = Conversation(FRAME, 0, 1, (9, 9), ((11, 12),))
    whole.begin()
    assert whole.speaker is Part.ANSWER
    assert whole.ids == [*FRAME.opening, 11, 12, *ANSWER]
    assert set(whole.parts) == {Part.FRAME}


def test_given_turns_are_said_one_after_the_other_and_only_answers_are_drawn() -> None:
    text = Conversation(FRAME, 0, 2, (9, 9), ((11, 12), (14,)))
    text.begin()
    for token in (13, END):
        text.add(token)
    assert text.speaker is Part.ANSWER
    for token in (15, 16, END):
        assert not text.is_over
        text.add(token)
    assert text.is_over
    assert text.ids == rendered([11, 12], [13], [14], [15, 16])
    assert [token for part, token in zip(text.parts, text.ids, strict=True) if part] == [
        *(13, END),
        *(15, 16, END),
    ]
    assert Part.USER not in text.parts


def test_a_given_turn_follows_also_an_answer_that_was_cut() -> None:
    text = Conversation(FRAME, 0, 2, (9, 2), ((11, 12), (14,)))
    text.begin()
    for token in (13, 15, 16, END):
        assert not text.is_over
        text.add(token)
    assert text.is_over
    assert text.ids == rendered([11, 12], [13, 15], [14], [16])


@pytest.mark.parametrize("opener", OPENERS)
def test_no_opener_ends_within_a_word(opener: str) -> None:
    assert opener[-1] in " \n"
