"""Federated learning by distillation.

    import fedstill

    data = fedstill.split(x, y, partition=fedstill.Dirichlet(10, alpha=0.5))
    population = fedstill.Population(data, Net)  # any torch.nn.Module
    runs = [
        fedstill.run(fedstill.Experiment(method, population, rounds=10))
        for method in (fedstill.FedAvg(), fedstill.FedDM())
    ]
    fedstill.compare(runs)
    fedstill.plot(runs, "accuracy.png")

Names are fetched from their rooms when they are asked for, so that `import fedstill` is quick.
Whole rooms can be asked for too, such as `fedstill.data`, `fedstill.metrics` or, for authors of
methods, `fedstill.testing`.
"""

# Where each name lives. __init__.pyi says the same to type checkers; a test compares the two.
# One text for each room: what is quick to import is what is quick to read.
_HOMES = {
    "fedstill.runs.run": "Run compare plot read run",
    "fedstill.federation.clock": "Clock LogNormal Uniform",
    "fedstill.federation.experiment": "Experiment",
    "fedstill.federation.population": "Population",
    "fedstill.federation.run": "Progress",
    "fedstill.privacy.privacy": "Privacy",
    "fedstill.federation.topology": (
        "TOPOLOGIES Complete ErdosRenyi Exponential Grid RandomRegular Ring SmallWorld Star "
        "Topology Torus"
    ),
    "fedstill.federation.sampling": "Everyone Sample Scripted",
    "fedstill.engines.execution": "ENGINES Execution",
    "fedstill.data": (
        "DATASETS PARTITIONS ClassesPerClient Collection Dirichlet DirichletPrior Domains "
        "FromFile Iid NIIDBench Partition QuantitySkew clients load split unlabelled"
    ),
    "fedstill.methods": (
        "METHODS DFRD FCCL VHL Centralised DeSA Dense DynaFed FedAvg FedDF FedDM FedDropout "
        "FedDualMatch FedFTG FedGen FedHe FedLGD FedNova FedProto FedProx FedRolex HeteroFL Local "
        "Moon Scaffold"
    ),
    "fedstill.models": "MLP MODELS AlexNet Conv4 ConvNet Module PreResNet18 ResNet18",
    "fedstill.channels": "CHANNELS Channel EightBit Half LowRank TensorChannel TopK",
    "fedstill.core": (
        "SERVER SGD Adam Addressed Batch Data Inbox Message Method Model Node NodeId Place "
        "Positional State Step Weights at_clients at_server minimize "
        "minimize_further"
    ),
    "fedstill.core.errors": "FedstillError",
}
_HOME = {name: room for room, names in _HOMES.items() for name in names.split()}
_ROOMS = (
    "channels", "core", "data", "engines", "federation", "logbook", "methods", "metrics", "models",
    "parts", "recipe", "report", "runs", "testing", "wire",
)  # fmt: skip

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _ROOMS:
        return import_module(f"fedstill.{name}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(_unknown(name), name=name, obj=None)  # Python adds no second hint
    globals()[name] = value  # the next time it is here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedstill")
    except PackageNotFoundError:
        return "0"  # run from its source


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    spelled = {known.casefold(): known for known in _HOME}  # papers write SCAFFOLD
    near = get_close_matches(name.casefold(), spelled, n=1, cutoff=0.6)
    hint = f"; did you mean {spelled[near[0]]!r}?" if near else ""
    return f"module 'fedstill' has no attribute {name!r}{hint}"
