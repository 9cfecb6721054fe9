"""The sections of a run that choose a component, and the places where their keys were written."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.component import Kind
from stretto.errors import ConfigError

# Sections that choose a component: dotted key -> kind.
SECTIONS: dict[str, Kind] = {
    "algorithm": "algorithm",
    "training": "training",
    "inference": "inference",
    "workflow": "workflow",
    "reward": "reward",
    "dataset": "dataset",
    "launcher": "launcher",
    "weights": "weights",
    "evaluation.dataset": "dataset",
}
LIST_SECTIONS: dict[str, Kind] = {"trackers": "tracker"}
# Sections with any number of named components.
NAMED_SECTIONS: dict[str, Kind] = {"groups": "training"}
GROUP_NAME = r"[a-z][a-z0-9_]*"
# Sections of a variant that choose a component, below `variants.NAME`.
VARIANT_SECTIONS: dict[str, Kind] = {"workflow": "workflow", "reward": "reward"}
VARIANT_NAME = r"[a-z][a-z0-9_]{0,31}"

# Keys of TRL, verl and transformers -> stretto's (docs/from-trl.md, docs/from-verl.md), for error messages.
FOREIGN_KEYS = {
    "adam_beta1": "training.betas",
    "adam_beta2": "training.betas",
    "adv_estimator": "algorithm.use",
    "beta": "algorithm.kl.coef",
    "bf16": "training.dtype",
    "clip_ratio": "algorithm.eps_clip",
    "clip_ratio_c": "algorithm.c_clip",
    "clip_ratio_high": "algorithm.eps_clip_high",
    "clip_ratio_low": "algorithm.eps_clip",
    "delta": "algorithm.c_clip",
    "epsilon": "algorithm.eps_clip",
    "epsilon_high": "algorithm.eps_clip_high",
    "eval_dataset": "evaluation.dataset",
    "eval_steps": "evaluation.every",
    "gpu_memory_utilization": "inference.share",
    "grad_clip": "training.clip_norm",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "lam": "algorithm.gae_lambda",
    "learning_rate": "training.lr",
    "logger": "trackers",
    "loss_agg_mode": "algorithm.loss_mean",
    "loss_type": "algorithm.loss_mean",
    "lr_scheduler_type": "training.schedule",
    "max_completion_length": "sampling.max_tokens",
    "max_grad_norm": "training.clip_norm",
    "max_length": "sampling.max_tokens",
    "max_model_len": "inference.context_length",
    "max_new_tokens": "sampling.max_tokens",
    "max_num_seqs": "inference.slots",
    "max_prompt_length": "dataset.max_prompt_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "algorithm.group_size",
    "num_iterations": "algorithm.epochs",
    "num_train_epochs": "steps",
    "output_dir": "out",
    "peft_config": "training.lora",
    "per_device_train_batch_size": "queue.batch_size",
    "ppo_epochs": "algorithm.epochs",
    "prompt_key": "dataset.prompt_column",
    "report_to": "trackers",
    "reward_funcs": "reward",
    "reward_weights": "reward.weights",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.group_reward_norm",
    "steps_per_generation": "algorithm.minibatches",
    "tensor_model_parallel_size": "inference.tensor_parallel",
    "test_freq": "evaluation.every",
    "total_training_steps": "steps",
    "train_batch_size": "queue.batch_size",
    "train_dataset": "dataset",
    "vllm_gpu_memory_utilization": "inference.share",
    "vllm_max_model_length": "inference.context_length",
    "vllm_tensor_parallel_size": "inference.tensor_parallel",
}

# Keys that are gone -> what to write instead, for error messages. A section's key stands for all its keys.
REMOVED_KEYS: dict[str, str] = {
    "training.cpu_offload": "write `state: host`",
}

_NAMED_KEY = re.compile(rf"groups\.{GROUP_NAME}|variants\.{VARIANT_NAME}\.({'|'.join(VARIANT_SECTIONS)})")


_PARTS = ".parts."
"""Text between the key of a section and the name of a part (see `stretto.component.ComponentParts`)."""


def names_component(path: str) -> bool:
    """Return whether the section at a dotted key chooses a component."""
    owner, part, name = path.rpartition(_PARTS)
    if part:
        return names_component(owner) and re.fullmatch(GROUP_NAME, name) is not None
    return path in SECTIONS or _NAMED_KEY.fullmatch(path) is not None


def kind_of(path: str) -> Kind:
    """Return the kind of the component that the section at a dotted key chooses."""
    path = path.partition(_PARTS)[0]
    if path.startswith("variants."):
        return VARIANT_SECTIONS[path.rpartition(".")[2]]
    return SECTIONS.get(path) or (LIST_SECTIONS | NAMED_SECTIONS)[path.partition(".")[0]]


def instead_of_list(path: str) -> str:
    """Return a hint on what to write instead of a list for a section; empty if there is no hint."""
    return "; several rewards are the `parts` of the reward `sum`" if path == "reward" else ""


class KeySource:
    """The places of a run's keys, for messages. This class serves runs that were composed before."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.raw: Mapping[str, Any] = {}
        """The run file with overrides, before interpolations are resolved."""

    def is_overridden(self, path: str) -> bool:
        """Return whether an override set this key, or a section around it."""
        del path
        return False

    def place(self, path: str) -> str:
        """Return where a key was written: `run.yaml:14: training.lr`, or `override training.lr`."""
        return f"{self.file}: {path}"

    def component_in_file(self, path: str) -> str:
        """Return the component that the file chooses for a section, without the overrides; empty if none."""
        del path
        return ""

    def error(self, path: str, message: str, value: Any = None) -> ConfigError:
        """Return an error about a key. It begins with the place where the key was written."""
        return ConfigError(f"{self.place(path)}: {message}", path=path, value=value)
