"""Figures: what is plotted is what was given, nothing overlaps, the SVG stands in a page."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from outrider.measure import figures
from outrider.measure.figures import ALPHA, GAMMA, Measured, TimedRound, TimeRow

POINTS = [Measured(0.42, 1.6, 3), Measured(0.62, 2.4, 5), Measured(0.78, 3.3, None)]
ROWS = [
    TimeRow("long", (TimedRound(0, 4, 10, 15, 4, 3), TimedRound(16, 4, 11, 32, 4, 5))),
    TimeRow("plain", tuple(TimedRound(9 * k, 0, 8, 9 * k + 8.5) for k in range(8))),
]
ALPHA_NAME = f"{ALPHA} (chance that an examined draft token is accepted)"
DRAWN: dict[str, Callable[[], Figure]] = {
    "2": figures.draw_tokens_per_round,
    "2 with points": lambda: figures.draw_tokens_per_round(POINTS),
    "3": figures.draw_best_gamma,
    "3 with costs": lambda: figures.draw_best_gamma(POINTS, own_c=[0.098, 0.004]),
    "4": figures.draw_speed_and_operations,
    "4 with points": lambda: figures.draw_speed_and_operations(POINTS),
    "5": lambda: figures.draw_time_line(ROWS),
}
WRITTEN: dict[str, tuple[Callable[[], str], list[str]]] = {
    "2": (
        lambda: figures.tokens_per_round_svg(POINTS),
        [ALPHA_NAME, "tokens per round (target pass)", f"{GAMMA} = 7", "no drafts: 1"],
    ),
    "3": (
        lambda: figures.best_gamma_svg(own_c=[0.03]),
        [ALPHA_NAME, f"best {GAMMA} (tokens drafted per round)", "c = 0.01", "yours: 0.03"],
    ),
    "4": (
        lambda: figures.speed_and_operations_svg(POINTS),
        [ALPHA_NAME, "times faster", "times the operations", f"{GAMMA} = 10"],
    ),
    "5": (
        lambda: figures.time_line_svg(ROWS),
        ["time after the prompt was read (ms)", "long: 8 tokens in 2 rounds, 32 ms", "+3"],
    ),
}


def curve(axes: Axes, name: str) -> dict[float, float]:
    """Values of a named curve by alpha, rounded so that 0.9 can be asked for."""
    [line] = [line for line in axes.get_lines() if line.get_label() == name]
    return {round(float(x), 6): float(y) for x, y in line.get_xydata()}


def points(axes: Axes) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for c in axes.collections for x, y in c.get_offsets()]


# --- What is plotted ---


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [(1, 1.5, 1.9), (3, 1.875, 3.439), (5, 1.96875, 4.68559), (7, 1.9921875, 5.6953279)],
)
def test_figure_2_has_the_papers_curves(name: int, low: float, high: float) -> None:
    [axes] = figures.draw_tokens_per_round().axes
    values = curve(axes, f"{GAMMA} = {name}")
    assert (values[0.5], values[0.9]) == (pytest.approx(low), pytest.approx(high))


def test_figure_2_has_the_limit_of_endless_drafts() -> None:
    [axes] = figures.draw_tokens_per_round().axes
    values = curve(axes, f"{GAMMA} = \N{INFINITY}")
    assert (values[0.5], values[0.9]) == (pytest.approx(2), pytest.approx(10))


@pytest.mark.parametrize(("c", "best"), [(0.01, 24), (0.02, 19), (0.05, 13), (0.1, 10)])
def test_figure_3_has_the_papers_optima(c: float, best: int) -> None:
    [axes] = figures.draw_best_gamma().axes
    assert curve(axes, f"c = {c:g}")[0.9] == best


def test_figure_3_has_a_curve_for_a_measured_cost() -> None:
    [axes] = figures.draw_best_gamma(own_c=[0.05]).axes
    assert curve(axes, "yours: 0.05") == curve(axes, "c = 0.05")


def test_a_measured_cost_whose_curve_is_out_of_sight_is_left_out() -> None:
    [axes] = figures.draw_best_gamma(own_c=[0.0]).axes
    assert len(axes.get_lines()) == len(figures.FIGURE_3_COSTS)


@pytest.mark.parametrize(("gamma", "low", "high"), [(1, 4 / 3, 2 / 1.9), (10, 5.5027, 1.603056)])
def test_figure_4_has_the_papers_operations(gamma: int, low: float, high: float) -> None:
    lower = figures.draw_speed_and_operations().axes[1]
    values = curve(lower, f"{GAMMA} = {gamma}")
    assert values[0.5] == pytest.approx(low, abs=1e-4)
    assert values[0.9] == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize("draw", [figures.draw_tokens_per_round, figures.draw_best_gamma])
def test_the_plotted_points_are_those_given(draw: Callable[..., Figure]) -> None:
    assert points(draw(POINTS).axes[0]) == [(point.alpha, point.value) for point in POINTS]


def test_measured_speed_ups_stand_among_the_speeds_alone() -> None:
    upper, lower = figures.draw_speed_and_operations(POINTS).axes
    assert points(upper) == [(point.alpha, point.value) for point in POINTS]
    assert points(lower) == []


def test_a_point_has_the_colour_of_its_curve_or_lies_between_its_neighbours() -> None:
    asked = [Measured(0.6, 1.8, gamma) for gamma in (3, 4, 5, 40, None)]
    axes = figures.draw_speed_and_operations(asked).axes[0]
    [found] = axes.collections
    at_3, at_4, at_5, at_40, adaptive = (tuple(c[:3]) for c in found.get_facecolor())
    curves = {line.get_label(): to_rgb(line.get_color()) for line in axes.get_lines()}
    assert at_3 == pytest.approx(curves[f"{GAMMA} = 3"])
    assert at_5 == pytest.approx(curves[f"{GAMMA} = 5"])
    assert at_40 == pytest.approx(curves[f"{GAMMA} = 10"])
    assert at_4 == pytest.approx([(x + y) / 2 for x, y in zip(at_3, at_5, strict=True)])
    assert len(set(adaptive)) == 1


def test_the_curves_reach_as_far_as_the_measured_points() -> None:
    asked = [Measured(0.1, 1.1, 3), Measured(1.0, 12.0, 11)]
    [axes] = figures.draw_tokens_per_round(asked).axes
    low, high = axes.get_xlim()
    assert low < 0.1
    assert high == 1.0
    assert axes.get_ylim()[1] > 12.0


def test_every_figure_can_be_drawn_where_everything_is_accepted_or_nothing() -> None:
    extremes = [Measured(0.0, 1.0, 3), Measured(1.0, 8.0, 7)]
    figures.tokens_per_round_svg(extremes)
    figures.best_gamma_svg(extremes, own_c=[0.0, 0.5, 3.0])
    figures.speed_and_operations_svg(extremes)


# --- The time line ---


def blocks(axes: Axes) -> list[tuple[float, float, float]]:
    """(start, end, bottom) of every block that has a width, in drawing order."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            if box.width > 0:
                found.append((box.x0, box.x1, box.y0))
    return found


