"""Which code runs here: a version and a digest of the source, for parties to compare.

The version is that of a release; all checkouts between two releases have the same. The digest is of
the source itself. It guards against accidents: whoever means harm can say any digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

OURS = "fedstill"
SHORT = 12  # digits of a digest that people compare
ENDING = ".py"


def installed(package: str) -> str:
    """The version of an installed package, or that it is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


@cache
def own_digest() -> str:
    """The digest of fedstill's own source, as it lies there when it is first asked for."""
    return digest_of(files(OURS))


def own_version() -> str:
    """What runs here, as parties compare it: fedstill 0.1.0 (code 1f0c2a77b3d4)."""
    return written(OURS, installed(OURS), own_digest())


def version_of(plug_in: EntryPoint) -> str:
    """The same of the package that a plug-in lies in."""
    name, number = (plug_in.dist.name, plug_in.dist.version) if plug_in.dist else ("a plug-in", "")
    root = _root(plug_in.module)
    return written(name, number, "" if root is None else digest_of(root))


def digest_of(root: Traversable) -> str:
    """The digest of a source file, or of all those in a folder and the folders below it.

    Names relative to the folder and contents count. What is hidden, what does not end in .py, and
    whether lines end as on Windows does not.
    """
    found = hashlib.sha256()
    for name, file in sorted(_sources(root, ""), key=lambda pair: pair[0]):
        for part in (name.encode(), file.read_bytes().replace(b"\r\n", b"\n")):
            found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _sources(root: Traversable, before: str) -> Iterator[tuple[str, Traversable]]:
    if not root.is_dir():
        yield root.name, root
        return
    for item in root.iterdir():
        if item.name.startswith("."):
            continue
        if item.is_dir():
            yield from _sources(item, f"{before}{item.name}/")
        elif item.name.endswith(ENDING):
            yield f"{before}{item.name}", item


def _root(module: str) -> Path | None:
    """The folder of the outermost package that a module lies in, or its file; None if compiled."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:end]))
        if spec is None or spec.origin is None:  # a name that several packages share
            continue
        path = Path(spec.origin)
        if path.suffix != ENDING:
            return None
        return path.parent if spec.submodule_search_locations else path
    return None


def written(name: str, number: str, digest: str) -> str:
    """A package, its version and the first digits of a digest, where there is one."""
    code = f"(code {digest[:SHORT]})" if digest else ""
    return " ".join(part for part in (name, number, code) if part)
