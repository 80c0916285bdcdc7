"""python -m systems.worker NAME WORK.json RESULT.json: one run of one system in its process."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

from work import Work


def main(name: str, settings: str, result: str) -> None:
    work = Work(**json.loads(Path(settings).read_text()))
    system = importlib.import_module(f"systems.{name}")
    found = system.run(work)
    found["versions"] = {package: version(package) for package in system.VERSIONS}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
