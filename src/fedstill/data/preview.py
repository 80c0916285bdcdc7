"""Who holds what, as a table. No drawing."""

from __future__ import annotations

from fedstill.core.errors import DataError
from fedstill.data.sites import Collection


def counts_table(collection: Collection) -> list[dict[str, str | int]]:
    """One row per client: `client`, a column for each class name, `total`."""
    taken = {"client", "total"} & set(collection.class_names)
    if taken:
        raise DataError(
            f"a class is called {taken.pop()!r}, which is a column of the table; rename the class"
        )
    table = []
    for site in collection.sites:
        row: dict[str, str | int] = {"client": site.name}
        counts = site.counts(collection.classes).tolist()
        row.update(zip(collection.class_names, counts, strict=True))
        row["total"] = len(site)
        table.append(row)
    return table


def counts_text(collection: Collection) -> str:
    """The table for a terminal, columns aligned."""
    rows = counts_table(collection)
    header = list(rows[0])
    cells = [header, *([str(row[column]) for column in header] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = []
    for client, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([client.ljust(widths[0]), *aligned]))
    return "\n".join(lines)
