"""The command line: `stretto COMMAND`. `stretto COMMAND --help` describes a command.

- Start: `quickstart`, `run`, `resume`, `sweep`, `evaluate`.
- For a nats-server of your own: `certs` makes certificates.
- Change a living run: `scale`, `stop`; `worker` joins it, `invite` writes the credentials for that.
- Use a run that is elsewhere: `mirror`.
- See one run: `status`, `watch`, `logs`, `ui`, `plot`, `report`, `samples`, `trace`.
- See several runs: `runs`, `compare`; also `ui`, `plot` and `report`.
- Verify: `check` a run file, `audit` a run that has ended, `replay` its training.
- `track` sends to trackers what they have not received.
- For other programs: `export` writes a run's model, or its samples.
- Describe the installation: `plugins`, `schema`; `doctor` says what is wrong with it.
- Extend it: `new` writes a plugin package.

Exit status: 0 the command succeeded; 1 a run failed, or an audit found violations; 2 a mistake was found
before the run started a worker, or a run cannot be audited; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
from typer.core import TyperCommand

from stretto.errors import ConfigError, PluginError, StrettoError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from stretto.cli.audit.audit import AuditReport
    from stretto.cli.make.doctor import Observation
    from stretto.cli.make.evaluate import Result
    from stretto.component import Kind
    from stretto.records.run import RunRecord

__all__ = ["main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (YAML).")]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Return when the run trains; it goes on in the background."),
]
TrustPlugins = Annotated[
    bool,
    typer.Option("--trust-plugins", help="Import the plugin files of a run that another user owns."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values that override keys of the run file, for example queue.max_staleness=0.",
    ),
]
EvaluationOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values that override keys of the run file, for example inference.slots=64.",
    ),
]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be submitted to the cluster, and stop.")
]

RunOrViewer = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_VIEWER", help="A run's folder, or a copy of its bus/viewer.json."),
]
ElsewhereUrl = Annotated[
    str | None,
    typer.Option(
        "--url", help="Without the run's folder: address of nats-server as it is reached from here."
    ),
]
ElsewhereLogin = Annotated[
    str | None,
    typer.Option(
        "--credentials", help="Without the run's folder: login for a server of your own.", metavar="FILE"
    ),
]
ElsewhereCertificate = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="Without the run's folder: certificate for a server of your own, beside its key NAME.key.",
        metavar="NAME.pem",
    ),
]

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs.")
]

_MOST_VIOLATIONS = 20
"""Maximum number of violations of one check that the table's text lists."""


def main() -> None:
    """Entry point of the `stretto` command. Only this user can read the files that it and its workers
    write."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))  # until a run sets its own handler
    try:
        app()
    except (ConfigError, PluginError) as error:
        _fail(error, 2)
    except StrettoError as error:
        _fail(error, 1)


class _WithOverrides(TyperCommand):
    """A command that takes `key=value`. It refuses `--steps=3` and says what to write instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from stretto.config import RunConfig

        options = {name for parameter in self.params for name in parameter.opts}
        for item, after in pairwise([*args, "VALUE"]):
            option, equals, value = item.partition("=")
            key = option.removeprefix("--")
            is_key = key.split(".")[0] in RunConfig.__struct_fields__
            if option.startswith("--") and option not in options and is_key:
                raise ConfigError(
                    f"no option {option!r}: keys of the run file are written without dashes; "
                    f"write {key}={value if equals else after}"
                )
        return super().parse_args(ctx, args)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"stretto {version('stretto')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models, composed from plugins."""


@app.command(cls=_WithOverrides)
def run(file: RunFile, overrides: Overrides = None, detach: Detach = False, dry_run: DryRun = False) -> None:
    """Train: read the run file, start the run's processes, and show the run until it ends.

    With the launcher of a cluster, submit the run instead. It begins when the cluster starts it.
    """
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted_start
    from stretto.cli.start.submit import submitted_run

    composed = compose(file, overrides or ())
    if submitted_run(composed, file, overrides or (), dry_run=dry_run):
        return
    if detach:
        from stretto.assembly.plan import run_folder

        folder = run_folder(composed.config)
        if (folder / "config.yaml").exists():
            raise ConfigError(f"{composed.place('out')}: {folder} already holds a run", path="out")
        _detach(["run", str(file), *(overrides or ()), f"out={folder}"], folder)
        return
    with accepted_start(composed) as (folder, forks):
        from stretto.kernel.life import run_to_end

        status = run_to_end(composed, folder, forks)
    raise typer.Exit(status)


