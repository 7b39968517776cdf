"""Render plain text tables with narrow columns and right-aligned numbers."""

from collections.abc import Collection, Sequence


def render(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a table whose columns `left` are left-aligned and others right-aligned, without trailing blanks."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        aligned = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(head), *(line(row) for row in rows)])
