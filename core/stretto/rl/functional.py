"""(torch) The arithmetic of reinforcement learning on packed batches: pure functions of tensors.

Shapes: T tokens of S sequences end to end; `index` (T,) names each token's sequence. A column of
logprobs stands at the token it is the probability of. Policies are named: *behaviour* sampled the
token, *proximal* is the policy at the start of the train step, *current* is being optimised.

Papers: PPO, Schulman et al. 2017 (arXiv 1707.06347); GAE, Schulman et al. 2015 (1506.02438); dual-clip, Ye et
al. 2019 (1912.09729); GRPO, Shao et al. 2024 (2402.03300); decoupled PPO, Hilton et al. 2021 (2110.00641) as
used by AReaL, Fu et al. 2025 (2505.24298); Dr. GRPO, Liu et al. 2025 (2503.20783); DAPO, Yu et al. 2025
(2503.14476); GSPO, Zheng et al. 2025 (2507.18071); CISPO, MiniMax 2025 (2506.13585); RLOO, Ahmadian et al.
2024 (2402.14740); REINFORCE++, Hu et al. 2025 (2501.03262); adaptive KL, Ziegler et al. 2019 (1909.08593);
DPO, Rafailov et al. 2023 (2305.18290); IPO, Azar et al. 2023 (2310.12036); hinge on preferences, Liu et al.
2023 (RSO, 2309.06657).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stretto.algorithm import Reduction

__all__ = [
    "adapted_kl_coef",
    "at_last_token",
    "bounded_kl",
    "clipped_objective",
    "clipped_value_loss",
    "entropy_of",
    "gae",
    "group_normalise",
    "importance_weight",
    "kl_estimate",
    "kl_to_behaviour",
    "logprobs_of",
    "loss_count",
    "loss_weights",
    "masked_whiten",
    "overlong_penalty",
    "pairs_of",
    "preference_loss",
    "second_moment_mask",
    "sequence_mean",
    "sequence_sum",
    "soft_gate",
]


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probability of each target under softmax(logits / temperature).

    Args:
        logits: (N, V), any floating dtype; computed in float32.
        targets: (N,) int64.

    Returns:
        (N,) float32.
    """
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    picked = scaled.gather(-1, targets[:, None]).squeeze(-1)
    return picked - scaled.logsumexp(-1)


