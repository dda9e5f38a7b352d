"""The loss of pairs of a chosen and a rejected answer to one prompt, from the losses of their labels.

One formula has the published forms as values of its keys (`pref`). With s = log-probability of an answer minus that of
the reference, divided by its number of tokens with `pref.per_token`, and m = beta * (s_chosen - s_rejected) - gamma:

    weight * f(m) - sft_weight * (mean log-probability of a token of the chosen answer)

f is DPO's -log sigmoid(m) (arXiv 2305.18290), and with label smoothing e that of conservative DPO, -(1 - e) log
sigmoid(m) - e log sigmoid(-m); or another one of `PairForm`. SimPO (arXiv 2405.14734) has no reference, divides by
tokens, and a gamma; RPO (arXiv 2404.19733) and MPO (arXiv 2411.10442) add the second term.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from llava_fsdp.config import PairForm, PrefConfig


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the answers of a micro-batch. The two answers of a pair are neighbors, the chosen one
    first."""

    sums: torch.Tensor
    """Sum over the tokens of each answer, float32 [2 * pairs]."""
    tokens: torch.Tensor
    """Number of tokens of each answer, float32 [2 * pairs]."""


def answers_of(losses: torch.Tensor, owners: torch.Tensor, pairs: int) -> Answers:
    """Return the log-probability and the number of tokens of each answer, from the losses of its labels. A product with
    a matrix of 0 and 1 has the same bits every time; additions at indices do not on CUDA.

    Args:
        losses: loss of each label, float32 [labels].
        owners: for each label, the number of its answer in the micro-batch, int64 [labels].
        pairs: number of pairs, each with two answers.
    """
    is_own = (owners == torch.arange(2 * pairs, device=owners.device)[:, None]).to(losses.dtype)
    return Answers(-(is_own @ losses), is_own.sum(1))


def preference_losses(
    answers: Answers, reference: torch.Tensor | None, cfg: PrefConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each pair, float32 [pairs], and the rewards of its chosen and rejected answer, float32 [pairs,
    2], without gradients. A reward is `pref.beta` times the log-probability of the answer minus that by the reference
    model, with `pref.per_token` divided by the number of tokens. `reference`: log-probabilities by that model, float32
    [2 * pairs]; None: there is no such model."""
    scores = answers.sums if reference is None else answers.sums - reference
    if cfg.per_token:
        scores = scores / answers.tokens
    rewards = cfg.beta * scores.view(-1, 2)
    losses = cfg.weight * form_losses(rewards[:, 0] - rewards[:, 1] - cfg.gamma, cfg)
    if cfg.sft_weight:
        losses = losses - cfg.sft_weight * (answers.sums / answers.tokens).view(-1, 2)[:, 0]
    return losses, rewards.detach()


def form_losses(margins: torch.Tensor, cfg: PrefConfig) -> torch.Tensor:
    """Return the loss of each pair by `pref.form`, float32 [pairs]: sigmoid and robust are forms of DPO, in which
    `pref.label_smoothing` is the share of pairs whose answers may be the wrong way round. `margins`: reward of the
    chosen answer minus that of the rejected one minus `pref.gamma`, float32 [pairs]."""
    share = cfg.label_smoothing
    match cfg.form:
        case PairForm.sigmoid:
            return -(1 - share) * logsigmoid(margins) - share * logsigmoid(-margins)
        case PairForm.robust:
            return (-(1 - share) * logsigmoid(margins) + share * logsigmoid(-margins)) / (1 - 2 * share)
        case PairForm.hinge:
            return torch.relu(1 - margins)
        case PairForm.ipo:
            return ((margins - 0.5) / cfg.beta) ** 2
