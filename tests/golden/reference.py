"""Losses written out token by token, and the golden vectors made from them.

This is the second opinion on the arithmetic: plain NumPy in float64, loops in place of masked tensors, and
not one import from stretto. It is to be changed from the papers only, never to agree with the code it judges.
`python tests/golden/reference.py` writes the files beside it again; the same code writes the same files.

Three policies give every token a log-probability: the behaviour policy sampled it, the proximal policy is
where the training step began, the current policy is the one being trained. A token with loss_mask 0 is not
trained: it has no advantage and no loss, and no sum, mean or count knows it. Position t runs over the flat
batch of T tokens, in which the S sequences follow each other without padding.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]  # (T,)


# --- options ---

_LOSS: dict[str, Any] = {
    "correction": {"use": "behaviour"},
    "loss_mean": "token",
    "loss_divisor": 1.0,
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "c_clip": 3.0,
    "kl": {},
}
KL: dict[str, Any] = {"coef": 0.0, "estimator": "k3", "where": "loss"}
PPO_KL = KL | {"estimator": "k1", "where": "reward", "target": None, "horizon": 10_000.0}
_FADING = {"gamma": 1.0, "gae_lambda": 1.0}
_GROUP = _FADING | {"baseline": "mean", "group_reward_norm": True, "norm_eps": 1e-6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": _LOSS | _GROUP,
    "dapo": _LOSS | _GROUP | {"eps_clip_high": 0.28, "overlong": None},
    "gspo": _LOSS | _GROUP | {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "loss_mean": "sequence"},
    "cispo": _LOSS | _GROUP | {"eps_clip": 1.0, "eps_clip_high": 0.28},
    "sapo": _LOSS | _GROUP | {"tau_pos": 1.0, "tau_neg": 1.05, "loss_mean": "sequence"},
    "rloo": _LOSS,
    "reinforce_pp": _LOSS | {"gamma": 1.0, "baseline": False},
    "m2po": _LOSS | _GROUP | {"tau": 0.04},
    "distill": _LOSS | {"coef": 1.0, "reward_weight": 0.0},
    "ppo": _LOSS | _FADING | {"reward_norm": False, "adv_norm": True, "value_clip": 0.2},
    "sft": {"loss_mean": "token"},
    "dpo": {"variant": "sigmoid", "beta": 0.1, "label_smoothing": 0.0},
    "reward_model": {"margin": 0.0, "centering": 0.0},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "decoupled": {"cap": 5.0},
    "token_tis": {"cap": 2.0},
    "sequence_tis": {"cap": 2.0},
    "icepop": {"low": 0.5, "cap": 5.0},
    "sequence_mask": {"low": 0.99, "cap": 1.01},
    "behaviour": {},
    "none": {},
}


def _with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    # A misspelt option would otherwise leave a vector that tests the default under another name.
    unknown = set(given) - set(defaults)
    if unknown:
        raise ValueError(f"unknown options {sorted(unknown)}; accepted: {sorted(defaults)}")
    return {**defaults, **given}


# --- the batch ---


@dataclass(frozen=True)
class Sequence:
    """One sequence of the batch, and the positions of its trained tokens in the flat lists."""

    group: int
    reward: float
    tokens: list[int]


def _sequences(inputs: Mapping[str, Any]) -> list[Sequence]:
    sequences: list[Sequence] = []
    start = 0
    rewards = inputs.get("rewards", [0.0] * len(inputs["lengths"]))
    for length, group, reward in zip(inputs["lengths"], inputs["group"], rewards, strict=True):
        tokens = [t for t in range(start, start + length) if inputs["loss_mask"][t] == 1]
        sequences.append(Sequence(group, reward, tokens))
        start += length
    assert start == len(inputs["loss_mask"])
    return sequences


# --- advantages ---


def _overlong(n: int, overlong: Mapping[str, Any]) -> float:
    """What DAPO adds to the reward of an answer of n tokens: 0 up to the buffer, then down to -penalty."""
    begin = overlong["limit"] - overlong["buffer"]
    return overlong.get("penalty", 1.0) * max(-1.0, min(0.0, (begin - n) / overlong["buffer"]))


def _centred(rewards: list[float], i: int, baseline: str) -> float:
    """Reward i of a group less its baseline; nothing is known of a group of one."""
    if len(rewards) == 1:
        return 0.0
    if baseline == "mean":
        return rewards[i] - float(np.mean(rewards))
    if baseline == "leave_one_out":
        others = rewards[:i] + rewards[i + 1 :]
        return rewards[i] - float(np.mean(others))
    raise ValueError(f"no baseline {baseline!r}; accepted: mean, leave_one_out")


def _group_scalars(
    sequences: list[Sequence], rewards: list[float], options: Mapping[str, Any]
) -> list[float]:
    """One number for each sequence: how much better it was than its group."""
    scalars: list[float] = []
    for s, sequence in enumerate(sequences):
        members = [m for m, other in enumerate(sequences) if other.group == sequence.group]
        of_group = [rewards[m] for m in members]
        scalar = _centred(of_group, members.index(s), options["baseline"])
        if options["group_reward_norm"] and len(members) > 1:
            scalar /= float(np.std(of_group, ddof=1)) + options["norm_eps"]
        scalars.append(scalar)
    return scalars


def _fading(sequences: list[Sequence], scalars: list[float], decay: float, total: int) -> Floats:
    """Advantages of scalars that stand at the last trained token: decay^k with k trained tokens to come."""
    advantages = np.zeros(total)
    for sequence, scalar in zip(sequences, scalars, strict=True):
        for k, t in enumerate(reversed(sequence.tokens)):
            advantages[t] = scalar * decay**k
    return advantages


def _token_rewards(sequences: list[Sequence], scores: list[float], penalties: Floats) -> list[list[float]]:
    """The rewards that follow the trained tokens of each sequence: its score the last, less penalties."""
    rewards: list[list[float]] = []
    for sequence, score in zip(sequences, scores, strict=True):
        of_sequence = [-float(penalties[t]) for t in sequence.tokens]
        if of_sequence:
            of_sequence[-1] += score
        rewards.append(of_sequence)
    return rewards


def _gae(rewards: list[float], values: list[float], gamma: float, decay: float) -> list[float]:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}; the value after the last token is 0."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * decay) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]


def _whitened(sequences: list[Sequence], returns: Floats) -> Floats:
    """Returns with mean 0 and standard deviation 1 over the trained tokens of the whole batch."""
    trained = [t for sequence in sequences for t in sequence.tokens]
    mean = np.mean(returns[trained])
    std = np.std(returns[trained], ddof=1)
    whitened = np.zeros(len(returns))
    for t in trained:
        whitened[t] = (returns[t] - mean) / (std + 1e-6)
    return whitened


def _ppo_advantages(
    options: Mapping[str, Any], sequences: list[Sequence], penalties: Floats, values: Floats
) -> tuple[Floats, Floats]:
    scores = [sequence.reward for sequence in sequences]
    if options["reward_norm"]:
        mean, std = np.mean(scores), np.std(scores, ddof=1)
        scores = [float((score - mean) / (std + 1e-6)) for score in scores]
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    rewards = _token_rewards(sequences, scores, penalties)
    for sequence, of_sequence in zip(sequences, rewards, strict=True):
        of_tokens = [float(values[t]) for t in sequence.tokens]
        estimate = _gae(of_sequence, of_tokens, options["gamma"], options["gae_lambda"])
        for t, advantage in zip(sequence.tokens, estimate, strict=True):
            advantages[t] = advantage
            returns[t] = advantage + values[t]
    return _whitened(sequences, advantages) if options["adv_norm"] else advantages, returns


def _advantages(
    algorithm: str,
    options: Mapping[str, Any],
    sequences: list[Sequence],
    penalties: Floats,
    taught: Floats | None,
) -> Floats:
    total = len(penalties)
    rewards = [sequence.reward for sequence in sequences]
    mean = {"baseline": "mean", "group_reward_norm": False}
    if algorithm == "distill":
        assert taught is not None
        scalars = [options["reward_weight"] * s for s in _group_scalars(sequences, rewards, mean)]
        advantages = _fading(sequences, scalars, 1.0, total)
        for sequence in sequences:
            for t in sequence.tokens:
                advantages[t] += options["coef"] * taught[t] - penalties[t]
        return advantages
    if algorithm == "reinforce_pp":
        if options["baseline"]:
            rewards = _group_scalars(sequences, rewards, mean)
        returns = np.zeros(total)
        tokens = _token_rewards(sequences, rewards, penalties)
        for sequence, of_sequence in zip(sequences, tokens, strict=True):
            for k, t in enumerate(sequence.tokens):
                returns[t] = sum(options["gamma"] ** j * r for j, r in enumerate(of_sequence[k:]))
        return _whitened(sequences, returns)
    if algorithm == "dapo" and options["overlong"] is not None:
        shaped = [_overlong(len(sequence.tokens), options["overlong"]) for sequence in sequences]
        rewards = [reward + penalty for reward, penalty in zip(rewards, shaped, strict=True)]
    # A whole answer has one reward here, so it bears the penalties of all its tokens.
    rewards = [r - float(np.sum(penalties[s.tokens])) for r, s in zip(rewards, sequences, strict=True)]
    if algorithm == "rloo":
        alone = {"baseline": "leave_one_out", "group_reward_norm": False}
        return _fading(sequences, _group_scalars(sequences, rewards, alone), 1.0, total)
    scalars = _group_scalars(sequences, rewards, options)
    return _fading(sequences, scalars, options["gamma"] * options["gae_lambda"], total)


# --- KL to a reference ---


def _kl(estimator: str, logprob: float, reference: float) -> float:
    """Schulman's estimates of KL(policy || reference) at one token of the policy, whose r is ref / policy."""
    r = float(np.exp(reference - logprob))
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": (r - 1) - np.log(r)}[estimator]


