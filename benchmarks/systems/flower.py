"""Federated averaging by Flower's simulation, with its own strategy and message types."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from systems.plain import train
from work import Rounds, Work, accuracy, load, network

VERSIONS = ("flwr", "ray", "torch")


def run(work: Work) -> dict[str, object]:
    found: dict[str, object] = {}
    on_gpu = work.device.startswith("cuda")
    resources = {"num_cpus": 1, "num_gpus": work.gpu_share if on_gpu else 0.0}
    run_simulation(
        server_app=server(work, found),
        client_app=client(work),
        num_supernodes=work.clients,
        backend_config={"client_resources": resources, "init_args": {"include_dashboard": False}},
    )
    if not found:
        raise RuntimeError("the simulation ended without a result")
    return found


def client(work: Work) -> ClientApp:
    app = ClientApp()

    @app.train()
    def learn(message: Message, context: Context) -> Message:
        arrays, count = message.content["arrays"], 1
        model = network(work)
        model.load_state_dict(arrays.to_torch_state_dict())
        if work.data is not None:
            x, y = load(work.data, work.device).of(int(context.node_config["partition-id"]))
            train(model, x, y, work)
            count = len(y)
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": count}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server(work: Work, found: dict[str, object]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(work.seed)
        model, rounds = network(work), Rounds(work)

        def after(number: int, arrays: ArrayRecord) -> MetricRecord:
            """Called before the first round and after each: the times are taken here."""
            if number:
                rounds.end()
            if number == work.rounds:
                model.load_state_dict(arrays.to_torch_state_dict())
                found.update(rounds.result(accuracy(model, work)))
            else:
                rounds.begin()
            return MetricRecord({"round": number})

        strategy = FedAvg(
            fraction_train=work.awake / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.awake,
            min_evaluate_nodes=0,
            min_available_nodes=work.clients,
        )
        strategy.start(grid, ArrayRecord(model.state_dict()), work.rounds, evaluate_fn=after)

    return app
