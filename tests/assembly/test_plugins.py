"""Plugins: found by entry point or by path, loaded by need, and clear words about those that do not load."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pluggy
import pytest

from stretto import hooks
from stretto.assembly import plugins
from stretto.assembly.compose import compose
from stretto.assembly.plugins import KINDS, Plugins
from stretto.component import Component
from stretto.errors import ConfigError, PluginError

ROOT = Path(__file__).parents[2]

REWARD = """
from stretto import Component, RewardConfig, hookimpl

@hookimpl
def stretto_reward():
    make = lambda config, context: (lambda prompt, completion: 1.0)
    yield Component("brevity", make, RewardConfig, "short")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of other distributions, as if they were installed; modules are looked for in tmp_path."""
    others: list[EntryPoint] = []
    real = importlib.metadata.entry_points

    def installed_of(group: str, search_path: object) -> list[EntryPoint]:
        return [*real(group=group), *(entry for entry in others if entry.group == group)]

    monkeypatch.setattr(plugins, "_installed_of", installed_of)
    monkeypatch.syspath_prepend(tmp_path)
    yield others
    for entry in others:
        sys.modules.pop(entry.value, None)


class Distribution(NamedTuple):
    """As much of one as an entry point shows."""

    name: str
    version: str = "1.2"


def entry(name: str, module: str, kind: str, distribution: str = "acme") -> EntryPoint:
    point = EntryPoint(name, module, f"stretto.{kind}")
    vars(point)["dist"] = Distribution(distribution)
    return point


WITHOUT_RAY = "'ray' needs 'ray': pip install 'stretto[ray]'"
"""The one library that the tests do not need: `make test-clusters` installs it."""


def test_every_built_in_component_loads_by_the_public_route() -> None:
    lines = Plugins().listing()
    assert [line for line in lines if line.error and line.error != WITHOUT_RAY] == []
    assert {line.kind for line in lines} == set(KINDS)
    assert all(line.summary and line.distribution == "stretto" for line in lines)


def test_packages_and_entry_points_agree_with_the_folders() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["tool"]["hatch"]["build"]
    folders = [*ROOT.glob("core/*/__init__.py"), *ROOT.glob("plugins/*/*/__init__.py")]
    homes = {str(path.parents[1].relative_to(ROOT)) for path in folders}
    in_wheel = build["targets"]["wheel"]["sources"]
    assert {folder for folder, place in in_wheel.items() if not place} == set(build["dev-mode-dirs"]) == homes
    groups = project["project"]["entry-points"].values()
    targets = {re.split("[.:]", target)[0] for group in groups for target in group.values()}
    assert targets == {path.parent.name for path in ROOT.glob("plugins/*/*/__init__.py")}
    assert all((path.parent / "py.typed").exists() for path in folders)


def test_every_hook_is_documented_and_every_kind_has_one() -> None:
    manager = pluggy.PluginManager("stretto")
    manager.add_hookspecs(hooks)
    specified = {name for name in vars(manager.hook) if name.startswith("stretto_")}
    assert {f"stretto_{kind}" for kind in KINDS} <= specified
    guide = (ROOT / "docs" / "plugins.md").read_text()
    for name in specified:
        assert getattr(hooks, name).__doc__
        assert f"`{name}`" in guide, f"{name} is not in docs/plugins.md"


def test_listing_names_imports_nothing(installed: list[EntryPoint], tmp_path: Path) -> None:
    (tmp_path / "acme_bomb.py").write_text("raise RuntimeError('imported')")
    installed.append(entry("bomb", "acme_bomb", "reward"))
    assert "bomb" in Plugins().names("reward")
    assert Plugins().get("reward", "exact").name == "exact"  # which does not touch the other


def test_a_broken_plugin_says_why_and_leaves_the_others(installed: list[EntryPoint], tmp_path: Path) -> None:
    (tmp_path / "acme_extra.py").write_text("import no_such_library")
    (tmp_path / "acme_typo.py").write_text(REWARD.replace("stretto_reward", "stretto_rewards"))
    (tmp_path / "acme_other.py").write_text(REWARD.replace('"brevity"', '"width"'))
    (tmp_path / "acme_base.py").write_text(REWARD.replace("RewardConfig", "DatasetConfig"))
    (tmp_path / "acme_raises.py").write_text(REWARD.replace("yield", "1 / 0; yield"))
    reasons = {
        "acme_extra": "ModuleNotFoundError: No module named 'no_such_library'",
        "acme_typo": "stretto_rewards",
        "acme_other": "implements stretto_reward for ['width'], not for 'brevity'",
        "acme_base": "must extend RewardConfig",
        "acme_raises": "ZeroDivisionError",
    }
    for module, reason in reasons.items():
        installed[:] = [entry("brevity", module, "reward")]
        with pytest.raises(PluginError, match=re.escape(reason)):
            Plugins().get("reward", "brevity")
        [line] = [line for line in Plugins().listing() if line.error and line.name != "ray"]
        assert (line.name, line.distribution, line.version) == ("brevity", "acme", "1.2")
        assert reason in line.error


def test_two_distributions_with_one_name_are_refused_and_one_can_be_picked(
    installed: list[EntryPoint], tmp_path: Path
) -> None:
    (tmp_path / "acme_exact.py").write_text(REWARD.replace('"brevity"', '"exact"'))
    installed.append(entry("exact", "acme_exact", "reward", "acme-rl"))
    with pytest.raises(
        PluginError, match=r"'acme-rl' and 'stretto' offer .*; choose one, for example `use: acme-rl:exact`"
    ):
        Plugins().get("reward", "exact")
    assert Plugins().get("reward", "acme-rl:exact").summary == "short"
    assert Plugins().get("reward", "stretto:exact").summary != "short"


def test_a_plugin_by_path_is_listed_and_used(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: a\nsteps: 1\nplugins: [my_reward.py]\nalgorithm: grpo\nreward: brevity\n"
        "dataset: {use: jsonl, path: rows.jsonl}\n"
    )
    composed = compose(file)
    assert composed.config.plugins == (str(tmp_path / "my_reward.py"),)
    assert composed.components["reward"].summary == "short"
    file.write_text(file.read_text().replace("reward: brevity", "reward: brevty"))
    with pytest.raises(PluginError, match=r"run\.yaml:5: reward\.use: .*did you mean 'brevity'\?"):
        compose(file)
    file.write_text(file.read_text().replace("my_reward.py", "absent.py"))
    with pytest.raises(ConfigError, match=r"no such file or folder: 'absent\.py'"):
        compose(file)


def test_a_missing_extra_is_named_with_what_to_install() -> None:
    component: Component[Any] = Component(
        "x", object, plugins.BASES["reward"], "", requires={"no_such_lib": "acme[x]"}
    )
    assert plugins.missing_extra(component) == "'x' needs 'no_such_lib': pip install 'acme[x]'"


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"no inference 'sglan'; did you mean 'sglang'\?"):
        Plugins().get("inference", "sglan")
    with pytest.raises(PluginError, match=r"no reward 'zzz'; installed: code, exact, format, function"):
        Plugins().get("reward", "zzz")


LIGHT = """
import sys
from importlib import import_module
for module in sys.argv[1:]:
    import_module(module)
    heavy = {"torch", "transformers", "math_verify", "sympy"} & set(sys.modules)
    assert not heavy, (module, heavy)
"""


def test_modules_of_light_processes_import_neither_torch_nor_transformers() -> None:
    modules = [
        *("stretto", "stretto.cli.main", "stretto.cli.make.schema", "stretto.assembly.assembly"),
        *("stretto.runs.life", "stretto.user_code.reward", "stretto.workers.sampling.rollout"),
        *(f"stretto.workers.{part}" for part in ("scoring.verifier", "inference", "training.trainer")),
        *("stretto_policy_gradients", "stretto_torch", "stretto_mock", "stretto_math", "stretto_file"),
        *("stretto_text_rewards", "stretto_local"),
    ]
    subprocess.run([sys.executable, "-c", LIGHT, *modules], check=True)


def test_a_tokenizer_is_loaded_without_torch(tiny_models: Any) -> None:
    code = (
        "import sys\nfrom stretto.models.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(tiny_models('qwen2'))!r})\n"
        "ids = tokenizer.encode_prompt('3+5=')\nassert tokenizer.decode(ids) == '3+5=', ids\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
