"""Block tables against a plain model: every sequence is a list, every block a list of slots.

What is read back through a table's blocks must be its own tokens, whatever was shared, rolled back,
copied and given up before. Pools that get one of these things wrong are planted and caught.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from outrider.errors import CacheFull
from outrider.models.blocks import BlockPool, BlockTable

SIZE = 4  # tokens per block
MakePool = Callable[[int, Callable[[int, int], None]], BlockPool]


def make_pool(num_blocks: int, copy: Callable[[int, int], None]) -> BlockPool:
    return BlockPool(num_blocks, block_size=SIZE, copy=copy)


class Memory:
    """A pool with the memory behind it: what a model would have written for every token."""

    def __init__(self, num_blocks: int, make: MakePool = make_pool) -> None:
        self.blocks: list[list[int | None]] = [[None] * SIZE for _ in range(num_blocks)]
        self.copies: list[tuple[int, int]] = []
        self.pool = make(num_blocks, self.copy)

    def copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.blocks[target] = list(self.blocks[source])

    def write(self, *feeds: tuple[BlockTable, Sequence[int]]) -> None:
        """Append tokens and fill their slots."""
        begins = [table.length for table, _ in feeds]
        self.pool.append(feeds)
        for (table, tokens), begin in zip(feeds, begins, strict=True):
            for place, token in enumerate(tokens, begin):
                self.blocks[table.blocks[place // SIZE]][place % SIZE] = token

    def read(self, table: BlockTable) -> list[int | None]:
        """The content of the slots that the table says are its own."""
        places = range(table.length)
        return [self.blocks[table.blocks[place // SIZE]][place % SIZE] for place in places]

    def fresh(self, tokens: Sequence[int]) -> BlockTable:
        """A sequence with all of these tokens cached."""
        table = self.pool.open(tokens)
        self.write((table, tokens[table.length :]))
        return table

    def state(self) -> tuple[object, ...]:
        """All that a refused append must leave alone."""
        tables = [(t, t.length, list(t.blocks), t.tokens) for t in self.pool._live]
        return tables, list(self.pool._holders), self.pool.num_free, [*map(list, self.blocks)]


def common(first: Sequence[int], second: Sequence[int]) -> int:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


def blocks_for(length: int) -> int:
    return -(-length // SIZE)


# --- Everything that can happen, against lists ---

# Two different tokens and short texts: sequences begin alike all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class PlainModel(RuleBasedStateMachine):
    """Plays a pool and a dictionary of lists side by side."""

    make: MakePool = staticmethod(make_pool)
    num_blocks = 9
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(self.num_blocks, self.make)
        self.texts: dict[BlockTable, list[int]] = {}
        self.ended: list[list[int]] = []

    @rule(target=tables, prompt=TOKENS)
    def open(self, prompt: list[int]) -> BlockTable:
        table = self.memory.pool.open(prompt)
        live = [common(text, prompt[:-1]) for text in self.texts.values()]
        ended = [common(text, prompt[:-1]) for text in self.ended]
        assert max(live, default=0) <= table.length <= max([*live, *ended], default=0)
        self.texts[table] = prompt[: table.length]
        return table

    @rule(table=tables, tokens=TOKENS)
    def append(self, table: BlockTable, tokens: list[int]) -> None:
        self.write((table, tokens))

    @rule(first=tables, second=tables, third=tables, tokens=st.tuples(TOKENS, TOKENS, TOKENS))
    def append_together(
        self,
        first: BlockTable,
        second: BlockTable,
        third: BlockTable,
        tokens: tuple[list[int], list[int], list[int]],
    ) -> None:
        feeds = dict(zip((first, second, third), tokens, strict=True))
        self.write(*feeds.items())

    @rule(table=tables, share=st.floats(0, 1))
    def rollback(self, table: BlockTable, share: float) -> None:
        blocks = list(table.blocks)
        del self.texts[table][round(share * table.length) :]
        table.rollback(len(self.texts[table]))
        assert table.blocks == blocks

    @rule(table=tables)
    def room_is_what_fits_and_not_a_token_more(self, table: BlockTable) -> None:
        room = self.memory.pool.room(table)
        if room:
            memory, same = copy.deepcopy((self.memory, table))
            memory.write((same, [0] * room))
        memory, same = copy.deepcopy((self.memory, table))
        with pytest.raises(CacheFull):
            memory.write((same, [0] * (room + 1)))

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> BlockTable:
        forked = table.fork()
        self.texts[forked] = list(self.texts[table])
        return forked

    @rule(target=tables, table=consumes(tables), twice=st.booleans())
    def close(self, table: BlockTable, twice: bool) -> object:
        self.ended.append(self.texts.pop(table))
        table.close()
        if twice:
            table.close()
        return multiple()

    @rule()
    def clear(self) -> None:
        self.memory.pool.clear()
        self.ended.clear()
        held = {block for table in self.texts for block in table.blocks}
        assert self.memory.pool.num_free == self.num_blocks - len(held)

    def write(self, *feeds: tuple[BlockTable, list[int]]) -> None:
        before, used = self.memory.state()[0], self.demand(feeds)
        try:
            self.memory.write(*feeds)
        except CacheFull:
            assert self.memory.state()[0] == before
            held = {block for table in self.texts for block in table.blocks}
            assert used > self.num_blocks - len(held)  # giving up all that has ended is no help
        else:
            for table, tokens in feeds:
                self.texts[table].extend(tokens)

    def demand(self, feeds: Sequence[tuple[BlockTable, list[int]]]) -> int:
        """Blocks that the feeds take where nothing ended holds any: new ones and copies."""
        live = [block for table in self.texts for block in table.blocks]
        wanted = 0
        for table, tokens in feeds:
            for index in range(table.length // SIZE, blocks_for(table.length + len(tokens))):
                own = index < len(table.blocks) and live.count(table.blocks[index]) == 1
                wanted += not own
        return wanted

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for table, text in self.texts.items():
            assert table.length == len(text)
            assert table.tokens == text
            assert self.memory.read(table) == text

    @invariant()
    def the_pool_adds_up(self) -> None:
        self.memory.pool.check_integrity()


TestPlainModel = PlainModel.TestCase
TestPlainModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


class NeverCopies(BlockPool):
    """Writes into blocks that others hold."""

    def _extend(self, table: BlockTable, tokens: Sequence[int]) -> None:
        for index in self._written(table, len(tokens)):
            if index == len(table.blocks):
                table.blocks.append(self._take())
        table._tokens[table.length :] = tokens
        table._length += len(tokens)


class CopiesOnlyWholeBlocks(BlockPool):
    """Forgets that the last block of a shared beginning is half full."""

    def _written(self, table: BlockTable, num_tokens: int) -> range:
        begin = blocks_for(table.length)
        return range(begin, blocks_for(table.length + num_tokens))


class SharesTheWholePrompt(BlockPool):
    """Takes over the last token too, so that there is nothing to feed."""

    def open(self, tokens: Sequence[int]) -> BlockTable:
        return super().open([*tokens, -1])


class TakesOverTooMuch(BlockPool):
    """Takes one token more than is the same."""

    def share(self, table: BlockTable, length: int) -> BlockTable:
        return super().share(table, min(length + 1, table.length))


class FreesWhatOthersHold(BlockPool):
    """Gives all blocks of an ended sequence back at once, sharing or not."""

    def retire(self, table: BlockTable) -> None:
        if table in self._live:
            del self._live[table]
            self._free += [block for block in table.blocks if block not in self._free]


class KeepsNothing(BlockPool):
    """Loses an ended sequence's blocks."""

    def retire(self, table: BlockTable) -> None:
        self._live.pop(table, None)


