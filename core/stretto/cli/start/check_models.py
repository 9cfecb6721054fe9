"""Find models that do not exist, that do not fit together, or that have no room for the run's samples."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stretto.assembly.assembly import Assembly
from stretto.component import Head, Problem
from stretto.config import RunConfig
from stretto.models import files
from stretto.models.files import cached_file, known_config, pieces_of, text_config, vocabulary_of
from stretto.models.safetensors import fault_of_files
from stretto.models.vision import is_vision_language
from stretto.training.config import ModelTrainingConfig
from stretto.training.source_files import adapter_problems, base_of

_warning = partial(Problem, severity="warning")

_NAMED = 3  # models that a message lists
_GENERATES = (
    "ForCausalLM",
    "LMHead",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
)
"""Parts of the names of architectures that a trainer can load."""
_FILE_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".safetensors", ".bin", ".pt", ".pth", ".gguf")


def model_problems(assembly: Assembly) -> Iterator[Problem]:
    """Check the sources of the models, and whether the models fit together."""
    config, graph, placement = assembly.config, assembly.graph, assembly.placement
    components = assembly.composed.components
    is_sampling = graph.samples or config.evaluates_answers
    if config.model is not None:
        yield from source_problems("model", config.model)
        inference = components["inference"]
        if is_sampling:
            yield from _context_problems(config)
            yield from token_problems(config)
        trained = isinstance(placement.lead.section, ModelTrainingConfig)
        if trained and graph.samples and config.steps and not inference.needs_model:
            yield _warning(
                "inference.use",
                f"{inference.name!r} samples answers without {config.model!r}, and the run trains that model "
                "on them; choose an engine that has the model, or `training: mock`",
            )
        if is_sampling and not inference.reads_images and is_vision_language(known_config(config.model)):
            yield Problem(
                "inference.use",
                f"{inference.name!r} reads text only, but {config.model!r} is a vision-language "
                "model; use another engine (docs/engines.md), or a text model",
            )
    else:
        paths = [group.path for group in placement.groups.values()]
        for path in [*paths, *(["inference"] if is_sampling else [])]:
            if components[path].needs_model:
                name = components[path].name
                yield Problem(
                    "model", f"required by the {path} engine {name!r}; give a local folder or a hub id"
                )
    for path, source, _ in loaded_models(assembly):
        if Path(source, "config.json").is_file() and not next(Path(source).glob("*.safetensors"), None):
            text = f"{source!r} has no weights: expected *.safetensors in the folder"
            yield Problem(path, text, "error" if assembly.gpu_bytes is None else "environment")
    for name, settings in config.models.items():
        if settings.path is not None:
            yield from source_problems(f"models.{name}.path", settings.path)
            yield from _vocabulary_problems(f"models.{name}.path", settings.path, config.model)
        if settings.lr is not None and not graph.models[name].trainable:
            yield _warning(f"models.{name}.lr", "has no effect: the algorithm does not train it")
    if config.evaluates_answers and graph.models[graph.lead].head != "policy":
        yield Problem(
            "evaluation",
            f"it samples answers from the model {graph.lead!r}, which is not a policy; set "
            "`evaluation.measure: loss`, or remove `evaluation`",
        )
    section, source = placement.lead.section, config.source_of(graph.lead)
    lora = section.lora if isinstance(section, ModelTrainingConfig) else None
    if lora is not None and lora.adapter is not None and source is not None:
        yield from adapter_problems(lora, source, f"{placement.lead.path}.lora")
        yield from _copy_problems(assembly, source, lora.adapter)
    if is_sampling and lora is not None and lora.send == "adapter" and source != config.model:
        yield Problem(
            f"{placement.lead.path}.lora.send",
            f"is 'adapter': inference workers would apply the adapter to {config.model!r}, but the run "
            f"trains {source!r}; set it to 'merged'",
        )


def _copy_problems(assembly: Assembly, source: str, adapter: str) -> Iterator[Problem]:
    """Refuse a frozen copy of the policy that would begin without the policy's adapter."""
    config, graph, placement = assembly.config, assembly.graph, assembly.placement
    for group in placement.groups.values():
        lora = getattr(group.section, "lora", None)
        policies = (name for name in group.models if graph.models[name].head == "policy")
        copies = [name for name in policies if config.source_of(name) == source]
        if copies and (lora is None or lora.adapter != adapter):
            yield Problem(
                f"{group.path}.lora",
                f"{', '.join(copies)} would begin without the adapter with which {graph.lead} begins; write "
                f"the same `lora` as in {placement.lead.path}",
            )


