"""make kernels: what is compiled, what is refused, and its table."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

import on_gpu
from compile_kernels import GENERATION, Cost, Lenient, command, told, too_much
from interpreted import needs_triton

KERNELS = """
import torch, triton, triton.language as tl

@triton.jit
def _doubled(x, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)

@triton.jit
def _wrong(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, SIZE + 1))

def test_doubled():
    for size in 32, 64:
        x = torch.ones(size)
        _doubled[(1,)](x, size, size)
        assert (x == 2).all()

def test_wrong():
    _wrong[(1,)](torch.ones(32), 32)
"""


@needs_triton
@pytest.mark.parametrize("chosen", ["test_doubled", "test_wrong"])
def test_kernels_are_compiled_for_a_gpu_that_is_not_there(chosen: str, tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(KERNELS)
    paths = [str(on_gpu.ROOT / folder) for folder in ("src", "tests")]
    ended = subprocess.run(
        [*command([f"{file}::{chosen}"]), "-c", os.devnull, "-q"], capture_output=True, text=True,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), GENERATION: "90",
            "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        },
    )  # fmt: skip
    if chosen == "test_doubled":  # both sizes, though nothing is doubled
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "2 variants of 1 compiled, 0 refused" in ended.stdout
    else:
        assert ended.returncode == 1
        assert "REFUSED test_two._wrong: CompilationError" in ended.stdout


def test_the_table_has_the_dearest_variant_of_each_kernel() -> None:
    costs = {
        "b.fast": {"1": Cost(40, 0, 512)},
        "a.slow": {"1": Cost(64, 0, 9), "2": Cost(32, 8, 0)},
    }
    cut = {"test_a": "ValueError: " + "x" * 200}
    head, slow, fast, early, refused, line = told(costs, {"c.bad": "no"}, cut, 90)
    assert head.split() == ["kernel", "variants", "registers", "spilled", "shared"]
    assert slow.split() == ["a.slow", "2", "64", "8", "9"]
    assert fast.split() == ["b.fast", "1", "40", "0", "512"]
    assert early.startswith("ended early: test_a: ValueError: xxx") and len(early) < 130
    assert refused == "REFUSED c.bad: no"
    assert line.endswith("for compute capability 9.0: 3 variants of 2 compiled, 1 refused")


def test_an_assertion_is_evaluated_and_never_fails() -> None:
    tree = Lenient().visit(ast.parse("def f(seen):\n    assert seen.append(1)\n    return seen"))
    scope: dict[str, object] = {}
    exec(compile(tree, "here", "exec"), scope)  # our own three lines
    assert scope["f"]([]) == [1]  # type: ignore[operator]


def test_a_gpu_with_little_shared_memory_is_told_how_much_is_asked_for() -> None:
    wanted = "it needs 131072 bytes of shared memory, of which there are 65536"
    assert too_much(131072, 75) == wanted
