"""What Leviathan et al. 2023 print: Tables 1 and 4 and the curves of Figure 3, as data.

Only inputs and printed values stand here. What the formulas give for the inputs is computed by
`outrider.theory` when it is asked for, so that printed and computed can be compared.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider import theory

__all__ = ["FIGURE_3", "TABLE_1", "TABLE_4", "Figure3Row", "Table1Row", "Table4Row"]


class Table1Row(NamedTuple):
    """One row of Table 1: operations and speed for a drafter of no cost (c = c_hat = 0).

    Attributes:
        alpha, gamma: as given.
        printed_operations, printed_speed: as printed, to two decimals.
    """

    alpha: float
    gamma: int
    printed_operations: str
    printed_speed: str

    @property
    def operations(self) -> float:
        """Theorem 3.11."""
        return theory.operations_factor(self.alpha, self.gamma, 0.0)

    @property
    def speed(self) -> float:
        """Theorem 3.8."""
        return theory.walltime_improvement(self.alpha, self.gamma, 0.0)

    @property
    def reproduces(self) -> bool:
        """Whether both formulas, rounded as the paper rounds, give what it prints."""
        computed = (f"{self.operations:.2f}", f"{self.speed:.2f}")
        return computed == (self.printed_operations, self.printed_speed)


class Table4Row(NamedTuple):
    """One row of Table 4: T5-XXL sped up by a smaller T5, expected and measured.

    Attributes:
        task: "EnDe" (translation) or "CNN/DM" (summarising).
        drafter: size of the drafting T5.
        temperature: 0 or 1.
        gamma, alpha, c: as given; alpha and c are rounded to two decimals.
        printed_expected: the paper's expected factor, to one decimal.
        printed_measured: the factor it measured (Table 2).
    """

    task: str
    drafter: str
    temperature: float
    gamma: int
    alpha: float
    c: float
    printed_expected: str
    printed_measured: str

    @property
    def expected(self) -> float:
        """Theorem 3.8 with the printed alpha, c and gamma."""
        return theory.walltime_improvement(self.alpha, self.gamma, self.c)

    @property
    def reproduces(self) -> bool:
        """Whether that rounds to the printed value; three rows do not.

        For all three, some alpha and c that round to the printed ones do (`could_reproduce`).
        """
        return f"{self.expected:.1f}" == self.printed_expected

    @property
    def could_reproduce(self) -> bool:
        """Whether some alpha and c that round to the printed ones give the printed value."""
        half_digit = 0.005
        alpha, c = self.alpha, self.c
        least = theory.walltime_improvement(alpha - half_digit, self.gamma, c + half_digit)
        most = theory.walltime_improvement(alpha + half_digit, self.gamma, c - half_digit)
        printed = float(self.printed_expected)
        return least <= printed + 0.05 and most >= printed - 0.05


class Figure3Row(NamedTuple):
    """One curve of Figure 3, at four alphas. The figure prints no numbers, so none stand here.

    Attributes:
        c: the curve.
        alphas: where it is evaluated.
    """

    c: float
    alphas: tuple[float, ...]

    @property
    def optima(self) -> tuple[int, ...]:
        """Theorem 3.8, maximised over gamma."""
        return tuple(theory.best_gamma(alpha, self.c) for alpha in self.alphas)


TABLE_1 = (
    Table1Row(0.6, 2, "1.53", "1.96"),
    Table1Row(0.7, 3, "1.58", "2.53"),
    Table1Row(0.8, 2, "1.23", "2.44"),
    Table1Row(0.8, 5, "1.63", "3.69"),
    Table1Row(0.9, 2, "1.11", "2.71"),
    Table1Row(0.9, 10, "1.60", "6.86"),
)

TABLE_4 = (
    Table4Row("EnDe", "T5-small", 0.0, 7, 0.75, 0.02, "3.2", "3.4"),
    Table4Row("EnDe", "T5-base", 0.0, 7, 0.80, 0.04, "3.3", "2.8"),
    Table4Row("EnDe", "T5-large", 0.0, 7, 0.82, 0.11, "2.5", "1.7"),
    Table4Row("EnDe", "T5-small", 1.0, 7, 0.62, 0.02, "2.3", "2.6"),
    Table4Row("EnDe", "T5-base", 1.0, 5, 0.68, 0.04, "2.4", "2.4"),
    Table4Row("EnDe", "T5-large", 1.0, 3, 0.71, 0.11, "2.0", "1.4"),
    Table4Row("CNN/DM", "T5-small", 0.0, 5, 0.65, 0.02, "2.4", "3.1"),
    Table4Row("CNN/DM", "T5-base", 0.0, 5, 0.73, 0.04, "2.6", "3.0"),
    Table4Row("CNN/DM", "T5-large", 0.0, 3, 0.74, 0.11, "2.0", "2.2"),
    Table4Row("CNN/DM", "T5-small", 1.0, 5, 0.53, 0.02, "1.9", "2.3"),
    Table4Row("CNN/DM", "T5-base", 1.0, 3, 0.55, 0.04, "1.8", "2.2"),
    Table4Row("CNN/DM", "T5-large", 1.0, 3, 0.56, 0.11, "1.6", "1.7"),
)

FIGURE_3 = tuple(Figure3Row(c, (0.5, 0.7, 0.8, 0.9)) for c in (0.01, 0.02, 0.05, 0.10))
