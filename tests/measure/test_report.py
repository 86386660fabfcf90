"""A report as Markdown, as a page and in a folder: one content, whole files, nothing outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outrider.errors import UsageError
from outrider.measure.report import (
    Picture,
    Report,
    Section,
    Table,
    Trace,
    prepare_folder,
    to_html,
    to_markdown,
    visible,
    write_report,
    write_whole,
)
from outrider.measure.traces import Piece

SVG = '<svg role="img" width="403.2pt" height="10pt"><text>alpha</text></svg>'
BROAD = '<svg role="img" width="576pt" height="10pt"><text>ms</text></svg>'
ROUNDS = (
    (Piece("accepted", "a b"), Piece("rejected", "<c>"), Piece("correction", "\nd")),
    (Piece("correction", "`e`"),),
)
REPORT = Report(
    "Tables & figures",
    "See `outrider bench`.",
    (
        Section("One", ("x < y", Table(("name", "value"), (("a|b", "1.5x"), ("c&d", "-"))))),
        Section("Two", (Picture("fig", SVG, "A <curve>"), Picture("wide", BROAD, "A line"))),
        Section("Three", (Trace(ROUNDS),)),
    ),
)


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps texts by class and by tag."""

    VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str, str]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.append((*self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for name, _, text in self.texts if name == tag]


# --- Markdown ---


def test_markdown_has_title_summary_and_headings_in_order() -> None:
    lines = to_markdown(REPORT).splitlines()
    assert lines[0] == "# Tables & figures"
    assert lines[2] == "See `outrider bench`."
    assert [line for line in lines if line.startswith("## ")] == ["## One", "## Two", "## Three"]


def test_a_markdown_table_sets_numbers_right_and_keeps_bars_inside_cells() -> None:
    text = to_markdown(REPORT)
    assert "| name | value |\n| --- | ---: |\n| a\\|b | 1.5x |\n| c&d | - |" in text


def test_a_markdown_figure_leads_to_its_file_and_has_its_caption() -> None:
    assert "![A <curve>](figures/fig.svg)\n\n*A <curve>*" in to_markdown(REPORT)


def test_a_markdown_trace_marks_fates_one_line_a_round() -> None:
    assert "\n1 a b[-<c>-][+\u21b5d+]\n2 [+`e`+]\n" in to_markdown(REPORT)


@pytest.mark.parametrize(
    ("text", "fence"), [("x", "```"), ("a ``` b", "````"), ("`````", "``````")]
)
def test_a_trace_cannot_end_its_own_fence(text: str, fence: str) -> None:
    report = Report("t", "s", (Section("x", (Trace(((Piece("accepted", text),),)),)),))
    lines = to_markdown(report).splitlines()
    assert [line for line in lines if re.fullmatch("`{3,}(text)?", line)] == [f"{fence}text", fence]


# --- The page ---


def test_the_page_is_well_formed_and_says_what_the_report_says() -> None:
    page = Reader(to_html(REPORT))
    assert page.of("title") == page.of("h1") == ["Tables & figures"]
    assert page.of("h2") == ["One", "Two", "Three"]
    assert page.of("code") == ["outrider bench"]
    assert "x < y" in page.of("p")
    assert page.of("th") == ["name", "value"]
    assert page.of("td") == ["a|b", "1.5x", "c&d", "-"]
    assert page.of("figcaption") == ["A <curve>", "A line"]


def test_the_page_colours_every_piece_by_its_fate() -> None:
    pieces = [(kind, text) for tag, kind, text in Reader(to_html(REPORT)).texts if tag == "span"]
    assert pieces[3:] == [
        ("accepted", "a b"),
        ("rejected", "<c>"),
        ("correction", "\u21b5d"),
        ("correction", "`e`"),
    ]
    style = to_html(REPORT)
    assert re.search(r"\.rejected \{[^}]*line-through", style)
    for fate in ("accepted", "rejected", "correction"):
        assert re.search(rf"\.{fate} \{{ color: #", style)


def test_the_page_holds_its_figures_and_needs_nothing_beside_it() -> None:
    page = to_html(REPORT)
    assert SVG in page
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(|https?://", page)


def test_only_a_figure_too_wide_for_a_phone_is_scrolled() -> None:
    assert to_html(REPORT).count('<svg class="broad"') == 1
    assert '<svg class="broad" role="img" width="576pt"' in to_html(REPORT)


def test_the_page_is_made_for_phones_and_for_paper() -> None:
    page = to_html(REPORT)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "@media print" in page


def test_only_columns_of_numbers_are_set_right() -> None:
    table = Table(("a", "b", "c"), (("1", "x", "-"), ("2.5x", "3", "7 %")))
    page = to_html(Report("t", "s", (Section("x", (table,)),)))
    assert re.findall(r"<th( class=n)?>", page) == [" class=n", "", " class=n"]


# --- Text on one line ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc\r", "a\u21b5b\u21e5c\u240d"),
        ("\x00\x1b\x7f", "\u2400\u241b\u2421"),
        ("\u202eabc\u2066", "\ufffdabc\ufffd"),
        ("\x85\u2028\udc80", "\ufffd\ufffd\ufffd"),
        ("caf\u00e9 \U0001f469\u200d\U0001f52c", "caf\u00e9 \U0001f469\u200d\U0001f52c"),
    ],
)
def test_text_is_shown_on_one_line_and_cannot_turn_it(text: str, shown: str) -> None:
    assert visible(text) == shown


# --- Files ---


def test_a_written_report_has_every_figure_its_markdown_names(tmp_path: Path) -> None:
    markdown, page = write_report(REPORT, tmp_path / "new" / "folder")
    named = re.findall(r"\]\((.*?)\)", markdown.read_text(encoding="utf-8"))
    assert named == ["figures/fig.svg", "figures/wide.svg"]
    for name in named:
        text = (markdown.parent / name).read_text(encoding="utf-8")
        assert text.startswith('<?xml version="1.0" encoding="utf-8"?>\n<svg ')
    assert markdown.read_text(encoding="utf-8") == to_markdown(REPORT)
    assert page.read_text(encoding="utf-8") == to_html(REPORT)


def test_a_report_written_twice_replaces_the_first_and_leaves_nothing_beside_it(
    tmp_path: Path,
) -> None:
    write_report(REPORT, tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    write_report(Report("Another", "s", REPORT.sections), tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert "Another" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.md"
    write_whole(path, "old")

    def full(self: Path, data: str, encoding: str | None = None) -> int:
        with self.open("w") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_whole(path, "new text")
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_is_a_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"cannot write '.*file.*': \w.*--out") as caught:
        prepare_folder(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_folder_is_made_with_those_above_it_and_nothing_stays_in_it(tmp_path: Path) -> None:
    folder = prepare_folder(tmp_path / "a" / "b")
    assert list(folder.iterdir()) == []
