"""Every loss equals what TRL's own trainers compute, value and gradient, to 1e-6. Skipped without TRL.

The methods of the trainers run unchanged on a stand-in for the trainer: a model that returns given log-probabilities,
and an accelerator of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rtkernels import losses

trl = pytest.importorskip("trl", minversion="1.15")
B, T, PROMPT = 5, 9, 3


class Accelerator:
    """An accelerator of one process."""

    num_processes, device, sync_gradients = 1, torch.device("cpu"), True
    parallelism_config = None

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x

    def unwrap_model(self, model: Any) -> Any:
        return model


def trainer(cls: type, **attributes: Any) -> Any:
    """Return a stand-in for a trainer of TRL with its methods and these attributes."""
    found = object.__new__(cls)
    found.__dict__ |= {
        "accelerator": Accelerator(), "_metrics": {"train": defaultdict(list)}, "aux_loss_enabled": False,
        "_total_train_tokens": 0, "_tp_size": 1, "current_gradient_accumulation_steps": 1, "ref_model": None,
        **attributes,
    }  # fmt: skip
    found.args = SimpleNamespace(
        report_to=[], gradient_checkpointing_kwargs=None, steps_per_generation=1, **attributes.get("options", {})
    )
    return found


class Model(torch.nn.Module):
    """Returns given per-token values for each call with ``fused_lm_head=True``, zeros where labels are ignored."""

    def __init__(self, log_probs: Tensor, log_sum_sq: Tensor | None = None) -> None:
        super().__init__()
        self.log_probs, self.log_sum_sq = log_probs, log_sum_sq

    def forward(self, labels: Tensor, fused_lm_head: bool, **kwargs: Any) -> Any:
        mask = labels[:, 1:] != -100
        other = torch.zeros_like(self.log_probs)
        return SimpleNamespace(
            log_probs=self.log_probs * mask, entropy=other, mean_logits=other, is_top1=other.bool(),
            log_sum_sq_probs=self.log_sum_sq, label_mask=mask,
        )  # fmt: skip


def tokens(*shape: int, scale: float = 1.0) -> Tensor:
    return -scale * torch.rand(*shape)


def mask_of(sequences: int, length: int, start: int = 0) -> Tensor:
    """Return a mask of completions of different lengths behind a prompt."""
    ends = torch.randint(start + 1, length + 1, (sequences,))
    at = torch.arange(length)
    return ((at >= start) & (at < ends[:, None])).long()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def compare(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    assert torch.isfinite(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for x in inputs:
        (mine,) = torch.autograd.grad(ours, x, retain_graph=True, allow_unused=True)
        (wanted,) = torch.autograd.grad(theirs, x, retain_graph=True, allow_unused=True)
        if wanted is not None:
            torch.testing.assert_close(torch.zeros_like(x) if mine is None else mine, wanted, rtol=1e-5, atol=1e-6)


# ---- DPO ------------------------------------------------------------------------------------------------------------

DPO_TYPES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
)  # fmt: skip


def dpo_both(types: list[str], weights: list[float], ld_alpha=None, wpo=False, divergence="reverse_kl", alpha=0.5):
    lp, ref = tokens(2 * B, T - 1, scale=3).requires_grad_(), tokens(2 * B, T - 1, scale=3)
    sq = -torch.rand(2 * B, T - 1) if wpo else None
    mask = mask_of(2 * B, T, PROMPT)
    inputs = {"input_ids": torch.ones(2 * B, T, dtype=torch.long), "completion_mask": mask, "attention_mask": mask}
    that = trainer(
        trl.DPOTrainer, model=Model(lp, sq), ld_alpha=ld_alpha, precompute_ref_logps=False, loss_types=types,
        loss_weights=weights, beta=0.3, label_smoothing=0.1, f_divergence_type=divergence, use_weighting=wpo,
        f_alpha_divergence_coef=alpha, options={"discopop_tau": 0.05},
    )  # fmt: skip
    that.ref_model = Model(ref)
    with no_checkpointing("dpo"):
        theirs = that._compute_loss(that.model, inputs, False)
    shifted = mask[:, 1:]
    more = {} if sq is None else {"chosen_log_sum_sq": sq[:B], "rejected_log_sum_sq": sq[B:]}
    ours = losses.dpo(
        lp[:B], lp[B:], ref[:B], ref[B:], chosen_mask=shifted[:B], rejected_mask=shifted[B:], loss_type=types,
        loss_weights=weights, beta=0.3, label_smoothing=0.1, ld_alpha=ld_alpha, f_divergence=divergence, f_alpha=alpha,
        **more,
    )  # fmt: skip
    return ours, theirs, lp


@contextmanager
def no_checkpointing(name: str) -> Iterator[None]:
    """Leave out what TRL does to the layers of a real model around a reference's forward."""
    module = __import__(f"trl.trainer.{name}_trainer", fromlist=["x"])
    before = module.disable_gradient_checkpointing
    module.disable_gradient_checkpointing = lambda model, kwargs: nullcontext()
    try:
        yield
    finally:
        module.disable_gradient_checkpointing = before


