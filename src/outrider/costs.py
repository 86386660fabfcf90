"""What passes cost on this machine: the verify-cost curve, a drafter step, and their ratio.

Leviathan et al. 2023 describe cost by one number, c (Definition 3.7), and take a target pass over
gamma + 1 positions to cost what one over 1 position costs. `Costs` keeps c and the measured curve.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.errors import UsageError
from outrider.models import CachedSequence, Feed, Model, Prompt
from outrider.models.cache import cache_folder, written_whole
from outrider.theory import interpolated

__all__ = ["Costs", "kept_costs", "measure_context", "measure_costs", "time_passes"]

CALIBRATION_POSITIONS = (1, 2, 3, 5, 6, 9, 17, 33)
_CONTEXT = 64
_FAR = 512
_PROMPT = 128
_FORMAT = "costs 8"


@dataclass(frozen=True)
class Costs:
    """Milliseconds of passes.

    Attributes:
        positions: numbers of positions that were measured, rising, the first of them 1.
        target_ms: a target pass over that many positions.
        drafter_ms: one drafter step behind another; for a drafter without a model, what a draft
            takes.
        context: tokens cached before those positions.
        change_ms: what a pass takes on top when the pass before it had another number of positions;
            an engine prepares for the shapes of a pass, and for the same again it has done so.
        drafter_reads: time that the drafter takes to read a prompt, over the target's.
        context_ms: what a pass takes on top for every further token that is cached, of any
            sequence in it: its keys and values are read too.
        drafter_begins_ms: what the first step of a draft takes on top: the target's pass before it
            has pushed the drafter's weights out of the processor's caches.
    """

    positions: tuple[int, ...] = (1, 33)
    target_ms: tuple[float, ...] = (1.0, 1.0)
    drafter_ms: float = 0.0
    context: int = 0
    change_ms: float = 0.0
    drafter_reads: float = 0.0
    context_ms: float = 0.0
    drafter_begins_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no curve; UsageError."""
        rising = all(a < b for a, b in zip(self.positions, self.positions[1:], strict=False))
        if not self.positions or self.positions[0] != 1 or not rising:
            raise UsageError(f"positions must rise from 1, not {self.positions!r}")
        if len(self.target_ms) != len(self.positions) or min(self.target_ms) <= 0.0:
            raise UsageError("target_ms must hold a time above 0 for each of the positions")
        for name in ("drafter_ms", "change_ms", "drafter_reads", "context_ms", "drafter_begins_ms"):
            if getattr(self, name) < 0.0:
                raise UsageError(f"{name} must be 0 or more, not {getattr(self, name)!r}")

    def target(self, num_positions: float) -> float:
        """Milliseconds of a target pass over that many positions, between measured ones linear.

        Beyond the last measured number the curve goes on as its last piece rises.
        """
        return interpolated(self.positions, self.target_ms, num_positions)

    def widest(self, num_positions: int) -> int:
        """Most positions that a pass may have in the measured time of one over `num_positions`."""
        same = [n for n in self.positions if self.target(n) == self.target(num_positions)]
        return max([num_positions, *same])

    def verify_cost(self, num_positions: float) -> float:
        """v(n): time of a target pass over n positions over the time of one over 1 position."""
        return self.target(num_positions) / self.target_ms[0]

    @property
    def c(self) -> float:
        """Time of a drafter step over time of a target step (Definition 3.7)."""
        return self.drafter_ms / self.target_ms[0]

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


def kept_costs(target: Model, drafter: Model | None, notify: Callable[[str], None]) -> Costs:
    """The costs of these models on this machine, measured now if they are not kept yet.

    They are measured once and kept, not again at every start: draft lengths depend on them, and the
    same seed shall give the same text tomorrow.

    Args:
        target: the model whose passes are verified with.
        drafter: a drafting model, if there is one.
        notify: told, in one line, that passes are timed.
    """
    models = [target] if drafter is None else [target, drafter]
    facts = [
        (
            *(model.name, model.engine, model.dtype, model.vocab_size),
            # What a model may tell beside the seam: a folder's model may be another one today.
            *(str(getattr(model, name, "")) for name in ("form", "device", "num_parameters")),
        )
        for model in models
    ]
    key = repr((_FORMAT, facts, platform.machine(), _num_processors()))
    name = Path(target.name).name
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    file = cache_folder() / "costs" / f"{name}-{digest}" / "costs.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, UsageError):
        kept = json.loads(file.read_text())
        return Costs(**kept | {name: tuple(kept[name]) for name in ("positions", "target_ms")})
    notify(f"timing passes of {name} once, for the draft length")
    # Whatever else ran meanwhile shall not be kept: the least disturbed turn counts.
    costs = measure_costs(target, drafter, repeats=3, typical=min)
    costs = replace(costs, context_ms=measure_context(target))
    for model in models:
        model.forget()
    with contextlib.suppress(OSError):  # nothing depends on its being kept
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as unfinished:
            unfinished.write_text(json.dumps(costs.as_dict()))
    return costs


def _num_processors() -> str:
    """Those that this process may use, and what it was told to use of them."""
    try:
        allowed: int | None = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        allowed = os.cpu_count()
    return f"{allowed} {os.environ.get('OMP_NUM_THREADS', '')}"