@app.command(cls=_WithOverrides)
def quickstart(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="A folder to make, or an empty one.")
    ] = "quickstart",
    overrides: Overrides = None,
) -> None:
    """Copy the quickstart into FOLDER and run it: a first run, on this machine's CPU."""
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted_start
    from stretto.cli.start.quickstart import copy_quickstart

    if "=" in folder:  # `stretto quickstart steps=2`
        folder, overrides = "quickstart", [folder, *(overrides or ())]
    with ExitStack() as stack:
        with copy_quickstart(Path(folder)) as file:
            composed = compose(file, overrides or ())
            out, forks = stack.enter_context(accepted_start(composed))
        again = shlex.join(["stretto", "run", str(file), *(overrides or ())])
        typer.echo(f"the quickstart is in {folder}; to run it again: {again}", err=True)
        from stretto.kernel.life import run_to_end

        status = run_to_end(composed, out, forks)
    raise typer.Exit(status)


@app.command(cls=_WithOverrides)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    overrides: Overrides = None,
    trust_plugins: TrustPlugins = False,
    accept_dataset: Annotated[
        bool, typer.Option("--accept-dataset", help="Continue although the rows of a dataset have changed.")
    ] = False,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Resume a run from its newest checkpoint and its journal. Overrides change its values.

    With the launcher of a cluster, submit the run instead.
    """
    from stretto.cli.start.submit import submitted_resume
    from stretto.cli.start.trust import require_trust

    folder = folder.absolute()
    require_trust(folder, trusted=trust_plugins)
    options = {"--trust-plugins": trust_plugins, "--accept-dataset": accept_dataset}
    chosen = [option for option, is_chosen in options.items() if is_chosen]
    if submitted_resume(folder, overrides or (), chosen, dry_run=dry_run):
        return
    if detach:
        if not (folder / "config.yaml").exists():
            raise ConfigError(f"{folder} holds no run: it has no config.yaml")
        _detach(["resume", str(folder), *(overrides or ()), *chosen], folder)
        return
    from stretto.cli.start.acceptance import accepted
    from stretto.kernel.durable.changes import compose_changes, put_into_force
    from stretto.kernel.life import owned, resume_to_end

    with owned(folder):
        if overrides:
            changed = accepted(compose_changes(folder, overrides), starting=True, resumed=True)
            put_into_force(folder, changed)
        status = resume_to_end(folder, accept_dataset=accept_dataset)
    raise typer.Exit(status)


@app.command()
def scale(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a living run.")],
    numbers: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=N...", help="rollout=6, inference=3, verifier=2; training=2 for ranks."),
    ],
) -> None:
    """Change how many processes a living run has. New workers start; those that leave finish their work."""
    from stretto.assembly.logs import log_nothing
    from stretto.cli.make.operate import numbers_of, scale_run

    log_nothing()
    for line in scale_run(folder.absolute(), numbers_of(numbers)):
        typer.echo(printable(line))


@app.command()
def stop(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a living run.")],
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
) -> None:
    """End a living run: it finishes the step under way and writes a checkpoint. `stretto resume` continues
    it."""
    from stretto.assembly.logs import log_nothing
    from stretto.cli.make.operate import stop_run

    log_nothing()
    typer.echo(printable(stop_run(folder.absolute(), now=now)))


@app.command(cls=_WithOverrides)
def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that has ended.")],
    overrides: Overrides = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="N", help="Begin at the checkpoint of version N; default the initial models."
        ),
    ] = None,
    stop: Annotated[
        int | None, typer.Option("--to", min=1, metavar="N", help="The last step to train; default the last.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder to make; default RUN-replay.", metavar="FOLDER")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Train the recorded steps of a run again from its kept samples, and compare the weights.

    Nothing is generated. Without overrides the weights are the same bit for bit, on the same machine. Exit
    status: 0 the replay is complete, and without overrides identical; 1 it differs, or failed.
    """
    from stretto.cli.audit.replay import ReplayOptions, replay_run
    from stretto.cli.audit.replay_report import report_lines, report_tables
    from stretto.cli.start.trust import require_trust

    require_trust(folder.absolute(), trusted=trust_plugins)
    replayed = replay_run(folder, ReplayOptions(start, stop, out), overrides or ())
    if replayed.report is None:
        from stretto.kernel.life import exit_status
        from stretto.kernel.observe.view import final_lines

        typer.echo(final_lines(replayed.summary, replayed.folder), err=True)
        raise typer.Exit(exit_status(replayed.summary))
    if as_json:
        typer.echo(msgspec.json.encode(replayed.report))
    else:
        for title, table in report_tables(replayed.report):
            typer.echo(title)
            _print_table(table)
        typer.echo("\n".join(map(printable, [*report_lines(replayed.report), f"see {replayed.folder}"])))
    raise typer.Exit(0 if overrides or replayed.report.difference is None else 1)


