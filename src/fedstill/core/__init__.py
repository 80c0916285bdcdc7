"""The words a method is written in; imports torch and the standard library only."""

from fedstill.core import algebra, seeds, trees
from fedstill.core.data import Batch, Batches, Data, Lazy, Pool
from fedstill.core.loop import Loop, minimize, minimize_further, side_by_side
from fedstill.core.method import Method, Place, Scored, Step, at_clients, at_server
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.optim import SGD, Adam, Schedule, scheduled
from fedstill.core.records import Change, Exact, Message, NodeId, Positional, Record, State, Weights

__all__ = [
    "SERVER",
    "SGD",
    "Adam",
    "Addressed",
    "Batch",
    "Batches",
    "Change",
    "Data",
    "Exact",
    "Inbox",
    "Lazy",
    "Loop",
    "Message",
    "Method",
    "Model",
    "Node",
    "NodeId",
    "Place",
    "Pool",
    "Positional",
    "Record",
    "Schedule",
    "Scored",
    "State",
    "Step",
    "Weights",
    "algebra",
    "at_clients",
    "at_server",
    "minimize",
    "minimize_further",
    "scheduled",
    "seeds",
    "side_by_side",
    "trees",
]