def _adapted(coef: float, kl: float, options: Mapping[str, Any], samples: int) -> float:
    error = (kl - options["target"]) / options["target"]
    error = max(-0.2, min(0.2, error))
    return coef * (1 + error * min(1.0, samples / options["horizon"]))


# --- correction for stale samples ---


def _token_weight(use: str, options: Mapping[str, Any], log_rho: float, of_sequence: Floats) -> float:
    if use in ("behaviour", "none"):
        return 1.0
    rho = float(np.exp(log_rho))
    cap = np.inf if options["cap"] is None else options["cap"]
    if use == "decoupled":
        return rho if rho <= cap else 0.0
    if use == "token_tis":
        return min(rho, cap)
    if use == "sequence_tis":
        return min(float(np.exp(np.sum(of_sequence))), cap)
    if use == "icepop":
        return rho if options["low"] <= rho <= cap else 0.0
    assert use == "sequence_mask"
    return rho if options["low"] <= np.exp(np.mean(of_sequence)) <= cap else 0.0


def _weights(
    correction: Mapping[str, Any], sequences: list[Sequence], behaviour: Floats, proximal: Floats
) -> Floats:
    use = correction.get("use", "behaviour")
    options = _with_defaults(correction, {"use": use} | CORRECTIONS[use])
    weights = np.zeros(len(behaviour))
    for sequence in sequences:
        of_sequence = proximal[sequence.tokens] - behaviour[sequence.tokens]
        for t, log_rho in zip(sequence.tokens, of_sequence, strict=True):
            weights[t] = _token_weight(use, options, log_rho, of_sequence)
    return weights


