"""Every launch that tests of kernels make, compiled for a GPU that need not be there: make kernels

Triton's interpreter tells whether a kernel is right (`interpreted.py`); the compiler tells whether
a GPU takes it and what a program of it needs: registers, bytes that do not fit into them and spill
to memory, and shared memory. Nothing is run here, so what a test asserts is not looked at.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import on_gpu

# Bytes of shared memory that one program may have, by compute capability.
SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
REAL_SIZES = "tests/real_sizes.py"  # no test of make test
GENERATION = "FEDSTILL_GENERATION"  # of the GPU to compile for, handed to the tests' process


class Cost(NamedTuple):
    """What one program needs."""

    registers: int
    spilled: int
    shared: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--generation", type=int, default=90, choices=SHARED,
        help="compute capability without its point: 90 is that of an H200",
    )  # fmt: skip
    parser.add_argument("tests", nargs="*", default=["tests/kernels", REAL_SIZES])
    options = parser.parse_args()
    here = [str(on_gpu.ROOT / "src"), str(on_gpu.ROOT / "tests")]
    surroundings = {
        **os.environ, GENERATION: str(options.generation), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    sys.exit(subprocess.run(command(options.tests), cwd=on_gpu.ROOT, env=surroundings).returncode)


def command(tests: Sequence[str]) -> list[str]:
    """How pytest is called."""
    return [
        sys.executable, "-m", "pytest", "-p", "compile_kernels", "--assert=plain", "--tb=no",
        "--no-summary", *on_gpu.OFF, *tests,
    ]  # fmt: skip


class Compiler:
    """In place of launches: what was compiled, and what was refused."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.costs: dict[str, dict[str, Cost]] = defaultdict(dict)
        self.refused: dict[str, str] = {}
        self.early: dict[str, str] = {}  # tests that did not get to their last launch

    def install(self) -> None:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        launch = JITFunction.run
        knobs.runtime.interpret = False
        driver.set_active(Absent(self.generation))

        def compile_only(kernel: Any, *words: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            name = f"{kernel.module.rpartition('.')[2]}.{kernel.fn.__name__}"
            try:
                made = launch(kernel, *words, grid=grid, warmup=True, **options)
            except Exception as error:  # of any stage of the compiler
                self.refused[name] = f"{type(error).__name__}: {error} ({playing()})"
                return None
            if made.hash not in self.costs[name]:
                self.costs[name][made.hash] = cost(made.asm["cubin"], made.metadata.shared)
            if made.metadata.shared > SHARED[self.generation]:
                lack = too_much(made.metadata.shared, self.generation)
                self.refused[name] = f"{lack} ({playing()})"
            return made

        JITFunction.run = compile_only

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        try:
            return (yield)
        except Exception as error:  # numbers that nothing has made are no fault of a kernel
            self.early[item.name] = f"{type(error).__name__}: {error}"
            return None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        print("\n" + "\n".join(told(self.costs, self.refused, self.early, self.generation)))
        session.exitstatus = int(bool(self.refused) or not self.costs)


class Lenient(ast.NodeTransformer):
    """Assertions are evaluated and never fail: the first to fail would end its test."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)

    def install(self) -> None:
        """For all that is imported from now on, also what was compiled before."""

        def code(_: Any, data: Any, path: Any, *, _optimization: int = -1) -> Any:
            return compile(self.visit(ast.parse(data, path)), path, "exec", dont_inherit=True)

        sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True
        SourceFileLoader.source_to_code = code  # type: ignore[method-assign,assignment]


class Absent:
    """The driver of a GPU that is not there, as far as a compiler asks for it."""

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.generation, 32)


def cost(binary: bytes, shared: int) -> Cost:
    """What the compiled code says of itself, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        words = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}
    return Cost(found["REG"], found["STACK"], shared)


def playing() -> str:
    """The test that is being run."""
    return os.environ.get("PYTEST_CURRENT_TEST", "no test").partition("::")[2].split(" (")[0]


def too_much(shared: int, generation: int) -> str:
    return f"it needs {shared} bytes of shared memory, of which there are {SHARED[generation]}"


def told(
    costs: Mapping[str, Mapping[str, Cost]], refused: Mapping[str, str], early: Mapping[str, str],
    generation: int,
) -> list[str]:  # fmt: skip
    """A line for each kernel, with the dearest of its variants, and one that sums them up."""
    lines = [f"{'kernel':40} variants registers spilled shared"]
    for name, variants in sorted(costs.items()):
        most = [max(numbers) for numbers in zip(*variants.values(), strict=True)]
        lines.append(f"{name:40} {len(variants):8} {most[0]:9} {most[1]:7} {most[2]:6}")
    lines += [f"ended early: {name}: {_short(why)}" for name, why in sorted(early.items())]
    lines += [f"REFUSED {name}: {why}" for name, why in sorted(refused.items())]
    variants = sum(len(of) for of in costs.values())
    return [
        *lines,
        f"kernels at {on_gpu.commit()} for compute capability {generation / 10}: "
        f"{variants} variants of {len(costs)} compiled, {len(refused)} refused",
    ]


def _short(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= 100 else f"{line[:97]}..."


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the tests' own settings ask for the interpreter."""
    compiler = Compiler(int(os.environ[GENERATION]))
    compiler.install()
    early_config.pluginmanager.register(compiler)
    Lenient().install()


if __name__ == "__main__":
    main()
