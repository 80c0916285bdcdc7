"""The line between processes that torchrun started; no knowledge of what is said on it.

It is for a simulation on machines that trust each other: nothing on it is encrypted, and nobody
is asked who they are.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fedstill.core.errors import RankError
from fedstill.engines.ranks.letters import as_bytes, as_tensor
from fedstill.engines.ranks.protocol import Disconnected

PATIENCE = timedelta(days=365)  # a rank that dies is noticed at once; a long step is no fault
CHUNK = 1 << 30  # bytes sent at once


class Gloo:
    """The line between processes that torchrun started: torch.distributed on the host."""

    one_job = True

    def __init__(self, local_rank: int = 0) -> None:
        try:
            dist.init_process_group("gloo", timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"the ranks of this job do not find each other: {error}; start it with torchrun, "
                "or unset RANK and WORLD_SIZE to run alone"
            ) from error
        self.rank, self.size, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank

    def send(self, rank: int, data: bytes) -> None:
        try:
            dist.send(torch.tensor([len(data)]), rank)
            for part in torch.split(as_tensor(data), CHUNK):
                dist.send(part, rank)
        except RuntimeError as error:
            raise _gone(rank, error) from error

    def receive(self, rank: int, seconds: float | None = None) -> memoryview:
        """What a rank sent next; in one job nobody is late."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(length, rank)
            data = torch.empty(int(length), dtype=torch.uint8)
            for part in torch.split(data, CHUNK):
                dist.recv(part, rank)
        except RuntimeError as error:
            raise _gone(rank, error) from error
        return as_bytes(data)

    def close(self) -> None:
        """Leave the job."""
        dist.destroy_process_group()


def _gone(rank: int, error: Exception) -> Disconnected:
    return Disconnected(
        f"rank {rank} has ended without a word ({str(error).splitlines()[0]}); see what its "
        "machine says, then go on with `fedstill resume`"
    )
