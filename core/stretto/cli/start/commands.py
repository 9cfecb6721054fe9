"""Commands that start a run, or check its file."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import arguments
from stretto.errors import ConfigError

app = typer.Typer()


@app.command(cls=arguments.WithOverrides)
def run(
    file: arguments.RunFile,
    overrides: arguments.Overrides = None,
    detach: arguments.Detach = False,
    supervise: arguments.Supervise = False,
    dry_run: arguments.DryRun = False,
    ui: arguments.WithPage = False,
    no_memory_limit: arguments.NoMemoryLimit = False,
) -> None:
    """Train: read the run file, start the run's processes, and show the run until it ends.

    With the launcher of a cluster, submit the run instead. It begins when the cluster starts it.
    """
    from stretto.assembly.assembly import Assembly
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted_start
    from stretto.cli.start.page import page_of
    from stretto.cli.start.submit import submitted_run

    assembly = Assembly(compose(file, overrides or ()))
    folder = assembly.folder
    if ui and (detach or supervise or dry_run):
        raise ConfigError(f"--ui: another process owns this run; start it, then stretto ui {folder}")
    if submitted_run(assembly, file, overrides or (), dry_run=dry_run):
        if ui:
            typer.echo(f"--ui: the run begins elsewhere; stretto ui {folder} shows it", err=True)
        return
    if detach or supervise:
        if (folder / "config.yaml").exists():
            raise ConfigError(f"{assembly.composed.place('out')}: {folder} already holds a run", path="out")
        words = ["run", str(file), *(overrides or ()), f"out={folder}"]
        words += ["--no-memory-limit"] if no_memory_limit else []
        _apart(words, folder, [], detach, supervise)
        return
    with accepted_start(assembly, memory_limit=not no_memory_limit) as forks, page_of(folder, serve=ui):
        from stretto.runs.life import run_to_end

        status = run_to_end(assembly, forks)
    raise typer.Exit(status)


@app.command(cls=arguments.WithOverrides)
def quickstart(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="A folder to make, or an empty one.")
    ] = "quickstart",
    overrides: arguments.Overrides = None,
    ui: arguments.WithPage = False,
) -> None:
    """Copy the quickstart into FOLDER and run it: a first run, on this machine's CPU."""
    from stretto.assembly.assembly import Assembly
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted_start
    from stretto.cli.start.page import page_of
    from stretto.cli.start.quickstart import copy_quickstart

    if "=" in folder:  # `stretto quickstart steps=2`
        folder, overrides = "quickstart", [folder, *(overrides or ())]
    with ExitStack() as stack:
        with copy_quickstart(Path(folder)) as file:
            assembly = Assembly(compose(file, overrides or ()))
            forks = stack.enter_context(accepted_start(assembly))
        again = shlex.join(["stretto", "run", str(file), *(overrides or ())])
        typer.echo(f"the quickstart is in {folder}; to run it again: {again}", err=True)
        from stretto.runs.life import run_to_end

        stack.enter_context(page_of(assembly.folder, serve=ui))
        status = run_to_end(assembly, forks)
    raise typer.Exit(status)


@app.command(cls=arguments.WithOverrides)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    overrides: arguments.Overrides = None,
    trust_plugins: arguments.TrustPlugins = False,
    accept_dataset: Annotated[
        bool, typer.Option("--accept-dataset", help="Continue although the rows of a dataset have changed.")
    ] = False,
    expire_batch: Annotated[
        bool,
        typer.Option(
            "--expire-batch", help="Expire the groups of the batch under way, which ends the trainers."
        ),
    ] = False,
    detach: arguments.Detach = False,
    supervise: arguments.Supervise = False,
    dry_run: arguments.DryRun = False,
) -> None:
    """Resume a run from its newest checkpoint and its journal. Overrides change its values.

    With the launcher of a cluster, the resumption becomes a submitted job.
    """
    from stretto.assembly.trust import require_trust
    from stretto.cli.start.submit import submitted_resume
    from stretto.kernel.durable.changes import (
        assemble_in_force,
        compose_changes,
        newest_values,
        put_into_force,
    )

    folder = folder.absolute()
    require_trust(folder, trusted=trust_plugins)
    options = {
        "--trust-plugins": trust_plugins,
        "--accept-dataset": accept_dataset,
        "--expire-batch": expire_batch,
    }
    chosen = [option for option, is_chosen in options.items() if is_chosen]
    values, assembly = newest_values(folder), assemble_in_force(folder)
    if submitted_resume(assembly, overrides or (), chosen, dry_run=dry_run):
        return
    if detach or supervise:
        later = [option for option in chosen if option != "--expire-batch"]
        words = ["resume", str(folder), *(overrides or ()), *chosen]
        _apart(words, folder, later, detach, supervise, overrides or ())
        return
    from stretto.cli.start.acceptance import accepted
    from stretto.runs.life import owned, resume_to_end

    with owned(folder):
        if newest_values(folder) != values:  # another process changed them before this one owned the run
            assembly = assemble_in_force(folder)
        if overrides:
            assembly = accepted(compose_changes(assembly, overrides), starting=True, resumed=True)
            put_into_force(folder, assembly.composed)
        status = resume_to_end(assembly, accept_dataset=accept_dataset, expire_batch=expire_batch)
    raise typer.Exit(status)


@app.command(cls=arguments.WithOverrides)
def check(
    file: arguments.RunFile,
    overrides: arguments.Overrides = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print only the algorithm's dataflow, as text.")
    ] = False,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print only the dataflow, as a Mermaid flowchart.")
    ] = False,
    no_memory_limit: arguments.NoMemoryLimit = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, metavar="GIB", help="Memory of each GPU, for a machine that is not this one."),
    ] = None,
) -> None:
    """Check a run file, and print the run's processes, models and batches. No worker starts."""
    from stretto.assembly.assembly import Assembly
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted
    from stretto.cli.start.checks import faults_and_warnings
    from stretto.cli.start.describe import describe

    gpu_bytes = None if gpu_memory is None else int(gpu_memory * 2**30)
    composed = compose(file, overrides or ())
    draft = Assembly(composed, folder="", gpu_bytes=gpu_bytes)  # nothing is counted to decide its values
    if faults_and_warnings(draft, starting=False, resumed=True, trials=False)[0]:
        accepted(draft, starting=False, resumed=True, trials=False)
    assembly = Assembly(composed, gpu_bytes=gpu_bytes)
    accepted(assembly, starting=False, memory_limit=not no_memory_limit)
    if mermaid:
        typer.echo(assembly.graph.mermaid())
    elif graph:
        typer.echo(assembly.graph.text())
    else:
        typer.echo(describe(assembly))


def _apart(
    words: Sequence[str],
    folder: Path,
    options: Sequence[str],
    detach: bool,
    supervise: bool,
    overrides: Sequence[str] = (),
) -> None:
    from stretto.cli.start import supervise as supervisor
    from stretto.cli.start.detach import run_detached

    if not detach:
        raise typer.Exit(supervisor.supervise(words, folder, options, overrides))
    process = run_detached([*words, *(["--supervise"] if supervise else [])], folder)
    where = shlex.quote(str(folder))
    typer.echo(f"the run in {folder} trains (pid {process}); follow it: stretto watch {where}")
    typer.echo(f"in a browser: stretto ui {where}; its log: stretto logs -f {where}")
    typer.echo(f"to end it: stretto stop {where}")
