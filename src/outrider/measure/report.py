"""A report as a Markdown text with its figures beside it, and as one HTML page that holds all.

`Report` is what is said; `to_markdown` and `to_html` say it; `write_report` puts it in a folder,
every file whole or not at all.
"""

from __future__ import annotations

import html
import re
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import UsageError
from outrider.measure.traces import Piece
from outrider.models.cache import written_whole

__all__ = [
    "Block",
    "Picture",
    "Report",
    "Section",
    "Table",
    "Trace",
    "prepare_folder",
    "to_html",
    "to_markdown",
    "visible",
    "write_report",
    "write_whole",
]

MARKDOWN_NAME = "report.md"
HTML_NAME = "report.html"


@dataclass(frozen=True)
class Table:
    """Cells as text; columns of numbers are set to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A figure: the stem of its file's name, one `<svg>` element, what it shows in words."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Trace:
    """Rounds as pieces of text with their fates, one line a round (Figure 1)."""

    rounds: tuple[tuple[Piece, ...], ...]


Block = str | Table | Picture | Trace
"""A part of a section; a string is a paragraph, in which `backticks` set code."""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Report:
    """A title, what the report is, and its sections."""

    title: str
    summary: str
    sections: tuple[Section, ...]

    @property
    def pictures(self) -> list[Picture]:
        """All figures in order."""
        blocks = [block for section in self.sections for block in section.blocks]
        return [block for block in blocks if isinstance(block, Picture)]


def visible(text: str) -> str:
    """`text` on one line: line ends and tabs as signs, other control characters as pictures.

    Characters that would turn the writing direction of the line, or that are none, become U+FFFD.
    """
    return "".join(_VISIBLE.get(character) or _printable(character) for character in text)


_VISIBLE = {"\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5", "\x7f": "\u2421"}
_TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def _printable(character: str) -> str:
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if category in ("Cc", "Cs", "Cn", "Co", "Zl", "Zp"):
        return "\ufffd"
    return "\ufffd" if unicodedata.bidirectional(character) in _TURNING else character


# Markdown


def to_markdown(report: Report, *, folder: str = "figures") -> str:
    """The report as Markdown; figures are expected in `folder`, beside the text."""
    parts = [f"# {report.title}", report.summary]
    for section in report.sections:
        parts.append(f"## {section.title}")
        parts.extend(_block_markdown(block, folder) for block in section.blocks)
    return "\n\n".join(parts) + "\n"


def _block_markdown(block: Block, folder: str) -> str:
    match block:
        case str():
            return block
        case Table():
            return _table_markdown(block)
        case Picture():
            return f"![{block.caption}]({folder}/{block.name}.svg)\n\n*{block.caption}*"
        case Trace():
            return _trace_markdown(block)


def _table_markdown(table: Table) -> str:
    rules = ["---:" if right else "---" for right in _numeric(table)]
    lines = [table.columns, tuple(rules), *table.rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


_MARKS = {"accepted": ("", ""), "rejected": ("[-", "-]"), "correction": ("[+", "+]")}


def _trace_markdown(trace: Trace) -> str:
    lines = []
    width = len(str(len(trace.rounds)))
    for count, pieces in enumerate(trace.rounds, start=1):
        marked = (_MARKS[piece.fate] for piece in pieces)
        texts = (
            f"{before}{visible(piece.text)}{after}"
            for piece, (before, after) in zip(pieces, marked, strict=True)
        )
        lines.append(f"{count:>{width}} {''.join(texts)}")
    text = "\n".join(lines)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    key = "Accepted as it stands, `[-rejected-]`, `[+the target's own+]`:"
    return f"{key}\n\n{fence}text\n{text}\n{fence}"


# HTML

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 46rem; color: #222; background: #fff;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .4rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-top: .6rem; border-top: 1px solid #ddd; }
p { margin: .6rem 0; }
code { font-size: .92em; background: #f3f3f3; padding: .05em .3em; border-radius: 3px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .92rem; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid #e5e5e5;
  vertical-align: top; font-variant-numeric: tabular-nums; }
th { border-bottom-color: #999; font-weight: 600; }
.n { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0; }
figure svg { display: block; max-width: 100%; height: auto; }
figure svg.broad { min-width: 34rem; }
figcaption { color: #555; font-size: .88rem; margin-top: .3rem; }
ol.trace { font: .9rem/1.65 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  padding-left: 2.4rem; overflow-wrap: anywhere; }
ol.trace li::marker { color: #999; }
ol.trace span { white-space: pre-wrap; }
.accepted { color: #0a7a3c; }
.rejected { color: #c0271d; text-decoration: line-through; }
.correction { color: #0b57d0; font-weight: 700; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2 { break-after: avoid; }
  figure, table, li { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
_BROAD_PT = 450
"""A figure wider than this is scrolled sideways on a phone; made smaller, nobody could read it."""


def to_html(report: Report) -> str:
    """The report as one page that needs nothing beside it."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(report.title)}</title>",
        f"<style>{_CSS}</style>",
        "</head>",
        "<body>",
        f"<h1>{html.escape(report.title)}</h1>",
        _paragraph_html(report.summary),
    ]
    for section in report.sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts.extend(_block_html(block) for block in section.blocks)
    return "\n".join([*parts, "</body>", "</html>", ""])