def measure_costs(
    target: Model,
    drafter: Model | None,
    *,
    positions: Sequence[int] = CALIBRATION_POSITIONS,
    context: int = _CONTEXT,
    repeats: int = 5,
    num_sequences: int = 1,
    typical: Callable[[list[float]], float] = statistics.median,
) -> Costs:
    """Time passes by turns: of each number of positions two, the first behind another number.

    As in decoding, drafter steps come before every target pass over several positions: what one
    model leaves in the processor's caches, the other has to fetch again.

    Args:
        target: the model whose passes are verified with.
        drafter: a drafting model; None for a drafter without one, whose steps count as free.
        positions: numbers of positions of each sequence to measure; the curve begins at 1.
        context: tokens cached before them.
        repeats: turns; the first, which may warm something up, is not counted.
        num_sequences: side by side in every pass.
        typical: of the times of all turns, the one that counts.
    """
    room = target.context_length - context
    kept = [n for n in positions if n <= room] or [1]
    changed: dict[int, list[float]] = {n: [] for n in kept}
    times: dict[int, list[float]] = {n: [] for n in kept}
    begun: list[float] = []
    steps: list[float] = []
    with contextlib.ExitStack() as opened:
        drafted = []
        if drafter is not None:
            behind = min(context, drafter.context_length - 1)
            drafted = opened.enter_context(_cached(drafter, [behind] * num_sequences, 1))

        def draft() -> None:
            """The first step comes behind a target pass, the second behind the first."""
            assert drafter is not None
            first, second = _two_passes(drafter, drafted, 1)
            begun.append(first)
            steps.append(second)

        for turn in range(repeats + 1):
            if turn == 1:
                del begun[:], steps[:]
            for n in kept:
                first, second = time_passes(
                    target,
                    n,
                    context=context,
                    num_sequences=num_sequences,
                    before=None if drafter is None or n == 1 else draft,
                )
                if turn:
                    changed[n].append(first)
                    times[n].append(second)
            if drafter is not None:
                draft()
    # A pass may be filled up to more positions (`pass_width`): where the measured curve falls, by
    # chance or since a kernel likes another width better, the wider pass is the price of both.
    curve = [typical(times[n]) for n in kept]
    for k in range(len(curve) - 2, -1, -1):
        curve[k] = min(curve[k], curve[k + 1])
    drafter_ms = typical(steps) if steps else 0.0
    begins_ms = max(0.0, typical(begun) - drafter_ms) if begun else 0.0
    change_ms = 0.0
    if len(kept) > 1:
        # By pairs: of single times, the least disturbed ones of either kind differ by chance.
        pairs = (
            (first, second)
            for n in kept
            for first, second in zip(changed[n], times[n], strict=True)
        )
        change_ms = max(0.0, statistics.median(first - second for first, second in pairs))
    return Costs(
        tuple(kept),
        tuple(curve),
        drafter_ms,
        context,
        change_ms,
        drafter_reads=0.0 if drafter is None else _share_of_reading(target, drafter),
        drafter_begins_ms=begins_ms,
    )


def _share_of_reading(target: Model, drafter: Model) -> float:
    """Time that the drafter takes to read a prompt, over the target's."""
    length = min(_PROMPT, target.context_length, drafter.context_length)
    # Of two equal passes the second: for the first, an engine prepares.
    target_ms, drafter_ms = (
        time_passes(model, length, context=0)[1] for model in (target, drafter)
    )
    return drafter_ms / target_ms


def measure_context(
    model: Model, *, near: int = _CONTEXT, far: int = _FAR, repeats: int = 5
) -> float:
    """Milliseconds that every further cached token adds to a pass over one position.

    Args:
        model: whose passes.
        near, far: tokens cached; both are cut to what the model can hold.
        repeats: passes behind either, by turns.
    """
    lengths = sorted({min(length, model.context_length - 1) for length in (near, far)})
    if len(lengths) < 2:
        return 0.0
    times: list[list[float]] = [[], []]
    with _cached(model, lengths) as sequences:
        for _ in range(repeats):
            for k, (table, _) in enumerate(sequences):
                started = time.perf_counter()
                model.score([Feed(table, [0], 1)])
                times[k].append(1e3 * (time.perf_counter() - started))
                table.rollback(lengths[k])
    short, long = map(statistics.median, times)
    return max(0.0, long - short) / (lengths[1] - lengths[0])


def time_passes(
    model: Model,
    num_positions: int,
    *,
    context: int,
    num_sequences: int = 1,
    before: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Milliseconds of two equal passes over `num_positions` of each sequence behind `context`.

    Args:
        model: whose passes.
        num_positions: of each sequence.
        context: tokens cached before them.
        num_sequences: side by side.
        before: called before each of the two.
    """
    with _cached(model, [context] * num_sequences, num_positions) as sequences:
        return _two_passes(model, sequences, num_positions, before)


def _two_passes(
    model: Model,
    sequences: Sequence[tuple[CachedSequence, list[int]]],
    num_positions: int,
    before: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Milliseconds of two equal passes over so many positions of each of some sequences."""
    feeds = [Feed(table, following, num_positions) for table, following in sequences]
    lengths = [table.length for table, _ in sequences]
    taken = []
    for _ in range(2):
        if before is not None:
            before()
        started = time.perf_counter()
        model.score(feeds)
        taken.append(1e3 * (time.perf_counter() - started))
        for (table, _), length in zip(sequences, lengths, strict=True):
            table.rollback(length)
    return taken[0], taken[1]


@contextlib.contextmanager
def _cached(
    model: Model, lengths: Sequence[int], num_following: int = 0
) -> Iterator[list[tuple[CachedSequence, list[int]]]]:
    """Sequences that have so many tokens cached, each with ids that may follow; closed at the end.

    No two begin alike, so that they share nothing.
    """
    sequences: list[tuple[CachedSequence, list[int]]] = []
    try:
        for k, length in enumerate(lengths):
            ids = [(17 + k + 37 * i) % model.vocab_size for i in range(length + num_following)]
            table = model.start(Prompt(ids))
            sequences.append((table, ids[length:]))
            if table.length < length:
                model.score([Feed(table, ids[table.length : length], 1)])
            table.rollback(length)
        yield sequences
    finally:
        for table, _ in sequences:
            table.close()
