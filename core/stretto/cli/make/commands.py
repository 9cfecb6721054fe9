"""Commands that make something: a project, a model, an invitation, a certificate."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.arguments import EvaluationOverrides, TrustPlugins, WithOverrides
from stretto.errors import ConfigError, PluginError, nearest, printable
from stretto.records.figures import print_table

if TYPE_CHECKING:
    from stretto.cli.make.doctor import Observation
    from stretto.cli.make.evaluate import Result
    from stretto.component import Kind

app = typer.Typer()
engine = typer.Typer(no_args_is_help=True, help="Install the servers of inference engines.")
app.add_typer(engine, name="engine")


@app.command(cls=WithOverrides)
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
    from stretto.assembly.assembly import Assembly
    from stretto.assembly.trust import require_trust
    from stretto.cli.make.evaluate import EvaluationOptions, compose_evaluation, run_evaluation
    from stretto.cli.start.acceptance import accepted_start

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: no folder {str(json_file.absolute().parent)!r}")
    if (Path(source) / "config.yaml").is_file():
        require_trust(Path(source).absolute(), trusted=trust_plugins)
    evaluation = EvaluationOptions(version, dataset, reward, n, temperature, max_tokens, rows, inference, out)
    assembly = Assembly(compose_evaluation(source, evaluation, overrides or ()))
    folder = assembly.folder
    with accepted_start(assembly) as forks:
        result, summary = run_evaluation(assembly, forks, threshold)
    if result is None:
        from stretto.observe.view import final_lines
        from stretto.runs.life import exit_status

        typer.echo(final_lines(summary, folder), err=True)
        raise typer.Exit(exit_status(summary) or 1)
    if json_file is not None:
        json_file.write_text(json.dumps(summary["result"], indent=1) + "\n")
    _show_result(result, summary["reasons"], folder)


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
    from stretto.cli.make.operate import answer_of, numbers_of, scale_request

    log_nothing()
    for line in answer_of(scale_request(folder.absolute(), numbers_of(numbers))).done:
        typer.echo(printable(line))


@app.command()
def stop(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a living run.")],
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
) -> None:
    """End a living run: it finishes the step under way and writes a checkpoint. `stretto resume` continues
    it."""
    from stretto.assembly.logs import log_nothing
    from stretto.cli.make.operate import answer_of, stop_request

    log_nothing()
    typer.echo(printable(answer_of(stop_request(folder.absolute(), now=now)).state))


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
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default as the run's model.", metavar="DTYPE"),
    ] = None,
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
    from stretto.records.run_folder import RunFolder

    run_record = RunFolder(folder)
    if samples is not None:
        if to or version or adapter or push or dtype:
            raise ConfigError(
                "--samples goes with --min-reward and --best-of-group only: it exports no model"
            )
        exported = export_samples(folder, samples, min_reward=min_reward, best_of_group=best_of_group)
        typer.echo(
            f"{exported.rows} rows in {samples}, {exported.with_tokens} of them with tokens, because their "
            f"text makes other tokens; left out: {exported.truncated} samples that reached the limit of "
            f"tokens, {exported.unusable} with images that a row cannot have"
        )
        return
    if min_reward is not None or best_of_group:
        raise ConfigError("--min-reward and --best-of-group go with --samples FILE.jsonl")
    with TemporaryDirectory() if push and to is None else nullcontext() as temporary:
        target = Path(temporary, "export") if temporary else to
        form = "adapter" if adapter else "merged"
        written, dtype = export_model(run_record, version, form, target, dtype)
        typer.echo(f"the weights are {dtype}; --dtype chooses another")
        if not temporary:
            typer.echo(f"see {written}")
        if push:
            typer.echo(f"see {push_to_hub(written, push)}")


@app.command()
def plugins(
    kind: Annotated[str | None, typer.Argument(help="List only components of this kind.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show the config of this component.")] = None,
    path: Annotated[list[Path] | None, typer.Option(help="Also load this plugin file.")] = None,
) -> None:
    """List the installed components, or show one component's config keys: types, defaults, meanings."""
    from stretto.assembly.plugins import KINDS, Plugins

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
    shown = [line for distribution in chosen for line in examine_plugins(distribution, installed)]
    shown += [] if distributions else examine_machine(installed)
    _list_observations(shown)
    raise typer.Exit(int(any(line.level == "fault" for line in shown)))


@engine.command("install")
def engine_install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The inference engine: vllm or sglang.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="The build for CPUs.")] = False,
    cuda: Annotated[float | None, typer.Option(help="CUDA of the driver, if not of this one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Install the tested version of an engine's server below the cache folder, where runs find it, built for
    this machine's driver. Print its interpreter."""
    from stretto.cli.make.engine import commands_of, environment_for, install

    if dry_run:
        environment = environment_for(name, cpu=cpu, cuda=cuda)
        typer.echo("\n".join(map(shlex.join, commands_of(environment, cpu=cpu))))
    else:
        typer.echo(install(name, cpu=cpu, cuda=cuda))


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
            metavar="GUEST", help="A role, such as rollout; an id, such as rollout-x; or `viewer`."
        ),
    ],
) -> None:
    """Let one more worker join a run, or somebody watch it: write the file with the credentials, and print
    the command that uses it."""
    from stretto.cli.make.worker import invite_guest

    print(shlex.join(invite_guest(folder.absolute(), guest)))


@app.command()
def schema() -> None:
    """Print the JSON schema of run files, for editors. It covers every installed component."""
    from stretto.assembly.plugins import Plugins
    from stretto.cli.make.schema import json_schema

    typer.echo(json.dumps(json_schema(Plugins()), indent=2))


def _show_result(result: Result, reasons: Mapping[str, int], folder: Path) -> None:
    from rich.table import Table

    from stretto.cli.make.evaluate import answers_file

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(f"avg@{result.n} ({result.measure})", str(result.avg))
    if result.measure != "reward":
        table.add_row("reward", str(result.reward))
    for k, estimated in result.pass_at.items():
        table.add_row(f"pass@{k}", str(estimated))
    failed = f", {result.failed} rows failed" if result.failed else ""
    table.add_row("rows", f"{result.rows}, {result.samples} samples{failed}")
    table.add_row("length", f"{result.length:.1f} tokens, {100 * result.truncated:.1f} % truncated")
    table.add_row("speed", f"{result.tokens_per_s:,.0f} tokens/s")
    table.add_row("model", result.source)
    table.add_row("answers", str(folder / answers_file(result.version)))
    for reason, count in reasons.items():
        table.add_row(f"{count} x", printable(reason))
    print_table(table)


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
    print_table(table)


def _list_observations(observations: Sequence[Observation]) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "", "note": "dim", "warning": "yellow", "fault": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("level", "subject", "text"):
        table.add_column(column, overflow="fold", no_wrap=column != "text")
    for line in observations:
        table.add_row(Text(line.level, style=styles[line.level]), line.subject, printable(line.text))
    print_table(table)


def _show_component(installed: Any, kind: Kind, name: str) -> None:
    from stretto.cli.make.schema import fields_of

    component = installed.get(kind, name)
    typer.echo(f"{kind} {component.name}: {component.summary}\n")
    for field in fields_of(component.config):
        typer.echo(f"{field.name}: {field.type} = {field.default}")
        if field.meaning:
            typer.echo(f"    {field.meaning}")
