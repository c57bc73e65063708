"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Lay out rows under a head whose cells may have several lines; the first column is flush left.

    Example:
        >>> print(as_table(["name", "step\ntime"], [["a", "1.5"], ["longer", "10.25"]]))
                 step
        name     time
        a         1.5
        longer  10.25
    """
    height = max(cell.count("\n") + 1 for cell in head)
    cells = [cell.split("\n") for cell in head]
    top = [[""] * (height - len(cell)) + cell for cell in cells]
    lines = [list(line) for line in zip(*top, strict=True)] + [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )
