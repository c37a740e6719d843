"""Losses of post-training as plain functions of log-probabilities: preference, policy-gradient and distillation losses.

Their inputs come from :func:`rtkernels.linear_logprob`, or from any other source of log-probabilities. Tensors are
``[sequences, tokens]`` or ``[sequences]``, so small that plain torch is as fast as a kernel. Every function is
stateless, computes in fp32 (fp64 inputs stay fp64), never waits for the GPU, and is differentiable as torch code is.
"""

from rtkernels.losses.advantages import group_advantages, leave_one_out_advantages
from rtkernels.losses.cpo import cpo, orpo, simpo
from rtkernels.losses.distillation import topk_distillation
from rtkernels.losses.dpo import dpo
from rtkernels.losses.grpo import grpo, rloo
from rtkernels.losses.kto import kto
from rtkernels.losses.ratios import entropy_mask, kl_penalty, off_policy_mask, sampler_ratio

__all__ = [
    "cpo", "dpo", "entropy_mask", "group_advantages", "grpo", "kl_penalty", "kto", "leave_one_out_advantages",
    "off_policy_mask", "orpo", "rloo", "sampler_ratio", "simpo", "topk_distillation",
]  # fmt: skip
