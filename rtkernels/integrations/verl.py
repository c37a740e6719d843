"""verl's fused head: name this module in ``external_lib``, with ``use_fused_kernels=True``.

Importing it replaces the forward of verl's ``FusedLinearForPPO``, the function behind ``impl_backend="torch"`` and
``"liger"``, by :func:`rtkernels.linear_logprob`, for all models of the process.
"""

from __future__ import annotations

from torch import Tensor, nn
from verl.utils.experimental.torch_functional import FusedLinearForPPO

import rtkernels


def forward(
    self: nn.Module, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies; `temperature` is a number, or one of each token."""
    weight = vocab_weights if vocab_weights.dtype == hidden_states.dtype else vocab_weights.to(hidden_states.dtype)
    return rtkernels.linear_logprob(hidden_states, weight, input_ids, temperature=temperature, return_entropy=True)


FusedLinearForPPO.forward = forward
