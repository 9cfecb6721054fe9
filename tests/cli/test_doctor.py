"""`stretto doctor`: faults of plugins are found before a run, and named."""

import textwrap
from pathlib import Path

import pytest

from commands import output_of
from stretto.api import API_VERSION
from stretto.assembly.plugins import Plugins
from stretto.cli.make.doctor import Observation, examine_machine, examine_plugins
from stretto.errors import PluginError

GOOD = '''
from stretto import Component, RewardConfig, hookimpl

class BrevityConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `brevity`."""

    limit: int = 100
    """Characters."""

def make(config, context):
    return lambda prompt, completion: 1.0

@hookimpl
def stretto_reward():
    yield Component("brevity", make, BrevityConfig, "1 for short answers")
'''


def findings(folder: Path, source: str) -> list[Observation]:
    file = folder / "acme.py"
    file.write_text(textwrap.dedent(source))
    plugins = Plugins()
    plugins.add_path(file)
    return [finding for finding in examine_plugins("acme", plugins) if finding.level != "ok"]


SUMMARY = '"1 for short answers"'


@pytest.mark.parametrize(
    ("former", "now", "level", "text"),
    [
        ("make(config, context)", "make(config)", "fault", "cannot be called as factory(config, context)"),
        (SUMMARY, '"1", check=lambda config: []', "fault", "check cannot be called as check(config, run)"),
        (SUMMARY, '"1", check_row="id"', "fault", "check_row is 'id'; expected a function"),
        ("fields=True)", "fields=False)", "fault", "accepts unknown keys"),
        ('    """Characters."""', "", "warning", "the key 'limit' has no meaning"),
        (SUMMARY, '""', "warning", "has no summary"),
        (SUMMARY, '"1", requires={"no_such": "acme[x]"}', "note", "pip install 'acme[x]'"),
        (SUMMARY, '"1", api="1.0.0"', "fault", "api: '1.0.0' is no API version; expected MAJOR.MINOR"),
        (SUMMARY, '"1", api=1.0', "fault", "api: "),
        (SUMMARY, '"1", api="0.9"', "warning", "was made for API 0.9"),
        (SUMMARY, '"1", api="99.0"', "warning", "names may be missing; pip install -U stretto"),
        ('"brevity"', '"exact"', "warning", "so a run file has to name one: `use: acme:exact`"),
    ],
)  # fmt: skip
def test_a_fault_is_named(tmp_path: Path, former: str, now: str, level: str, text: str) -> None:
    assert former in GOOD
    [finding] = findings(tmp_path, GOOD.replace(former, now))
    assert (finding.level, text in finding.text) == (level, True), finding


def test_a_good_plugin_has_no_finding_also_if_it_names_this_api(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD) == []
    assert findings(tmp_path, GOOD.replace(SUMMARY, f'{SUMMARY}, api="{API_VERSION}"')) == []


def test_stretto_itself_is_well() -> None:
    found = examine_plugins("stretto", Plugins())
    assert [finding for finding in found if finding.level not in ("ok", "note")] == []
    unknown = "no distribution 'streto' offers a component; did you mean 'stretto'"
    with pytest.raises(PluginError, match=unknown):
        examine_plugins("streto", Plugins())


def test_the_machine_has_what_a_run_needs() -> None:
    subjects = {finding.subject: finding for finding in examine_machine(Plugins())}
    needed = "python stretto cores bfloat16 memory nats-server sandbox libraries"
    assert {*needed.split()} <= subjects.keys()
    assert subjects["nats-server"].text.startswith("v2.")
    assert not [finding for finding in subjects.values() if finding.level == "fault"]


def test_the_exit_status_is_for_ci(tmp_path: Path) -> None:
    file = tmp_path / "acme.py"
    file.write_text(GOOD.replace("make(config, context)", "make(config)"))
    text = output_of("doctor", "acme", "--path", file, status=1)
    assert "factory cannot be called" in text
    assert "nats-server" not in text
    file.write_text(GOOD)
    output_of("doctor", "acme", "--path", file)
