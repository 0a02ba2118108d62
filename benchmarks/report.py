"""How a benchmark shows what it measured: one line a comparison, with its limits."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Row:
    """One comparison; times in nanoseconds, None for what could not be measured."""

    operation: str
    ours: float
    alternative: str = ""
    theirs: float | None = None
    limit: float | None = None  # of the ratio
    most: float | None = None  # of ours
    note: str = ""

    @property
    def ratio(self):
        """Ours by theirs."""
        return None if self.theirs is None else self.ours / self.theirs

    @property
    def verdict(self):
        """Within the limits or over one; empty where there is none."""
        checks = []
        if self.most is not None:
            checks.append(self.ours <= self.most)
        if self.limit is not None and self.ratio is not None:
            checks.append(self.ratio <= self.limit)
        return "" if not checks else "ok" if all(checks) else "over"


def print_report(rows, device, json_file=None):
    """Print the table, and write the rows as JSON if a file is named."""
    title = f"Python {platform.python_version()}, {platform.machine()}"
    if os.environ.get("RDMAVIEW_RXE_VM") == "count":
        title += "; an emulated processor: a ns is one of its instructions"
    print(title, table(rows), sep="\n\n")
    if not device:
        print("\nNo kernel device: give --device NAME, as --device soft0.")
    if json_file:
        found = [
            {**asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows
        ]
        report = {"python": sys.version, "device": device, "rows": found}
        Path(json_file).write_text(json.dumps(report, indent=2) + "\n")


def table(rows):
    """One line a row."""
    head = ("operation", "ns", "at most", "beside", "ns", "ratio", "at most", "")
    body = [head, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    return "\n".join(line(row, widths) for row in body)


def cells(row):
    """What a row shows."""
    return (
        row.operation,
        number(row.ours),
        "" if row.most is None else f"{row.most:g}",
        row.alternative,
        number(row.theirs) if row.alternative else "",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.limit is None else f"{row.limit:g}",
        " ".join(filter(None, (row.verdict, row.note))),
    )


def number(ns):
    """With one decimal where it says something."""
    if ns is None:
        return "-"
    return f"{ns:.1f}" if ns < 1000 and ns != int(ns) else f"{ns:,.0f}"


def line(row, widths):
    """Words to the left, numbers to the right."""
    text = "  ".join(
        cell.ljust(width) if i in (0, 3, 7) else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return text.rstrip()