# --- objectives, one token at a time ---


def _clip(value: float, eps_low: float, eps_high: float) -> float:
    return max(1 - eps_low, min(1 + eps_high, value))


def _clip_loss(
    ratio: float, advantage: float, eps_low: float, eps_high: float, c_clip: float | None
) -> float:
    """PPO's clipped objective as a loss; with `c_clip`, bounded for bad tokens that became likely."""
    loss = -min(ratio * advantage, _clip(ratio, eps_low, eps_high) * advantage)
    if c_clip is not None and advantage < 0:
        loss = min(loss, -c_clip * advantage)
    return loss


def _sapo_loss(ratio: float, advantage: float, tau_pos: float, tau_neg: float) -> float:
    tau = tau_pos if advantage > 0 else tau_neg
    gate = 1 / (1 + float(np.exp(-tau * (ratio - 1))))
    return -gate * 4 / tau * advantage


def _within_second_moment(behaviour: Floats, proximal: Floats, trained: list[int], tau: float) -> set[int]:
    """What M2PO keeps: the furthest go, one by one, until the rest has a mean square within tau."""
    squares = (behaviour - proximal) ** 2
    kept = sorted(trained, key=lambda t: squares[t])
    while kept and np.mean(squares[kept]) > tau:
        kept.pop()
    return set(kept)


