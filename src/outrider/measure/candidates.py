"""The drafters of a measurement file, ready to be planned with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from outrider.errors import UsageError
from outrider.measure.planning import Candidate
from outrider.measure.records import AlphaRecord, measurement_from

__all__ = ["candidates_from"]


def candidates_from(
    facts: Mapping[str, object],
    *,
    source: str = "the measurement",
    temperature: float | None = None,
    policy: str | None = None,
    drafter: str | None = None,
) -> tuple[list[Candidate], list[str]]:
    """The drafters of a measurement under one sampling policy, and notes on what was taken.

    Args:
        facts: what `outrider measure --json` wrote.
        source: its name in messages.
        temperature: rows to take; None takes the lowest one measured.
        policy: rows to take; None takes the first one at that temperature.
        drafter: the only drafter to take; None takes all.

    Raises:
        UsageError: something is missing or out of range, with the row, or no row fits.
    """
    measurement = measurement_from(facts, source)
    if not measurement.alpha:
        raise UsageError(f"{source} has no alpha rows; measure without --cost-only")
    cost = facts.get("cost")
    if not isinstance(cost, dict):
        raise UsageError(f"{source} has no cost; measure without --no-cost")
    v = _verify_cost(cost, f"{source}: cost")
    notes: list[str] = []
    numbered = _chosen(facts, measurement.alpha, source, temperature, policy, drafter, notes)
    shared = "drafters" not in cost
    if shared and len({row.drafter for _, row in numbered}) > 1:
        notes.append("one c for all drafters: the file has no cost for each of them")
    found = []
    for number, row in numbered:
        c = measurement.c if shared else measurement.cost_of(row.drafter)
        if c is None:
            notes.append(f"{row.drafter} is left out: its cost was not measured")
            continue
        if not row.survival:
            raise UsageError(
                f"{source}: alpha[{number}] ({row.drafter} at temperature {row.temperature:g}): "
                "survival is missing; measure again"
            )
        c_hat = _c_hat(cost, row.drafter, source)
        if c_hat is None:
            notes.append(f"{row.drafter}: c_hat was not measured and is taken as c")
        found.append(
            Candidate(
                row.alpha,
                c,
                c if c_hat is None else c_hat,
                row.drafter,
                row.low,
                row.high,
                row.survival,
                v,
                _outside(cost, row.drafter, source),
            )
        )
    if not found:
        raise UsageError(f"{source} has no cost for any drafter; measure it with alpha")
    return found, notes


def _chosen(
    facts: Mapping[str, object],
    rows: Sequence[AlphaRecord],
    source: str,
    temperature: float | None,
    policy: str | None,
    drafter: str | None,
    notes: list[str],
) -> list[tuple[int, AlphaRecord]]:
    """The rows asked for, with their numbers; adds to `notes` what else there is."""
    raw = facts["alpha"]
    assert isinstance(raw, list)
    temperatures = sorted({row.temperature for row in rows})
    if temperature is None:
        temperature = temperatures[0]
        if len(temperatures) > 1:
            notes.append(
                f"temperature {temperature:g} of {', '.join(f'{t:g}' for t in temperatures)}; "
                "--temperature picks another"
            )
    elif temperature not in temperatures:
        raise UsageError(
            f"{source} has no row at temperature {temperature:g}; it has "
            f"{', '.join(f'{t:g}' for t in temperatures)}"
        )
    kept = [(k, row) for k, row in enumerate(rows) if row.temperature == temperature]
    policies = list(dict.fromkeys(str(raw[k].get("policy", "")) for k, _ in kept))
    if policy is None:
        policy = policies[0]
        if len(policies) > 1:
            notes.append(f"policy {policy!r} of {len(policies)}; --policy picks another")
    elif policy not in policies:
        raise UsageError(
            f"{source} has no row with policy {policy!r} at temperature {temperature:g}; it has "
            f"{', '.join(map(repr, policies))}"
        )
    kept = [(k, row) for k, row in kept if str(raw[k].get("policy", "")) == policy]
    drafters = [row.drafter for _, row in kept]
    if drafter is not None and drafter not in drafters:
        raise UsageError(f"{source} has no drafter {drafter!r} there; it has {', '.join(drafters)}")
    return [(k, row) for k, row in kept if drafter in (None, row.drafter)]


def _verify_cost(cost: Mapping[str, object], where: str) -> dict[int, float]:
    curve = cost.get("verify_cost")
    if not isinstance(curve, dict) or "1" not in curve:
        raise UsageError(
            f'{where}: verify_cost must be an object like {{"1": 1.0, "6": 1.2}}, not {curve!r}'
        )
    found = {}
    for key, value in curve.items():
        if not key.isdecimal() or int(key) < 1:
            raise UsageError(f"{where}: verify_cost has {key!r} where a number of positions stands")
        found[int(key)] = _cost(value, f"{where}: verify_cost[{key!r}]")
        if not found[int(key)]:
            raise UsageError(f"{where}: verify_cost[{key!r}] must be above 0")
    return found


def _c_hat(cost: Mapping[str, object], drafter: str, source: str) -> float | None:
    """Of that drafter, else of the pair."""
    drafters = cost.get("drafters")
    entry = drafters.get(drafter) if isinstance(drafters, dict) else cost
    value = entry.get("c_hat") if isinstance(entry, dict) else None
    return None if value is None else _cost(value, f"{source}: c_hat of {drafter}")


def _outside(cost: Mapping[str, object], drafter: str, source: str) -> float:
    """Time around the passes for every position, over a target step; 0 where it was not timed."""
    drafters = cost.get("drafters")
    entry = drafters.get(drafter) if isinstance(drafters, dict) else cost
    value = entry.get("outside_ms_per_position") if isinstance(entry, dict) else None
    target_ms = cost.get("target_ms")
    if value is None or target_ms is None:
        return 0.0
    step = _cost(target_ms, f"{source}: cost: target_ms")
    if not step:
        raise UsageError(f"{source}: cost: target_ms must be above 0")
    return _cost(value, f"{source}: outside_ms_per_position of {drafter}") / step


def _cost(value: object, where: str) -> float:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not 0.0 <= value < math.inf
    ):
        raise UsageError(f"{where} must be a number, 0 or more, not {value!r}")
    return float(value)
