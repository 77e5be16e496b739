"""A report as JSON, Markdown and one self-contained HTML page, with its figures as PNG beside them."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.metrics.jsonl import encode, write_bytes, write_json

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "{{DATA}}"


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A PNG. It is on the page where `inline`; the page draws comparisons itself."""

    name: str  # of the file, without its ending
    caption: str
    png: bytes
    inline: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    """`record` is the JSON. `charts` is what report.html draws by itself: see `rlx.proxy.charts`."""

    title: str
    lines: Sequence[str]  # what is said first, a sentence each
    tables: Sequence[Table]
    figures: Sequence[Figure]
    record: Mapping[str, Any]
    charts: Mapping[str, Any] | None = None

    def markdown(self) -> str:
        parts = [f"# {self.title}", *(f"- {line}" for line in self.lines)]
        text = "\n".join([parts[0], "", *parts[1:]])
        for table in self.tables:
            text += f"\n\n## {table.title}\n\n" + "\n".join(markdown_table(table))
        for figure in self.figures:
            text += f"\n\n![{figure.caption}]({figure.name}.png)"
        return text + "\n"

    def html(self) -> str:
        """A page that needs no network."""
        images = [{"caption": f.caption, "data": base64.b64encode(f.png).decode()} for f in self.figures if f.inline]
        tables = [dataclasses.asdict(table) for table in self.tables]
        shown = {"title": self.title, "lines": self.lines, "tables": tables, "images": images, "charts": self.charts}
        # Inside a script element only `</` and `<!--` could end or change it.
        data = encode(shown).replace("<", "\\u003c")
        return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)

    def write(self, directory: Path, stem: str) -> list[Path]:
        """Writes STEM.json, STEM.md, STEM.html and the figures; returns what it wrote."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"{stem}.{ending}" for ending in ("json", "md", "html")]
        write_json(paths[0], self.record)
        write_bytes(paths[1], self.markdown().encode())
        write_bytes(paths[2], self.html().encode())
        for figure in self.figures:
            paths.append(directory / f"{figure.name}.png")
            write_bytes(paths[-1], figure.png)
        return paths


def markdown_table(table: Table) -> list[str]:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(table.header), *lines[1:]]


def rate(value: float, low: float, high: float) -> str:
    """A sampled rate is never shown without its interval."""
    if not math.isfinite(value):
        return "–"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:.3f} [no interval: attempts unknown]"
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def short(value: float) -> str:
    """Three digits; a dash for what is not known."""
    return f"{value:.3g}" if math.isfinite(value) else "–"


def whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def span(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
