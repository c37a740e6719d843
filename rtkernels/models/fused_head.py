"""``use_fused_head(trainer)``: log-probabilities of TRL's trainers from :func:`rtkernels.linear_logprob`.

SFT, DPO, KTO, GRPO and RLOO trainers of TRL give their models a forward with a fused head when they are built. Ours
takes its place: same arguments, same results, options from the closure of TRL's. The head is called as a module, so
that hooks which gather its weight (FSDP2, ZeRO-3) run. Trainers of pairs (``trl_pairs``) and of distillation
(``trl_distillation``) have other ways.
"""

from __future__ import annotations

import functools
import warnings
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import loss as losses
from rtkernels.models import replace, trl_distillation, trl_pairs
from rtkernels.models.patch_report import PatchReport, Site
from rtkernels.models.probe import NotRecognized
from rtkernels.models.trl_forward import FUSED, ORIGINAL, TOLD, find, is_ours, is_trl
from rtkernels.models.trl_values import IGNORED, RESULTS, prepare_head, values

# What the closure of TRL's forward holds. Unknown names may be options that change results.
_CELLS = frozenset((
    "original_forward", "text_config", "final_logit_softcapping", "logit_scale", "backbone_attr", "temperature",
    "cast_lm_head_to_fp32", "outputs",
))  # fmt: skip
_SAVES = ("stats", "logits", "projected")


def _options(function: FunctionType) -> dict[str, Any]:
    """Return the options of TRL's forward.

    Raises:
        NotRecognized: TRL has options that are not known here.
    """
    cells = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
    if other := set(cells) ^ _CELLS:
        raise NotRecognized(f"this version of TRL has other options of its head: {', '.join(sorted(other))}")
    if other := set(cells["outputs"]) - {"log_probs", *RESULTS}:
        raise NotRecognized(f"this version of TRL asks its head for {', '.join(sorted(other))}")
    return cells


def _forward(model: nn.Module, trl: FunctionType, cells: dict[str, Any], given: dict[str, Any]) -> FunctionType:
    """Return a forward that computes what TRL's does."""
    output = trl.__globals__["FusedCausalLMOutput"]
    original, config = cells["original_forward"], cells["text_config"]

    @functools.wraps(type(model).forward)
    def forward(
        self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs
    ) -> Any:
        if not fused_lm_head:
            named = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return original(*args, **kwargs, **{name: value for name, value in named.items() if value is not None})
        kwargs["use_cache"] = False
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        body = getattr(self, cells["backbone_attr"])(*args, **kwargs)
        hidden = body.last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        head = self.get_output_embeddings()
        hidden, targets = hidden.to(head.weight.device), shift_labels.to(head.weight.device)
        mask = targets != IGNORED
        found = values(head, hidden[mask], targets[mask], cells, given)
        # scattering keeps the results connected to the model if nothing counts: a zero with a gradient
        found = {name: x.new_zeros(mask.shape).masked_scatter(mask, x) for name, x in found.items()}
        for name in ("log_sum_sq_probs", "mean_logits"):
            if name in found:
                found[name] = found[name].detach()
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss, aux = -found["log_probs"].sum() / items, None
        if kwargs.get("output_router_logits"):
            aux = _load_balancing(self, config, body.router_logits, kwargs.get("attention_mask"))
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux
        return output(loss=loss, label_mask=mask, aux_loss=aux, **found)

    forward.__dict__[ORIGINAL] = trl
    return forward


def _load_balancing(model: nn.Module, config: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None)
    experts = model.num_experts if experts is None else experts
    return load_balancing_loss_func(router_logits, experts, config.num_experts_per_tok, attention_mask)


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside DDP, DeepSpeed and PEFT wrappers."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers) or type(model).__name__ == "DeepSpeedEngine":
        model = model.module
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) and hasattr(model, "peft_config") else model


