"""Steps of loops traced once and compiled; no nodes.

A step is a pure function of tensors. So it can be written down operation by operation, gradients
and gradients of gradients included, and be handed to torch's compiler, which joins operations that
stand apart in Python. That takes some twenty seconds for each kind of step and is worth it in long
runs. Results are those of the plain step up to rounding. What cannot be compiled is run plainly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.loop import Descent, Given, Loop
from fedstill.core.precision import half_asked_for
from fedstill.core.torch_internals import traced
from fedstill.engines.engine import autograd_gradient, functional_gradient

WORTHWHILE = 8  # steps of a loop
BACKEND = "inductor"
TRACED = "traced"  # no compiler: what was traced is run operation by operation
Flat = Callable[..., list[Tensor]]  # of tensors


class Compiler:
    """Compiles each kind of step when it is first made; keeps the latest."""

    def __init__(
        self,
        notes: list[str] | None = None,
        keep: int = 64,
        *,
        worthwhile: int | None = None,
        backend: str | None = None,
    ):
        self.notes = [] if notes is None else notes
        self.keep = keep
        self.worthwhile = WORTHWHILE if worthwhile is None else worthwhile
        self.backend = BACKEND if backend is None else backend
        self.known: OrderedDict[Hashable, Flat] = OrderedDict()
        self.refused: set[Any] = set()  # bodies of loops

    def takes(self, loop: Loop[Any]) -> bool:
        """Whether a loop may be compiled, is long enough, and did not resist before."""
        body = loop.body
        if not isinstance(body, Descent) or body in self.refused:
            return False
        on_gpu = any(tensor.is_cuda for tensor in trees.tensors(loop.carry))
        if on_gpu and half_asked_for() and body.model.takes_half:
            self._refuse(body, "its network has kernels of its own in half precision")
            return False
        return len(loop.batches) >= self.worthwhile

    def call(
        self, body: Any, shapes: Hashable, function: Flat, leaves: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """What a function gives; None where it cannot be compiled."""
        if body in self.refused:
            return None
        key = (body, shapes)
        try:
            if key not in self.known:
                while len(self.known) >= self.keep:
                    self.known.popitem(last=False)
                self.known[key] = self._compiled(function, leaves)
            self.known.move_to_end(key)
            with torch.no_grad():
                return self.known[key](*_apart(leaves))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's; a fault of the step shows when run plainly
            self.known.pop(key, None)
            first_lines = " ".join(str(error).split("\n")[:2]).strip()
            self._refuse(body, f"{type(error).__name__}: {first_lines}")
            return None

    def _compiled(self, function: Flat, leaves: Sequence[Tensor]) -> Flat:
        def settled(*leaves: Tensor) -> list[Tensor]:
            """Results lie in memory as they did before, or the next step would be another kind."""
            return [tensor.contiguous() for tensor in function(*leaves)]

        apart = [leaf.clone() for leaf in leaves]
        graph: Flat = traced(settled, apart)
        if self.backend == TRACED:
            return graph
        made: Flat = torch.compile(graph, dynamic=False, fullgraph=True, backend=self.backend)
        with torch.no_grad():
            made(*apart)
        return made

    def _refuse(self, body: Any, why: str) -> None:
        self.refused.add(body)
        self.notes.append(f"a loop is not compiled: {why}")


def _apart(leaves: Sequence[Tensor]) -> list[Tensor]:
    """What is there twice, as where a loop starts and what it is held to, as two things."""
    seen: set[int] = set()
    apart = []
    for leaf in leaves:
        apart.append(leaf.detach() if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return apart


class Steps:
    """The steps of one loop, compiled where batches have the shape of the first, else plain."""

    def __init__(self, loop: Loop[Any], compiler: Compiler | None):
        self.body = loop.body
        self.compiler = compiler if compiler and compiler.takes(loop) else None
        self.first = trees.shape(loop.batches[0]) if self.compiler else None

    def __call__(self, carry: Any, given: Given, batch: Any) -> tuple[Any, Tensor]:
        """Where a step leads, and its loss."""
        if self.compiler and trees.shape(batch) == self.first:
            inputs = (carry, dict(given), batch)

            def flat(*leaves: Tensor) -> list[Tensor]:
                moved, loss = self.body(*trees.with_tensors(inputs, leaves), functional_gradient)
                ordered = trees.map_tensors(lambda _, tensor: tensor, carry, moved)
                return [*trees.tensors(ordered), loss]

            leaves = trees.tensors(inputs)
            found = self.compiler.call(self.body, trees.shape(inputs), flat, leaves)
            if found is not None:
                return trees.with_tensors(carry, found[:-1]), found[-1]
        moved, loss = self.body(carry, given, batch, autograd_gradient)
        return moved, loss
