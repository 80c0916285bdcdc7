"""Every test that may need a GPU, and one line that says what came of them: make test-gpu

Left out are tests that say nothing about a device and take long: recipes, examples, sites and
deployments, which `make test` runs on any machine. Names of failed tests come first; the last line
has the commit, the device and the counts, as docs/benchmarks.md cites it. With a limit of time what
was counted by then is told.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("test_recipes.py", "test_examples.py", "test_readme.py", "sites", "deploy")
# Plug-ins: one that writes, and one that warns beside several workers, where a warning is an error.
OFF = ("-p", "no:cacheprovider", "-p", "no:benchmark")
FAILED = re.compile(r"^(FAILED|ERROR) ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after these")
    parser.add_argument("--without-gpu", action="store_true", help="to see that it works")
    parser.add_argument("tests", nargs="*", help="paths; all by default")
    options = parser.parse_args()
    device = gpu()
    if device is None and not options.without_gpu:
        sys.exit("no CUDA device is here; make test runs everything that needs none")
    lines, code, stopped = played(command(options.tests, options.workers), options.limit)
    print("\n".join(line for line in lines if FAILED.match(line)), end="\n" * any_failed(lines))
    print(summary(lines, commit(), device or "no GPU") + ", stopped then" * stopped)
    sys.exit(code)


def played(words: Sequence[str], limit: float | None) -> tuple[list[str], int, bool]:
    """What the tests print, their exit code, and whether they were stopped at the limit."""
    added = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    tests = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(added), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        return tests.communicate(timeout=limit)[0].splitlines(), tests.returncode, False
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)  # it then counts what has ended
        return tests.communicate()[0].splitlines(), tests.returncode, True


def command(tests: Sequence[str], workers: int) -> list[str]:
    """How pytest is called."""
    left_out = [f"--ignore=tests/{name}" for name in LEFT_OUT]
    several = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    return [
        sys.executable, "-m", "pytest", "--tb=no", *OFF, *several, *left_out,
        *(tests or ["tests"]),
    ]  # fmt: skip


def any_failed(lines: Sequence[str]) -> bool:
    return any(FAILED.match(line) for line in lines)


def summary(lines: Sequence[str], commit: str, device: str) -> str:
    """One line: what pytest counted, at which commit and where."""
    counted = next((line for line in reversed(lines) if " in " in line), "nothing was counted")
    return f"GPU tests at {commit} on {device}: {counted.strip('= ')}"


def gpu() -> str | None:
    """The device's name and torch's version, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def commit() -> str:
    """The commit that is tested; with a plus where files were changed since."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
