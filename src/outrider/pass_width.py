"""How wide a target pass is: as wide as it must be, or still as wide as the one before.

An engine that prepares for the shapes of a pass takes longer where a pass is of another width than
the last (`Costs.change_ms`), and drafts of varying length change it in almost every round. A few
positions more often cost less than that, or nothing; some widths take less than narrower ones.
Tokens behind the last that counts change nothing before them, and are rolled back with the drafts
that fell.

Staying wide is paid for pass by pass, changing at once: the rent or the price of a pair of skis. A
width is left when the rent since it was last needed has reached the price, so nobody pays more than
twice what leaving at once would have cost (Karlin et al. 1988, Algorithmica 3).
"""

from __future__ import annotations

from outrider.costs import Costs

__all__ = ["PassWidth"]


class PassWidth:
    """Remembers the last pass of one engine.

    Args:
        costs: of the target's passes. Where a change costs nothing, nothing is added.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._width = 0
        self._rent = 0.0

    @property
    def last(self) -> int:
        """Positions of the last pass; 0 before the first."""
        return self._width

    def padding(self, needed: int) -> int:
        """Positions to add to the next pass.

        Args:
            needed: positions that it must have, of all requests together.
        """
        if self._costs.change_ms == 0.0:
            return 0
        if self._width == needed:
            self._rent = 0.0
        elif self._width > needed:
            self._rent += self._costs.target(self._width) - self._costs.target(needed)
        if self._width < needed or self._rent > self._costs.change_ms:
            self.now(self._costs.widest(needed))
        return self._width - needed

    def now(self, width: int) -> None:
        """A pass of that width is made, whatever was told here."""
        self._width, self._rent = width, 0.0