def entropy_of(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (N, V) -> (N,) float32."""
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    return -(logprobs.exp() * logprobs).sum(-1)


def sequence_sum(values: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """Sum of each sequence's tokens: (T,), (T,) int64 -> (S,) in the dtype of `values`."""
    return values.new_zeros(num_sequences).index_add_(0, index, values)


def sequence_mean(values: Tensor, mask: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """Mean of each sequence's masked tokens, 0 without one: (T,), (T,) bool, (T,) int64 -> (S,)."""
    count = sequence_sum(mask.to(values.dtype), index, num_sequences).clamp(min=1)
    return sequence_sum(torch.where(mask, values, 0.0), index, num_sequences) / count


# ------------------------------------------------------------------------------------ advantages


def group_normalise(
    rewards: Tensor,
    group: Tensor,
    sample: Tensor | None = None,
    *,
    std: bool = True,
    eps: float = 1e-6,
    leave_one_out: bool = False,
) -> Tensor:
    """Group-relative rewards, GRPO eq. 3: (R - mean_G) / (std_G + eps), with the unbiased standard deviation.

    A group of one has nothing to be compared with: its advantage is 0.

    Args:
        rewards: (S,) float32.
        group: (S,) int64, equal for sequences of one prompt; any numbers.
        sample: (S,) int64, equal for sequences of a group that are one sample, such as the pieces of a
            conversation: mean and standard deviation count it once, with the mean of their rewards. None
            where each sequence is one.
        std: divide by the standard deviation; without it this is Dr. GRPO's advantage.
        leave_one_out: subtract the mean of the others, as in RLOO (2402.14740): G / (G - 1) times as much.

    Returns:
        (S,) float32.
    """
    groups, members = torch.unique(group, return_inverse=True)  # (G,), (S,) 0..G-1
    of_sample, owners = (rewards, members) if sample is None else _by_sample(rewards, members, sample)
    size = sequence_sum(torch.ones_like(of_sample), owners, len(groups))  # (G,)
    mean = sequence_sum(of_sample, owners, len(groups)) / size
    centred = rewards - mean[members]
    squares = (of_sample - mean[owners]).square()
    variance = sequence_sum(squares, owners, len(groups)) / (size - 1).clamp(min=1)
    if leave_one_out:
        centred = centred * (size / (size - 1).clamp(min=1))[members]
    return centred / (variance.sqrt()[members] + eps) if std else centred


def _by_sample(rewards: Tensor, members: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Mean reward and group of each of N samples, (N,) and (N,), from those of their sequences, (S,)."""
    numbers, places = torch.unique(sample, return_inverse=True)
    keys, pieces = torch.unique(members * len(numbers) + places, return_inverse=True)  # (N,), (S,) 0..N-1
    everywhere = torch.ones_like(rewards, dtype=torch.bool)
    return sequence_mean(rewards, everywhere, pieces, len(keys)), keys // max(1, len(numbers))


def at_last_token(values: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """One number a sequence, put at the last of its masked tokens: (S,), (T,) bool, (T,) -> (T,), 0
    elsewhere.

    A sequence without a masked token loses its number.
    """
    positions = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    last = positions.new_full((len(values),), -1).scatter_reduce(0, index, positions, "amax")  # (S,)
    spread = values.new_zeros(len(mask))
    spread[last[last >= 0]] = values[last >= 0]
    return spread


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment, DAPO eq. 13: 0 up to limit - buffer tokens, then down to -factor at the
    limit.

    Args:
        lengths: (S,) sampled tokens of each sequence.

    Returns:
        (S,) float32, to be added to the rewards.
    """
    return factor * ((limit - buffer - lengths.float()) / buffer).clamp(min=-1.0, max=0.0)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: list[int],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each sequence's own tokens, GAE eq. 11, 12 and 16.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = sum_k (gamma lam)^k delta_{t+k}, where t runs over the
    tokens with `mask` only: prompts, and text between turns, are stepped over. After a sequence's last
    such token the value is 0. With values 0 and gamma = lam = 1 every token gets the sequence's return.

    Args:
        rewards: (T,) float32, reward that follows each token.
        values: (T,) float32, value of the state in which each token is chosen.
        mask: (T,) bool, tokens the policy chose.
        lengths: tokens of each sequence, S of them.

    Returns:
        advantages and returns (advantages + values), (T,) float32, 0 where `mask` is False.
    """
    # (S, L): the chosen tokens of each sequence, moved together to the left.
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[mask.cpu()]
    counts = torch.bincount(index, minlength=len(lengths))
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(index)) - starts[index]
    shape = (len(lengths), int(counts.max()) if len(index) else 0)
    place = (index.to(rewards.device), column.to(rewards.device))
    padded_rewards = rewards.new_zeros(shape).index_put_(place, rewards[mask])
    padded_values = rewards.new_zeros(shape).index_put_(place, values[mask])
    padded = rewards.new_zeros(shape)
    following_value = following_advantage = rewards.new_zeros(len(lengths))
    for t in reversed(range(shape[1])):
        delta = padded_rewards[:, t] + gamma * following_value - padded_values[:, t]
        following_advantage = delta + gamma * lam * following_advantage
        padded[:, t] = following_advantage
        following_value = padded_values[:, t]
    advantages = torch.zeros_like(rewards)
    advantages[mask] = padded[place]
    return advantages, torch.where(mask, advantages + values, 0.0)


def masked_whiten(values: Tensor, mask: Tensor, group: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Values to mean 0 and standard deviation 1 over the masked tokens, of the batch or of each group.

    Args:
        values: (T,) float32.
        mask: (T,) bool.
        group: (T,) int64, the group of each token; None takes all tokens as one.

    Returns:
        (T,) float32, 0 where `mask` is False.
    """
    chosen = values[mask]
    members = torch.zeros_like(chosen, dtype=torch.long) if group is None else group[mask]
    whitened = torch.zeros_like(values)
    whitened[mask] = group_normalise(chosen, members, eps=eps)
    return whitened


# ------------------------------------------------------------------------------------- objective


def clipped_objective(
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    c_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate as a loss per token, PPO eq. 7, with dual clip for negative advantages.

    r = exp(logprobs - anchor); loss = -min(r A, clip(r, 1 - eps, 1 + eps_high) A), and for A < 0 at most
    -c A (dual-clip PPO eq. 5), so that a ratio that exploded cannot dominate.

    Args:
        logprobs: (T,) current, with gradient.
        anchor_logprobs: (T,) of the policy that the ratio is taken to, without gradient.
        advantages: (T,).
        eps_clip: half-width of the trust region below 1, and above unless `eps_clip_high` is given.
        c_clip: c > 1; None is without dual clip.

    Returns:
        loss (T,); whether the clip was active (T,) bool; whether the dual clip was (T,) bool.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = torch.exp(logprobs - anchor_logprobs)
    clipped_ratio = ratio.clamp(1 - eps_clip, 1 + high)
    surrogate, clipped = ratio * advantages, clipped_ratio * advantages
    loss = -torch.minimum(surrogate, clipped)
    is_clipped = clipped < surrogate
    if c_clip is None:
        return loss, is_clipped, torch.zeros_like(is_clipped)
    bound = -c_clip * advantages  # (T,), positive where the advantage is negative
    is_dual = (advantages < 0) & (loss > bound)
    return torch.where(is_dual, bound, loss), is_clipped, is_dual


def soft_gate(
    logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float
) -> Tensor:
    """SAPO's loss per token (arXiv 2511.20347): -f(r) A with f = sigmoid(tau (r - 1)) * 4 / tau, so that the
    slope at r = 1 is that of r itself. tau depends on the sign of A; 0 takes `tau_neg`. (T,)."""
    ratio = torch.exp(logprobs - anchor_logprobs)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def second_moment_mask(delta: Tensor, mask: Tensor, tau: float) -> Tensor:
    """M2PO's trust region (2510.01161): drop the masked tokens with the largest delta^2, one by one, until
    the mean of the rest is at most tau.

    Args:
        delta: (T,) behaviour minus proximal logprobs, of the whole batch.
        mask: (T,) bool, trained tokens.

    Returns:
        (T,) bool, the trained tokens that are kept.
    """
    ascending, order = delta[mask].square().sort()
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=delta.device)
    within = torch.zeros_like(ascending, dtype=torch.bool)
    within[order] = means <= tau  # means of ascending numbers ascend
    kept = torch.zeros_like(mask)
    kept[mask] = within
    return kept


def importance_weight(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    *,
    cap: float | None,
    over_cap: Literal["mask", "truncate"] = "mask",
) -> Tensor:
    """Weight that corrects for tokens sampled by older weights, pi_prox / pi_behav, AReaL eq. 5.

    Args:
        proximal_logprobs, behaviour_logprobs: (T,), without gradient.
        cap: largest weight that counts; None for no bound.
        over_cap: a token above the cap is left out (AReaL), or weighs `cap` (truncated importance sampling).

    Returns:
        (T,), without gradient.
    """
    weight = torch.exp(proximal_logprobs - behaviour_logprobs).detach()
    if cap is None:
        return weight
    if over_cap == "truncate":
        return weight.clamp(max=cap)
    return torch.where(weight <= cap, weight, 0.0)


def loss_count(mask: Tensor, index: Tensor, num_sequences: int, reduction: Reduction) -> int:
    """What a batch adds to the denominator of its loss: trained tokens, or sequences that have one.

    Args:
        mask: (T,) bool, trained tokens.
        index: (T,) int64, each token's sequence.
    """
    if reduction == "token":
        return int(mask.sum())
    return int((sequence_sum(mask.float(), index, num_sequences) > 0).sum())


def loss_weights(
    mask: Tensor, index: Tensor, num_sequences: int, reduction: Reduction, *, count: int | None = None
) -> Tensor:
    """What each token's loss counts in the loss of the whole batch; see `stretto.algorithm.Reduction`.

    The sum of `weights * losses` over any partition of the batch is the batch's loss, so micro-batches,
    accumulation and packing cannot change the gradient. Tokens that a loss zeroes still count in the
    denominator; sequences without a trained token do not.

    Args:
        mask: (T,) bool, trained tokens.
        index: (T,) int64, each token's sequence.
        count: the denominator: the sum of `loss_count` over all parts of the batch, where this is one of
            several; None where it is all of it.

    Returns:
        (T,) float32, 0 where `mask` is False.
    """
    if count is None:
        count = loss_count(mask, index, num_sequences, reduction)
    weights = mask.float()
    if reduction == "sequence":
        weights = weights / sequence_sum(weights, index, num_sequences).clamp(min=1)[index]
    return weights / max(1, count)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's loss of a critic per token, as in its authors' code: with V' = clip(V, V_old - eps, V_old + eps),
    1/2 max((V - R)^2, (V' - R)^2).

    Args:
        values: (T,) current, with gradient.
        old_values: (T,) of the critic at the start of the train step.
        returns: (T,) what the values should have been.
        value_clip: eps; None is without clipping, 1/2 (V - R)^2.

    Returns:
        loss (T,); whether the clip was active, so that the token has no gradient (T,) bool.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    clipped_values = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    clipped = (clipped_values - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


# -------------------------------------------------------------------------------------------- KL


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate of KL(policy || reference) at tokens that the policy sampled (Schulman 2020, "Approximating KL
    divergence"), with d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 and k3 have the right mean, k2 and k3 are never negative. Nothing is clamped. As a loss, at tokens of
    the current policy, their gradients are: k1, grad log policy, whose mean is 0: no pull at all; k2,
    d grad log policy, that of KL(policy || reference); k3, (1 - exp(-d)) grad log policy, that of
    KL(reference || policy).

    Returns:
        (T,), with the gradient of `logprobs`.
    """
    d = logprobs - reference_logprobs
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.expm1(-d) + d


def kl_to_behaviour(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(behaviour || policy) at tokens the behaviour policy sampled. (T,) -> (T,)."""
    return kl_estimate(behaviour_logprobs, logprobs, "k3")


def bounded_kl(logprobs: Tensor, behaviour_logprobs: Tensor, *, bound: float = 1.0) -> Tensor:
    """k3 estimate of KL(behaviour || policy) by token, each at most `bound` nats: (T,), (T,) -> (T,).

    The estimate has a long tail: a token that has become 1,000 times as likely counts as much as thousands of
    others. The bound keeps the mean over a batch from resting on a few tokens.
    """
    return kl_to_behaviour(logprobs, behaviour_logprobs).clamp(max=bound)


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """The KL coefficient of the next step, Ziegler et al. 2019 (1909.08593), section 2.2: it grows where the
    KL is above its target and shrinks below.

    Args:
        kl: of the step's samples to the reference, an answer, in nats.
        horizon: samples over which the coefficient changes by at most a fifth; a step of more samples than
            that counts as so many, lest the coefficient turn negative.
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * min(1.0, samples / horizon))


# ----------------------------------------------------------------------------------- preferences


def pairs_of(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two sequences of each group, in the order in which they stand in the batch.

    Args:
        group: (S,) int64, every number twice.

    Returns:
        index of the first of each pair (P,), of the second (P,), and the pair of each sequence (S,); int64.
    """
    numbers, pair, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    assert bool((sizes == 2).all()), "a group is not a pair"
    first, second = pair.argsort(stable=True).view(len(numbers), 2).unbind(1)
    return first, second, pair


def preference_loss(
    difference: Tensor,
    *,
    variant: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
    beta: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair from h, by how much the chosen answer is ahead of the rejected one.

    `sigmoid`, DPO eq. 7 and Bradley-Terry: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), where e is
    the share of labels that are wrong (conservative DPO). `ipo`, IPO eq. 17: (h - 1 / (2 beta))^2. `hinge`,
    RSO's hinge-norm: max(0, 1 - beta h). The latter two know no label smoothing.

    Args:
        difference: h (P,), with gradient.

    Returns:
        (P,).
    """
    if variant == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if variant == "hinge":
        return (1 - beta * difference).clamp(min=0)
    log_sigmoid = torch.nn.functional.logsigmoid
    right, wrong = log_sigmoid(beta * difference), log_sigmoid(-beta * difference)
    return -(1 - label_smoothing) * right - label_smoothing * wrong
