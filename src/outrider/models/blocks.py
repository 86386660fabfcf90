"""Block tables: where every token's keys and values lie, and who shares them.

Keys and values live in blocks of `block_size` tokens. A sequence owns a table of blocks; what it
has cached is the first `length` tokens of them. Everything else follows from two rules:

* *A block is a function of the tokens up to its end.* A sequence may therefore begin with any
  blocks that were filled for the same tokens: those of a sibling, of the conversation's last turn,
  of a request that has ended. Ended sequences stay until their blocks are needed.
* *Who writes into a block that others hold copies it first.*

So rolling back and forking move no data: one is a smaller number, the other a copied list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outrider.errors import CacheFull

__all__ = ["BlockPool", "BlockTable"]

_MAX_RETAINED = 64  # ended sequences kept; more would only make the search for a beginning longer


class BlockTable:
    """One sequence's blocks. Made by `BlockPool.open` and `fork`.

    Attributes:
        blocks: block of tokens 0 to block_size - 1, of the next ones, and so on. After a rollback
            there may be more than `length` needs; they are written again.
    """

    def __init__(self, pool: BlockPool, blocks: list[int], tokens: list[int]) -> None:
        self.blocks = blocks
        self._pool = pool
        self._tokens = tokens  # behind `length`: what was rolled back
        self._length = len(tokens)

    @property
    def length(self) -> int:
        """Tokens cached."""
        return self._length

    @property
    def tokens(self) -> list[int]:
        """The cached tokens."""
        return self._tokens[: self._length]

    def rollback(self, length: int) -> None:
        """Forget all tokens after the first `length`; no block moves."""
        assert 0 <= length <= self._length, (length, self._length)
        self._length = length

    def fork(self) -> BlockTable:
        """A second sequence with the same tokens, in the same blocks until one of them writes."""
        return self._pool.share(self, self._length)

    def close(self) -> None:
        """Give the blocks back. The tokens stay findable until the blocks are needed."""
        self._pool.retire(self)


class BlockPool:
    """A fixed number of blocks, lent to sequences.

    Args:
        num_blocks: how many there are.
        block_size: tokens per block.
        copy: called with (source, target) when a shared block is about to be written.
    """

    def __init__(
        self, num_blocks: int, *, block_size: int, copy: Callable[[int, int], None]
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._copy = copy
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._live: dict[BlockTable, None] = {}
        self._retained: dict[BlockTable, None] = {}  # the longest untouched first

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, neither a live nor an ended one."""
        return len(self._free)

    def open(self, tokens: Sequence[int]) -> BlockTable:
        """A sequence for these tokens, with as many of them cached as any other sequence has.

        The last token is never taken over, so that there is always something to feed.
        """
        tokens = list(tokens)
        donor, length = None, 0
        for table in (*self._live, *self._retained):
            common = _common(table._tokens, tokens, min(table.length, len(tokens) - 1))
            if common > length:
                donor, length = table, common
        if donor is None:
            table = BlockTable(self, [], [])
            self._live[table] = None
            return table
        if donor in self._retained:  # used again: the last to be given up
            self._retained[donor] = self._retained.pop(donor)
        return self.share(donor, length)

    def share(self, table: BlockTable, length: int) -> BlockTable:
        """A new sequence that begins with the first `length` cached tokens of `table`."""
        blocks = table.blocks[: self._needed(length)]
        for block in blocks:
            self._holders[block] += 1
        forked = BlockTable(self, blocks, table._tokens[:length])
        self._live[forked] = None
        return forked

    def retire(self, table: BlockTable) -> None:
        """A live sequence has ended: kept for who begins alike. Harmless for one that has ended."""
        if table not in self._live:
            return
        del self._live[table]
        needed = self._needed(table.length)
        self._release(table.blocks[needed:])
        del table.blocks[needed:]
        if not table.blocks:
            return
        self._retained[table] = None
        if len(self._retained) > _MAX_RETAINED:
            self._give_up_oldest()

    def room(self, table: BlockTable) -> int:
        """Most tokens that could be appended to this sequence alone, ended ones given up."""
        live = self._live_holders()
        free = self.num_blocks - len(live)
        room = -table.length
        for index, block in enumerate(table.blocks):
            is_written = index >= table.length // self.block_size
            if is_written and live[block] > 1:  # has to be copied first
                if free == 0:
                    return max(0, room)
                free -= 1
            room += self.block_size
        return room + free * self.block_size

    def append(self, feeds: Sequence[tuple[BlockTable, Sequence[int]]]) -> None:
        """Make room for new tokens and count them as cached: for all feeds, or for none.

        Args:
            feeds: live sequences, each at most once, and the tokens that will be written.

        Raises:
            CacheFull: there are not enough blocks; nothing has changed.
        """
        if self._wanted(feeds, self._holders) > len(self._free):
            self._check_room(feeds)
            # Giving up can end the sharing of a block, which then need not be copied.
            while self._wanted(feeds, self._holders) > len(self._free):
                self._give_up_oldest()
        for table, tokens in feeds:
            self._extend(table, tokens)

    def clear(self) -> None:
        """Give up all ended sequences."""
        while self._retained:
            self._give_up_oldest()

    def check_integrity(self) -> None:
        """Count everything again; an AssertionError names what does not add up."""
        held = Counter(block for table in (*self._live, *self._retained) for block in table.blocks)
        for block, count in enumerate(self._holders):
            assert held[block] == count, f"block {block}: {held[block]} holders, {count} counted"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert set(self._free) == {b for b, count in enumerate(self._holders) if count == 0}, (
            "a block is lost, or free and held"
        )
        for table in (*self._live, *self._retained):
            assert table.length <= len(table._tokens), "more tokens are counted than known"
            assert self._needed(table.length) <= len(table.blocks), "cached tokens without a block"
            assert len(set(table.blocks)) == len(table.blocks), "a block is twice in a table"

    def _live_holders(self) -> Counter[int]:
        return Counter(block for table in self._live for block in table.blocks)

    def _needed(self, length: int) -> int:
        return -(-length // self.block_size)

    def _written(self, table: BlockTable, num_tokens: int) -> range:
        """Indices into the table of the blocks that `num_tokens` more tokens touch."""
        last = self._needed(table.length + num_tokens)
        return range(table.length // self.block_size, last)

    def _wanted(
        self, feeds: Sequence[tuple[BlockTable, Sequence[int]]], holders: Sequence[int]
    ) -> int:
        """Free blocks that the feeds take, if every block had this many holders."""
        new, writers = 0, Counter[int]()
        for table, tokens in feeds:
            for index in self._written(table, len(tokens)):
                if index < len(table.blocks):
                    writers[table.blocks[index]] += 1
                else:
                    new += 1
        # The last holder of a block that all others have copied writes into it as it is.
        return new + sum(min(count, holders[block] - 1) for block, count in writers.items())

    def _check_room(self, feeds: Sequence[tuple[BlockTable, Sequence[int]]]) -> None:
        """Raise CacheFull if the feeds do not fit even without the ended sequences."""
        live = self._live_holders()
        wanted = self._wanted(feeds, [live[block] for block in range(self.num_blocks)])
        free = self.num_blocks - len(live)
        if wanted > free:
            raise CacheFull(wanted * self.block_size, free * self.block_size)

    def _extend(self, table: BlockTable, tokens: Sequence[int]) -> None:
        for index in self._written(table, len(tokens)):
            if index == len(table.blocks):
                table.blocks.append(self._take())
            elif self._holders[table.blocks[index]] > 1:
                shared, own = table.blocks[index], self._take()
                if index * self.block_size < table.length:  # else nothing in it is used
                    self._copy(shared, own)
                table.blocks[index] = own
                self._release([shared])
        table._tokens[table.length :] = tokens
        table._length += len(tokens)

    def _take(self) -> int:
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def _give_up_oldest(self) -> None:
        table = next(iter(self._retained))
        del self._retained[table]
        self._release(table.blocks)
        table.blocks.clear()
        table._length = 0


def _common(ours: Sequence[int], theirs: Sequence[int], limit: int) -> int:
    """How many of the first `limit` tokens are the same."""
    step, same = 64, 0  # slices are compared at the speed of memory
    while same < limit:
        end = min(same + step, limit)
        if ours[same:end] != theirs[same:end]:
            return same + next(i for i in range(end - same) if ours[same + i] != theirs[same + i])
        same = end
    return same
