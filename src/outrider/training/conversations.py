"""Conversations that a target writes alone: its users' turns, and its answers to them.

A model trained on chats knows how users write. Fed with its chat format up to where a user's words
begin, it writes them itself, ends the turn, and answers (Xu et al. 2024, "Magpie", arXiv
2406.08464). Left alone it asks much of the same; `OPENERS`, the first words of a turn, lead it to
other kinds of task. What a drafter will draft is the answers. The turns are written only to be
answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from outrider.text import Message, Tokenizer

__all__ = ["OPENERS", "Conversation", "Frame", "Part", "chat_frame"]

OPENERS = (
    "Translate this German text into English:\n\n",
    "Translate this English text into French:\n\n",
    "Translate the following sentence into Spanish: ",
    "Summarise the following text in three sentences.\n\n",
    "Give a short summary of this article:\n\n",
    "What are the main points of this text?\n\n",
    "Answer the question with the help of these passages.\n\n[1] ",
    "Use only the text below to answer.\n\nText: ",
    "Read this passage and answer the question at its end.\n\n",
    "Why does ",
    "What is the difference between ",
    "How does ",
    "Who was ",
    "Explain in simple words ",
    "A shop sells ",
    "A train leaves ",
    "Solve step by step: ",
    "How many ",
    "Write a Python function that ",
    "Correct the mistakes in this text: ",
    "Rewrite this more politely: ",
    "Write a short story about ",
    "Write an email to ",
    "Give me five ideas for ",
    "Plan ",
    "My ",
    "I want to ",
    "Can you recommend ",
    "Make a list of ",
    "Compare ",
)
"""First words of users' turns. None is a prompt that anything here is measured with."""


class Part(IntEnum):
    """Whose words a token is."""

    FRAME = 0
    USER = 1
    ANSWER = 2


@dataclass(frozen=True)
class Frame:
    """The token ids around the words of a conversation.

    Attributes:
        opening: up to where the first user's words begin.
        answer: from the end of a user's words to where the answer begins.
        turn: from the end of an answer to where the next user's words begin.
        ends: ids that end a text.
    """

    opening: tuple[int, ...]
    answer: tuple[int, ...]
    turn: tuple[int, ...]
    ends: frozenset[int]

    @property
    def is_chat(self) -> bool:
        """Whether there are turns: a base model has only a beginning."""
        return bool(self.answer)


def chat_frame(tokenizer: Tokenizer, ends: frozenset[int]) -> Frame:
    """What a tokenizer's chat format puts around the words; for one without, its opening alone.

    Found by comparing conversations that differ in one word: what is alike before and behind it is
    the format's.
    """
    if not tokenizer.has_chat_template:
        opening = tokenizer.encode("") or sorted(ends)[:1]
        return Frame(tuple(opening), (), (), ends)

    def chat(*words: str) -> list[int]:
        roles = ("user", "assistant", "user")
        messages: list[Message] = [
            {"role": role, "content": word} for role, word in zip(roles, words, strict=False)
        ]
        return tokenizer.encode_chat(messages)

    one, other = chat("0"), chat("1")
    opening = _alike(one, other)
    answer = _alike(one[::-1], other[::-1])[::-1]
    one, other = chat("0", "0", "0"), chat("0", "1", "0")
    before = _alike(one, other)
    behind = one[len(before) + 1 :]
    turn = behind[: len(behind) - len(answer) - 1]
    return Frame(tuple(opening), tuple(answer), tuple(turn), ends)


def _alike(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """What two lists begin with."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return list(one[:length])


@dataclass
class Conversation:
    """One conversation while it is written, token by token.

    Attributes:
        frame: of the target.
        policy: index of the policy its answers are drawn by.
        num_turns: users' turns it shall have.
        max_words: most tokens of a user's turn, and of an answer.
        given: users' turns that are still to be said as they are; those behind them are drawn.
        ids: everything so far.
        parts: of every id, whose word it is, if it was drawn; FRAME for all that was given.
        is_over: whether nothing is to be drawn any more.
    """

    frame: Frame
    policy: int
    num_turns: int
    max_words: tuple[int, int]
    given: tuple[tuple[int, ...], ...] = ()
    ids: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    is_over: bool = False
    _speaker: Part = Part.USER
    _num_words: int = 0
    _turn: int = 1

    def begin(self, words: Sequence[int] = ()) -> None:
        """The frame, and the user's turn that is given; else `words`, the first ones of a turn."""
        self._say(self.frame.opening)
        if self.given:
            self._say_given()
        else:
            self._say(words)
        if not self.frame.is_chat:
            self._speaker = Part.ANSWER

    @property
    def speaker(self) -> Part:
        """Whose words are drawn next."""
        return self._speaker

    def add(self, token: int) -> None:
        """The next word that was drawn; at the end of a turn, the frame up to the next one."""
        self.ids.append(token)
        self.parts.append(self._speaker)
        self._num_words += 1
        ended = token in self.frame.ends or (
            self._speaker is Part.USER and (token,) == self.frame.answer[:1]
        )
        if not ended and self._num_words < self.max_words[self._speaker is Part.ANSWER]:
            return
        if self._speaker is Part.USER:
            self._hand_over()
        elif (ended or self.given) and self.frame.is_chat and self._turn < self.num_turns:
            self._turn += 1
            self._go_on(self.frame.turn)
            self._speaker, self._num_words = Part.USER, 0
            if self.given:
                self._say_given()
        else:
            self.is_over = True

    def _say_given(self) -> None:
        words, *others = self.given
        self.given = tuple(others)
        self._say(words)
        if self.frame.is_chat:
            self._hand_over()

    def _hand_over(self) -> None:
        self._go_on(self.frame.answer)
        self._speaker, self._num_words = Part.ANSWER, 0

    def _go_on(self, frame: Sequence[int]) -> None:
        """The frame, but for its first id where that was drawn: the end of a turn is part of it."""
        self._say(frame[1:] if self.ids[-1:] == list(frame[:1]) else frame)

    def _say(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.parts.extend([Part.FRAME] * len(ids))
