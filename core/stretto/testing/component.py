"""Tests for components of all kinds, and the component under test in a composed run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.component import Component, Context, Kind

__all__ = ["ComponentConformance", "ComponentUnderTest", "needs_model"]

needs_model = pytest.mark.usefixtures("has_model")
"""Marks a test of a model's numbers, which only components with a model run."""
_ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


class ComponentUnderTest:
    """A component in a composed run file, as a run has it. The other sections of the run file name components
    that need nothing, unless `run` has these sections."""

    def __init__(
        self,
        kind: Kind,
        section: Mapping[str, Any],
        run: Mapping[str, Any],
        plugins: tuple[str, ...],
        folder: Path,
    ) -> None:
        self.folder = folder
        """An empty folder for the run; the run file and its rows are beside it."""
        self.path = "trackers.0" if kind == "tracker" else kind
        """Dotted key of the component's section."""
        rows = folder.with_name("rows.jsonl")
        rows.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
        document = {
            "name": "conformance",
            "steps": 1,
            "plugins": list(plugins),
            "algorithm": {"use": "grpo", "group_size": 2},
            "training": "mock",
            "inference": "mock",
            "reward": "exact",
            "dataset": {"use": "jsonl", "path": str(rows)},
            **run,
            **({"trackers": [section]} if kind == "tracker" else {kind: section}),
        }
        file = folder.with_name("run.yaml")
        file.write_text(json.dumps(document))  # JSON is YAML
        self.composed = compose(file)
        folder.mkdir()

    @property
    def component(self) -> Component[Any]:
        """The component, as its plugin offers it."""
        return self.composed.components[self.path]

    @property
    def config(self) -> Any:
        """The component's section."""
        return self.composed.section(self.path)

    def context(self, **facts: Any) -> Context:
        """Return the run's context, with `facts` in place of its own values."""
        assembly = Assembly(self.composed, folder=self.folder, run="conformance")
        return msgspec.structs.replace(assembly.context, **facts)

    def make(self, **facts: Any) -> Any:
        """Make the object as a worker does; see `context`. Raises ContractError if it breaks its contract."""
        return self.composed.make(self.path, self.context(**facts))


class ComponentConformance:
    """The tests that all kinds share. Each kind has a subclass of its own."""

    kind: ClassVar[Kind]
    use: ClassVar[str]
    """Name of the component, as in a run file."""
    options: ClassVar[Mapping[str, Any]] = {}
    """More keys of the component's section."""
    plugins: ClassVar[tuple[str, ...]] = ()
    """Plugin files to load the component from, if it is not installed."""
    run: ClassVar[Mapping[str, Any]] = {}
    """Other sections of the run file, for a component that needs certain ones."""

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls) -> Mapping[str, Any]:
        """The component's section. A class whose options name files that a test has to write first defines
        this fixture itself."""
        return {"use": cls.use, **cls.options}

    @pytest.fixture(scope="class")
    @classmethod
    def under_test(
        cls, section: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
    ) -> ComponentUnderTest:
        """The component in a composed run file. Composing finds it, and refuses wrong keys and values."""
        folder = tmp_path_factory.mktemp(cls.__name__) / "run"
        return ComponentUnderTest(cls.kind, section, cls.run, cls.plugins, folder)

    @pytest.fixture
    def has_model(self, under_test: ComponentUnderTest) -> None:
        """Skip a test that needs the numbers of a model."""
        if not under_test.component.needs_model:
            pytest.skip("it has no model")

    def test_its_config_is_frozen_and_refuses_unknown_keys(self, under_test: ComponentUnderTest) -> None:
        """A misspelt key in a run file must be an error."""
        config = under_test.component.config
        assert config.__struct_config__.forbid_unknown_fields, (
            f"{config.__name__} accepts unknown keys; add forbid_unknown_fields=True"
        )
        assert config.__struct_config__.frozen, f"{config.__name__} can be changed; add frozen=True"

    def test_its_check_finds_no_error_in_these_options(self, under_test: ComponentUnderTest) -> None:
        """Only problems with the severity `error` count, not a program that this machine lacks."""
        check = under_test.component.check
        problems = [] if check is None else list(check(under_test.config, under_test.composed.config))
        errors = [problem for problem in problems if problem.severity == "error"]
        assert not errors, f"its check finds {errors[0].path}: {errors[0].message}"

    def test_its_factory_makes_an_object_of_the_contract_and_no_file(
        self, under_test: ComponentUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`stretto check` makes the object too, without a run's folder."""
        monkeypatch.chdir(tmp_path)
        under_test.make(folder="")
        new_files = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")]
        assert not new_files, f"its factory makes {new_files[0]!r}; make files and connections in the methods"