def _token_loss(
    algorithm: str,
    options: Mapping[str, Any],
    log_ratio: float,
    of_sequence: Floats,
    advantage: float,
    logprob: float,
) -> float:
    """The loss of one token before its weight, from its log-ratio to the anchor and those of its sequence."""
    eps_low, eps_high = options["eps_clip"], options["eps_clip_high"]
    if eps_high is None:
        eps_high = eps_low
    ratio = float(np.exp(log_ratio))
    if algorithm == "cispo":
        return -_clip(ratio, eps_low, eps_high) * advantage * logprob
    if algorithm == "sapo":
        return _sapo_loss(ratio, advantage, options["tau_pos"], options["tau_neg"])
    if algorithm == "gspo":
        ratio = float(np.exp(np.mean(of_sequence)))
    return _clip_loss(ratio, advantage, eps_low, eps_high, options.get("c_clip"))


# --- the loss of the batch ---


def _reduced(losses: Floats, sequences: list[Sequence], loss_mean: str) -> float:
    """One number for the batch. A token of weight 0 was trained on all the same, so it counts."""
    answers = [sequence for sequence in sequences if sequence.tokens]
    sums = [float(np.sum(losses[sequence.tokens])) for sequence in answers]
    counts = [len(sequence.tokens) for sequence in answers]
    if loss_mean == "token":
        return sum(sums) / sum(counts)
    if loss_mean == "sequence":
        return sum(of_answer / n for of_answer, n in zip(sums, counts, strict=True)) / len(answers)
    if loss_mean == "sequence_sum":
        return sum(sums) / len(answers)
    raise ValueError(f"no loss_mean {loss_mean!r}; accepted: token, sequence, sequence_sum")


