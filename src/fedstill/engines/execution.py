"""Execution: how an experiment is computed, and every process-wide switch that this needs.

What comes out is decided by the experiment; an execution decides on which device, with which
engine, how exactly and how fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from fedstill.core import gpu, precision, ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.model import Model
from fedstill.core.node import Cache
from fedstill.core.precision import Precision
from fedstill.core.ranges import Count, Whole
from fedstill.core.torch_internals import operations
from fedstill.engines.allocator import memory_kept
from fedstill.engines.engine import Absences
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import STREAMS, Streams
from fedstill.federation.experiment import Experiment

AUTO = "auto"
ENGINES: dict[str, type[InProcess]] = {kind.name: kind for kind in (InProcess, Batched, Streams)}

# Multiplications and additions for one example:
LIGHT = 1e6  # below which threads do not pay
SLIGHT = 2e5  # below which networks of matrices are sooner stacked than trained one by one


@dataclass(frozen=True)
class Execution:
    """How an experiment is computed; with `auto` the fitting engine and device are chosen.

    Execution(device="cpu", engine="batched")
    Execution(precision="half", compile=True)
    """

    engine: str = AUTO  # or a name in ENGINES
    device: str = AUTO  # or cpu, cuda, cuda:0, …
    precision: Precision = "tf32"  # of a GPU
    threads: Count | None = None  # of the processor; chosen by the networks when left out
    streams: Count = STREAMS  # loops that run beside each other on a GPU
    stack_at_most: Count = 256  # loops that run as one
    record: bool = True  # on a GPU, replay the steps of a loop from a recording
    compile: bool = False  # hand the steps of long loops to torch's compiler
    memory_limit: Whole | None = None  # bytes of clients' memories at hand; the rest lie on disk

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        wrong = ranges.faults(self)
        if isinstance(self.engine, str) and self.engine not in (AUTO, *ENGINES):
            wrong.append("engine: " + unknown("engine", self.engine, (AUTO, *ENGINES)))
        if isinstance(self.device, str):
            wrong += device_faults(self.device)
        if wrong:
            raise BadValue(wrong)

    @property
    def torch_device(self) -> torch.device:
        """The device; `auto` takes a CUDA device where there is one."""
        if self.device == AUTO:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def at(self, local_rank: int) -> Execution:
        """The same for one of several ranks of a machine: they sit at its GPUs in turn."""
        if str(self.torch_device) != "cuda":
            return self
        return replace(self, device=f"cuda:{local_rank % torch.cuda.device_count()}")

    def engine_name(self, networks: Iterable[Model]) -> str:
        """The engine's name; `auto` takes what was fastest in docs/benchmarks.md."""
        if self.engine != AUTO:
            return self.engine
        if self.torch_device.type == "cuda":
            return Streams.name
        slight = all(is_slight(network) for network in networks)
        return Batched.name if slight else InProcess.name

    def why_engine(self) -> str:
        """Where the choice of the engine comes from."""
        if self.engine != AUTO:
            return "as asked for"
        return f"chosen for device {self.torch_device.type} and these networks"

    def chosen_threads(self, networks: Iterable[Model]) -> int:
        """As many as asked for; else one for a GPU or where every network is light; else torch's.

        For a GPU the host hands out work in small pieces, which several threads only slow down.
        The threads of an operation wait for each other at its end. Operations of a light network
        end sooner than that pays, and where other programs hold a core, a step takes a hundred
        times as long. The choice rests on the networks alone, so that an experiment gives the same
        numbers again.
        """
        if self.threads is not None:
            return self.threads
        on_gpu = self.torch_device.type == "cuda"
        few = on_gpu or all(work(network) < LIGHT for network in networks)
        return 1 if few else torch.get_num_threads()

    def notes(self, networks: Iterable[Model]) -> list[str]:
        """What is not computed as asked for, or not as fast as it could be."""
        return [*self._about_an_old_gpu(), *self._about_precision(networks)]

    def _about_an_old_gpu(self) -> list[str]:
        device = self.torch_device
        if not gpu.is_too_old(device):
            return []
        has, needs = (f"{one}.{other}" for one, other in (gpu.capability(device), gpu.LEAST))
        return [
            f"{torch.cuda.get_device_name(device)} has compute capability {has}, and kernels of "
            f"fedstill are for {needs} and later; torch's own operations are used, which are slower"
        ]

    def _about_precision(self, networks: Iterable[Model]) -> list[str]:
        if self.precision not in precision.HALVES:
            return []
        if self.torch_device.type != "cuda":
            return ["half precision is for a GPU; on a CPU all is single precision"]
        names = sorted({net.title for net in networks if not net.takes_half})
        return [f"{name}: not in half precision here, but as with tf32" for name in names]

    @contextmanager
    def applied(self, networks: Iterable[Model]) -> Iterator[None]:
        """Every process-wide switch set as these networks need it; at the end, as it was before."""
        device = self.torch_device
        with ExitStack() as restored:
            restored.enter_context(precision.using(self.precision))
            restored.enter_context(precision.as_written(device.type))
            restored.enter_context(deterministic())
            restored.enter_context(threads(self.chosen_threads(networks)))
            restored.enter_context(memory_kept())
            if device.type == "cuda" and device.index is not None:
                restored.enter_context(torch.cuda.device(device))  # where what names none lands
            yield


def engine_of(
    experiment: Experiment,
    execution: Execution,
    *,
    cache: Cache | None = None,
    absences: Absences | None = None,
) -> InProcess:
    """The engine that an execution asks for, ready to play an experiment."""
    kind = ENGINES[execution.engine_name(experiment.networks)]
    return kind(experiment, execution, cache=cache, absences=absences)


@contextmanager
def deterministic() -> Iterator[None]:
    """Convolutions that give the same numbers again, so that runs with one seed are equal."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for an operation on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_faults(name: str) -> list[str]:
    """What is wrong with the name of a device, here."""
    if name == AUTO:
        return []
    try:
        device = torch.device(name)
    except RuntimeError:
        return [f"device = {name!r}: use auto, cpu, cuda or cuda:0"]
    if device.type not in ("cpu", "cuda"):
        return [f"device = {name!r}: use auto, cpu, cuda or cuda:0"]
    if device.type == "cuda" and not torch.cuda.is_available():
        return [f"device = {name!r}, but there is no CUDA device; use auto or cpu"]
    return []


@torch.no_grad()
def work(network: Model) -> float:
    """Multiplications and additions of a network for one example."""
    weights = {name: torch.zeros(law.shape) for name, law in network.initial().items()}
    # One alone has no batch statistics; tokens of 0 are often nothing but padding.
    two = torch.full((2, *network.shape), float(network.tokens))
    return operations(lambda: network(weights, two)) / 2


def is_slight(network: Model) -> bool:
    """Whether a step of this network on a CPU is mostly the calls of its operations.

    One that cannot be stacked, such as an LSTM, gains nothing from a stack, or fails in it.
    """
    matrices = all(len(law.shape) <= 2 for law in network.initial().values())
    return matrices and work(network) < SLIGHT and network.stackable
