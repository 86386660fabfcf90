"""Rounds in words: which text was kept, refused and corrected (Leviathan et al. 2023, Figure 1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from outrider.requests import Round
from outrider.text import Tokenizer

__all__ = ["Piece", "round_pieces"]


class Piece(NamedTuple):
    """A run of text with one fate in a round.

    Attributes:
        fate: "accepted" drafts, "rejected" drafts, or the target's own "correction" (which is the
            bonus token where every draft was accepted).
        text: what the tokens say.
    """

    fate: Literal["accepted", "rejected", "correction"]
    text: str


def round_pieces(item: Round, tokenizer: Tokenizer | None) -> list[Piece]:
    """The pieces of one round in reading order; without a tokenizer, ids are shown.

    drafted [a b c], accepted 1, emitted [a x] -> accepted "a", rejected "bc", correction "x"
    """
    accepted = item.emitted[: item.accepted]
    rejected = item.drafted[item.accepted :]
    correction = item.emitted[item.accepted :]

    def show(tokens: tuple[int, ...]) -> str:
        if tokenizer is None:
            return "".join(f" {token}" for token in tokens)
        return tokenizer.decode(tokens)

    pieces = [
        Piece("accepted", show(accepted)),
        Piece("rejected", show(rejected)),
        Piece("correction", show(correction)),
    ]
    return [piece for piece in pieces if piece.text]