@app.command(cls=_WithOverrides)
def sweep(
    file: RunFile,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE,VALUE...]...",
            help="Values of keys of the run file, for example training.lr=1e-4,3e-4. A key with one value "
            "has it in every run.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds: every combination of values runs with each.", metavar="1,2,3")
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            help="Most runs at once; auto: as many as this machine has cores, memory and GPUs for.",
            metavar="auto|N",
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="The sweep's folder; default runs/sweep-NAME.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Train with every combination of values and seeds, and compare the results.

    Each run has its own processes and its own folder. The same command again skips complete runs, resumes
    others, and begins the rest; other values extend the sweep.
    """
    from stretto.cli.sweep.sweep import Sweep, default_folder
    from stretto.cli.sweep.sweep_grid import grid
    from stretto.cli.sweep.sweep_report import report_of, report_tables, write_report
    from stretto.cli.sweep.sweep_view import SweepView

    if jobs != "auto" and not (jobs.isdecimal() and int(jobs)):
        raise ConfigError(f"--jobs {jobs}: expected auto, or a number of runs of at least 1")
    runs = grid(values or (), seeds)
    folder = (out or default_folder(file, runs[0])).expanduser().absolute()
    planned = Sweep(file, runs, folder)
    planned.check(lambda warning: typer.echo(f"warning: {printable(warning)}", err=True))
    view = SweepView(folder, list(planned.runs))
    exit_status = planned.run(None if jobs == "auto" else int(jobs), view)
    report = report_of(folder, planned.planned())
    write_report(folder, report)
    for title, table in report_tables(report):
        typer.echo(title)
        _print_table(table)
        typer.echo("")
    if exit_status == 130:
        typer.echo("interrupted; the same command again goes on")
    typer.echo(f"see {folder}")
    raise typer.Exit(exit_status)


@app.command(cls=_WithOverrides)
def evaluate(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, a model folder, or a hub id.")
    ],
    overrides: EvaluationOverrides = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Held-out rows: a .jsonl file, or the name of a dataset component.", metavar="FILE_OR_NAME"
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Reward component that scores the answers.", metavar="NAME")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Answers to each row.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one answer.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Evaluate only this many rows, the first.")] = None,
    inference: Annotated[
        str | None, typer.Option(help="Inference engine that samples the answers.", metavar="NAME")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="Version or checkpoint of the run to evaluate; by default the newest checkpoint."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="An answer with at least this score passes.")] = 1.0,
    out: Annotated[str | None, typer.Option(help="Folder for the results.", metavar="FOLDER")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.", metavar="FILE")
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Evaluate a model, or a checkpoint of a run: avg@n and pass@k with 95 % intervals."""
    from stretto.cli.make.evaluate import EvaluationOptions, compose_evaluation, run_evaluation
    from stretto.cli.start.acceptance import accepted_start
    from stretto.cli.start.trust import require_trust

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: no folder {str(json_file.absolute().parent)!r}")
    if (Path(source) / "config.yaml").is_file():
        require_trust(Path(source).absolute(), trusted=trust_plugins)
    evaluation = EvaluationOptions(version, dataset, reward, n, temperature, max_tokens, rows, inference, out)
    composed = compose_evaluation(source, evaluation, overrides or ())
    with accepted_start(composed) as (folder, forks):
        result, summary = run_evaluation(composed, folder, forks, threshold)
    if result is None:
        from stretto.kernel.life import exit_status
        from stretto.kernel.observe.view import final_lines

        typer.echo(final_lines(summary, folder), err=True)
        raise typer.Exit(exit_status(summary) or 1)
    if json_file is not None:
        json_file.write_text(json.dumps(summary["result"], indent=1) + "\n")
    _show_result(result, summary["reasons"], folder)


