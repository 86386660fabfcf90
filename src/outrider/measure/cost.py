"""What passes cost on this machine: the verify-cost curve, drafter steps, and what is around them.

* v(n), the time of a target pass over n positions over that of a pass over 1, for several lengths
  of context and several sequences side by side, and what a pass takes on top behind another width.
* c of every drafter (Leviathan et al. 2023, Definition 3.7) and c_hat (Definition 3.10).
* The time outside the models' passes, from rounds of a short real generation.
* Bytes that a plain step reads, and the bandwidth that amounts to.

Operations are counted as two for every parameter and token. Those of attention over the context are
left out: 4 * context * width a layer, some percent of the whole for contexts of a few hundred
tokens. What a model does not tell (its number of parameters, the size of its cache) is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.costs import CALIBRATION_POSITIONS, Costs, measure_costs
from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.measure.prediction import steps_of
from outrider.models import Model
from outrider.requests import Request
from outrider.sampling import SamplingPolicy

__all__ = [
    "FULL_POSITIONS",
    "POSITIONS",
    "QUICK_POSITIONS",
    "cost_facts",
    "curve_places",
    "measure_curve",
    "measure_drafter",
    "num_parameters",
    "usual_context",
    "usual_curve",
]

POSITIONS = CALIBRATION_POSITIONS
QUICK_POSITIONS = (1, 2, 3, 5, 9, 17)
FULL_POSITIONS = tuple(range(1, 34))

_USUAL_CONTEXT = 256
"""The curve that comes first is the one for the context closest to this."""
_GAMMA = 5
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

Facts = Mapping[str, object]


def curve_places(
    target: Model, contexts: Sequence[int], batches: Sequence[int]
) -> list[tuple[int, int]]:
    """(context, batch) of every curve to measure; contexts without room behind them are left out.

    If none has room, half of the target's context is taken.
    """
    room = target.context_length - max(QUICK_POSITIONS)
    fitting = [n for n in contexts if n <= room] or [max(1, target.context_length // 2)]
    return [(context, batch) for batch in batches for context in fitting]


def measure_curve(
    target: Model,
    drafter: Model | None,
    context: int,
    batch: int,
    *,
    positions: Sequence[int],
    repeats: int,
) -> dict[str, object]:
    """One curve, ready for JSON: {"context", "batch", "target_ms", "verify_cost", "change_ms"}.

    Args:
        target: the model.
        drafter: a model whose steps come before passes over several positions, as in decoding.
        context: tokens cached before the positions.
        batch: sequences side by side; `target_ms` is the time of a pass over one position of each.
        positions: numbers of positions of each sequence, beginning at 1.
        repeats: turns that count.
    """
    costs = measure_costs(
        target,
        drafter,
        positions=positions,
        context=context,
        repeats=repeats,
        num_sequences=batch,
    )
    return {
        "context": context,
        "batch": batch,
        "target_ms": costs.target(1),
        "verify_cost": {str(n): costs.verify_cost(n) for n in costs.positions},
        "change_ms": costs.change_ms,
    }


def measure_drafter(
    target: Model,
    drafter: Drafter,
    prompt: Sequence[int],
    policy: SamplingPolicy,
    *,
    context: int,
    repeats: int,
    num_tokens: int = 24,
) -> dict[str, object]:
    """Times of one drafter, for JSON: {"drafter_ms", "outside_ms", "outside_ms_per_position"}.

    A drafting model's step is a pass of its own over one position; for any other drafter it is what
    a drafted token takes in real rounds. Outside is what rounds take beyond these and the target's
    pass: laws, verification, bookkeeping. Most of it is work on rows of V probabilities, so it is
    also told for every verified position.

    Args:
        target: decodes with `drafter`, `gamma` 5.
        drafter: what proposes.
        prompt: ids to continue.
        policy: how both sample.
        context: tokens cached before a drafting model's step.
        repeats: steps that count.
        num_tokens: of the generation.
    """
    request = Request(
        prompt, policy, max_new_tokens=num_tokens, gamma=_GAMMA, seed=0, ignore_eos=True
    )
    results = Engine(target, drafter, max_batch=1).generate([request])
    steps = steps_of(results, first=1) or steps_of(results)
    if (model := drafter.model) is not None:
        room = min(context, model.context_length - 1)
        own: Costs = measure_costs(model, None, positions=(1,), context=room, repeats=repeats)
        drafter_ms = own.target(1)
        drafting_ms = drafter_ms * sum(step.model_steps for step in steps)
    else:
        drafted = sum(max(step.drafted) for step in steps)
        drafting_ms = sum(step.draft_ms for step in steps)
        drafter_ms = drafting_ms / max(drafted, 1)
    outside = max(0.0, sum(step.total_ms - step.target_ms for step in steps) - drafting_ms)
    return {
        "drafter_ms": drafter_ms,
        "outside_ms": outside / len(steps),
        "outside_ms_per_position": outside / sum(step.num_rows for step in steps),
    }


def cost_facts(
    target: Model,
    drafters: Mapping[str, Drafter],
    main: str,
    curves: Sequence[Facts],
    measured: Mapping[str, Facts],
) -> dict[str, object]:
    """All costs, ready for JSON; on top those of the main drafter and of the usual context.

    Args:
        target: the model whose passes were timed.
        drafters: by name.
        main: the drafter of the pair.
        curves: from `measure_curve`, at least one of a single sequence.
        measured: from `measure_drafter`, for each of `drafters`.
    """
    usual = usual_curve(curves)
    target_ms, context = _number(usual, "target_ms"), int(_number(usual, "context"))
    by_name = {
        name: {
            "c": _number(measured[name], "drafter_ms") / target_ms,
            **measured[name],
            "c_hat": _c_hat(target, drafter),
        }
        for name, drafter in drafters.items()
    }
    parameters = num_parameters(target)
    weight_bytes = None if parameters is None else parameters * _BYTES.get(target.dtype, 4)
    kv_bytes = _told(target, "kv_bytes_per_token")
    read = None if weight_bytes is None else weight_bytes + context * (kv_bytes or 0)
    return {
        **by_name[main],
        "drafter": main,
        "target_ms": target_ms,
        "context": context,
        "verify_cost": usual["verify_cost"],
        "change_ms": usual["change_ms"],
        "drafters": by_name,
        "contexts": list(curves),
        "num_parameters": parameters,
        "operations_per_token": None if parameters is None else 2 * parameters,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_cached_token": kv_bytes,
        "bytes_read_per_token": read,
        "bandwidth_gbs": None if read is None else read / target_ms / 1e6,
    }


def usual_curve(curves: Sequence[Facts]) -> Facts:
    """The curve of the fewest sequences and the context closest to 256 tokens."""

    fewest = min(_number(curve, "batch") for curve in curves)
    alone = [curve for curve in curves if _number(curve, "batch") == fewest]
    context = usual_context([int(_number(curve, "context")) for curve in alone])
    return next(curve for curve in alone if _number(curve, "context") == context)


def usual_context(contexts: Sequence[int]) -> int:
    """The one closest to 256 tokens, by ratio."""
    return min(contexts, key=lambda context: abs(math.log(max(1, context) / _USUAL_CONTEXT)))


def num_parameters(model: Model) -> int | None:
    """How many weights a model has, from what it tells or the size of their file; None if neither.

    Kept weights have four bytes each whatever they are computed in, those of 8 bits one.
    """
    told = _told(model, "num_parameters")
    file = getattr(model, "weights", None)
    if told is not None or not isinstance(file, Path):
        return told
    try:
        size = file.stat().st_size
    except OSError:
        return None
    return size // (1 if model.dtype == "int8" else 4)


def _c_hat(target: Model, drafter: Drafter) -> float | None:
    """Operations of a drafter step over those of a target step; a table has none."""
    if drafter.model is None:
        return 0.0
    ours, theirs = num_parameters(target), num_parameters(drafter.model)
    return None if ours is None or theirs is None else theirs / ours


def _told(model: Model, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if isinstance(value, int) else None


def _number(facts: Facts, name: str) -> float:
    value = facts[name]
    assert isinstance(value, (int, float)), (name, value)
    return float(value)
