"""The paper's figures 2 to 5 as SVG, with measured points on the curves.

Every figure has two functions: `draw_...` returns matplotlib's figure, for looking at what is in
it, and `..._svg` the same as text that stands in a page. The curves come from `outrider.theory`;
nothing measured is known here but what is passed in.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, ParamSpec

from outrider.theory import (
    best_gamma,
    expected_tokens_per_round,
    operations_factor,
    oracle_tokens_per_round,
    walltime_improvement,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Measured",
    "TimeRow",
    "TimedRound",
    "best_gamma_svg",
    "draw_best_gamma",
    "draw_speed_and_operations",
    "draw_time_line",
    "draw_tokens_per_round",
    "speed_and_operations_svg",
    "time_line_svg",
    "tokens_per_round_svg",
]

_P = ParamSpec("_P")

FIGURE_2_GAMMAS = (1, 3, 5, 7)
FIGURE_3_COSTS = (0.01, 0.02, 0.05, 0.1)
FIGURE_4_GAMMAS = (1, 3, 5, 7, 10)
LEAST_ALPHA, MOST_ALPHA = 0.5, 0.9
"""The paper's range of alpha; wider where a measured point lies outside."""
MOST_GAMMA_SHOWN = 26

_LINE_HEIGHT = 0.065
"""Of a label, as a share of its panel's height."""

# Told apart without colour vision: shades of matplotlib's plasma, and Okabe and Ito's hues.
_SHADES = {1: "#d06a00", 3: "#d8576b", 5: "#9c179e", 7: "#5302a3", 10: "#0d0887"}
_COST_SHADES = ("#0d0887", "#7e03a8", "#cc4778", "#d06a00")
ALPHA, GAMMA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER GAMMA}"
_GREY, _DARK = "#8a8a8a", "#333333"
_TARGET, _DRAFTER, _REST = "#0072b2", "#e69f00", "#cccccc"
_STYLE = {
    "font.size": 11.0,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "mathtext.default": "regular",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "xtick.color": _DARK,
    "ytick.color": _DARK,
    "svg.fonttype": "none",
}


class Measured(NamedTuple):
    """One point that was measured.

    Attributes:
        alpha: the share of examined drafts that was accepted, or the mean of beta.
        value: what the figure's y axis shows.
        gamma: tokens drafted per round; None where it varied from round to round.
    """

    alpha: float
    value: float
    gamma: int | None = None


class TimedRound(NamedTuple):
    """One round on the time line.

    Attributes:
        start_ms, end_ms: of the round, from the same zero as its neighbours.
        draft_ms: in the drafter, first thing in the round.
        target_ms: in the target's pass, right after it.
        num_steps: passes of a drafting model; 0 or 1 draws one block.
        num_emitted: tokens the round added.
    """

    start_ms: float
    draft_ms: float
    target_ms: float
    end_ms: float
    num_steps: int = 0
    num_emitted: int = 1


class TimeRow(NamedTuple):
    """One way to decode, as a row of the time line."""

    label: str
    rounds: tuple[TimedRound, ...]


def _styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """`draw` under the style of all figures, which leaves no trace in matplotlib's settings."""

    @functools.wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with _settings():
            return draw(*args, **kwargs)

    return styled


def _settings(salt: str = "") -> AbstractContextManager[None]:
    """matplotlib's settings while a figure is made; `salt` tells apart the ids of its parts."""
    import matplotlib

    settings = {**_STYLE, "svg.hashsalt": salt or None}
    return matplotlib.rc_context(settings)  # type: ignore[arg-type]


# Figure 2


@_styled
def draw_tokens_per_round(measured: Sequence[Measured] = ()) -> Figure:
    """Figure 2: expected tokens per round against alpha, Equation (1), with measured points."""
    figure, axes = _one_panel(5.6, 4.0)
    alphas = _alphas(measured)
    axes.set_ylim(0.0, max([10.3, *(point.value * 1.05 for point in measured)]))
    ends = [_curve(axes, alphas, [1.0] * len(alphas), _GREY, "no drafts: 1", "--")]
    for gamma in FIGURE_2_GAMMAS:
        tokens = [expected_tokens_per_round(alpha, gamma) for alpha in alphas]
        ends.append(_curve(axes, alphas, tokens, _SHADES[gamma], f"{GAMMA} = {gamma}"))
    endless = [oracle_tokens_per_round(min(alpha, 0.999)) for alpha in alphas]
    ends.append(_curve(axes, alphas, endless, _DARK, f"{GAMMA} = \N{INFINITY}"))
    _label_ends(axes, ends, alphas[-1])
    _scatter(axes, measured)
    _name_alpha(axes, alphas)
    axes.set_ylabel("tokens per round (target pass)")
    return figure


def tokens_per_round_svg(measured: Sequence[Measured] = ()) -> str:
    """Figure 2 as SVG; `value` of a point is tokens per target pass."""
    return _svg(draw_tokens_per_round(measured), "Expected tokens per round against alpha")


# Figure 3