WRONG_POOLS: dict[str, MakePool] = {
    "a copy that does nothing": lambda n, copy: make_pool(n, lambda source, target: None),
    "a copy the wrong way": lambda n, copy: make_pool(
        n, lambda source, target: copy(target, source)
    ),
    "never copies": lambda n, copy: NeverCopies(n, block_size=SIZE, copy=copy),
    "half blocks": lambda n, copy: CopiesOnlyWholeBlocks(n, block_size=SIZE, copy=copy),
    "the whole prompt": lambda n, copy: SharesTheWholePrompt(n, block_size=SIZE, copy=copy),
    "too much": lambda n, copy: TakesOverTooMuch(n, block_size=SIZE, copy=copy),
    "frees shared blocks": lambda n, copy: FreesWhatOthersHold(n, block_size=SIZE, copy=copy),
    "loses blocks": lambda n, copy: KeepsNothing(n, block_size=SIZE, copy=copy),
}


@pytest.mark.parametrize("wrong", WRONG_POOLS)
def test_a_wrong_pool_is_caught_by_the_plain_model(wrong: str) -> None:
    class Wrong(PlainModel):
        make = staticmethod(WRONG_POOLS[wrong])

    quick = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # the smallest example does not matter
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(Wrong, settings=quick)


# --- Sharing and copying ---