def _block_html(block: Block) -> str:
    match block:
        case str():
            return _paragraph_html(block)
        case Table():
            return _table_html(block)
        case Picture():
            return _picture_html(block)
        case Trace():
            return _trace_html(block)


def _paragraph_html(text: str) -> str:
    escaped = html.escape(text, quote=False)
    return "<p>" + re.sub("`([^`]+)`", r"<code>\1</code>", escaped) + "</p>"


def _table_html(table: Table) -> str:
    right = _numeric(table)

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if numeric else ''}>{html.escape(cell)}</{tag}>"
            for cell, numeric in zip(cells, right, strict=True)
        )

    body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    head = f"<thead><tr>{row(table.columns, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}\n<tbody>\n{body}\n</tbody></table></div>'


def _picture_html(picture: Picture) -> str:
    svg = picture.svg
    width = re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)
    if width and float(width[1]) > _BROAD_PT:
        svg = svg.replace("<svg ", '<svg class="broad" ', 1)
    caption = html.escape(picture.caption)
    return f'<figure><div class="wide">{svg}</div><figcaption>{caption}</figcaption></figure>'


def _trace_html(trace: Trace) -> str:
    lines = []
    for pieces in trace.rounds:
        spans = (
            f'<span class="{piece.fate}">{html.escape(visible(piece.text))}</span>'
            for piece in pieces
        )
        lines.append(f"<li>{''.join(spans)}</li>")
    key = (
        '<p><span class="accepted">accepted</span>, <span class="rejected">rejected</span>, '
        '<span class="correction">the target\'s own</span></p>'
    )
    return f'{key}\n<ol class="trace">\n' + "\n".join(lines) + "\n</ol>"


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers (or a dash where there is none) and nothing else."""
    number = re.compile(r"-|[-+\u2212]?\d[\d.,]*\s?(x|%|ms)?")
    return [
        bool(table.rows) and all(number.fullmatch(row[column]) for row in table.rows)
        for column in range(len(table.columns))
    ]


# Files


def prepare_folder(folder: Path) -> Path:
    """`folder`, made if it was not there, after a try to write in it.

    Raises:
        UsageError: it cannot be made or written.
    """
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from error
    return folder


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and move it there: whoever reads it finds all of it or none.

    Raises:
        UsageError: it cannot be written; what stood there before still stands.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write figures, Markdown and page into `folder`; where the two texts are.

    Raises:
        UsageError: the folder cannot be written.
    """
    folder = prepare_folder(folder)
    for picture in report.pictures:
        head = '<?xml version="1.0" encoding="utf-8"?>\n'
        write_whole(folder / "figures" / f"{picture.name}.svg", f"{head}{picture.svg}\n")
    markdown, page = folder / MARKDOWN_NAME, folder / HTML_NAME
    write_whole(markdown, to_markdown(report))
    write_whole(page, to_html(report))
    return markdown, page


def _unwritable(path: Path, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(
        f"cannot write {str(path)!r}: {reason}; pass a place that can be written with --out"
    )