@app.command()
def status(
    source: RunOrViewer,
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Show what a run does now: its step, its workers, and who waits for whom since when."""
    from stretto.assembly.logs import log_nothing
    from stretto.cli.show.status import status_lines, status_lines_over_bus

    _require_begun(source)
    if source.is_file():
        log_nothing()
        typer.echo("\n".join(status_lines_over_bus(source, url, credentials, certificate)))
        return
    _refuse_viewer_options(url, credentials, certificate)
    typer.echo("\n".join(status_lines(source)))


@app.command()
def logs(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until the run has ended.")
    ] = False,
    worker: Annotated[
        str, typer.Option(help="Whose log: the kernel's, or that of a worker such as rollout-0.")
    ] = "kernel",
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Begin this many lines before the end.")
    ] = None,
) -> None:
    """Print the log of a run's kernel, or of one of its workers."""
    from stretto.cli.show.logs import log_lines

    for line in log_lines(folder, worker, newest=lines, follow=follow):
        print(line, flush=follow)


@app.command()
def watch(
    source: RunOrViewer,
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Show the live view of a run that another process owns. `q` ends the view; the run goes on."""
    from stretto.cli.show.watch import watch_bus, watch_folder

    _require_begun(source)
    if source.is_dir():
        _refuse_viewer_options(url, credentials, certificate)
        raise typer.Exit(watch_folder(source))
    raise typer.Exit(watch_bus(source, url, credentials, certificate))


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs, at any depth.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List all runs below a folder, the newest first."""
    from stretto.cli.show.runs import runs_below, runs_table

    rows = runs_below(folder)
    if as_json:
        typer.echo(msgspec.json.encode(rows))
    elif rows:
        _print_table(runs_table(rows, folder.absolute()))
    else:
        typer.echo(f"no run in {folder}")


@app.command()
def plot(
    folders: Runs,
    keys: Annotated[
        str,
        typer.Option(
            "--key", metavar="KEY,…", help="Keys of metrics.jsonl, such as reward,loss,evaluation/accuracy."
        ),
    ] = "",
    window: Annotated[
        int, typer.Option("--smooth", min=1, metavar="STEPS", help="Draw means over this many steps.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Draw into a .png or .svg file.")
    ] = None,
) -> None:
    """Draw the curves of one run, or of several over each other, in the terminal or into a file."""
    from stretto.cli.show.plot import draw_file, draw_text, panels_of

    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    panels = panels_of(_runs_in(folders), wanted, window)
    if out is not None:
        draw_file(panels, out)
        typer.echo(f"drawn: {out}")
        return
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(draw_text(panels, shutil.get_terminal_size((100, 24)).columns, coloured=coloured))


@app.command()
def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A run's folder, or a folder of runs.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback let other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 is any free one.")] = 0,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Certificate for https, beside its key NAME.key.", metavar="NAME.pem"),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen off loopback without TLS: others may read along.")
    ] = False,
) -> None:
    """Show runs in a browser, live or ended: curves, timeline, samples, configuration."""
    import anyio

    from stretto.ui.server import serve

    anyio.run(partial(serve, folder, host, port, typer.echo, certificate=certificate, insecure=insecure))


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default RUN/trace.pftrace.")
    ] = None,
) -> None:
    """Write what happened when into a file for Perfetto (https://ui.perfetto.dev)."""
    from stretto.cli.show.trace import write_trace

    file = out or folder / "trace.pftrace"
    write_trace(folder, file)
    typer.echo(f"wrote {file}; open it at https://ui.perfetto.dev, which reads it in your browser")


@app.command()
def compare(
    folders: Runs,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare runs: figures, values that differ, curves at equal steps, accuracies with 95 % intervals."""
    from stretto.cli.show.compare import comparison_tables
    from stretto.records.comparison import compare_runs

    comparison = compare_runs(_runs_in(folders))
    if as_json:
        typer.echo(msgspec.json.encode(comparison))
        return
    for title, table in comparison_tables(comparison):
        typer.echo(f"\n{printable(title)}")
        _print_table(table)


@app.command()
def report(
    folders: Runs,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write; default report.html."),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or several: curves, evaluations, ledger, advice, values.

    The file needs no network and no other file.
    """
    from stretto.cli.show.report import write_report

    if out is None and (out := Path("report.html")).exists():
        raise ConfigError(f"{out} exists; name the file to write, or to replace, with --out")
    write_report(_runs_in(folders), out)
    typer.echo(f"written: {out}")


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    ticket: Annotated[
        int | None, typer.Option(min=0, help="Tell the story of this training ticket instead.")
    ] = None,
) -> None:
    """Check that a run that has ended lost no ticket, trained none twice and kept its bounds.

    The audit reads journal, log and checkpoints by itself, from a copy of the run's store. Exit status: 0
    clean, 1 violations, 2 the run cannot be audited.
    """
    from stretto.cli.audit.audit import audit_run
    from stretto.cli.audit.ticket_story import ticket_story

    if ticket is not None:
        try:
            story = ticket_story(folder, ticket)
        except StrettoError as error:
            _fail(error, 2)
        if as_json:
            typer.echo(msgspec.json.encode(story))
        else:
            typer.echo("\n".join(map(printable, [f"ticket {ticket}", *story.events])))
        for violation in story.violations:
            typer.echo(f"error: {printable(violation)}", err=True)
        raise typer.Exit(1 if story.violations else 0)
    try:
        report = audit_run(folder)
    except StrettoError as error:
        _fail(error, 2)
    if as_json:
        typer.echo(msgspec.json.encode(report))
    else:
        _show_audit(report)
    raise typer.Exit(0 if report.status == "clean" else 1)


