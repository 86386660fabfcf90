"""What `outrider measure` and `outrider bench` wrote, read back as far as a report needs it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import UsageError

__all__ = [
    "AlphaRecord",
    "BenchRecord",
    "Measurement",
    "bench_from",
    "json_object",
    "measurement_from",
]

Object = Mapping[str, object]


@dataclass(frozen=True)
class AlphaRecord:
    """alpha of one drafter under one policy, with its interval.

    Attributes:
        survival: survival[i - 1] is the probability that the first i drafted tokens are all
            accepted.
        policy: the sampling settings in words.
    """

    drafter: str
    temperature: float
    alpha: float
    low: float
    high: float
    num_tokens: int
    survival: tuple[float, ...] = ()
    policy: str = ""


@dataclass(frozen=True)
class Measurement:
    """A measurement file.

    Attributes:
        costs: c of every drafter that was timed.
        c: of the pair; None where no cost was measured.
    """

    target: str
    alpha: tuple[AlphaRecord, ...]
    costs: Mapping[str, float]
    c: float | None

    def cost_of(self, drafter: str) -> float | None:
        """c of a drafter; of one not timed by itself, the pair's if that is the only drafter."""
        if drafter in self.costs:
            return self.costs[drafter]
        known = {record.drafter for record in self.alpha}
        return self.c if not self.costs and known == {drafter} else None


@dataclass(frozen=True)
class BenchRecord:
    """One row of a bench file; `gamma` is None where the draft length was adaptive."""

    task: str
    temperature: float
    gamma: int | None
    rule: str
    drafter: str
    batch: int
    speedup: float
    low: float
    high: float
    alpha_hat: float | None
    tokens_per_call: float | None
    predicted_speedup: float | None


def json_object(text: str, source: str) -> dict[str, object]:
    """The JSON object that `text` is, or that its last line is (a saved standard output).

    Raises:
        UsageError: there is none.
    """
    lines = text.strip().splitlines()
    for candidate in (text, lines[-1] if lines else ""):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise UsageError(
        f"{source} holds no JSON object; pass what `outrider measure --json` or "
        "`outrider bench --json` wrote"
    )


def measurement_from(facts: Object, source: str = "the measurement") -> Measurement:
    """A measurement file's object, checked.

    Raises:
        UsageError: a field is missing or not what it should be; the message names it.
    """
    cost = _object(facts.get("cost", {}), f"{source}: cost")
    if "alpha" not in facts and "cost" not in facts:
        raise UsageError(
            f'{source} has neither "alpha" nor "cost"; pass what `outrider measure --json` wrote'
        )
    records = [
        _alpha_record(row, f"{source}: alpha[{number}]")
        for number, row in enumerate(_rows(facts.get("alpha", []), f"{source}: alpha"))
    ]
    drafters = _object(cost.get("drafters", {}), f"{source}: cost.drafters")
    costs = {}
    for name, entry in drafters.items():
        where = f"{source}: cost.drafters[{name!r}]"
        costs[name] = _number(_object(entry, where), "c", where, least=0.0)
    c = None if cost.get("c") is None else _number(cost, "c", f"{source}: cost", least=0.0)
    return Measurement(str(facts.get("target", "")), tuple(records), costs, c)


def bench_from(facts: Object, source: str = "the bench") -> tuple[BenchRecord, ...]:
    """The rows of a bench file's object, checked.

    Raises:
        UsageError: a field is missing or not what it should be; the message names it.
    """
    if "rows" not in facts:
        raise UsageError(f'{source} has no "rows"; pass what `outrider bench --json` wrote')
    return tuple(
        _bench_record(row, f"{source}: rows[{number}]")
        for number, row in enumerate(_rows(facts["rows"], f"{source}: rows"))
    )


def _alpha_record(row: Object, where: str) -> AlphaRecord:
    survival = row.get("survival", [])
    if not isinstance(survival, list) or not all(_is_share(share) for share in survival):
        raise UsageError(f"{where}: survival must be a list of numbers in [0, 1], not {survival!r}")
    return AlphaRecord(
        drafter=_text(row, "drafter", where),
        temperature=_number(row, "temperature", where, least=0.0),
        alpha=_number(row, "alpha", where, least=0.0, most=1.0),
        low=_number(row, "low", where),
        high=_number(row, "high", where),
        num_tokens=int(_number(row, "num_tokens", where, least=0.0)),
        survival=tuple(float(share) for share in survival),
        policy=str(row.get("policy", "")),
    )


def _bench_record(row: Object, where: str) -> BenchRecord:
    def optional(name: str, most: float = math.inf) -> float | None:
        if row.get(name) is None:
            return None
        return _number(row, name, where, least=0.0, most=most)

    gamma = row.get("gamma")
    fixed = isinstance(gamma, int) and not isinstance(gamma, bool)
    if not fixed and gamma not in (None, "adaptive"):
        raise UsageError(
            f'{where}: gamma must be a whole number, null or "adaptive", not {gamma!r}'
        )
    return BenchRecord(
        task=_text(row, "task", where),
        temperature=_number(row, "temperature", where, least=0.0),
        gamma=int(_number(row, "gamma", where, least=0.0)) if fixed else None,
        rule=_text(row, "rule", where),
        drafter=_text(row, "drafter", where),
        batch=int(_number(row, "batch", where, least=1.0)),
        speedup=_number(row, "speedup", where, least=0.0),
        low=_number(row, "low", where),
        high=_number(row, "high", where),
        alpha_hat=optional("alpha_hat", most=1.0),
        tokens_per_call=optional("tokens_per_call"),
        predicted_speedup=optional("predicted_speedup"),
    )


def _rows(value: object, where: str) -> list[Object]:
    if not isinstance(value, list):
        raise UsageError(f"{where} must be a list of objects, not {value!r}")
    return [_object(row, f"{where}[{number}]") for number, row in enumerate(value)]


def _object(value: object, where: str) -> Object:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object, not {value!r}")
    return value


def _text(row: Object, name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} must be a string, not {value!r}")
    return value


def _number(
    row: Object, name: str, where: str, *, least: float = -math.inf, most: float = math.inf
) -> float:
    value = row.get(name)
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type, operator]
        limits = f" from {least:g} to {most:g}" if math.isfinite(most) else ""
        limits = limits or (f", at least {least:g}" if math.isfinite(least) else "")
        raise UsageError(f"{where}: {name} must be a number{limits}, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0
