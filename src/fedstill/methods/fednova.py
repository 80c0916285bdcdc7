"""FedNova: FedAvg with updates normalised by each client's number of steps.

Wang, Liu, Liang, Joshi, Poor. Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020. Equations 6 to 8, with momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedstill.core import Inbox, Message, Node, NodeId, Weights, algebra, at_clients, at_server
from fedstill.core.content import Amount
from fedstill.core.records import is_buffer
from fedstill.methods import fedavg
from fedstill.methods.fedavg import Down, FedAvg, Global, Own


class Up(fedavg.Up):
    """Where a client came to, how many examples it has, how many steps it took."""

    steps: Amount


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Each client's way is divided by its own length before the mean is taken."""

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train on local examples from the global weights; count the steps actually taken."""
        weights, steps = await self.trained(client, inbox.only().weights)
        if self.score_own:
            client.state = Own(weights)
        return Up(weights, len(client.data), steps)

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """w ← w - (Σ p_i a_i) · Σ p_i (w - w_i) / a_i; statistics are averaged as they are."""
        ups = list(inbox.values())
        if self.aggregation != "mean":
            server.state = Global(self.joined_ways(server.state.weights, ups))
            return
        shares, lengths = self.shares(ups), [self.path_length(up.steps) for up in ups]
        if not any(p * a for p, a in zip(shares, lengths, strict=True)):  # nobody has learnt
            return
        shares = normalised(shares)
        effective = sum(p * a for p, a in zip(shares, lengths, strict=True))
        start = server.state.weights
        ways = [algebra.sub(start, up.weights) for up in ups]
        rates = [p / a if a else 0.0 for p, a in zip(shares, lengths, strict=True)]
        moved = algebra.add(start, algebra.mean(ways, rates), -effective * sum(rates))
        plain = algebra.mean([up.weights for up in ups], shares)
        server.state = Global({n: plain[n] if is_buffer(n) else moved[n] for n in start})

    def joined_ways(self, start: Weights, ups: Sequence[Up]) -> Weights:
        """w - (median of a_i) · what a robust rule makes of (w - w_i) / a_i; statistics as sent."""
        lengths = [self.path_length(up.steps) for up in ups]
        rates = [1 / length if length else 0.0 for length in lengths]
        pairs = zip(ups, rates, strict=True)
        ways = [algebra.scale(algebra.sub(start, up.weights), rate) for up, rate in pairs]
        moved = algebra.add(start, self.joining.joined(ways), -median(lengths))
        plain = self.averaged(start, ups)
        return {name: plain[name] if is_buffer(name) else moved[name] for name in start}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        why = super().wrong(node, sender, message)
        if why or not isinstance(message, Up):
            return why
        most = self.epochs * self.in_a_pass(message.examples)
        most = most if self.round_steps is None else self.round_steps
        if message.steps > most:
            return f"sent steps = {message.steps}, but {message.examples} examples make {most}"
        return None

    def path_length(self, steps: int) -> float:
        """a_i: how far `steps` of unit gradients carry under momentum; `steps` without it."""
        m = self.momentum
        return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m) if m else float(steps)


def normalised(shares: Sequence[float]) -> list[float]:
    """Shares that sum to one."""
    return [share / sum(shares) for share in shares]