@app.command()
def track(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that has ended.")],
    trust_plugins: TrustPlugins = False,
) -> None:
    """Send to the run's trackers what they have not received, such as after a time without a network."""
    from stretto.cli.make.track import track_run
    from stretto.cli.start.trust import require_trust

    folder = folder.absolute()
    require_trust(folder, trusted=trust_plugins)
    if failed := track_run(folder):
        raise StrettoError(f"not everything was sent to: {', '.join(failed)}")


@app.command()
def samples(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    ticket: Annotated[
        int | None, typer.Option(min=0, help="Number of the ticket; with --purpose eval, of an evaluation's.")
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="A:B", help="Steps in which they were trained.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="A:B", help="Lowest and highest reward.")] = None,
    length: Annotated[
        str | None, typer.Option(metavar="A:B", help="Number of tokens with the prompt.")
    ] = None,
    staleness: Annotated[str | None, typer.Option(metavar="A:B", help="Staleness at the train step.")] = None,
    finish: Annotated[str | None, typer.Option(help="Why sampling ended: stop or length.")] = None,
    text: Annotated[str | None, typer.Option(help="A text in the prompt or in the answer.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="trained, filtered, expired, failed, evaluated or pending.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="The same as --outcome failed.")] = False,
    purpose: Annotated[str | None, typer.Option(help="Only those of `train`, or of `eval`.")] = None,
    worker: Annotated[str | None, typer.Option(help="Rollout or inference worker.")] = None,
    order: Annotated[
        str, typer.Option(help="For example reward; -reward begins with the highest.")
    ] = "sequence",
    limit: Annotated[int, typer.Option(min=1, help="Most samples to show.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Leave out this many samples first.")] = 0,
    group: Annotated[
        bool, typer.Option("--group", help="Show the whole groups, their samples side by side.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With jsonl and parquet: also tokens, logprobs, versions, …")
    ] = False,
    format: Annotated[str, typer.Option(help="text, jsonl or parquet.")] = "text",
    output: Annotated[Path | None, typer.Option(help="Write to this file.", metavar="FILE")] = None,
) -> None:
    """Show the samples that a run has kept, also while it runs: prompts, answers, rewards, outcomes."""
    from rich.console import Console

    from stretto.cli.show.samples import (
        bounds_of,
        open_samples,
        print_groups,
        print_samples,
        sample_filter,
        why_none,
        write_lines,
        write_parquet,
    )

    if format not in ("text", "jsonl", "parquet"):
        raise ConfigError(f"--format {format!r}: expected text, jsonl or parquet")
    if format == "parquet" and output is None:
        raise ConfigError("--format parquet needs --output FILE")
    if tokens and format == "text":
        raise ConfigError("--tokens goes with --format jsonl or --format parquet")
    wanted = sample_filter(
        ticket=ticket,
        step=bounds_of(step, "--step"),
        reward=bounds_of(reward, "--reward"),
        length=bounds_of(length, "--length"),
        staleness=bounds_of(staleness, "--staleness"),
        finish=finish,
        text=text,
        outcome="failed" if failed else outcome,
        purpose=purpose or (None if ticket is None else "train"),
        worker=worker,
    )
    store = open_samples(folder)
    rows = store.find(wanted, limit=limit, offset=offset, order=order, tokens=tokens)
    if format == "parquet":
        assert output is not None
        write_parquet(rows, output)
        return
    with output.open("w") if output else nullcontext(sys.stdout) as file:
        if format == "jsonl":
            write_lines(rows, lambda line: print(line, file=file))
            return
        console = Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=not group)
        if group:
            print_groups(store, rows, console)
        else:
            print_samples(rows, console)
    if not rows:
        typer.echo(why_none(store, wanted), err=True)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    to: Annotated[
        Path | None,
        typer.Option(help="A folder to make; default RUN's name and the version.", metavar="FOLDER"),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="A version, or a checkpoint's name; default the newest.", metavar="N")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter/--merged", help="Only the LoRA adapter, for peft; or the whole model.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push-to-hub", help="Upload it to this repository of the hub.", metavar="REPOSITORY"),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(help="Export samples instead, as rows for supervised training.", metavar="FILE.jsonl"),
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only samples with at least this reward.")] = None,
    best_of_group: Annotated[
        bool, typer.Option("--best-of-group", help="Only the sample with the highest reward of each group.")
    ] = False,
) -> None:
    """Write a run's model as a folder for transformers or peft, or its samples as rows for supervised
    training."""
    from stretto.cli.make.export import export_model, export_samples, push_to_hub
    from stretto.records.run import RunRecord

    run_record = RunRecord(folder)
    if samples is not None:
        if to or version or adapter or push:
            raise ConfigError(
                "--samples goes with --min-reward and --best-of-group only: it exports no model"
            )
        told = export_samples(folder, samples, min_reward=min_reward, best_of_group=best_of_group)
        typer.echo(
            f"{told.rows} rows in {samples}, {told.with_tokens} of them with tokens, because their text "
            f"makes other tokens; left out: {told.truncated} samples that reached the limit of tokens, "
            f"{told.unusable} with images that a row cannot have"
        )
        return
    if min_reward is not None or best_of_group:
        raise ConfigError("--min-reward and --best-of-group go with --samples FILE.jsonl")
    with TemporaryDirectory() if push and to is None else nullcontext() as temporary:
        target = Path(temporary, "export") if temporary else to
        written = export_model(run_record, version, "adapter" if adapter else "merged", target)
        if not temporary:
            typer.echo(f"see {written}")
        if push:
            typer.echo(f"see {push_to_hub(written, push)}")