@_styled
def draw_best_gamma(measured: Sequence[Measured] = (), *, own_c: Sequence[float] = ()) -> Figure:
    """Figure 3: the best gamma against alpha for several c, with curves for the costs measured.

    Args:
        measured: `value` of a point is the draft length that was fastest.
        own_c: measured c of drafters; each gets a dashed curve.
    """
    figure, axes = _one_panel(5.6, 4.0)
    alphas = _alphas(measured)
    axes.set_ylim(0.0, MOST_GAMMA_SHOWN)
    ends = []
    most = 2 * MOST_GAMMA_SHOWN  # out of sight; without a limit, alpha = 1 has no best gamma
    for c, shade in zip(FIGURE_3_COSTS, _COST_SHADES, strict=True):
        lengths = [float(best_gamma(alpha, c, max_gamma=most)) for alpha in alphas]
        ends.append(_curve(axes, alphas, lengths, shade, f"c = {c:g}"))
    for c in own_c:
        if best_gamma(alphas[0], c, max_gamma=most) > MOST_GAMMA_SHOWN:
            continue
        lengths = [float(best_gamma(alpha, c, max_gamma=most)) for alpha in alphas]
        ends.append(_curve(axes, alphas, lengths, _DARK, f"yours: {c:.2g}", "--"))
    for line in axes.get_lines():
        line.set_drawstyle("steps-mid")
    _label_ends(axes, ends, alphas[-1])
    _scatter(axes, measured, _DARK)
    _name_alpha(axes, alphas)
    axes.set_ylabel(f"best {GAMMA} (tokens drafted per round)")
    return figure


def best_gamma_svg(measured: Sequence[Measured] = (), *, own_c: Sequence[float] = ()) -> str:
    """Figure 3 as SVG."""
    return _svg(draw_best_gamma(measured, own_c=own_c), "Best draft length against alpha")


# Figure 4


@_styled
def draw_speed_and_operations(measured: Sequence[Measured] = ()) -> Figure:
    """Figure 4: time saved (above) and operations added (below) against alpha, for c = c_hat = 0.

    Args:
        measured: `value` of a point is the speed-up; it paid for its drafter and for verifying,
            the curves did not.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    alphas = _alphas(measured)
    upper.set_ylim(0.0, max([7.5, *(point.value * 1.05 for point in measured)]))
    most = operations_factor(alphas[0], FIGURE_4_GAMMAS[-1], 0.0)
    lower.set_ylim(0.0, max(7.5, 1.12 * most))
    speeds = []
    for gamma in FIGURE_4_GAMMAS:
        shade, name = _SHADES[gamma], f"{GAMMA} = {gamma}"
        speed = [walltime_improvement(alpha, gamma, 0.0) for alpha in alphas]
        factor = [operations_factor(alpha, gamma, 0.0) for alpha in alphas]
        speeds.append(_curve(upper, alphas, speed, shade, name))
        _curve(lower, alphas, factor, shade, name, ":")
        # At the right end these curves are too close together to be named.
        place = (alphas[0], factor[0])
        lower.annotate(name, place, (5, 2), textcoords="offset points", color=shade)
    _label_ends(upper, speeds, alphas[-1])
    _scatter(upper, measured)
    _name_alpha(lower, alphas)
    upper.set_ylabel("times faster")
    lower.set_ylabel("times the operations")
    return figure


def speed_and_operations_svg(measured: Sequence[Measured] = ()) -> str:
    """Figure 4 as SVG."""
    return _svg(draw_speed_and_operations(measured), "Speed-up and operations against alpha")


# Figure 5


@_styled
def draw_time_line(rows: Sequence[TimeRow]) -> Figure:
    """Figure 5: real rounds in time, drafter and target blocks to scale, one row per draft length.

    A drafting model's block is divided evenly into its steps.
    """
    from matplotlib.patches import Patch

    figure, axes = _one_panel(8.0, 1.1 + 0.75 * len(rows))
    longest = max((item.end_ms for row in rows for item in row.rounds), default=1.0)
    axes.set_xlim(0.0, longest * 1.01)
    axes.set_ylim(-0.25, len(rows) - 0.1)
    points_per_ms = 72 * 7.6 / longest
    for count, row in enumerate(rows):
        bottom = len(rows) - 1 - count
        num_tokens = sum(item.num_emitted for item in row.rounds)
        taken = row.rounds[-1].end_ms if row.rounds else 0.0
        heading = f"{row.label}: {num_tokens} tokens in {len(row.rounds)} rounds, {taken:.0f} ms"
        axes.text(0.0, bottom + 0.5, heading, va="bottom", color=_DARK)
        for item in row.rounds:
            _draw_round(axes, item, bottom, points_per_ms)
    colours = {"drafter": _DRAFTER, "target pass": _TARGET, "verifying, the rest": _REST}
    keys = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=keys, loc="outside upper left", ncols=3, frameon=False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time after the prompt was read (ms)")
    return figure


def time_line_svg(rows: Sequence[TimeRow]) -> str:
    """Figure 5 as SVG."""
    return _svg(draw_time_line(rows), "Rounds in time, for several draft lengths")


def _draw_round(axes: Axes, item: TimedRound, bottom: float, points_per_ms: float) -> None:
    height = 0.46
    target_start = item.start_ms + item.draft_ms
    target_end = target_start + item.target_ms
    for start, width, colour in (
        (item.start_ms, item.draft_ms, _DRAFTER),
        (target_start, item.target_ms, _TARGET),
        (target_end, max(item.end_ms - target_end, 0.0), _REST),
    ):
        axes.broken_barh([(start, width)], (bottom, height), facecolors=colour, linewidth=0)
    steps = item.num_steps
    if steps > 1 and item.draft_ms / steps * points_per_ms > 2.5:
        for k in range(1, steps):
            x = item.start_ms + item.draft_ms * k / steps
            axes.plot([x, x], [bottom, bottom + height], color="white", linewidth=0.8)
    axes.plot([item.start_ms] * 2, [bottom, bottom + height], color="white", linewidth=1.2)
    text = f"+{item.num_emitted}"
    if item.target_ms * points_per_ms > 6.0 * len(text):
        middle = (target_start + target_end) / 2
        axes.text(
            middle, bottom + height / 2, text, color="white", ha="center", va="center", fontsize=9
        )


# What the figures share


class _End(NamedTuple):
    """What is written at a curve's end, and how high that is."""

    y: float
    text: str
    colour: str