def _use(model: nn.Module, given: dict[str, Any]) -> None:
    """Put our forward in the place of TRL's.

    Raises:
        NotRecognized: TRL's forward stays, for the reason in the message.
    """
    found = find(model, is_trl)
    if found is None:
        known = find(model, is_ours)
        if known is None:
            raise NotRecognized("it has no fused head of TRL")
        found = getattr(known[0], ORIGINAL), known[1]
    trl, put = found
    cells = _options(trl)
    prepare_head(model)
    put(_forward(model, trl, cells, given))


def use_fused_head(trainer: Any, *, save: str = "stats", chunk_bytes: int | None = None) -> PatchReport:
    """Let a trainer of TRL compute log-probabilities, entropies and losses with our functions.

    ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer`` and ``RLOOTrainer`` of TRL 1.15 and newer, and
    others that use TRL's ``add_fused_lm_head``: :func:`rtkernels.linear_logprob`, for the policy and for the reference.
    ``CPOTrainer`` and ``ORPOTrainer``: also :func:`rtkernels.linear_cross_entropy`, no logits are stored.
    ``DistillationTrainer``: :func:`rtkernels.linear_divergence`.

    Call it when the trainer has been built; :func:`patch` the model before or after. It changes this trainer only.
    :func:`unpatch` of the trainer's model undoes it. Calling it again changes the options.

    Args:
        trainer: The trainer.
        save: What is kept for the backward pass, as in :func:`rtkernels.linear_logprob`: "stats" (least memory),
            "logits" (fewest products), or "projected" for a frozen head, which is "stats" where the head is not
            frozen or a trainer needs more results. For distillation, "logits" and "projected" are the "gradients" of
            :func:`rtkernels.linear_divergence`, with float16 they are "stats".
        chunk_bytes: Size of the slabs of logits, as in :func:`rtkernels.linear_logprob`.

    Returns:
        The report. `left_alone` has the models that keep TRL's head, with the reason; a warning says so, too.

    Raises:
        ArgumentError: `trainer` has no model, or an option is unknown.
        RtkError: The trainer computes its loss in a way that is not known here.
    """
    model = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"trainer is a {type(trainer).__name__} without a model; expected a trainer of TRL")
    if save not in _SAVES:
        raise ArgumentError(f"save is {save!r}; expected one of {', '.join(_SAVES)}")
    given = {"save": save, "chunk_bytes": chunk_bytes}
    inner = _unwrapped(model)
    if trl_pairs.is_one(trainer):
        return PatchReport([trl_pairs.use(trainer, inner, given)], ("head",), given)
    if trl_distillation.is_one(trainer):
        teacher = _unwrapped(trainer.teacher_model)
        return PatchReport([trl_distillation.use(trainer, inner, teacher, given)], ("head",), given)
    if find(inner, is_trl) is None and find(inner, is_ours) is None:
        raise RtkError(
            f"the model of this {type(trainer).__name__} has no fused head of TRL ({FUSED}=True), which SFT, DPO, KTO, "
            f"GRPO and RLOO trainers of TRL 1.15 and newer give it when they are built, and this is no CPO, ORPO or "
            f"distillation trainer of TRL"
        )
    sites = []
    for name in ("model", "ref_model"):
        one = getattr(trainer, name, None)
        if not isinstance(one, nn.Module) or (name == "ref_model" and _unwrapped(one) is inner):
            continue
        one, reason = _unwrapped(one), None
        try:
            _use(one, given)
        except NotRecognized as error:
            reason = str(error)
            one.__dict__[TOLD] = True
            warnings.warn(f"rtkernels.models.use_fused_head: {name} keeps TRL's head: {reason}", stacklevel=2)
        sites.append(Site("head", name, type(one).__name__, reason))
    return PatchReport(sites, ("head",), given)


def restore_fused_head(model: nn.Module) -> None:
    """Undo :func:`use_fused_head` for a model."""
    trl_pairs.restore(model)
    trl_distillation.restore(model)
    if (found := find(model, is_ours)) is not None:
        function, put = found
        put(getattr(function, ORIGINAL))
    for head in losses._heads(model):
        own = getattr(head.__dict__.get("forward"), "_rtkernels_own", None)
        if own is not None:
            head.forward = own
        if replace.replaced(head) == losses._KIND:
            replace.restore(head)
