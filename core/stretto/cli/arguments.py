"""Arguments and options that several commands have."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stretto.errors import ConfigError


def _overrides(example: str) -> Any:
    text = f"Values that override keys of the run file, for example {example}."
    return typer.Argument(metavar="[KEY=VALUE]...", help=text)


Overrides = Annotated[list[str] | None, _overrides("queue.max_staleness=0")]
EvaluationOverrides = Annotated[list[str] | None, _overrides("inference.slots=64")]
RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (YAML).")]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Return when the run trains; it continues in the background."),
]
Supervise = Annotated[
    bool,
    typer.Option("--supervise", help="Stay beside the kernel, and start the next one when it is killed."),
]
TrustPlugins = Annotated[
    bool,
    typer.Option("--trust-plugins", help="Import the plugin files of a run that another user owns."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be submitted to the cluster, and stop.")
]
NoMemoryLimit = Annotated[
    bool,
    typer.Option(
        "--no-memory-limit", help="Do not refuse a run whose engines take more memory than the machine has."
    ),
]
WithPage = Annotated[
    bool, typer.Option("--ui", help="Serve the run's page until the command ends, and print its address.")
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


class WithOverrides(TyperCommand):
    """A command with `key=value` arguments. It refuses `--steps=3` and prints what to write instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse keys with dashes, then parse as usual."""
        from stretto.config import RunConfig

        options = {name for parameter in self.params for name in parameter.opts}
        for item, following in pairwise([*args, "VALUE"]):
            option, equals, value = item.partition("=")
            key = option.removeprefix("--")
            is_key = key.split(".")[0] in RunConfig.__struct_fields__
            if option.startswith("--") and option not in options and is_key:
                raise ConfigError(
                    f"no option {option!r}: keys of the run file are written without dashes; "
                    f"write {key}={value if equals else following}"
                )
        return super().parse_args(ctx, args)