def _one_panel(width: float, height: float) -> tuple[Figure, Axes]:
    # Figures made without pyplot need no display and leave nothing behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _alphas(measured: Sequence[Measured]) -> list[float]:
    """Where curves are computed: the paper's range, and as far as the measured points go."""
    low = max(0.0, min([LEAST_ALPHA, *(point.alpha - 0.02 for point in measured)]))
    high = min(1.0, max([MOST_ALPHA, *(point.alpha + 0.01 for point in measured)]))
    return [low + (high - low) * k / 200 for k in range(201)]


def _curve(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    colour: str,
    name: str,
    dashes: str = "-",
) -> _End:
    """Draw a curve; its end is the last point that can be seen."""
    axes.plot(xs, ys, dashes, color=colour, linewidth=1.8, label=name)
    top = axes.get_ylim()[1]
    return _End([y for y in ys if y <= top][-1], name, colour)


def _label_ends(axes: Axes, ends: Sequence[_End], right: float) -> None:
    """Name curves at the right edge, moved apart where the names would touch."""
    low, high = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end.y)
    gap = _LINE_HEIGHT * (high - low)
    heights = _apart([end.y for end in ordered], gap, high - gap / 4)
    for end, height in zip(ordered, heights, strict=True):
        axes.annotate(
            end.text,
            (right, height),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=end.colour,
            annotation_clip=False,
        )


def _apart(values: Sequence[float], gap: float, most: float) -> list[float]:
    """Rising `values`, moved as little as makes neighbours at least `gap` apart, none over `most`.

    They are moved up; those that come out too high are moved down again.
    """
    placed: list[float] = []
    for value in values:
        placed.append(max([value, *(last + gap for last in placed[-1:])]))
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], most)
        most = placed[k] - gap
    return placed


def _shade(gamma: int | None) -> tuple[float, float, float]:
    """The colour of a draft length: its curve's, or between those of the nearest curves."""
    from matplotlib.colors import to_rgb

    if gamma is None:
        return to_rgb(_GREY)
    below = max((known for known in _SHADES if known <= gamma), default=min(_SHADES))
    above = min((known for known in _SHADES if known >= gamma), default=max(_SHADES))
    share = (gamma - below) / (above - below) if above > below else 0.0
    start, end = to_rgb(_SHADES[below]), to_rgb(_SHADES[above])
    red, green, blue = (x + share * (y - x) for x, y in zip(start, end, strict=True))
    return red, green, blue


def _scatter(axes: Axes, measured: Sequence[Measured], colour: str | None = None) -> None:
    """Measured points in one colour, or in the shade of their gamma; a key says what they are."""
    if not measured:
        return
    axes.scatter(
        [point.alpha for point in measured],
        [point.value for point in measured],
        s=42,
        c=[colour or _shade(point.gamma) for point in measured],
        edgecolors="white",
        linewidths=1.0,
        zorder=5,
        clip_on=False,
        label="measured",
    )
    axes.text(
        0.02, 0.98, "\N{BLACK CIRCLE} measured", transform=axes.transAxes, va="top", color=_DARK
    )


def _name_alpha(axes: Axes, alphas: Sequence[float]) -> None:
    axes.set_xlim(alphas[0], alphas[-1])
    axes.set_xlabel(f"{ALPHA} (chance that an examined draft token is accepted)")


def _svg(figure: Figure, title: str) -> str:
    """The figure as one `<svg>` element that can stand in a page beside others."""
    stream = io.StringIO()
    with _settings(title):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    # Every figure of a page would bring its own "axes_1"; a page's ids must be unique.
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