@pytest.mark.parametrize("loss_type", DPO_TYPES)
@pytest.mark.parametrize("wpo", [False, True])
def test_dpo(loss_type: str, wpo: bool) -> None:
    if wpo and loss_type in ("hinge", "sft"):
        pytest.skip("TRL multiplies these losses in place, which autograd rejects")
    compare(*dpo_both([loss_type], [1.0], wpo=wpo))


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge", "discopop"])
def test_dpo_divergences(divergence: str, loss_type: str) -> None:
    for alpha in (0.5, 1.0, 2.0):
        compare(*dpo_both([loss_type], [1.0], divergence=divergence, alpha=alpha))


def test_dpo_of_several_types_and_lengths() -> None:
    compare(*dpo_both(["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]))
    compare(*dpo_both(["sigmoid"], [1.0], ld_alpha=0.3))


# ---- KTO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("labels", [[1, 0, 1, 1, 0], [1] * 5, [0] * 5])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_kto(loss_type: str, labels: list[int], shift: float) -> None:
    lp, ref = tokens(B, T - 1).requires_grad_(), tokens(B, T - 1)
    kl, kl_ref = tokens(B), tokens(B) - shift
    mask = mask_of(B, T, PROMPT)
    desirable = torch.tensor(labels, dtype=torch.bool)
    inputs = {
        "input_ids": torch.ones(B, T, dtype=torch.long), "completion_mask": mask, "attention_mask": mask,
        "label": desirable, "ref_logps": (ref * mask[:, 1:]).sum(1), "ref_KL_logps": kl_ref,
    }  # fmt: skip
    that = trainer(
        trl.KTOTrainer, model=Model(lp), precompute_ref_logps=True, calculate_KL=loss_type == "kto", beta=0.3,
        loss_type=loss_type, desirable_weight=1.3, undesirable_weight=0.7,
    )  # fmt: skip
    that._compute_kl_logps = lambda model, batch: kl
    theirs = that._compute_loss(that.model, inputs, False)
    ours = losses.kto(
        lp, ref, desirable, mask=mask[:, 1:], kl_logprobs=kl, kl_ref=kl_ref, loss_type=loss_type, beta=0.3,
        desirable_weight=1.3, undesirable_weight=0.7,
    )  # fmt: skip
    compare(ours, theirs, lp)


# ---- CPO, SimPO, ORPO -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo", "hinge", "ipo"])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_cpo(loss_type: str, alpha: float) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    w, l = tokens(B).requires_grad_(), tokens(B).requires_grad_()  # noqa: E741
    options = {"beta": 0.4, "label_smoothing": 0.1, "simpo_gamma": 0.6, "alpha": alpha, "loss_type": loss_type}
    theirs = trainer(cpo.CPOTrainer, **options).cpo_loss(w, l)[0].mean()
    compare(losses.cpo(w, l, cpo_alpha=0.0, **options), theirs, w, l)
    if loss_type == "simpo" and not alpha:
        compare(losses.simpo(w, l, beta=0.4, gamma=0.6, label_smoothing=0.1), theirs, w, l)


def test_cpo_of_tokens() -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    logits = torch.randn(2 * B, T, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2 * B, T)).masked_fill(mask_of(2 * B, T, PROMPT) == 0, -100)
    get = cpo.CPOTrainer.get_batch_logps
    that = trainer(cpo.CPOTrainer, beta=0.4, label_smoothing=0.0, simpo_gamma=0.6, alpha=0.0, loss_type="simpo")
    means = get(logits, labels.clone(), average_log_prob=True)
    nll = torch.nn.functional.cross_entropy(logits[:B, :-1].reshape(-1, 11), labels[:B, 1:].reshape(-1))
    theirs = that.cpo_loss(means[:B], means[B:])[0].mean() + 0.7 * nll
    mask = labels[:, 1:] != -100
    lp = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    ours = losses.cpo(
        lp[:B], lp[B:], chosen_mask=mask[:B], rejected_mask=mask[B:], loss_type="simpo", beta=0.4, simpo_gamma=0.6,
        cpo_alpha=0.7,
    )  # fmt: skip
    compare(ours, theirs, logits)


def test_orpo() -> None:
    orpo = pytest.importorskip("trl.experimental.orpo")
    w, l, nll = tokens(B).requires_grad_(), tokens(B, scale=3).requires_grad_(), torch.tensor(1.5)  # noqa: E741
    theirs = nll - trainer(orpo.ORPOTrainer, beta=0.4).odds_ratio_loss(w, l)[0].mean()
    compare(losses.orpo(w, l, nll, beta=0.4), theirs, w, l)


# ---- GRPO family ----------------------------------------------------------------------------------------------------

GRPO_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


def grpo_both(loss_type: str, level: str, beta=0.0, delta=None, off_policy=None, quantile=1.0, ratio=None, steps=1):
    lp = tokens(B, T).requires_grad_()
    old, ref, entropy = (lp.detach() + 0.4 * torch.randn(B, T) for _ in range(3))
    entropy = entropy.abs()
    mask, advantages = mask_of(B, T), torch.randn(B)
    high = 3.0 if loss_type == "cispo" else 0.28
    that = trainer(
        trl.GRPOTrainer, model=SimpleNamespace(training=True), loss_type=loss_type, importance_sampling_level=level,
        beta=beta, epsilon_low=0.2, epsilon_high=high, top_entropy_quantile=quantile, max_completion_length=20,
        off_policy_mask_threshold=off_policy, use_vllm=ratio is not None, vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=steps,
        options={"delta": delta, "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0,
                 "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
                 "vespo_lambda_neg": 2.0},
    )  # fmt: skip
    that._get_per_token_logps_and_entropies = lambda *args, **kwargs: (lp, entropy, None)
    items = torch.tensor(23)
    inputs = {
        "prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref, "num_items_in_batch": items,
    }  # fmt: skip
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
    theirs = that._compute_loss(that.model, inputs)
    keep = None
    if off_policy is not None:
        keep = losses.off_policy_mask(lp, old, advantages, off_policy, mask=mask)
    if quantile < 1:
        of_entropy = losses.entropy_mask(entropy, quantile, mask=mask)
        keep = of_entropy if keep is None else keep * of_entropy
    ours = losses.grpo(
        lp, advantages, old=old, ref=ref, mask=mask, loss_type=loss_type, importance_sampling_level=level, beta=beta,
        epsilon=0.2, epsilon_high=high, delta=delta, sampler_ratio=ratio, keep=keep, num_items=items * steps,
        max_completion_length=20, accumulation_steps=steps,
    )  # fmt: skip
    return ours, theirs, lp


@pytest.mark.parametrize("loss_type", GRPO_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo(loss_type: str, level: str, beta: float) -> None:
    compare(*grpo_both(loss_type, level, beta))


@pytest.mark.parametrize("loss_type", GRPO_TYPES)
def test_grpo_with_everything(loss_type: str) -> None:
    for ratio in (0.5 + torch.rand(B, T), 0.5 + torch.rand(B, 1)):
        compare(*grpo_both(loss_type, "token", 0.1, 1.5, 0.02, 0.5, ratio, 4))


def test_grpo_without_old() -> None:
    lp, advantages = tokens(B, T).requires_grad_(), torch.randn(B)
    ours, again = (losses.grpo(lp, advantages, old=o, loss_type="bnpo") for o in (None, lp.detach()))
    compare(ours, again, lp)


def test_rloo() -> None:
    lp, mask, advantages = tokens(B, T, scale=0.2).requires_grad_(), mask_of(B, T), torch.randn(B)
    old = lp.detach() + 0.1 * torch.randn(B, T)
    that = trainer(trl.RLOOTrainer, model=SimpleNamespace(training=True), epsilon_low=0.2, epsilon_high=0.28)
    that._get_per_token_logps_and_entropies = lambda *args, **kwargs: (lp, torch.zeros(B, T), None)
    inputs = {
        "prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask,
        "advantages": advantages, "old_logps": (old * mask).sum(1),
    }  # fmt: skip
    compare(losses.rloo(lp, old, advantages, mask=mask, epsilon_high=0.28), that._compute_loss(that.model, inputs), lp)


# ---- distillation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", [True, False])
def test_topk_distillation(beta: float, tail: bool) -> None:
    module = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    student, teacher = (torch.randn(B, T, 11).log_softmax(-1)[..., :4] for _ in range(2))
    student.requires_grad_()
    support = torch.rand(B, T, 4) > 0.3
    support[..., 0] = True
    mask = mask_of(B, T)
    q, p = (torch.where(support, x, float("-inf")) for x in (student, teacher))
    inside = support
    if tail:
        q, inside = module._add_tail_bucket(q, support)
        p, _ = module._add_tail_bucket(p, support)
    else:
        q, p = q - q.logsumexp(-1, keepdim=True), p - p.logsumexp(-1, keepdim=True)
    each = module._jsd_divergence(q, p, beta, inside)
    for items in (None, torch.tensor(17)):
        reduce = module.ServerDistillationTrainer._reduce_divergence_loss
        theirs = reduce(each, completion_mask=mask, reduction="batchmean", num_items_in_batch=items)
        ours = losses.topk_distillation(
            student, teacher, support=support, mask=mask, beta=beta, tail=tail, num_items=items
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        (mine,), (wanted,) = (torch.autograd.grad(loss, student, retain_graph=True) for loss in (ours, theirs))
        assert mine.isfinite().all() and not mine[~support].any()
        known = support & wanted.isfinite()  # a sum over -inf leaves NaN in TRL's gradient of some rows
        assert known.any()
        torch.testing.assert_close(mine[known], wanted[known], rtol=1e-5, atol=1e-6)