def test_the_time_line_draws_drafter_target_and_rest_of_every_round_to_scale() -> None:
    [axes] = figures.draw_time_line(ROWS[:1]).axes
    assert [block[:2] for block in blocks(axes)] == [
        *[(0, 4), (4, 14), (14, 15)],
        *[(16, 20), (20, 31), (31, 32)],
    ]


def test_plain_rounds_have_no_drafter_block() -> None:
    [axes] = figures.draw_time_line(ROWS[1:]).axes
    starts = [block[:2] for block in blocks(axes)]
    assert starts[:2] == [(0, 8), (8, 8.5)]
    assert len(starts) == 16


def test_rows_stand_below_each_other_in_the_order_given() -> None:
    [axes] = figures.draw_time_line(ROWS).axes
    heights = list(dict.fromkeys(block[2] for block in blocks(axes)))
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 2


def test_a_drafting_models_block_is_divided_into_its_steps() -> None:
    def num_lines(steps: int) -> int:
        row = TimeRow("x", (TimedRound(0, 50, 50, 101, steps, 3),))
        return len(figures.draw_time_line([row]).axes[0].get_lines())

    assert num_lines(5) - num_lines(0) == 4
    assert num_lines(1) == num_lines(0)


def test_a_row_without_rounds_says_so() -> None:
    svg = figures.time_line_svg([TimeRow("plain", ())])
    assert "plain: 0 tokens in 0 rounds, 0 ms" in svg


# --- How it looks ---


def shown_texts(figure: Figure) -> list[Text]:
    """Every text that is drawn; ticks exist beyond the limits as well."""
    found = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found.extend(axes.texts)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            found.extend(tick.label1 for tick in ticks)
            found.append(axis.label)
    return [text for text in found if text.get_text().strip() and text.get_visible()]


@pytest.mark.parametrize("name", DRAWN)
def test_no_two_texts_of_a_figure_overlap_and_none_is_cut_off(name: str) -> None:
    figure = DRAWN[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = {text: text.get_window_extent(renderer) for text in shown_texts(figure)}
    assert len(boxes) > 10
    width, height = canvas.get_width_height()
    for text, box in boxes.items():
        assert box.x0 >= 0, text
        assert box.x1 <= width, text
        assert box.y0 >= 0, text
        assert box.y1 <= height, text
    found = list(boxes.items())
    for k, (text, box) in enumerate(found):
        for other, other_box in found[:k]:
            assert not box.padded(-1).overlaps(other_box.padded(-1)), (text, other)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 5.0], [1.0, 5.0]),
        ([1.0, 1.5, 9.0], [1.0, 2.0, 9.0]),
        ([1.0, 9.8, 9.9], [1.0, 9.0, 10.0]),
        ([9.9, 9.9, 9.9], [8.0, 9.0, 10.0]),
        ([], []),
    ],
)
def test_labels_are_moved_apart_and_stay_below_the_top(
    values: list[float], expected: list[float]
) -> None:
    assert figures._apart(values, 1.0, 10.0) == pytest.approx(expected)


# --- As SVG ---


@pytest.mark.parametrize("name", WRITTEN)
def test_the_svg_is_one_xml_element_that_holds_its_labels_as_text(name: str) -> None:
    write, labels = WRITTEN[name]
    root = ElementTree.fromstring(write())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("text")]
    for label in labels:
        assert label in texts


def test_an_svg_has_a_name_for_those_who_cannot_see_it() -> None:
    root = ElementTree.fromstring(figures.best_gamma_svg())
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "Best draft length against alpha"


def test_no_id_occurs_twice_among_all_figures_of_a_page() -> None:
    page = "".join(write() for write, _ in WRITTEN.values())
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) > 10
    assert len(ids) == len(set(ids))


def test_every_reference_inside_an_svg_leads_somewhere() -> None:
    for write, _ in WRITTEN.values():
        svg = write()
        wanted = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
        assert wanted
        assert wanted <= set(re.findall(r' id="([^"]+)"', svg))


def test_the_same_figure_is_the_same_text_twice() -> None:
    assert figures.tokens_per_round_svg(POINTS) == figures.tokens_per_round_svg(POINTS)


def test_drawing_leaves_matplotlibs_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    figures.time_line_svg(ROWS)
    assert dict(matplotlib.rcParams) == before


def test_importing_the_figures_imports_no_matplotlib() -> None:
    code = "import sys, outrider.measure.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