def test_a_fork_shares_every_block_and_the_first_to_write_copies_the_last_one() -> None:
    memory = Memory(8)
    first = memory.fresh([1, 2, 3, 4, 5, 6])
    second = first.fork()
    assert second.blocks == first.blocks
    assert (memory.copies, memory.pool.num_free) == ([], 6)
    shared = first.blocks[1]
    memory.write((second, [7]))
    assert memory.copies == [(shared, second.blocks[1])]
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] == shared != second.blocks[1]
    memory.write((first, [8, 9]))  # now alone in its last block
    assert len(memory.copies) == 1
    assert memory.read(first) == [1, 2, 3, 4, 5, 6, 8, 9]
    assert memory.read(second) == [1, 2, 3, 4, 5, 6, 7]
    memory.pool.check_integrity()


def test_a_fork_at_a_blocks_border_copies_nothing() -> None:
    memory = Memory(8)
    first = memory.fresh([1, 2, 3, 4])
    second = first.fork()
    memory.write((first, [5]), (second, [6]))
    assert memory.copies == []
    assert (memory.read(first), memory.read(second)) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6])


def test_a_sibling_is_untouched_by_a_rollback_and_other_tokens() -> None:
    memory = Memory(8)
    first = memory.fresh([1, 2, 3, 4, 5, 6])
    second = first.fork()
    first.rollback(2)
    memory.write((first, [9, 9, 9, 9]))
    assert memory.read(second) == second.tokens == [1, 2, 3, 4, 5, 6]
    assert memory.read(first) == [1, 2, 9, 9, 9, 9]
    memory.pool.check_integrity()


def test_a_block_behind_the_cached_tokens_is_left_to_its_other_holder_without_a_copy() -> None:
    memory = Memory(8)
    first = memory.fresh([1, 2, 3, 4, 5, 6])
    second = first.fork()
    first.rollback(4)
    memory.write((first, [9]))
    assert memory.copies == []
    assert memory.read(second) == [1, 2, 3, 4, 5, 6]


def test_siblings_of_one_pass_are_kept_apart() -> None:
    memory = Memory(12)
    tables = [memory.fresh([1, 2, 3, 4, 5])]
    tables += [tables[0].fork() for _ in range(3)]
    memory.write(*((table, [10 + i] * 4) for i, table in enumerate(tables)))
    for i, table in enumerate(tables):
        assert memory.read(table) == [1, 2, 3, 4, 5, *[10 + i] * 4]
    memory.pool.check_integrity()


def test_a_rollback_moves_no_block_and_reads_no_memory() -> None:
    memory = Memory(300)
    table = memory.fresh(list(range(1000)))
    blocks, contents = list(table.blocks), [list(block) for block in memory.blocks]
    for length in (999, 500, 500, 3, 0):
        table.rollback(length)
        assert (table.length, table.tokens) == (length, list(range(length)))
        assert table.blocks == blocks
    assert memory.blocks == contents
    assert memory.copies == []
    memory.write((table, [7] * 20))
    assert table.blocks == blocks  # they are written again
    assert memory.read(table) == [7] * 20


@pytest.mark.parametrize("length", [-1, 4])
def test_a_rollback_to_more_tokens_or_less_than_none_is_an_error_of_ours(length: int) -> None:
    table = Memory(2).fresh([1, 2, 3])
    with pytest.raises(AssertionError):
        table.rollback(length)


