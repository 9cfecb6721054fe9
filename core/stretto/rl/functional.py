"""(torch) The arithmetic of reinforcement learning on packed batches: pure functions of tensors.

Shapes: T tokens of S sequences end to end; `index` (T,) names each token's sequence. A logprob is stored
at the token that it belongs to. Three policies have names: *behaviour* sampled the token, *proximal* is the
policy at the start of the train step, *current* is being optimised.

Papers: PPO, Schulman et al. 2017 (arXiv 1707.06347); GAE, Schulman et al. 2015 (1506.02438); dual-clip, Ye et
al. 2019 (1912.09729); GRPO, Shao et al. 2024 (2402.03300); decoupled PPO, Hilton et al. 2021 (2110.00641) as
used by AReaL, Fu et al. 2025 (2505.24298); Dr. GRPO, Liu et al. 2025 (2503.20783); DAPO, Yu et al. 2025
(2503.14476); GSPO, Zheng et al. 2025 (2507.18071); CISPO, MiniMax 2025 (2506.13585); RLOO, Ahmadian et al.
2024 (2402.14740); REINFORCE++, Hu et al. 2025 (2501.03262); adaptive KL, Ziegler et al. 2019 (1909.08593);
DPO, Rafailov et al. 2023 (2305.18290); IPO, Azar et al. 2023 (2310.12036); hinge on preferences, Liu et al.
2023 (RSO, 2309.06657).
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence, unpad_sequence

from stretto.algorithm import EQUAL, Reduction

__all__ = [
    "adapt_kl_coef",
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
    "moments_of_ratios",
    "overlong_penalty",
    "pairs_of",
    "preference_loss",
    "second_moment_mask",
    "sequence_mean",
    "sequence_sum",
    "soft_gate",
]


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probability of each target under softmax(logits / temperature): (N,) float32.

    Args:
        logits: (N, V), any floating dtype; computed in float32.
        targets: (N,) int64.
    """
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    target_logits = scaled.gather(-1, targets[:, None]).squeeze(-1)
    return target_logits - scaled.logsumexp(-1)


