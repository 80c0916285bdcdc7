"""The command that measures: bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form
from fedstill.commands.options import Listing


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Benchmarks to run, or all; the usual four by default."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:0.")
    ] = "auto",
    repeat: Annotated[
        int, typer.Option(metavar="N", help="Repetitions that are measured.", min=1)
    ] = 5,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the raw numbers.")] = Path(
        "runs/bench"
    ),
    small: Annotated[
        bool | None,
        typer.Option(
            "--small/--full",
            help="Sizes of networks and data.  [default: full on CUDA, small on a CPU]",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this engine; may be repeated.")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this precision; may be repeated.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Also with engine.compile, which takes minutes.")
    ] = False,
    form: Listing = Form.table,
) -> None:
    """Measure how fast fedstill is on this machine: time of a step, spread, memory."""
    from fedstill.commands import bench as benches
    from fedstill.commands.bench_work import BENCHMARKS
    from fedstill.engines.execution import Execution
    from fedstill.runs import recipes as runs

    wanted = benches.chosen(names or [])
    where = Execution(device=device).torch_device
    reduced = where.type == "cpu" if small is None else small
    sizes = {name: BENCHMARKS[name].sizes(reduced) for name in wanted}
    only = benches.Wanted(tuple(engine or ()), tuple(precision or ()), compile)
    for name in wanted:  # refused before anything is measured
        only.cases(name, sizes[name], where)
    target = runs.fresh_folder(out)
    results = []
    for name in wanted:
        for so_far in benches.as_measured(
            name, where, sizes=sizes[name], repeat=repeat, wanted=only
        ):
            benches.write(so_far, target)
        results.append(so_far)
    if form is Form.json:
        listings.print_json(results)
        return
    listings.print_rows(benches.rows(results), form)
    for each in results:
        typer.echo(benches.explained(each))
    typer.echo(f"ms: for what each line says, the median of {repeat}; raw numbers → {target}")