@app.command(cls=_WithOverrides)
def check(
    file: RunFile,
    overrides: Overrides = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print only the algorithm's dataflow, as text.")
    ] = False,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print only the dataflow, as a Mermaid flowchart.")
    ] = False,
) -> None:
    """Check a run file, and print the run's processes, models and batches. No worker starts."""
    from stretto.assembly import plan
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted
    from stretto.cli.start.describe import describe

    composed = accepted(compose(file, overrides or ()), starting=False)
    if mermaid:
        typer.echo(plan.graph(composed).mermaid())
    elif graph:
        typer.echo(plan.graph(composed).text())
    else:
        typer.echo(describe(composed))


@app.command()
def plugins(
    kind: Annotated[str | None, typer.Argument(help="List only components of this kind.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show the config of this component.")] = None,
    path: Annotated[list[Path] | None, typer.Option(help="Also load this plugin file.")] = None,
) -> None:
    """List the installed components, or show one component's config keys: types, defaults, meanings."""
    from stretto.assembly.plugins import KINDS, Plugins
    from stretto.errors import nearest

    installed = Plugins()
    for file in path or []:
        installed.add_path(file.resolve())
    if kind is not None and kind not in KINDS:
        raise PluginError(f"no kind {kind!r}{nearest(kind, KINDS)}; kinds: {', '.join(KINDS)}")
    if kind is not None and name is not None:
        _show_component(installed, kind, name)
    else:
        _list_components(installed, kind)


