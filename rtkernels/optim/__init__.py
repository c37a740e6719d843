"""Optimizers and gradient clipping, in a few launches for all parameters."""

from rtkernels.optim.adamw import AdamW
from rtkernels.optim.clip import clip_grad_norm_
from rtkernels.optim.lion import Lion
from rtkernels.optim.muon import Muon

__all__ = ["AdamW", "Lion", "Muon", "clip_grad_norm_"]
