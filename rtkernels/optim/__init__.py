"""Optimizers and gradient clipping, one launch for all parameters."""

from rtkernels.optim.adamw import AdamW
from rtkernels.optim.clip import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