# --- Beginnings ---


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("ended", [False, True])
def test_a_sequence_takes_over_the_longest_beginning_of_any_other(
    kind: Callable[[Sequence[int]], Sequence[int]], ended: bool
) -> None:
    memory = Memory(40)
    short, long = memory.fresh([1, 2, 3, 4, 5, 6]), memory.fresh([1, 2, 3, 4, 5, 6, 7, 8, 9])
    memory.fresh([2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    if ended:
        short.close()
        long.close()
    table = memory.pool.open(kind([1, 2, 3, 4, 5, 6, 7, 8, 0, 0]))
    assert table.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert memory.read(table) == table.tokens
    memory.pool.check_integrity()


def test_a_long_beginning_is_compared_to_its_end() -> None:
    memory = Memory(80)
    text = [i % 7 for i in range(200)]
    memory.fresh(text)
    for length in (1, 63, 64, 65, 127, 128, 129, 199):
        assert memory.pool.open([*text[:length], 99, 99]).length == length


def test_the_last_token_is_never_taken_over() -> None:
    memory = Memory(20)
    memory.fresh([1, 2, 3, 4, 5]).close()
    for prompt, expected in (([1], 0), ([1, 2], 1), ([1, 2, 3, 4], 3), ([1, 2, 3, 4, 5], 4)):
        assert memory.pool.open(prompt).length == expected
    assert memory.pool.open([1, 2, 3, 4, 5, 6]).length == 5


def test_tokens_that_were_rolled_back_are_not_found() -> None:
    memory = Memory(20)
    table = memory.fresh([1, 2, 3, 4, 5, 6])
    table.rollback(2)
    assert memory.pool.open([1, 2, 3, 4, 5, 6]).length == 2
    memory.write((table, [9, 9, 9]))
    assert memory.pool.open([1, 2, 3, 4, 5, 6]).length == 2
    assert memory.pool.open([1, 2, 9, 9, 9, 6]).length == 5


def test_the_prompts_list_is_not_kept() -> None:
    memory = Memory(20)
    memory.fresh([1, 2, 3])
    prompt = [1, 2, 3]
    table = memory.pool.open(prompt)
    prompt[0] = 9
    assert table.tokens == [1, 2]


def test_what_has_ended_is_found_by_the_next_turn_of_its_conversation() -> None:
    memory = Memory(20)
    first = memory.fresh([1, 2, 3, 4, 5, 6])
    memory.write((first, [7]))
    first.rollback(6)
    first.close()
    second = memory.pool.open([1, 2, 3, 4, 5, 6, 8, 9])
    assert second.length == 6
    memory.write((second, [8, 9]))
    assert memory.read(second) == [1, 2, 3, 4, 5, 6, 8, 9]


# --- The end of the memory ---


def test_the_ended_sequence_that_was_not_used_for_longest_is_given_up_first() -> None:
    memory = Memory(6)
    for token in (1, 2, 3):
        memory.fresh([token] * 8).close()
    memory.pool.open([1] * 4 + [9]).close()  # a part is used again, so 2 is the oldest now
    memory.fresh([4] * 8)
    assert memory.pool.open([2] * 9).length == 0
    assert memory.pool.open([3] * 9).length == 8
    assert memory.pool.open([1] * 9).length == 8


def test_only_as_many_ended_sequences_are_given_up_as_are_needed() -> None:
    memory = Memory(4)
    for token in (1, 2, 3):
        memory.fresh([token] * 4).close()
    memory.fresh([4] * 4)
    assert [memory.pool.open([token] * 5).length for token in (1, 2, 3)] == [4, 4, 4]


def test_no_more_than_64_ended_sequences_are_kept() -> None:
    memory = Memory(100)
    for token in range(70):
        memory.fresh([token] * 4).close()
    found = [memory.pool.open([token] * 5).length for token in range(70)]
    assert found == [0] * 6 + [4] * 64
    memory.pool.check_integrity()


def test_giving_up_an_ended_sequence_can_end_the_sharing_of_a_block() -> None:
    memory = Memory(2)
    first = memory.fresh([1, 2, 3, 4, 5])
    second = first.fork()
    first.close()
    memory.write((second, [6]))  # there is no block for a copy, and none is needed
    assert memory.copies == []
    assert memory.read(second) == [1, 2, 3, 4, 5, 6]
    memory.pool.check_integrity()


def test_a_full_cache_names_what_was_wanted_and_what_is_free() -> None:
    memory = Memory(3)
    memory.fresh([1] * 5)
    table = memory.pool.open([2] * 9)
    with pytest.raises(CacheFull, match="room for 12 tokens is needed and 4 are free") as caught:
        memory.write((table, [2] * 9))
    assert "kv_memory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_cache_changes_nothing_not_even_for_the_feeds_that_would_fit() -> None:
    memory = Memory(4)
    first, second = memory.fresh([1] * 5), memory.fresh([2] * 3)
    third = first.fork()
    before = memory.state()
    feeds = [(second, [2]), (third, [3]), (first, [4] * 8)]
    with pytest.raises(CacheFull):
        memory.write(*feeds)
    assert memory.state() == before
    memory.pool.check_integrity()
    memory.write(*feeds[:2])
    assert memory.read(third) == [1] * 5 + [3]


def test_a_pool_can_be_filled_to_its_last_token() -> None:
    memory = Memory(3)
    table = memory.fresh([1] * 12)
    assert memory.pool.num_free == 0
    with pytest.raises(CacheFull, match="room for 4 tokens is needed and 0 are free"):
        memory.write((table, [1]))
    table.rollback(11)
    memory.write((table, [2]))
    assert memory.read(table) == [1] * 11 + [2]


def test_two_siblings_that_write_in_one_pass_need_one_copy_only() -> None:
    memory = Memory(2)
    first = memory.fresh([1])
    second = first.fork()
    memory.write((first, [2]), (second, [3]))
    assert (memory.read(first), memory.read(second)) == ([1, 2], [1, 3])


def test_a_full_cache_leaves_the_ended_sequences_where_giving_them_up_does_not_help() -> None:
    memory = Memory(3)
    memory.fresh([1] * 4).close()
    with pytest.raises(CacheFull):
        memory.fresh([2] * 16)
    assert memory.pool.open([1] * 5).length == 4


# --- The end of a sequence ---


def test_closing_twice_is_harmless_also_after_the_blocks_went_to_others() -> None:
    memory = Memory(2)
    first = memory.fresh([1] * 4)
    first.close()
    first.close()
    memory.pool.check_integrity()
    second = memory.fresh([2] * 8)
    first.close()
    memory.pool.check_integrity()
    assert memory.read(second) == [2] * 8


def test_a_sequence_that_never_had_a_token_leaves_nothing_behind() -> None:
    memory = Memory(2)
    table = memory.pool.open([1, 2])
    table.close()
    assert memory.pool.num_free == 2
    memory.pool.check_integrity()


def test_an_ended_sequence_keeps_no_block_behind_its_tokens() -> None:
    memory = Memory(4)
    table = memory.fresh([1] * 16)
    table.rollback(5)
    table.close()
    assert memory.pool.num_free == 2


def test_clearing_gives_up_what_has_ended_and_nothing_else() -> None:
    memory = Memory(6)
    alive = memory.fresh([1] * 6)
    memory.fresh([2] * 6).close()
    alive.fork().close()
    memory.pool.clear()
    assert memory.pool.num_free == 4
    assert memory.read(alive) == [1] * 6
    assert memory.pool.open([2] * 6).length == 0
    alive.close()
    memory.pool.clear()
    assert memory.pool.num_free == 6
    memory.pool.check_integrity()


# --- The integrity check itself ---


def count_a_holder_too_many(memory: Memory, table: BlockTable) -> None:
    memory.pool._holders[table.blocks[0]] += 1


def count_a_holder_too_few(memory: Memory, table: BlockTable) -> None:
    memory.pool._holders[table.blocks[0]] -= 1


def free_a_block_twice(memory: Memory, table: BlockTable) -> None:
    memory.pool._free.append(memory.pool._free[0])


def free_a_block_that_is_held(memory: Memory, table: BlockTable) -> None:
    memory.pool._free.append(table.blocks[0])


def lose_a_block(memory: Memory, table: BlockTable) -> None:
    memory.pool._free.pop()


def forget_a_table(memory: Memory, table: BlockTable) -> None:
    del memory.pool._live[table]


def count_more_tokens_than_are_known(memory: Memory, table: BlockTable) -> None:
    table._length += 1


def count_more_tokens_than_there_are_blocks_for(memory: Memory, table: BlockTable) -> None:
    table._tokens += [0] * SIZE
    table._length += SIZE


def put_a_block_into_a_table_twice(memory: Memory, table: BlockTable) -> None:
    memory.pool._holders[table.blocks[0]] += 1
    table.blocks.append(table.blocks[0])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (count_a_holder_too_many, "1 holders, 2 counted"),
        (count_a_holder_too_few, "1 holders, 0 counted"),
        (free_a_block_twice, "free twice"),
        (free_a_block_that_is_held, "lost, or free and held"),
        (lose_a_block, "lost, or free and held"),
        (forget_a_table, "0 holders, 1 counted"),
        (count_more_tokens_than_are_known, "more tokens are counted than known"),
        (count_more_tokens_than_there_are_blocks_for, "without a block"),
        (put_a_block_into_a_table_twice, "twice in a table"),
    ],
)
def test_damage_is_named_by_the_integrity_check(
    damage: Callable[[Memory, BlockTable], None], named: str
) -> None:
    memory = Memory(4)
    table = memory.fresh([1, 2, 3, 4, 5])
    memory.pool.check_integrity()
    damage(memory, table)
    with pytest.raises(AssertionError, match=named):
        memory.pool.check_integrity()
