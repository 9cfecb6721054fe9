"""The checks between a composed run and its start, and the messages for the user."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from stretto.assembly.assembly import Assembly
from stretto.errors import ConfigError, printable
from stretto.kernel.fleet.forks import ForkServer, fork_server
from stretto.models.hub import download


def print_notice(level: str, text: str) -> None:
    """Print a note or a warning to stderr."""
    print(f"{level}: {printable(text)}", file=sys.stderr)


def accepted(
    assembly: Assembly, *, starting: bool, show: Callable[[str, str], None] = print_notice, **options: bool
) -> Assembly:
    """Show warnings, and return the run if it has no errors. `starting`: this machine's faults are errors.
    `options`: those of `problems`."""
    from stretto.cli.start.checks import faults_and_warnings  # slow; a fork server imports meanwhile

    composed = assembly.composed
    chosen = (f"{key} is {composed.section(key)}: {why}" for key, why in composed.reasons)
    for notice in (*composed.notices, *chosen):
        show("note", notice)
    faults, warnings = faults_and_warnings(assembly, starting=starting, **options)
    for warning in warnings:
        show("warning", warning)
    if faults:
        raise ConfigError("\n".join(faults))
    return assembly


@contextmanager
def accepted_start(
    assembly: Assembly, show: Callable[[str, str], None] = print_notice, *, memory_limit: bool = True
) -> Generator[ForkServer | None]:
    """Check the run while a fork server imports, download the run's models, and yield the fork server."""
    with fork_server(assembly) as forks:
        accepted(assembly, starting=True, memory_limit=memory_limit, show=show)
        for model in _models_of_hub(assembly):
            download(model, show)
        yield forks


def _models_of_hub(assembly: Assembly) -> list[str]:
    """Return the hub models that this machine's processes load; with another launcher, other machines do."""
    config, components = assembly.config, assembly.composed.components.values()
    if config.launcher.use != "local" or not any(each.needs_model for each in components):
        return []
    sources = [config.model, *(model.path for model in config.models.values())]
    return [each for each in dict.fromkeys(sources) if each is not None and not Path(each).is_dir()]