def reference(algorithm: str, options: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be found, of which `losses` are those of the tokens before the mean (T,), and `loss` that of
    the batch; policy gradients have `advantages` (T,), and `statistics` are means over trained tokens.

    Args:
        algorithm: One of `DEFAULTS`.
        options: What departs from the algorithm's defaults.
        inputs: lengths (S,), group (S,), loss_mask (T,), and what the algorithm needs of: rewards (S,);
            behaviour_logprobs, proximal_logprobs, logprobs, reference_logprobs, teacher_logprobs, values,
            current_values, scores, each (T,).
    """
    options = _with_defaults(options, DEFAULTS[algorithm])
    if algorithm == "sft":
        return _sft(options, inputs)
    if algorithm == "dpo":
        return _dpo(options, inputs)
    if algorithm == "reward_model":
        return _reward_model(options, inputs)
    return _policy_gradient(algorithm, options, inputs)


def _floats(inputs: Mapping[str, Any], name: str) -> Floats:
    return np.array(inputs[name], dtype=np.float64)


def _policy_gradient(algorithm: str, options: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    behaviour = _floats(inputs, "behaviour_logprobs")
    proximal = _floats(inputs, "proximal_logprobs")
    current = _floats(inputs, "logprobs")
    total = len(current)
    sequences = _sequences(inputs)
    trained = [t for sequence in sequences for t in sequence.tokens]
    found: dict[str, Any] = {}
    statistics: dict[str, float] = {}

    kl = _with_defaults(options["kl"], PPO_KL if algorithm == "ppo" else KL)
    kls = np.zeros(total)
    if kl["coef"] > 0:
        to = _floats(inputs, "reference_logprobs")
        of = current if kl["where"] == "loss" else behaviour
        for t in trained:
            kls[t] = _kl(kl["estimator"], of[t], to[t])
        statistics["reference_kl"] = float(np.mean(kls[trained]))
    none = np.zeros(total)
    penalties = kl["coef"] * kls if kl["where"] == "reward" else none
    in_loss = kl["coef"] * kls if kl["where"] == "loss" else none

    if algorithm == "ppo":
        values = _floats(inputs, "values")
        advantages, returns = _ppo_advantages(options, sequences, penalties, values)
        found |= {"returns": returns.tolist(), "critic": _critic(options, inputs, sequences, returns)}
        if kl["target"] is not None:
            answers = float(np.mean([np.sum(kls[sequence.tokens]) for sequence in sequences]))
            found["state"] = {"kl_coef": _adapted(kl["coef"], answers, kl, len(sequences))}
            statistics["kl_coef"] = kl["coef"]
    else:
        taught = _floats(inputs, "teacher_logprobs") - behaviour if algorithm == "distill" else None
        advantages = _advantages(algorithm, options, sequences, penalties, taught)
        if taught is not None:
            statistics["teacher_kl"] = -float(np.mean(taught[trained]))
    weights = _weights(options["correction"], sequences, behaviour, proximal)
    anchor = behaviour if options["correction"].get("use", "behaviour") == "behaviour" else proximal
    kept = set(trained)
    if algorithm == "m2po":
        kept = _within_second_moment(behaviour, proximal, trained, options["tau"])

    losses = np.zeros(total)
    for sequence in sequences:
        of_sequence = current[sequence.tokens] - anchor[sequence.tokens]
        for t, log_ratio in zip(sequence.tokens, of_sequence, strict=True):
            if t in kept:
                loss = _token_loss(algorithm, options, log_ratio, of_sequence, advantages[t], current[t])
                losses[t] = weights[t] * loss
            losses[t] += in_loss[t]
    loss = _reduced(losses, sequences, options["loss_mean"]) / options["loss_divisor"]
    found = {"advantages": advantages.tolist(), "losses": losses.tolist(), "loss": loss} | found
    return found | ({"statistics": statistics} if statistics else {})


def _value_loss(value: float, old: float, wanted: float, value_clip: float | None) -> float:
    """Half the squared error, or that of the clipped value if it is the greater one."""
    error = (value - wanted) ** 2
    if value_clip is not None:
        clipped = max(old - value_clip, min(old + value_clip, value))
        error = max(error, (clipped - wanted) ** 2)
    return error / 2


def _critic(
    options: Mapping[str, Any], inputs: Mapping[str, Any], sequences: list[Sequence], returns: Floats
) -> dict[str, Any]:
    old, new = _floats(inputs, "values"), _floats(inputs, "current_values")
    losses = np.zeros(len(old))
    for sequence in sequences:
        for t in sequence.tokens:
            losses[t] = _value_loss(new[t], old[t], returns[t], options["value_clip"])
    return {"losses": losses.tolist(), "loss": _reduced(losses, sequences, "token")}


# --- supervised ---


def _sft(options: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    current, sequences = _floats(inputs, "logprobs"), _sequences(inputs)
    losses = np.zeros(len(current))
    for sequence in sequences:
        for t in sequence.tokens:
            losses[t] = -current[t]
    nll = _reduced(losses, sequences, "token")
    loss = _reduced(losses, sequences, options["loss_mean"])
    return {"losses": losses.tolist(), "loss": loss, "statistics": {"nll": nll}}


def _pairs(sequences: list[Sequence]) -> list[tuple[Sequence, Sequence]]:
    """Chosen and rejected: the first and the second of each group in the order of the batch."""
    of_group: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        of_group.setdefault(sequence.group, []).append(sequence)
    return [(chosen, rejected) for chosen, rejected in of_group.values()]


def _of_pair(h: float, variant: str, beta: float, label_smoothing: float) -> float:
    if variant == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    if variant == "hinge":
        return max(0.0, 1 - beta * h)
    assert variant == "sigmoid"
    right = 1 / (1 + float(np.exp(-beta * h)))
    return -(1 - label_smoothing) * float(np.log(right)) - label_smoothing * float(np.log(1 - right))


def _of_pairs(
    pairs: list[tuple[Sequence, Sequence]], of_pair: list[float], ahead: list[float], total: int
) -> dict[str, Any]:
    """Both sequences carry the loss of their pair at the last trained token."""
    losses = np.zeros(total)
    for (chosen, rejected), loss in zip(pairs, of_pair, strict=True):
        losses[chosen.tokens[-1]] = losses[rejected.tokens[-1]] = loss
    statistics = {"accuracy": float(np.mean([h > 0 for h in ahead])), "margin": float(np.mean(ahead))}
    return {"losses": losses.tolist(), "loss": float(np.mean(of_pair)), "statistics": statistics}


def _dpo(options: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    log_ratio = _floats(inputs, "logprobs") - _floats(inputs, "reference_logprobs")
    pairs = _pairs(_sequences(inputs))
    ahead = [float(np.sum(log_ratio[c.tokens]) - np.sum(log_ratio[r.tokens])) for c, r in pairs]
    of_pair = [_of_pair(h, options["variant"], options["beta"], options["label_smoothing"]) for h in ahead]
    return _of_pairs(pairs, of_pair, [options["beta"] * h for h in ahead], len(log_ratio))


def _reward_model(options: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    scores = _floats(inputs, "scores")
    pairs = _pairs(_sequences(inputs))
    ends = [
        (float(scores[chosen.tokens[-1]]), float(scores[rejected.tokens[-1]])) for chosen, rejected in pairs
    ]
    of_pair = [
        _of_pair(better - worse - options["margin"], "sigmoid", 1.0, 0.0)
        + options["centering"] * (better + worse) ** 2
        for better, worse in ends
    ]
    return _of_pairs(pairs, of_pair, [better - worse for better, worse in ends], len(scores))


# --- golden vectors ---


@dataclass(frozen=True)
class Layout:
    """The shape of a batch: prompts of two tokens, one answer with a hole, one group with equal rewards."""

    lengths: list[int]
    group: list[int]
    hole: int
    equal: int


PROMPT = 2
LAYOUTS = {
    # Group 2 has one member.
    "alone": Layout(lengths=[7, 6, 8, 4, 3, 5], group=[0, 0, 0, 1, 1, 2], hole=2, equal=1),
    # Pairs, whose members stand apart; the first one of a pair is the chosen one.
    "pairs": Layout(lengths=[7, 5, 4, 6, 9, 3], group=[0, 1, 0, 2, 2, 1], hole=4, equal=-1),
    # The groups' members are interleaved, and one answer is longer than the limit of the case dapo.
    "mixed": Layout(lengths=[5, 8, 4, 6, 7, 3, 10], group=[0, 1, 2, 0, 1, 2, 0], hole=4, equal=2),
}
# How far the three policies of a case lie apart, as standard deviations: of log(proximal / behaviour), large
# enough for caps and masks to act; of log(current / proximal), for the clips; of the critic's values.
SPREAD = {"stale": 1.0, "moved": 0.5, "value_moved": 0.4}


def _inputs(case: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that a case draws.

    Its seed is chosen so that each clip, cap and mask acts on some tokens with an advantage and spares
    others, and so that no token is so near to an edge that float32 puts it on the other side.
    """
    algorithm, settings = case["algorithm"], SPREAD | case["drawn"]
    layout = LAYOUTS[settings["layout"]]
    # NumPy may change what a Generator draws from a seed; a RandomState is frozen for good.
    random = np.random.RandomState(settings["seed"])
    mask: list[int] = []
    for s, length in enumerate(layout.lengths):
        of_sequence = [0] * PROMPT + [1] * (length - PROMPT)
        if s == layout.hole:
            of_sequence[(PROMPT + length) // 2] = 0
        mask += of_sequence
    drawn = random.uniform(0.0, 1.0, len(layout.group))
    rewards = [
        1.0 if g == layout.equal else round(reward, 2) for g, reward in zip(layout.group, drawn, strict=True)
    ]
    # The tokens that are not trained differ as much as the others, so that a mask left out is seen.
    behaviour = random.uniform(-8.0, -5.0, len(mask))
    proximal = behaviour + random.normal(0.0, settings["stale"], len(mask))
    current = proximal + random.normal(0.0, settings["moved"], len(mask))
    assert max(behaviour.max(), proximal.max(), current.max()) < 0.0
    batch: dict[str, Any] = {"lengths": layout.lengths, "loss_mask": mask, "group": layout.group}
    if algorithm == "sft":
        return batch | {"logprobs": current.tolist()}
    if algorithm == "dpo":
        return batch | {"logprobs": current.tolist(), "reference_logprobs": proximal.tolist()}
    if algorithm == "reward_model":
        last = [int(index in np.cumsum(layout.lengths) - 1) for index in range(len(mask))]
        return batch | {"loss_mask": last, "scores": random.normal(0.0, 1.0, len(mask)).tolist()}
    inputs = batch | {
        "rewards": rewards,
        "behaviour_logprobs": behaviour.tolist(),
        "proximal_logprobs": proximal.tolist(),
        "logprobs": current.tolist(),
    }
    if case["options"].get("kl"):
        inputs["reference_logprobs"] = (behaviour + random.normal(0.0, 0.5, len(mask))).tolist()
    if algorithm == "distill":
        inputs["teacher_logprobs"] = (behaviour + random.normal(0.0, 1.0, len(mask))).tolist()
    if algorithm == "ppo":
        values = random.normal(0.5, 0.5, len(mask))
        inputs["values"] = values.tolist()
        inputs["current_values"] = (values + random.normal(0.0, settings["value_moved"], len(mask))).tolist()
    return inputs


def _rounded(value: Any) -> Any:
    """The value with its floats at nine significant digits, and without negative zeros."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.9g}") + 0.0 if isinstance(value, float) else value


def golden(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case with its results; what is expected belongs to the inputs as rounded in the file."""
    inputs = _rounded(_inputs(case))
    expected = _rounded(reference(case["algorithm"], case["options"], inputs))
    return {**case, "inputs": inputs, "expected": expected}


def _as_json(value: Any, indent: str = "") -> str:
    """JSON with one line for each list; json.dumps would give one to each number."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + "  "
    lines = [f"{inner}{json.dumps(key)}: {_as_json(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def main() -> None:
    """Write inputs and results of every case again. A new case is a file with the other keys alone."""
    for file in Path(__file__).parent.glob("*.json"):
        file.write_text(_as_json(golden(json.loads(file.read_text()))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
