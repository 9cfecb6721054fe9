"""Plugins as files, for runs of tests: `from plugin_files import write_plugin`."""

import textwrap
from pathlib import Path


def write_reward(folder: Path, body: str) -> list[str]:
    """Write a reward `score`; the overrides of a run that has it."""
    (folder / "mine.py").write_text(textwrap.dedent(body))
    return ["reward=function", f"reward.function={folder}/mine.py:score"]


def write_plugin(folder: Path, kind: str, body: str, config: str) -> str:
    """Write a plugin that offers `mine`, a component of a kind that `make` of the body makes. Its path.

    Args:
        config: module and class of its section, such as `stretto_mock.MockTrainingConfig`.
    """
    module, _, section = config.rpartition(".")
    file = folder / f"my_{kind}.py"
    file.write_text(
        f"{textwrap.dedent(body).strip()}\n\n"
        "from stretto import Component, hookimpl\n"
        f"from {module} import {section}\n\n"
        "@hookimpl\n"
        f"def stretto_{kind}():\n"
        f"    yield Component('mine', make, {section}, 'mine', needs_model=False)\n"
    )
    return str(file)
