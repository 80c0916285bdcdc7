"""The words a method is written in; imports torch and the standard library only."""

from fedstill.core import algebra, seeds, trees
from fedstill.core.data import Batch, Batches, Data, Made, Pool
from fedstill.core.loop import Loop, minimize
from fedstill.core.method import Method, Place, Step, at_clients, at_server
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.optim import SGD, Adam, Fall, falling
from fedstill.core.records import Message, NodeId, Positional, Record, State, Weights

__all__ = [
    "SERVER", "SGD", "Adam", "Addressed", "Batch", "Batches", "Data", "Fall", "Inbox", "Loop",
    "Made", "Message", "Method", "Model", "Node", "NodeId", "Place", "Pool", "Positional",
    "Record", "State", "Step", "Weights", "algebra", "at_clients", "at_server", "falling",
    "minimize", "seeds", "trees",
]  # fmt: skip
