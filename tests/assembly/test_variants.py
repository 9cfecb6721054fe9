"""Variants in the run file: what they take over, and what is refused."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose, compose_mapping
from stretto.assembly.variants import BASE, runs_of
from stretto.cli.start.checks import problems
from stretto.errors import ConfigError, PluginError
from stretto.kernel.durable.changes import assemble_in_force, compose_changes, write_values

RUN = """\
name: test
algorithm: {use: grpo, group_size: 4}
training: mock
inference: mock
reward: {use: exact, timeout_s: 7}
workflow: {use: single_turn, timeout_s: 50}
sampling: {max_tokens: 40, temperature: 0.9}
dataset: {use: jsonl, path: rows.jsonl}
queue: {batch_size: 2}
steps: 5
variants:
  base: {weight: 3}
  short: {sampling: {max_tokens: 8}, workflow: {timeout_s: 9}, reward: {answer_cpu_s: 2}}
  form: {reward: {use: format, tags: [answer]}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def found(file: Path, *overrides: str) -> dict[str, str]:
    composed = compose(file, [*overrides, f"out={file.parent}/out"])
    return {each.path: each.message for each in problems(Assembly(composed)) if each.severity == "error"}


def test_a_variant_takes_over_the_keys_that_it_does_not_set(run_file: Path) -> None:
    composed = compose(run_file)
    assert not [each for each in problems(Assembly(composed)) if each.severity == "error"]
    for copy in (composed, compose_mapping(msgspec.to_builtins(composed.config))):  # as a worker gets it
        runs = {name: run.config for name, run in runs_of(copy).items()}
        assert list(runs) == [BASE, "base", "short", "form"]
        assert runs["base"].workflow == runs["short"].workflow.__class__(timeout_s=50)
        assert (runs["short"].sampling.max_tokens, runs["short"].sampling.temperature) == (8, 0.9)
        assert runs["short"].workflow.timeout_s == 9
        rewards = {name: run.reward for name, run in runs.items() if run.reward is not None}
        assert (rewards["short"].use, rewards["short"].timeout_s) == ("exact", 7)
        assert rewards["short"].answer_cpu_s == 2
        assert (rewards["form"].use, rewards["form"].timeout_s) == ("format", 30.0)  # its default
        assert runs["form"].sampling == runs[BASE].sampling


def test_overrides_reach_variants(run_file: Path) -> None:
    composed = compose(
        run_file, ["variants.base.reward=math", "variants.short.weight=2", "sampling.stop=[x]"]
    )
    runs = runs_of(composed)
    assert runs["base"].components["reward"].name == "math"
    assert composed.config.variants.short.weight == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert runs["short"].config.sampling.stop == ("x",)


def test_a_value_of_the_environment_is_not_written_where_a_variant_takes_it_over(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORE", "secret:score")
    reward = "reward={use: function, function: '${oc.env:SCORE}'}"
    composed = compose(
        run_file, [reward, "variants.base.reward={timeout_s: 3}", "variants.short.reward=math"]
    )
    taken_over = runs_of(composed)["base"].config.reward
    assert taken_over is not None
    assert taken_over.function == "secret:score"  # pyright: ignore[reportAttributeAccessIssue]
    assert "secret" not in yaml.safe_dump(dict(composed.document))


@pytest.mark.parametrize(
    ("override", "path", "complaint"),
    [
        ("variants.short.sampling.temperature=0.5", "variants.short.sampling.temperature", "sampling` (0.9)"),
        ("variants.base.sampling={top_k: 5, temperature: 0.9}", "variants.base.sampling", "top_p"),
        ("algorithm.group_size=1", "variants.form.reward", "expected algorithm.group_size of at least 2"),
        ("algorithm=sft", "variants", "this algorithm samples none"),
        (
            "variants.base.workflow={use: multi_turn, environment: 'nowhere:play'}",
            "variants.base.workflow.environment",
            "nowhere",
        ),
        ("variants.base.reward={use: function, function: 'no:f'}", "variants.base.reward.function", "module"),
    ],
)
def test_senseless_variants_are_refused(run_file: Path, override: str, path: str, complaint: str) -> None:
    assert complaint in found(run_file, override)[path]


def test_a_single_variant_is_refused(run_file: Path) -> None:
    run_file.write_text(RUN[: RUN.index("  short")])
    assert "'base' is the only variant" in found(run_file)["variants"]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("variants.A.weight=1", "'A' cannot be the name of a variant"),
        ("variants.a=1", "expected a mapping with `weight`, found 1"),
        ("variants.base.weight=0", "variants.base.weight: expected `float` > 0.0|expected float > 0"),
        ("variants.base.inference=mock", "unknown key 'inference'"),
        ("variants.base.sampling.max_token=3", "did you mean 'max_tokens'"),
        ("variants.base.workflow=nothing", "no workflow 'nothing'"),
    ],
)
def test_faulty_variants_are_refused_with_their_place(run_file: Path, override: str, complaint: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=complaint):
        compose(run_file, [override])


def test_a_resumed_run_keeps_names_and_weights(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    write_values(folder, compose(run_file))
    with pytest.raises(ConfigError, match=r"variants: cannot change from .* in a resumed run"):
        compose_changes(assemble_in_force(folder), ["variants.short.weight=2"])
    changed = compose_changes(assemble_in_force(folder), ["variants.short.sampling.max_tokens=9"])
    assert runs_of(changed.composed)["short"].config.sampling.max_tokens == 9
