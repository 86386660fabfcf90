"""Token ids to text, one token at a time: what a stream may show, and where a stop string cuts.

`TextBuilder` is fed every emitted token in order, in whatever groups the rounds produce them, so
what it shows does not depend on the grouping. The text of a result is the concatenation of what
was shown: a stream and a whole answer cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["Message", "TextBuilder", "Tokenizer"]

Message = Mapping[str, str]
"""One turn of a conversation: {"role": "system" | "user" | "assistant", "content": text}."""

_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are not (or not yet) a whole UTF-8 character."""


class Tokenizer(Protocol):
    """What Outrider needs of a tokenizer.

    Attributes:
        has_chat_template: whether `encode_chat` knows a format.
        special_ids: ids that stand for no text: ends, openings, marks of a chat format.
    """

    has_chat_template: bool
    special_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; with `special`, the model's own opening tokens are added (a BOS)."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the model's format, up to where its answer begins."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        ...

    def vocabulary(self) -> list[str | None]:
        """The token string of every id, None for an id without one."""
        ...


class TextBuilder:
    """The text of one request as it grows.

    Two kinds of text are held back: an unfinished UTF-8 character at the end, and an end that may
    be the beginning of a stop string.

    Args:
        tokenizer: None for a model without one; the text is then empty.
        stops: stop strings, none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._anchor = 0  # decoding starts here: a token's text can depend on the one before it
        self._done = 0  # ids whose text is wholly in `_text`
        self._num_early = 0  # characters in `_text` of the ids after those
        self._text = ""  # all text decoded so far, whole characters only
        self._num_shown = 0  # characters of `_text` already handed out by `take`
        self._stop_from = 0  # stop strings count from here on
        self._num_searched = 0  # characters of `_text` in which no stop string is complete
        self._may_stop = True
        self.stopped = False

    def add(self, token: int, *, may_stop: bool = True) -> bool:
        """Append one token; True when it completes a stop string, which ends the text before it.

        Args:
            token: the id.
            may_stop: False while stop strings do not count yet (`min_new_tokens`).
        """
        assert not self.stopped, "the text has ended"
        self._ids.append(token)
        self._may_stop = may_stop
        if self._tokenizer is not None:
            self._grow(self._tokenizer)
        if not may_stop:
            self._stop_from = self._num_searched = len(self._text)
            return False
        return self._find_stop()

    def take(self) -> str:
        """The text that may be shown and has not been taken yet."""
        end = len(self._text) - (0 if self.stopped else self._held_for_stop())
        shown = self._text[self._num_shown : end] if end > self._num_shown else ""
        self._num_shown = max(end, self._num_shown)
        return shown

    def finish(self) -> str:
        """The rest of the text, when no token follows: held text, half characters included."""
        if not self.stopped and self._tokenizer is not None:
            self._grow(self._tokenizer, whole=True)
            if self._may_stop:
                self._find_stop()
        rest = self._text[self._num_shown :]
        self._num_shown = len(self._text)
        return rest

    @property
    def text(self) -> str:
        """All text so far, held text included."""
        return self._text

    def _grow(self, tokenizer: Tokenizer, *, whole: bool = False) -> None:
        """Add the text of the newest ids, but for an unfinished character unless `whole`."""
        # Decoded in the company of the ids before them: a decoder may treat a beginning specially.
        before = tokenizer.decode(self._ids[self._anchor : self._done])
        grown = tokenizer.decode(self._ids[self._anchor :])[len(before) :]
        finished = grown if whole else grown.rstrip(_BROKEN)
        self._text += finished[self._num_early :]
        if len(finished) < len(grown):
            self._num_early = max(self._num_early, len(finished))
            return
        if grown:  # an id without text is no company for the next
            self._anchor = self._done
        self._done, self._num_early = len(self._ids), 0

    def _find_stop(self) -> bool:
        """Cut the text before the stop string that is complete first, if one is."""
        ends = []
        for stop in self._stops:
            start = max(self._stop_from, self._num_searched - len(stop) + 1)
            at = self._text.find(stop, start)
            if at >= 0:
                ends.append((at + len(stop), at))
        self._num_searched = len(self._text)
        if not ends:
            return False
        self._text = self._text[: min(ends)[1]]
        self.stopped = True
        return True

    def _held_for_stop(self) -> int:
        """Characters at the end of the text that are the beginning of a stop string."""
        longest = 0
        start = self._stop_from
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text) - start), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