def entropy_of(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (N, V) -> (N,) float32."""
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    return -(logprobs.exp() * logprobs).sum(-1)


def sequence_sum(values: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """Sum of each sequence's tokens: (T,), (T,) int64 -> (S,) in the dtype of `values`."""
    return values.new_zeros(num_sequences).index_add_(0, index, values)


def sequence_mean(values: Tensor, mask: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """Mean over each sequence's tokens where `mask` is True, 0 if there are none: (T,), (T,) bool, (T,) int64
    -> (S,)."""
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

    Computed in float64, returned as (S,) float32. The advantages of a group are 0 if it has one sample, or if
    `stretto.algorithm.are_equal` holds for its rewards: then they differ only by rounding.

    Args:
        rewards: (S,), any floating dtype.
        group: (S,) int64, equal for the sequences of one prompt; any numbers.
        sample: (S,) int64, equal for the sequences of a group that belong to one sample, such as the pieces
            of a conversation. Mean and standard deviation count a sample once, with the mean reward of its
            sequences. None if each sequence is a sample.
        std: divide by the standard deviation; without it this is Dr. GRPO's advantage.
        leave_one_out: subtract the mean of the other samples, as in RLOO (2402.14740; with `std=False`). This
            multiplies R - mean_G by G / (G - 1), with G samples in the group.
    """
    groups, members = torch.unique(group, return_inverse=True)  # (G,), (S,) 0..G-1
    rewards = rewards.double()
    by_sample, sample_groups = (rewards, members) if sample is None else _by_sample(rewards, members, sample)
    size = sequence_sum(torch.ones_like(by_sample), sample_groups, len(groups))  # (G,)
    mean = sequence_sum(by_sample, sample_groups, len(groups)) / size
    centred = rewards - mean[members]
    squares = (by_sample - mean[sample_groups]).square()
    variance = sequence_sum(squares, sample_groups, len(groups)) / (size - 1).clamp(min=1)
    if leave_one_out:
        centred = centred * (size / (size - 1).clamp(min=1))[members]
    relative = centred / (variance.sqrt()[members] + eps) if std else centred
    return torch.where(_is_equal(by_sample, sample_groups, len(groups))[members], 0.0, relative).float()


def _is_equal(values: Tensor, members: Tensor, num_groups: int) -> Tensor:
    """Return which groups have equal values, as in `stretto.algorithm.are_equal`: (S,), (S,) -> (G,) bool."""
    highest, lowest, largest = (
        values.new_zeros(num_groups).scatter_reduce_(0, members, column, reduce, include_self=False)
        for column, reduce in ((values, "amax"), (values, "amin"), (values.abs(), "amax"))
    )
    return highest - lowest <= EQUAL * largest


def _by_sample(rewards: Tensor, members: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean reward and group of each sample, (N,) and (N,), from the columns of the sequences, (S,)."""
    sample_ids, sample_places = torch.unique(sample, return_inverse=True)
    # A key stands for one sample of one group: sample numbers may repeat between groups.
    keys, places = torch.unique(members * len(sample_ids) + sample_places, return_inverse=True)  # (N,), (S,)
    everywhere = torch.ones_like(rewards, dtype=torch.bool)
    return sequence_mean(rewards, everywhere, places, len(keys)), keys // max(1, len(sample_ids))


def at_last_token(values: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """Put one number per sequence at the sequence's last token where `mask` is True: (S,), (T,) bool, (T,)
    -> (T,), 0 elsewhere. The number of a sequence without such a token is dropped.
    """
    positions = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    last = positions.new_full((len(values),), -1).scatter_reduce(0, index, positions, "amax")  # (S,)
    result = values.new_zeros(len(mask))
    result[last[last >= 0]] = values[last >= 0]
    return result


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment, DAPO eq. 13: 0 up to limit - buffer sampled tokens, then down to -factor at
    the limit. Return (S,) float32 for `lengths`, (S,); the caller adds it to the rewards."""
    return factor * ((limit - buffer - lengths.float()) / buffer).clamp(min=-1.0, max=0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: list[int], *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each sequence's own tokens, GAE eq. 11, 12 and 16.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = sum_k (gamma lam)^k delta_{t+k}, where t counts only the
    tokens with `mask`: prompts, and text between turns, are skipped. After the last such token of a sequence
    the value is 0. With values 0 and gamma = lam = 1, a token's advantage is the sum of the rewards from
    that token on: the sequence's return, if the only reward is at the end.

    Args:
        rewards: (T,) float32, the reward that follows each token.
        values: (T,) float32, the value of the state in which each token is chosen.
        mask: (T,) bool, the tokens that the policy chose.
        lengths: number of tokens of each of the S sequences.

    Returns:
        advantages and returns (advantages + values), (T,) float32, 0 where `mask` is False.
    """
    # (L, S): the chosen tokens of each sequence.
    counts = torch.stack([chosen.sum() for chosen in mask.split(lengths)])
    padded_rewards = pad_sequence([*rewards[mask].split(counts.tolist())])
    padded_values = pad_sequence([*values[mask].split(counts.tolist())])
    padded_advantages = torch.empty_like(padded_rewards)
    following_value = following_advantage = rewards.new_zeros(len(lengths))
    for t in reversed(range(len(padded_rewards))):
        delta = padded_rewards[t] + gamma * following_value - padded_values[t]
        following_advantage = delta + gamma * lam * following_advantage
        padded_advantages[t] = following_advantage
        following_value = padded_values[t]
    advantages = torch.zeros_like(rewards)
    advantages[mask] = torch.cat(unpad_sequence(padded_advantages, counts))
    return advantages, torch.where(mask, advantages + values, 0.0)


def masked_whiten(values: Tensor, mask: Tensor, group: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Scale values to mean 0 and standard deviation 1 over the tokens where `mask` is True, in the batch or
    in each group: (T,) float32, 0 where `mask` is False.

    Args:
        values: (T,), any floating dtype.
        mask: (T,) bool.
        group: (T,) int64, the group of each token; None puts all tokens into one group.
    """
    chosen = values[mask]
    members = torch.zeros_like(chosen, dtype=torch.long) if group is None else group[mask]
    whitened = torch.zeros_like(values, dtype=torch.float32)
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

    r = exp(logprobs - anchor); loss = -min(r A, clip(r, 1 - eps, 1 + eps_high) A). For A < 0 the loss is at
    most -c A (dual-clip PPO eq. 5), so that a very large ratio cannot dominate.

    Args:
        logprobs: (T,) of the current policy, with gradient.
        anchor_logprobs: (T,) of the policy in the denominator of the ratio, without gradient.
        advantages: (T,).
        eps_clip: width of the trust region below 1, and also above 1 unless `eps_clip_high` is given.
        c_clip: c of the dual clip, above 1; None turns the dual clip off.

    Returns:
        loss (T,); whether the clip was active (T,) bool; whether the dual clip was active (T,) bool.
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
    """SAPO's loss per token (arXiv 2511.20347), (T,): -f(r) A with f = sigmoid(tau (r - 1)) * 4 / tau. The
    slope of f at r = 1 is 1, the slope of r itself. tau is `tau_pos` for A > 0, else `tau_neg`."""
    ratio = torch.exp(logprobs - anchor_logprobs)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def second_moment_mask(delta: Tensor, mask: Tensor, tau: float) -> Tensor:
    """M2PO's trust region (2510.01161): drop the trained tokens with the largest delta^2, one by one, until
    the mean of delta^2 over the remaining ones is at most tau. Return the remaining tokens, (T,) bool.

    Args:
        delta: (T,) behaviour logprobs minus proximal logprobs, of the whole batch.
        mask: (T,) bool, trained tokens.
    """
    ascending, order = delta[mask].square().sort()
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=delta.device)
    within = torch.zeros_like(ascending, dtype=torch.bool)
    within[order] = means <= tau  # the running mean of ascending numbers ascends
    result = torch.zeros_like(mask)
    result[mask] = within
    return result


def importance_weight(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    *,
    cap: float | None,
    over_cap: Literal["mask", "truncate"] = "mask",
) -> Tensor:
    """Weight that corrects for tokens that older weights sampled: pi_prox / pi_behav, AReaL eq. 5: (T,)
    without gradient.

    Args:
        proximal_logprobs: (T,), of the policy at the start of the step, without gradient.
        behaviour_logprobs: (T,), of the policy that sampled.
        cap: largest weight that is allowed; None for no bound.
        over_cap: "mask" gives a token above the cap the weight 0 (AReaL); "truncate" gives it the weight
            `cap` (truncated importance sampling).
    """
    weight = torch.exp(proximal_logprobs - behaviour_logprobs).detach()
    if cap is None:
        return weight
    if over_cap == "truncate":
        return weight.clamp(max=cap)
    return torch.where(weight <= cap, weight, 0.0)


def loss_count(mask: Tensor, index: Tensor, num_sequences: int, reduction: Reduction) -> int:
    """Return the denominator of a batch's loss: the number of trained tokens for `token`, else the number of
    sequences with a trained token. `mask`: (T,) bool; `index`: (T,) int64."""
    if reduction == "token":
        return int(mask.sum())
    return int((sequence_sum(mask.float(), index, num_sequences) > 0).sum())


def loss_weights(
    mask: Tensor, index: Tensor, num_sequences: int, reduction: Reduction, *, count: int | None = None
) -> Tensor:
    """Each token's weight in the loss of the whole batch, (T,) float32, 0 where `mask` is False; see
    `stretto.algorithm.Reduction`.

    The sum of `weights * losses` over any partition of the batch is the batch's loss, so micro-batches,
    accumulation and packing do not change the gradient. A token whose loss is set to 0 still counts in the
    denominator. A sequence without a trained token does not count.

    Args:
        mask: (T,) bool, trained tokens.
        index: (T,) int64, each token's sequence.
        count: the denominator. If these tokens are one of several parts of the batch, pass the sum of
            `loss_count` over all parts; None if they are the whole batch.
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
    """PPO's loss of a critic per token, as in the code of PPO's authors: 1/2 max((V - R)^2, (V' - R)^2) with
    V' = clip(V, V_old - eps, V_old + eps).

    Args:
        values: (T,) of the current critic, with gradient.
        old_values: (T,) of the critic at the start of the train step.
        returns: (T,) the targets of the values.
        value_clip: eps; None turns clipping off: 1/2 (V - R)^2.

    Returns:
        loss (T,); whether the clip was active, so that the token has no gradient, (T,) bool.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    clipped_values = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    clipped = (clipped_values - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


# -------------------------------------------------------------------------------------------- KL


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate of KL(policy || reference), (T,), at tokens that the policy sampled (Schulman 2020,
    "Approximating KL divergence"): with d = log policy - log reference, k1 = d, k2 = d^2 / 2, and
    k3 = exp(-d) - 1 + d.

    k1 and k3 are unbiased; k2 and k3 are never negative. No estimate is clamped. As a loss at tokens that the
    current policy sampled, they have these gradients:

    - k1: grad log policy, whose mean is 0, so it has no effect on average.
    - k2: d grad log policy, the gradient of KL(policy || reference).
    - k3: (1 - exp(-d)) grad log policy, the gradient of KL(reference || policy).
    """
    d = logprobs - reference_logprobs
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.expm1(-d) + d


def kl_to_behaviour(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(behaviour || policy) at tokens that the behaviour policy sampled. (T,) -> (T,)."""
    return kl_estimate(behaviour_logprobs, logprobs, "k3")


def moments_of_ratios(
    logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, index: Tensor, num_sequences: int
) -> dict[str, Tensor]:
    """Columns, (T,) float32 each, whose means over the trained tokens give effective sample sizes.

    `token` and `token_square` are w and w² of each token, w = exp(logprobs - behaviour_logprobs). With W the
    product of w over the trained tokens of a sequence and n their number, `sequence`, `sequence_square` and
    `sequences` are W / n, W² / n and 1 / n, so that their sums over the sequence's n tokens are W, W² and 1.
    The logarithms of w and W are clamped to ±20.

    Args:
        logprobs: (T,) without gradient.
        behaviour_logprobs: (T,).
        mask: (T,) bool, the trained tokens.
        index: (T,) int64, the sequence of each token.
    """
    index = index.to(logprobs.device)
    log_w = torch.where(mask, logprobs - behaviour_logprobs, 0.0)
    w = log_w.clamp(-20, 20).exp()
    count = sequence_sum(mask.to(log_w.dtype), index, num_sequences).clamp(min=1)
    sequence_w = sequence_sum(log_w, index, num_sequences).clamp(-20, 20).exp()
    return {
        "moment/token": w,
        "moment/token_square": w.square(),
        "moment/sequence": (sequence_w / count)[index],
        "moment/sequence_square": (sequence_w.square() / count)[index],
        "moment/sequences": (1 / count)[index],
    }


def bounded_kl(logprobs: Tensor, behaviour_logprobs: Tensor, *, bound: float = 1.0) -> Tensor:
    """k3 estimate of KL(behaviour || policy) per token, each at most `bound` nats: (T,), (T,) -> (T,).

    The estimate has a long tail: a token that is now 1,000 times as likely counts as much as thousands of
    other tokens. The bound prevents a few tokens from dominating the mean over a batch.
    """
    return kl_to_behaviour(logprobs, behaviour_logprobs).clamp(max=bound)


def adapt_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """Return the KL coefficient of the next step, Ziegler et al. 2019 (1909.08593), section 2.2. It grows if
    the KL per answer from the step's samples to the reference, in nats, is above `target`, and shrinks if it
    is below, by at most a fifth over `horizon` samples. A step with more samples counts as one of `horizon`
    samples, so the coefficient cannot become negative."""
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * min(1.0, samples / horizon))


# ----------------------------------------------------------------------------------- preferences


def pairs_of(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the two sequences of each group, in the order of the batch.

    Args:
        group: (S,) int64; every number occurs twice.

    Returns:
        index of the first sequence of each pair (P,), index of the second (P,), and the pair of each sequence
        (S,); all int64.
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
    """Loss of each pair, (P,), from h (P,): the score of the chosen answer minus that of the rejected one.

    - `sigmoid`, DPO eq. 7 and Bradley-Terry: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), where
      e, `label_smoothing`, is the share of wrong labels (conservative DPO).
    - `ipo`, IPO eq. 17: (h - 1 / (2 beta))^2.
    - `hinge`, RSO's hinge-norm: max(0, 1 - beta h).

    `ipo` and `hinge` ignore `label_smoothing`."""
    if variant == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if variant == "hinge":
        return (1 - beta * difference).clamp(min=0)
    log_sigmoid = torch.nn.functional.logsigmoid
    right, wrong = log_sigmoid(beta * difference), log_sigmoid(-beta * difference)
    return -(1 - label_smoothing) * right - label_smoothing * wrong
