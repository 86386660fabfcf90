"""A toy model with the cache of a real engine: block tables, sharing, and an end.

Its law reads every token through the blocks, and depends on all of them. A table that is wrong
anywhere, or a block that another sequence has written into, gives another text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.models import Feed, Prompt
from outrider.models.blocks import BlockPool, BlockTable
from outrider.models.toy import ToyModel

BLOCK = 4


class BlockModel(ToyModel):
    """Keeps its tokens in `num_blocks` blocks of 4; raises CacheFull where they are used up.

    Attributes:
        passes: for every pass, the number of tokens of each feed.
        opened: every sequence, with the number of tokens it took over.
    """

    shares_prefixes = True

    def __init__(
        self,
        law: Callable[[Sequence[int]], Tensor],
        vocab_size: int,
        *,
        num_blocks: int = 512,
        **options: object,
    ) -> None:
        super().__init__(law, vocab_size, **options)  # type: ignore[arg-type]
        self.slots = [[0] * BLOCK for _ in range(num_blocks)]
        self.pool = BlockPool(num_blocks, block_size=BLOCK, copy=self.copy)
        self.passes: list[list[int]] = []
        self.opened: list[tuple[BlockTable, int]] = []

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def start(self, prompt: Prompt) -> BlockTable:  # type: ignore[override]
        table = self.pool.open(prompt.ids)
        self.opened.append((table, table.length))
        return table

    def room(self, sequence: BlockTable) -> int:  # type: ignore[override]
        return self.pool.room(sequence)

    def forget(self) -> None:
        self.pool.clear()

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        tables = [feed.sequence for feed in feeds]
        assert all(isinstance(table, BlockTable) for table in tables)
        begins = [table.length for table in tables]
        self.pool.append([(feed.sequence, feed.tokens) for feed in feeds])  # type: ignore[misc]
        self.passes.append([len(feed.tokens) for feed in feeds])
        for (table, tokens, _), begin in zip(feeds, begins, strict=True):
            assert table.length <= self.context_length
            for place, token in enumerate(tokens, begin):
                self.slots[table.blocks[place // BLOCK]][place % BLOCK] = token  # type: ignore[attr-defined]
        rows = []
        for table, _, keep in feeds:
            text = self.read(table)  # type: ignore[arg-type]
            rows += [self.law(text[:end]) for end in range(len(text) - keep + 1, len(text) + 1)]
        self.pool.check_integrity()
        return torch.stack(rows)

    def read(self, table: BlockTable) -> list[int]:
        """The tokens of a sequence, read through its blocks."""
        return [self.slots[table.blocks[i // BLOCK]][i % BLOCK] for i in range(table.length)]

    def assert_empty(self) -> None:
        """Every block comes back once nothing is live and what has ended is given up."""
        assert not self.pool._live
        self.pool.clear()
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks
