"""A system under measurement as a process: JSON lines in, JSON lines out.

A request is {"do": "open", "mode": M} or {"do": "run", ...the fields of `Job`...}. The answer to
"open" holds what the system is, to "run" the fields of `Run`; both add the highest resident size so
far. What goes wrong is answered as {"error": one line}; the driver decides what to do about it.

This module needs the standard library only: it runs in the interpreter of every system.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Models:
    """Where a system finds the pair, each in the format it reads.

    Attributes:
        target, drafter: a folder or file; `drafter` is None for a pair without a drafting model.
        engine: what runs Outrider's models; other systems have no choice.
        num_threads: threads a system may compute with.
        context_length: tokens that prompt and output need at most.
    """

    target: str
    drafter: str | None
    engine: str
    num_threads: int
    context_length: int


@dataclass(frozen=True)
class Job:
    """One generation, the same for every system.

    Attributes:
        mode: "plain", "draft-model" or "lookup".
        draft_length: tokens drafted in a round; None leaves it to the system.
        ids: the prompt.
        num_tokens: tokens to generate; the model's end tokens do not stop it.
        temperature: 0 is greedy; above, the whole law is sampled, nothing is cut off.
        seed: for temperatures above 0.
    """

    mode: str
    draft_length: int | None
    ids: list[int]
    num_tokens: int
    temperature: float
    seed: int


@dataclass
class Run:
    """What one generation gave.

    Attributes:
        ids: the generated tokens.
        wall_s: seconds of the whole call, prompt included.
        first_s: seconds until the first tokens were known; None where the system does not tell.
        num_first: how many tokens were known then.
        details: counters that the system tells.
    """

    ids: list[int]
    wall_s: float
    first_s: float | None = None
    num_first: int = 1
    details: dict[str, float | None] = field(default_factory=dict)


class System(Protocol):
    """One system with its models."""

    def open(self, mode: str) -> dict[str, str]:
        """Make ready for `mode`; returns versions and settings worth reporting."""
        ...

    def run(self, job: Job) -> Run:
        """Generate once; nothing is kept that could make a later run shorter."""
        ...


class Stopwatch:
    """Seconds since it was made, and when the first tokens came."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.first_s: float | None = None
        self.num_first = 1

    def tokens(self, count: int) -> None:
        """Tell that `count` tokens came; only the first call counts."""
        if self.first_s is None and count:
            self.first_s, self.num_first = self.seconds(), count

    def seconds(self) -> float:
        return time.perf_counter() - self._begun


def serve(make_system: Callable[[Models], System]) -> None:
    """Answer requests from stdin until it closes. The models are the process's only argument."""
    # Libraries print to stdout; the answers get a channel that they do not know.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    system = make_system(Models(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        try:
            answer = _answer(system, json.loads(line))
        except Exception as error:  # whatever a system raises is a result of this benchmark
            answer = {"error": _one_line(error)}
        answer["peak_rss_bytes"] = peak_rss_bytes()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def peak_rss_bytes() -> int:
    """The highest resident size of this process so far.

    The kernel's `VmHWM` where there is one: `ru_maxrss` also counts what the process that started
    this one had resident at that moment.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [peak] = [line for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(peak.split()[1])


def _answer(system: System, request: Mapping[str, object]) -> dict[str, object]:
    fields = {name: value for name, value in request.items() if name != "do"}
    if request["do"] == "open":
        return {"facts": system.open(str(fields["mode"]))}
    return asdict(system.run(Job(**fields)))  # type: ignore[arg-type]


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines)[:400]}"
