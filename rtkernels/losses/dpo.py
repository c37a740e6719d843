"""Direct preference optimisation and its relatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rtkernels.errors import ArgumentError
from rtkernels.losses.shared import choice, counted, either, like, mask_of, number, smoothed, values
from rtkernels.runtime.checks import check_shape, check_tensor

_EXPONENT = 80.0  # exp of more leaves fp32
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


class _Pairs(NamedTuple):
    """Sums of pairs ``[B]``: log-probabilities, log-ratios and scores of chosen (w) and rejected (l) completions."""

    y_w: Tensor
    y_l: Tensor
    ref_w: Tensor
    ref_l: Tensor
    s_w: Tensor
    s_l: Tensor
    n_w: Tensor | None
    n_l: Tensor | None
    nll: Tensor | None  # mean over all chosen tokens
    beta: float
    label_smoothing: float
    tau: float

    @property
    def r_w(self) -> Tensor:
        return self.y_w - self.ref_w

    @property
    def r_l(self) -> Tensor:
        return self.y_l - self.ref_l

    @property
    def u(self) -> Tensor:
        return self.beta * (self.s_w - self.s_l)

    @property
    def of_means(self) -> Tensor:
        """The difference of the scores, each divided by the number of its tokens."""
        return self.s_w / self.n_w.clamp(min=1) - self.s_l / self.n_l.clamp(min=1)


def _robust(p: _Pairs) -> Tensor:
    e = p.label_smoothing
    return (-(1 - e) * logsigmoid(p.u) + e * logsigmoid(-p.u)) / (1 - 2 * e)


def _exo_pair(p: _Pairs) -> Tensor:
    e = p.label_smoothing
    right = torch.sigmoid(p.u) * (logsigmoid(p.u) - math.log1p(-e))
    return right + torch.sigmoid(-p.u) * (logsigmoid(-p.u) - math.log(e))


def _nca_pair(p: _Pairs) -> Tensor:
    w, l = p.beta * p.r_w, p.beta * p.r_l  # noqa: E741
    return -logsigmoid(w) - 0.5 * logsigmoid(-w) - 0.5 * logsigmoid(-l)


def _sppo_hard(p: _Pairs) -> Tensor:
    return (p.r_w - 0.5 / p.beta) ** 2 + (p.r_l + 0.5 / p.beta) ** 2


def _aot(p: _Pairs) -> Tensor:
    own, ref = torch.sort(p.y_w - p.y_l).values, torch.sort(p.ref_w - p.ref_l).values
    return smoothed(p.beta * (own - ref), p.label_smoothing)


def _aot_unpaired(p: _Pairs) -> Tensor:
    return smoothed(p.beta * (torch.sort(p.r_w).values - torch.sort(p.r_l).values), p.label_smoothing)


def _discopop(p: _Pairs) -> Tensor:
    share = torch.sigmoid(p.u / p.tau)
    return -logsigmoid(p.u) * (1 - share) + torch.exp(-p.u) * share


_TYPES: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: -logsigmoid(p.u),
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.of_means),
    "hinge": lambda p: torch.relu(1 - p.u),
    "ipo": lambda p: (p.of_means - 1 / (2 * p.beta)) ** 2,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda p: -logsigmoid(p.beta * p.r_w) - logsigmoid(-p.beta * p.r_l),
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.r_w) + torch.sigmoid(p.beta * p.r_l),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.r_w) + 1 - torch.sigmoid(p.beta * (p.r_w - p.r_l)),
    "discopop": _discopop,
    "sft": lambda p: p.nll.expand_as(p.y_w),
}
_OF_LENGTHS = ("sigmoid_norm", "ipo")


def _score(r: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return the derivative of an f-divergence as a function of log-ratios."""
    if divergence == "forward_kl":
        return 1 - torch.exp(-r)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(r)
    if divergence == "reverse_kl" or abs(alpha - 1) < 1e-6:
        return r
    return (torch.exp(((alpha - 1) * r).clamp(max=_EXPONENT)) - 1) / (alpha - 1)


def _types(loss_type: Any, loss_weights: Any) -> list[tuple[str, float]]:
    types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    for one in types:
        choice("loss_type", one, tuple(_TYPES))
    weights = [1.0] * len(types) if loss_weights is None else list(loss_weights)
    if not types or len(weights) != len(types):
        raise ArgumentError(f"loss_weights has {len(weights)} values; expected {max(len(types), 1)}, one per loss_type")
    return [(one, number("loss_weights", weight)) for one, weight in zip(types, weights, strict=True)]


def _sums(
    name: str, given: Any, policy: Tensor, mask: Tensor | None, shared: Tensor | None, ld_alpha: float | None
) -> Tensor:
    """Return sums over the tokens of each sequence. Tokens behind the first `shared` ones count `ld_alpha` times."""
    found = values(name, given)
    if found.dim() == 1:
        check_shape(name, found.shape, policy.shape[:1], "one sum per sequence")
        return found
    check_shape(name, found.shape, policy.shape, "that of the policy's log-probabilities")
    found = counted(found, mask)
    return (found if shared is None else found * either(mask.cumsum(1) <= shared[:, None], 1.0, ld_alpha, found)).sum(1)


def _lengths(name: str, given: Any, mask: Tensor | None, policy: Tensor) -> Tensor | None:
    if given is None:
        return None if mask is None else mask.sum(1)
    check_tensor(name, given)
    check_shape(name, given.shape, policy.shape[:1], "one number per sequence")
    return given.to(policy.dtype)


