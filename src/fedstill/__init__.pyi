# What `import fedstill` gives, for type checkers; __init__.py fetches it when it is asked for.
# A test compares the two.
# ruff: noqa: I001
# fmt: off
from fedstill.runs.run import (
    Run as Run, compare as compare, plot as plot, read as read, run as run,
)
from fedstill.federation.clock import (
    Clock as Clock, LogNormal as LogNormal, Uniform as Uniform,
)
from fedstill.federation.experiment import (
    Experiment as Experiment,
)
from fedstill.federation.population import (
    Population as Population,
)
from fedstill.federation.run import (
    Progress as Progress,
)
from fedstill.privacy.privacy import (
    Privacy as Privacy,
)
from fedstill.federation.topology import (
    TOPOLOGIES as TOPOLOGIES, Complete as Complete, ErdosRenyi as ErdosRenyi,
    Exponential as Exponential, Grid as Grid, RandomRegular as RandomRegular, Ring as Ring,
    SmallWorld as SmallWorld, Star as Star, Topology as Topology, Torus as Torus,
)
from fedstill.federation.sampling import (
    Everyone as Everyone, Sample as Sample, Scripted as Scripted,
)
from fedstill.engines.execution import (
    ENGINES as ENGINES, Execution as Execution,
)
from fedstill.data import (
    DATASETS as DATASETS, PARTITIONS as PARTITIONS, ClassesPerClient as ClassesPerClient,
    Collection as Collection, Dirichlet as Dirichlet, DirichletPrior as DirichletPrior,
    Domains as Domains, FromFile as FromFile, Iid as Iid, NIIDBench as NIIDBench,
    Partition as Partition, QuantitySkew as QuantitySkew, clients as clients, load as load,
    split as split, unlabelled as unlabelled,
)
from fedstill.methods import (
    METHODS as METHODS, DFRD as DFRD, FCCL as FCCL, VHL as VHL, Centralised as Centralised,
    DeSA as DeSA, Dense as Dense, DynaFed as DynaFed, FedAvg as FedAvg, FedDF as FedDF,
    FedDM as FedDM, FedDropout as FedDropout, FedDualMatch as FedDualMatch, FedFTG as FedFTG,
    FedGen as FedGen, FedHe as FedHe, FedLGD as FedLGD, FedNova as FedNova,
    FedProto as FedProto, FedProx as FedProx, FedRolex as FedRolex, HeteroFL as HeteroFL,
    Local as Local, Moon as Moon, Scaffold as Scaffold,
)
from fedstill.models import (
    MLP as MLP, MODELS as MODELS, AlexNet as AlexNet, Conv4 as Conv4, ConvNet as ConvNet,
    Module as Module, PreResNet18 as PreResNet18, ResNet18 as ResNet18,
)
from fedstill.channels import (
    CHANNELS as CHANNELS, Channel as Channel, EightBit as EightBit, Half as Half,
    LowRank as LowRank, TensorChannel as TensorChannel, TopK as TopK,
)
from fedstill.core import (
    SERVER as SERVER, SGD as SGD, Adam as Adam, Addressed as Addressed, Batch as Batch,
    Data as Data, Inbox as Inbox, Message as Message, Method as Method, Model as Model,
    Node as Node, NodeId as NodeId, Place as Place, Positional as Positional, State as State,
    Step as Step, Weights as Weights, at_clients as at_clients, at_server as at_server,
    minimize as minimize, minimize_further as minimize_further,
)
from fedstill.core.errors import (
    FedstillError as FedstillError,
)
from fedstill import (
    channels as channels, core as core, data as data, engines as engines, federation as
    federation, logbook as logbook, methods as methods, metrics as metrics, models as models,
    parts as parts, recipe as recipe, report as report, runs as runs, testing as testing, wire
    as wire,
)
# fmt: on

__version__: str
__all__: list[str]