@app.command()
def new(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="Kind of the component, such as reward; or model.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, as run files will have it.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the package. Default: stretto-NAME, here.")
    ] = None,
    characters: Annotated[
        str | None,
        typer.Option(help="For model: the characters of prompts and answers. Default: printable ASCII."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For model: seed of the random weights.")] = 0,
) -> None:
    """Write a plugin package for one component: config, tests, README and CI. It works as it is.

    `stretto new model NAME` writes the folder NAME with a tiny untrained model for a task of your own."""
    from stretto.assembly.plugins import Plugins
    from stretto.cli.make.new import MODEL, new_model, new_package, next_steps

    if kind == MODEL:
        new_model(folder or Path(name), characters, seed)
        typer.echo(
            f"{folder or name} has an untrained model; train it with the algorithm `sft` first", err=True
        )
        return
    package = new_package(kind, name, folder, Plugins())
    typer.echo(f"{package} has the {kind} {name!r}, which works as it is. Try it, then change it:", err=True)
    for command in next_steps(kind, name, package):
        typer.echo(f"  {command}", err=True)


@app.command()
def doctor(
    distributions: Annotated[
        list[str] | None,
        typer.Argument(metavar="DIST", help="Examine the plugins of these distributions only."),
    ] = None,
    path: Annotated[list[Path] | None, typer.Option(help="Also load this plugin file.")] = None,
) -> None:
    """Examine the installed plugins and this machine: what is wrong, and what to install. Exit status 1 if
    there is a fault."""
    from stretto.assembly.plugins import Plugins
    from stretto.cli.make.doctor import examine_machine, examine_plugins

    installed = Plugins()
    for file in path or []:
        installed.add_path(file.resolve())
    chosen = distributions or [None]
    shown = [each for distribution in chosen for each in examine_plugins(distribution, installed)]
    shown += [] if distributions else examine_machine()
    _list_observations(shown)
    raise typer.Exit(int(any(each.level == "fault" for each in shown)))


@app.command()
def worker(
    folder: Annotated[
        Path | None, typer.Option("--run", help="The run's folder, here or shared.", metavar="RUN")
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="With --run: rollout, inference or verifier.", metavar="ROLE")
    ] = None,
    invitation: Annotated[
        Path | None, typer.Option(help="Instead: the file that `stretto invite` wrote.", metavar="FILE")
    ] = None,
    bus: Annotated[
        str | None, typer.Option(help="Address of nats-server as it is reached from here.", metavar="URL")
    ] = None,
    credentials: Annotated[
        str | None, typer.Option(help="Login for a server of your own.", metavar="FILE")
    ] = None,
) -> None:
    """Join a living run as one more worker, from any machine. Ctrl-C lets it finish its work and leave."""
    from stretto.cli.make.worker import work_by_hand

    if (folder is None) == (invitation is None) or (folder is None) != (role is None):
        raise ConfigError("expected --run RUN --role ROLE, or --invitation FILE")
    raise typer.Exit(work_by_hand(folder, role or "", invitation, url=bus, credentials=credentials))


@app.command()
def invite(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    guest: Annotated[
        str,
        typer.Argument(
            metavar="GUEST",
            help="A role, such as rollout; an id, such as rollout-x; `viewer`; or `operator`, for yourself.",
        ),
    ],
) -> None:
    """Let one more worker join a run, somebody watch it, or yourself use it from another machine: write the
    file with the credentials, and print the command that uses it."""
    from stretto.cli.make.worker import invite_guest

    print(shlex.join(invite_guest(folder.absolute(), guest)))


@app.command()
def mirror(
    invitation: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file that `stretto invite RUN operator` wrote.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the copy, or the copy.")],
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Keep a copy of the records of a run that is elsewhere, until the run ends. `ui`, `runs`, `watch`,
    `status`, `logs`, `samples`, `stop` and `scale` take the copy in place of the run's folder."""
    from stretto.bus.server import OPERATOR
    from stretto.cli.show.mirror import mirror_run
    from stretto.cli.show.watch import bootstrap_elsewhere

    bootstrap = bootstrap_elsewhere(invitation, OPERATOR, url, credentials, certificate)
    typer.echo(mirror_run(bootstrap, folder.absolute()))


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the files.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address by which clients call the servers; several times for several."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="Name of a client; several times for several. Default: client.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days for which the certificates are valid.")] = 365,
) -> None:
    """Make certificates for nats-servers of your own and their clients, and an authority that signs them.

    With an authority in FOLDER, it makes new certificates of the same authority.
    """
    from stretto.cli.make.certs import explanation, write_certificates

    clients = client or ["client"]
    write_certificates(folder, host or [], clients, days)
    typer.echo(explanation(folder, clients[0]))


@app.command()
def schema() -> None:
    """Print the JSON schema of run files, for editors. It covers every installed component."""
    from stretto.assembly.plugins import Plugins
    from stretto.cli.make.schema import json_schema

    typer.echo(json.dumps(json_schema(Plugins()), indent=2))


# ----------------------------------------------------------------------------------------- helpers


def _refuse_viewer_options(url: str | None, credentials: str | None, certificate: Path | None) -> None:
    if url is not None or credentials is not None or certificate is not None:
        options = "--url, --credentials and --certificate"
        raise ConfigError(f"{options} go with a viewer file, not with a run's folder")


