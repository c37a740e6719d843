"""Preference losses without a reference model: CPO, SimPO, AlphaPO and ORPO."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rtkernels.errors import ArgumentError
from rtkernels.losses.shared import choice, counted, mask_of, number, smoothed, values

_TYPES = ("sigmoid", "simpo", "hinge", "ipo")
_OF_MEANS = ("simpo", "ipo")


def _scores(name: str, tokens: Tensor, mask: Tensor | None, mean: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sum or mean of each sequence, and the negative mean over all tokens; sums are returned unchanged."""
    found = values(name, tokens)
    if found.dim() == 1:
        if mask is not None:
            raise ArgumentError(f"{name}_mask is given and {name} has shape {tuple(found.shape)}; expected [B, T]")
        return found, None
    counts = mask_of(f"{name}_mask", mask, found, name)
    found = counted(found, counts)
    sums = found.sum(1)
    return sums / counts.sum(1).clamp(min=1) if mean else sums, -found.sum() / counts.sum()


def _both(chosen, rejected, chosen_mask, rejected_mask, mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    y_w, nll = _scores("chosen", chosen, chosen_mask, mean)
    y_l, _ = _scores("rejected", rejected, rejected_mask, mean)
    if y_w.shape != y_l.shape:
        raise ArgumentError(f"rejected has {y_l.shape[0]} sequences; expected {y_w.shape[0]}, as chosen has")
    return y_w, y_l, nll


def cpo(
    chosen: Tensor, rejected: Tensor, *, chosen_mask: Tensor | None = None, rejected_mask: Tensor | None = None,
    loss_type: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0, simpo_gamma: float = 0.5,
    alpha: float = 0.0, cpo_alpha: float = 1.0, nll: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the CPO loss of pairs of completions: a mean over pairs, plus `cpo_alpha` times the chosen ones' NLL.

    Args:
        chosen: Log-probabilities of the chosen completions: of tokens ``[B, T]``, or one score per sequence ``[B]``,
            which is the sum over tokens, for "simpo" and "ipo" the mean.
        rejected: Those of the rejected completions, ``[B, T']`` or ``[B]``.
        chosen_mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        rejected_mask: The mask of `rejected`.
        loss_type: "sigmoid", "simpo", "hinge" or "ipo".
        beta: Factor of the difference of scores.
        label_smoothing: Probability that a label is wrong, for "sigmoid" and "simpo".
        simpo_gamma: Margin of "simpo".
        alpha: AlphaPO: scores ``y`` become ``(1 - exp(-alpha * y)) / alpha``. 0: they stay.
        cpo_alpha: Weight of the negative log-likelihood of the chosen completions.
        nll: That likelihood, a scalar. None: the mean over the tokens of `chosen`.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, an option is unknown or out of range, or `nll` is missing beside ``[B]``.
    """
    choice("loss_type", loss_type, _TYPES)
    number("beta", beta, 0, above=True)
    number("label_smoothing", label_smoothing, 0, 0.5)
    number("simpo_gamma", simpo_gamma)
    number("alpha", alpha)
    number("cpo_alpha", cpo_alpha)
    y_w, y_l, own = _both(chosen, rejected, chosen_mask, rejected_mask, loss_type in _OF_MEANS)
    if cpo_alpha and nll is None and own is None:
        raise ArgumentError("nll is None; expected a scalar, because chosen has no tokens and cpo_alpha is not 0")
    if alpha:
        y_w, y_l = -torch.expm1(-alpha * y_w) / alpha, -torch.expm1(-alpha * y_l) / alpha
    x = y_w - y_l
    if loss_type == "hinge":
        loss = torch.relu(1 - beta * x)
    elif loss_type == "ipo":
        loss = (x - 1 / (2 * beta)) ** 2
    else:
        loss = smoothed(beta * x - (simpo_gamma if loss_type == "simpo" else 0.0), label_smoothing)
    return loss.mean() + (cpo_alpha * (own if nll is None else nll) if cpo_alpha else 0.0)


def simpo(
    chosen: Tensor, rejected: Tensor, *, chosen_mask: Tensor | None = None, rejected_mask: Tensor | None = None,
    beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the SimPO loss: :func:`cpo` with ``loss_type="simpo"`` and without likelihood of the chosen completions.

    Args:
        chosen: Log-probabilities of the chosen completions: of tokens ``[B, T]``, or means ``[B]``.
        rejected: Those of the rejected completions.
        chosen_mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        rejected_mask: The mask of `rejected`.
        beta: Factor of the difference of means.
        gamma: The margin by which chosen completions are to be better, after the factor.
        label_smoothing: Probability that a label is wrong.

    Returns:
        A scalar.
    """
    return cpo(
        chosen, rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask, loss_type="simpo", beta=beta,
        simpo_gamma=number("gamma", gamma), label_smoothing=label_smoothing, cpo_alpha=0.0,
    )  # fmt: skip


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x < 0 without cancellation on either side."""
    far = x < -0.6931471805599453
    near = torch.log(-torch.expm1(torch.where(far, -0.5, x)))
    return torch.where(far, torch.log1p(-torch.exp(torch.where(far, x, -1.0))), near)


def orpo(
    chosen: Tensor, rejected: Tensor, nll: Tensor, *, chosen_mask: Tensor | None = None,
    rejected_mask: Tensor | None = None, beta: float = 0.1,
) -> Tensor:  # fmt: skip
    """Return the ORPO loss of pairs of completions: the chosen ones' NLL and the odds ratio of mean log-probabilities.

    Args:
        chosen: Log-probabilities of the chosen completions: of tokens ``[B, T]``, or means ``[B]``.
        rejected: Those of the rejected completions.
        nll: Negative log-likelihood of the chosen sequences, prompts included as a rule: a scalar.
        chosen_mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        rejected_mask: The mask of `rejected`.
        beta: Weight of the odds ratio.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, or `beta` is negative.
    """
    number("beta", beta, 0)
    nll = values("nll", nll, (0,))
    y_w, y_l, _ = _both(chosen, rejected, chosen_mask, rejected_mask, True)
    odds = y_w - y_l - (_log1mexp(y_w) - _log1mexp(y_l))
    return nll - beta * logsigmoid(odds).mean()