def _context_problems(config: RunConfig) -> Iterator[Problem]:
    positions = files.positions_of(config.model)
    written = text_config(config.model).get("max_position_embeddings")
    if positions is None:
        return
    room: int | None = getattr(config.inference, "context_length", None)
    if written and written > positions and (room or written) > positions:
        yield Problem(
            "inference.context_length",
            f"is {json.dumps(room)}, and {config.model!r} (longrope) reads a text in another way beside one "
            f"of more than {positions} tokens; set at most {positions}",
        )
    for path, sampling in config.samplings():
        if room is None and sampling.max_tokens >= positions:
            yield Problem(
                f"{path}.max_tokens",
                f"is {sampling.max_tokens}, but {config.model!r} has {positions} positions for prompt and "
                "answer",
            )
        # For `sampling`, the engine reports this (`context_problems` in serving/config.py).
        elif room is not None and path != "sampling" and sampling.max_tokens >= room:
            yield Problem(
                f"{path}.max_tokens",
                f"is {sampling.max_tokens}, but inference.context_length, for prompt and answer, is {room}",
            )
    canary, most = config.inference.canary, min(room or positions, positions)
    sizes = {} if canary is None else {"tokens": canary.tokens, "depth": canary.depth or 0}
    for key, size in sizes.items():
        if size > most:
            yield Problem(f"inference.canary.{key}", f"is {size}, more than a sample can have ({most})")


def token_problems(config: RunConfig) -> Iterator[Problem]:
    """Find token ids that the model does not have, if its config is on this machine."""
    vocabulary, reported = vocabulary_of(config.model), set[tuple[str, int]]()
    for path, sampling in config.samplings():
        for key, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            unknown = [token for token in ids if vocabulary and not 0 <= token < vocabulary]
            if unknown and (key, unknown[0]) not in reported:  # an evaluation takes over keys of `sampling`
                reported.add((key, unknown[0]))
                yield Problem(
                    f"{path}.{key}",
                    f"has the token {unknown[0]}, but {config.model!r} has a vocabulary of {vocabulary}: the "
                    "ids begin at 0",
                )


def loaded_models(assembly: Assembly) -> list[tuple[str, str, Head]]:
    """Return the key of the run file, the source and the head of each model that a trainer loads."""
    models: dict[tuple[str, Head], str] = {}
    for group in assembly.placement.groups.values():
        for name in group.models if isinstance(group.section, ModelTrainingConfig) else ():
            if source := assembly.config.source_of(name):
                settings = assembly.config.models.get(name)
                key = f"models.{name}.path" if settings and settings.path else "model"
                models.setdefault((source, assembly.graph.models[name].head), key)
    return [(key, *model) for model, key in models.items()]


def _vocabulary_problems(path: str, model: str, run_model: str | None) -> Iterator[Problem]:
    """Refuse a tokenizer with other ids: every model of a run gets the ids of `model`'s tokenizer. One of
    them may have more ids, or rows of padding: the trainer refuses an id that a model does not have."""
    if run_model is None or model == run_model:
        return
    both = f"{model!r} and the run's model ({run_model}) get the same token ids, and must have one tokenizer"
    own, of_run = pieces_of(model), pieces_of(run_model)
    if own is None or of_run is None:
        size, expected = vocabulary_of(model), vocabulary_of(run_model)
        if size and expected and size != expected:
            yield Problem(
                path, f"{both}: it has a vocabulary of {size} tokens, the run's model of {expected}"
            )
        else:
            lacking = model if own is None else run_model
            yield _warning(path, f"{both}: not compared, because {lacking!r} has no tokenizer.json here")
        return
    (pieces, merges), (run_pieces, run_merges) = own, of_run
    others = [id for id in sorted(pieces) if pieces[id] != run_pieces.get(id, pieces[id])]
    for id in others[:1]:
        found = f"the id {id} is {pieces[id]!r}, and {run_pieces[id]!r} for the run's model"
        yield Problem(path, f"{both}: {len(others)} ids differ; {found}")
    if not others and any(one != other for one, other in zip(merges, run_merges, strict=False)):
        yield Problem(path, f"{both}: their merges differ")