def _probable(name: str, log_sum_sq: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return WPO's weight of sequences: how probable their tokens are beside others that the policy would sample."""
    aligned = counted(tokens - like(name, log_sum_sq, tokens, "the policy's log-probabilities"), mask).detach()
    return torch.exp(aligned.sum(1) / mask.sum(1).clamp(min=1))


def dpo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, chosen_mask: Tensor | None = None,
    rejected_mask: Tensor | None = None, chosen_lengths: Tensor | None = None, rejected_lengths: Tensor | None = None,
    loss_type: str | Sequence[str] = "sigmoid", loss_weights: Sequence[float] | None = None, beta: float = 0.1,
    label_smoothing: float = 0.0, f_divergence: str = "reverse_kl", f_alpha: float = 0.5, discopop_tau: float = 0.05,
    ld_alpha: float | None = None, chosen_log_sum_sq: Tensor | None = None, rejected_log_sum_sq: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the DPO loss of pairs of completions, or one of its relatives: a mean over pairs.

    With log-ratios ``r = y - y_ref`` of sequences, ``y`` the sum of a completion's log-probabilities, the default is
    ``-logsigmoid(beta * (r_chosen - r_rejected))``.

    Args:
        chosen: Log-probabilities of the chosen completions under the policy: of tokens ``[B, T]``, or sums ``[B]``.
        rejected: Those of the rejected completions, ``[B, T']`` or ``[B]``.
        ref_chosen: Those of the chosen completions under the reference model, in the shape of `chosen` or ``[B]``.
        ref_rejected: Those of the rejected completions under the reference model.
        chosen_mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        rejected_mask: The mask of `rejected`.
        chosen_lengths: Numbers of tokens ``[B]`` for "ipo" and "sigmoid_norm". None: counted in the mask.
        rejected_lengths: Those of the rejected completions.
        loss_type: "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair",
            "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop" or "sft"; or several of them.
        loss_weights: Weights of several types. None: 1 for each.
        beta: How strongly the policy is held at the reference; for "ipo" the regularisation.
        label_smoothing: Probability that a label is wrong, for "robust", "exo_pair", "aot" and "aot_unpaired".
        f_divergence: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence": the score of a log-ratio.
        f_alpha: The order of the alpha divergence.
        discopop_tau: Temperature of "discopop".
        ld_alpha: LD-DPO: weight of the tokens behind the length of the shorter completion of a pair.
        chosen_log_sum_sq: WPO: the logarithm of the sum of squared probabilities ``[B, T]`` at each token, as
            :func:`rtkernels.linear_logprob` returns it. Pairs are weighted by how probable they are.
        rejected_log_sum_sq: Those of `rejected`.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, an option is unknown or out of range, or a type needs tokens and got sums.
    """
    types = _types(loss_type, loss_weights)
    names = [name for name, _ in types]
    number("beta", beta, 0, above=True)
    number("label_smoothing", label_smoothing, 0, 0.5)
    if "exo_pair" in names:
        number("label_smoothing", label_smoothing, 0, 0.5, above=True)
    number("discopop_tau", discopop_tau, 0, above=True)
    number("f_alpha", f_alpha)
    choice("f_divergence", f_divergence, _DIVERGENCES)
    if ld_alpha is not None:
        number("ld_alpha", ld_alpha, 0)
    w, l = values("chosen", chosen), values("rejected", rejected)  # noqa: E741
    if w.dim() != l.dim() or w.shape[0] != l.shape[0]:
        raise ArgumentError(f"rejected has shape {tuple(l.shape)}; expected as many sequences as {tuple(w.shape)}")
    weighted = chosen_log_sum_sq is not None or rejected_log_sum_sq is not None
    tokens = w.dim() == 2
    needs_tokens = {"loss_type 'sft'": "sft" in names, "ld_alpha": ld_alpha is not None, "chosen_log_sum_sq": weighted}
    needs_tokens |= {"chosen_mask": chosen_mask is not None, "rejected_mask": rejected_mask is not None}
    for what, given in needs_tokens.items():
        if given and not tokens:
            raise ArgumentError(f"chosen has shape {tuple(w.shape)}; expected tokens [B, T], which {what} needs")
    mask_w = mask_of("chosen_mask", chosen_mask, w, "chosen") if tokens else None
    mask_l = mask_of("rejected_mask", rejected_mask, l, "rejected") if tokens else None
    n_w = _lengths("chosen_lengths", chosen_lengths, mask_w, w)
    n_l = _lengths("rejected_lengths", rejected_lengths, mask_l, l)
    if n_w is None and (wanting := next((name for name in names if name in _OF_LENGTHS), None)):
        raise ArgumentError(f"chosen_lengths is None; expected numbers of tokens, which loss_type {wanting!r} needs")
    shared = None if ld_alpha is None else torch.minimum(mask_w.sum(1), mask_l.sum(1))
    y_w, ref_w = (_sums(*of, w, mask_w, shared, ld_alpha) for of in (("chosen", w), ("ref_chosen", ref_chosen)))
    y_l, ref_l = (_sums(*of, l, mask_l, shared, ld_alpha) for of in (("rejected", l), ("ref_rejected", ref_rejected)))
    nll = -counted(w, mask_w).sum() / mask_w.sum() if "sft" in names else None
    s_w, s_l = _score(y_w - ref_w, f_divergence, f_alpha), _score(y_l - ref_l, f_divergence, f_alpha)
    pairs = _Pairs(y_w, y_l, ref_w, ref_l, s_w, s_l, n_w, n_l, nll, beta, label_smoothing, discopop_tau)
    weight = 1.0
    if weighted:
        weight = _probable("chosen_log_sum_sq", chosen_log_sum_sq, w, mask_w)
        weight = weight * _probable("rejected_log_sum_sq", rejected_log_sum_sq, l, mask_l)
    return sum((_TYPES[name](pairs) * weight).mean() * factor for name, factor in types)
