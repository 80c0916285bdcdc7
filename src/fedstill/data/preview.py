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