def source_problems(path: str, model: str) -> Iterator[Problem]:
    """Check that a model is a folder with a model, or a hub id that exists."""
    if Path(model).is_file():
        what = f"a file of GGUF weights; {_OF_GGUF}" if model.endswith(".gguf") else "a file"
        yield Problem(path, f"{model!r} is {what}; expected the folder of a model, or a hub id")
        return
    if Path(model).is_dir():
        if not Path(model, "config.json").exists():
            yield Problem(path, f"{model!r} is not a model: {_what_is(Path(model))}")
        elif fault := fault_of_files(Path(model)):
            yield Problem(path, f"{model!r} {fault}")
        else:
            yield from _architecture_problems(path, model)
        return
    parts = model.split("/")
    looks_like_path = model.startswith((".", "/", "~")) or len(parts) > 2 or model.endswith(_FILE_SUFFIXES)
    if looks_like_path or (len(parts) == 2 and Path(parts[0]).is_dir()):
        yield Problem(path, f"no such folder: {model!r}")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        yield Problem(path, f"{model!r} is neither a folder nor a hub id such as 'org/name'")
    else:
        yield from _hub_problems(path, model)


_OF_GGUF = "transformers converts them: from_pretrained(…, gguf_file=…), then save_pretrained"


def _what_is(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        base = base_of(folder)
        return (
            f"it is a LoRA adapter of {repr(base) if base else 'another model'}; write that model, and the "
            "adapter as `training.lora.adapter` to continue it"
        )
    steps = sorted(folder.glob("checkpoints/step-*/model"), key=lambda each: each.stat().st_mtime)
    if (folder / "config.yaml").is_file():
        newest = f"{str(steps[-1])!r}" if steps else "not there yet: it has no checkpoint"
        return f"it is the folder of a run; the model of its newest checkpoint is {newest}"
    models = sorted(folder.glob("*/config.json"))
    if models:
        meant = " or ".join(repr(str(each.parent)) for each in models[:_NAMED])
        return f"the folder has no config.json; {meant} has one"
    if next(folder.glob("*.gguf"), None):
        return f"it has GGUF weights; {_OF_GGUF}"
    return "the folder has no config.json"


def _architecture_problems(path: str, model: str) -> Iterator[Problem]:
    config = known_config(model)
    names: list[str] = config.get("architectures") or []
    if config.get("is_encoder_decoder"):
        yield Problem(path, f"{model!r} is an encoder with a decoder; stretto trains models of one decoder")
    elif names and config.get("auto_map") and not _is_of_transformers(names[0]):
        yield Problem(
            path,
            f"{model!r} is a {names[0]}, which code in its own folder computes; stretto runs no code of "
            f"models, and would train a {config.get('model_type')} with its weights",
        )
    elif names and not any(part in name for name in names for part in _GENERATES):
        yield _warning(
            path,
            f"{model!r} is a {names[0]}, which has no head that writes text; the run needs a causal model, "
            "whose architecture ends in ForCausalLM",
        )


def _is_of_transformers(name: str) -> bool:
    import transformers

    return name in dir(transformers)  # a lazy module: this imports no model


def _hub_problems(path: str, model: str) -> Iterator[Problem]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if cached_file(model, "config.json"):
        return
    try:
        HfApi().model_info(model, timeout=5.0)
    except RepositoryNotFoundError:
        yield Problem(path, f"no model {model!r}: the hub does not have it, and there is no such folder")
    except Exception as error:  # noqa: BLE001 - the exceptions differ between versions of the hub's client
        reason = type(error).__name__
        text = f"{model!r} not verified: there is no such folder, and the hub cannot be reached ({reason})"
        yield _warning(path, text)
