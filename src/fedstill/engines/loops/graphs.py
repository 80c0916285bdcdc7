"""Steps as recorded CUDA graphs, in a row or with branches; no loops."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fedstill.core.branches import branching

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]

BRANCHES = 7  # more streams of a recording that has the GPU to itself


class Unrecordable(Exception):
    """A step does what a recording cannot hold."""


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Inside, no garbage is looked for: freed recordings would spoil the one that is made."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class CudaGraphs:
    """Records steps as CUDA graphs that share their memory, since one is replayed at a time.

    Recordings may branch onto so many more streams. These are made when they are first asked for,
    and are these recordings' own: libraries keep memory for each stream, which two recordings that
    run at once must not share.
    """

    def __init__(self, device: torch.device, branches: int = 0, priority: int = 0):
        self.device = device
        self.branches = branches
        self.more: list[Any] = []
        with torch.cuda.device(device):
            self.memory: Any = torch.cuda.graph_pool_handle()
            self.stream: Any = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Replay:
        with torch.cuda.device(self.device), branching(self._branches):
            return self._recorded(step)

    def _branches(self) -> list[Any]:
        while len(self.more) < self.branches:
            self.more.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return self.more

    def _recorded(self, step: Callable[[], None]) -> Replay:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()  # libraries prepare themselves at the first call; a fault shows here
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self.stream), _nothing_collected():
                graph.capture_begin(pool=self.memory)
                try:
                    step()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            self.memory = torch.cuda.graph_pool_handle()
            raise
        except RuntimeError as error:
            self.memory = torch.cuda.graph_pool_handle()  # the other one may be left half-used
            raise Unrecordable(str(error)) from error
        return graph.replay


class Lines:
    """Two streams of a GPU with recordings of their own, on which a loop runs in two lines.

    In one is made what steps will need, in the other steps are made. Steps go first where both
    have something to do: each waits for the one before, and what is early can wait.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.early = CudaGraphs(device)
        self.steps = CudaGraphs(device, priority=-1)

    def begin(self) -> None:
        """Both lines wait for what was done outside."""
        here = torch.cuda.current_stream(self.device)
        for line in (self.early, self.steps):
            line.stream.wait_stream(here)

    def end(self) -> None:
        """The outside waits for both lines."""
        here = torch.cuda.current_stream(self.device)
        for line in (self.early, self.steps):
            here.wait_stream(line.stream)

    def making(self) -> AbstractContextManager[Any]:
        """What runs inside, runs in the line of what is early."""
        return torch.cuda.stream(self.early.stream)

    def stepping(self) -> AbstractContextManager[Any]:
        """What runs inside, runs in the line of steps."""
        return torch.cuda.stream(self.steps.stream)

    def mark(self) -> Any:
        """A place in the line that the caller is in, for which the other may wait."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, mark: Any) -> None:
        """The line that the caller is in waits for a place in the other."""
        torch.cuda.current_stream(self.device).wait_event(mark)
