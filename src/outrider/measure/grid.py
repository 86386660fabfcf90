"""What a benchmark runs and what it found: settings, cells, rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import product

from outrider.errors import UsageError
from outrider.requests import Request
from outrider.sampling import SamplingPolicy

__all__ = ["Cell", "Grid", "Row", "Setting"]


@dataclass(frozen=True)
class Setting:
    """One way of speculating: a drafter by name, a draft length (None: adaptive), a rule."""

    drafter: str
    gamma: int | None
    rule: str


@dataclass(frozen=True)
class Cell:
    """What is decoded in the same turns."""

    task: str
    temperature: float
    batch: int


@dataclass(frozen=True)
class Grid:
    """What is run.

    Attributes:
        temperatures, gammas, rules, batches: every combination is run.
        num_tokens: tokens of every output.
        num_prompts: prompts of a task, each turn of a conversation counted as one.
        repeats: turns with each prompt, at least 2; sampled text gets another seed in each.
        top_k, top_p: of the policy at every temperature, see `SamplingPolicy`.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    gammas: tuple[int | None, ...] = (None,)
    rules: tuple[str, ...] = ("block",)
    batches: tuple[int, ...] = (1,)
    num_tokens: int = 128
    num_prompts: int = 10
    repeats: int = 3
    top_k: int = 0
    top_p: float = 1.0

    def policy(self, temperature: float) -> SamplingPolicy:
        """How tokens are drawn in a cell of that temperature."""
        return SamplingPolicy(temperature=temperature, top_k=self.top_k, top_p=self.top_p)

    def check(self) -> None:
        """Refuse what could never be run; UsageError."""
        for name in ("temperatures", "gammas", "rules", "batches"):
            values = getattr(self, name)
            if not values:
                raise UsageError(f"{name} must hold at least one value")
            if len(set(values)) < len(values):
                raise UsageError(f"{name} must differ from each other, not {list(values)!r}")
        for name in ("num_tokens", "num_prompts"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        if self.repeats < 2:
            raise UsageError(
                f"repeats must be 2 or more, not {self.repeats!r}: one turn shows no spread"
            )
        if min(self.batches) < 1:
            raise UsageError(f"batches must be 1 or more, not {min(self.batches)!r}")
        for temperature, gamma, rule in product(self.temperatures, self.gammas, self.rules):
            Request((), self.policy(temperature), gamma=gamma, rule=rule).check_settings()


@dataclass(frozen=True)
class Row:
    """What one setting did in one cell.

    Attributes:
        task, temperature, gamma, rule, drafter, batch: the cell and the setting.
        plain_ms_per_token, ms_per_token: milliseconds per emitted token (of all requests of a batch
            together): the median over the repeats of each prompt, averaged over prompts.
        speedup: their ratio.
        low, high: its interval; see `outrider.measure.benchmark.speedup_interval`.
        alpha_hat, tokens_per_call: counted in the rounds; see `Statistics`.
        predicted_speedup: see `outrider.measure.prediction`.
        agrees: where the texts have to be the same (greedy, or `coupled`), whether they were.
    """

    task: str
    temperature: float
    gamma: int | None
    rule: str
    drafter: str
    batch: int
    plain_ms_per_token: float
    ms_per_token: float
    speedup: float
    low: float
    high: float
    alpha_hat: float | None
    tokens_per_call: float
    predicted_speedup: float
    agrees: bool | None

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON; the adaptive gamma is "adaptive"."""
        return asdict(self) | {"gamma": "adaptive" if self.gamma is None else self.gamma}

    @classmethod
    def from_dict(cls, facts: Mapping[str, object]) -> Row:
        """The row that `as_dict` made these facts of."""
        values = {item.name: facts[item.name] for item in fields(cls)}
        if values["gamma"] == "adaptive":
            values["gamma"] = None
        return cls(**values)  # type: ignore[arg-type]

    @property
    def setting(self) -> Setting:
        """How it was run."""
        return Setting(self.drafter, self.gamma, self.rule)

    @property
    def cell(self) -> Cell:
        """What was run."""
        return Cell(self.task, self.temperature, self.batch)