def _require_begun(source: Path) -> None:
    """Refuse a path that does not exist. A submitted run makes its folder when the cluster starts it.

    Raises:
        ConfigError: if nothing is there.
    """
    if not source.exists():
        raise ConfigError(
            f"{source} does not exist: the run has not begun (a submitted run may still be waiting for the "
            "cluster), or it has another folder"
        )


def _detach(arguments: Sequence[str], folder: Path) -> None:
    """Start a run in the background, and say how to follow it."""
    from stretto.cli.start.detach import run_detached

    process = run_detached(arguments, folder)
    where = shlex.quote(str(folder))
    typer.echo(f"the run in {folder} trains (pid {process}); follow it: stretto watch {where}")
    typer.echo(f"its log: stretto logs -f {where}; to end it: stretto stop {where}")


def _runs_in(folders: list[Path]) -> list[RunRecord]:
    """Return the runs in these folders, and below those that are no runs.

    Raises:
        ConfigError: if a folder holds no run.
    """
    from stretto.records.run import find_runs

    found: list[RunRecord] = []
    for folder in folders:
        if not (runs := find_runs(folder)):
            raise ConfigError(f"{folder} holds no run")
        found += runs
    return found


def _show_result(result: Result, reasons: Mapping[str, int], folder: Path) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(f"avg@{result.n}", str(result.avg))
    if result.reward != result.avg:
        table.add_row("reward", str(result.reward))
    for k, estimated in result.pass_at.items():
        table.add_row(f"pass@{k}", str(estimated))
    failed = f", {result.failed} rows failed" if result.failed else ""
    table.add_row("rows", f"{result.rows}, {result.samples} samples{failed}")
    table.add_row("length", f"{result.length:.1f} tokens, {100 * result.truncated:.1f} % truncated")
    table.add_row("speed", f"{result.tokens_per_s:,.0f} tokens/s")
    table.add_row("model", result.source)
    table.add_row("answers", str(folder / "answers" / "step-000000.jsonl"))
    for reason, count in reasons.items():
        table.add_row(f"{count} x", printable(reason))
    _print_table(table)


def _show_audit(report: AuditReport) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("check", "result", "checked", "not checked"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        fine = "nothing to check" if check.empty else "ok"
        result = f"{len(check.violations)} violations" if check.violations else fine
        table.add_row(*map(printable, (check.name, result, check.checked, check.unchecked)))
    _print_table(table)
    for check in report.checks:
        for violation in check.violations[:_MOST_VIOLATIONS]:
            typer.echo(printable(f"{check.name}: {violation}"))
        if len(check.violations) > _MOST_VIOLATIONS:
            typer.echo(
                f"{check.name}: {len(check.violations) - _MOST_VIOLATIONS} more; --json lists them all"
            )
    typer.echo(
        f"{report.status}: {report.lost} tickets lost, {report.doubled} trained twice, in {report.folder}"
    )


def _list_components(installed: Any, kind: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    lines = [line for line in installed.listing() if kind in (None, line.kind)]
    if not lines:
        typer.echo(f"no {kind} is installed")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("kind", "name", "distribution", "version", "summary"):
        table.add_column(column, overflow="fold", no_wrap=column in ("kind", "name"))
    for line in lines:
        error = printable(f"unusable: {line.error}")
        summary = Text(error, style="red") if line.error else line.summary
        table.add_row(line.kind, line.name, line.distribution, line.version, summary)
    _print_table(table)


def _list_observations(observations: Sequence[Observation]) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "", "note": "dim", "warning": "yellow", "fault": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("level", "subject", "text"):
        table.add_column(column, overflow="fold", no_wrap=column != "text")
    for each in observations:
        table.add_row(Text(each.level, style=styles[each.level]), each.subject, printable(each.text))
    _print_table(table)


def _print_table(table: Table) -> None:
    """Print a table. Text in its cells is no markup: a model or a plugin may have written it."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def _show_component(installed: Any, kind: Kind, name: str) -> None:
    from stretto.cli.make.schema import fields_of

    component = installed.get(kind, name)
    typer.echo(f"{kind} {component.name}: {component.summary}\n")
    for field in fields_of(component.config):
        typer.echo(f"{field.name}: {field.type} = {field.default}")
        if field.meaning:
            typer.echo(f"    {field.meaning}")


def _fail(error: Exception, status: int) -> NoReturn:
    lines = printable(str(error)).splitlines() or [type(error).__name__]
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)
