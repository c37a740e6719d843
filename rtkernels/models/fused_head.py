"""``use_fused_head(trainer)``: log-probabilities of TRL's trainers from :func:`rtkernels.linear_logprob`.

SFT, DPO, KTO, GRPO and RLOO trainers of TRL give their models a forward with a fused head when they are built. Ours
takes its place: same arguments, same results, options from the closure of TRL's. The head is called as a module, so
that hooks which gather its weight (FSDP2, ZeRO-3) run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rtkernels
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import loss as losses
from rtkernels.models import replace
from rtkernels.models.patch_report import PatchReport, Site
from rtkernels.models.probe import NotRecognized
from rtkernels.models.trl_forward import FUSED, ORIGINAL, TOLD, find, is_ours, is_trl

_IGNORED = -100
# What the closure of TRL's forward holds. Unknown names may be options that change results.
_CELLS = frozenset((
    "original_forward", "text_config", "final_logit_softcapping", "logit_scale", "backbone_attr", "temperature",
    "cast_lm_head_to_fp32", "outputs",
))  # fmt: skip
# TRL's results in the order of linear_logprob's, with the option that asks for each.
_RESULTS = {
    "entropy": "return_entropy",
    "log_sum_sq_probs": "return_log_sum_sq",
    "mean_logits": "return_mean_logit",
    "is_top1": "return_top1",
}
_SAVES = ("stats", "logits", "projected")


def _options(function: FunctionType) -> dict[str, Any]:
    """Return the options of TRL's forward.

    Raises:
        NotRecognized: TRL has options that are not known here.
    """
    cells = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
    if other := set(cells) ^ _CELLS:
        raise NotRecognized(f"this version of TRL has other options of its head: {', '.join(sorted(other))}")
    if other := set(cells["outputs"]) - {"log_probs", *_RESULTS}:
        raise NotRecognized(f"this version of TRL asks its head for {', '.join(sorted(other))}")
    return cells


def _prepare_head(model: nn.Module) -> None:
    """Let the head compute a loss when it is called with one.

    Raises:
        NotRecognized: The head is not a plain linear layer.
    """
    heads = losses._heads(model)
    if not heads:
        raise NotRecognized("it has no head")
    for head in heads:
        if replace.replaced(head) is None and type(head).forward is not nn.Linear.forward:
            raise NotRecognized(f"its head is a {type(head).__name__}, no plain nn.Linear")
        own = head.__dict__.get("forward")
        cast = isinstance(own, FunctionType) and (own.__globals__.get("__name__") or "").startswith("trl.")
        if not cast:
            replace.check_own_forward(head)
    for head in heads:
        own = head.__dict__.get("forward")
        if isinstance(own, FunctionType) and not hasattr(own, "_rtkernels_own"):
            head.forward = _with_loss(head, own)  # cast_lm_head_to_fp32
        elif replace.replaced(head) is None:
            replace.replace(head, losses._KIND)


def _with_loss(head: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(hidden_states, loss=None):
        return own(hidden_states) if loss is None else loss(head, hidden_states)

    forward._rtkernels_own = own
    return forward


def _gathered(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _autocasts(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _values(head: nn.Module, hidden: Tensor, labels: Tensor, cells: dict[str, Any], given: dict[str, Any]) -> dict:
    """Return per-token results by TRL's names, of rows that all count."""
    names = [name for name in _RESULTS if name in cells["outputs"]]
    softcap, scale = cells["final_logit_softcapping"], cells["logit_scale"]

    def loss(module: nn.Module, hidden: Tensor) -> Any:
        weight, bias = _gathered(module.weight), _gathered(module.bias)
        if not _autocasts(hidden) and weight.dtype != hidden.dtype:
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        save = given["save"]
        if save == "projected" and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            save = "stats"
        if save == "projected" and ("log_sum_sq_probs" in names or "mean_logits" in names):
            save = "stats"
        return rtkernels.linear_logprob(
            hidden, weight, labels, bias=bias, ignore_index=_IGNORED, logit_scale=scale, softcap=softcap,
            temperature=cells["temperature"], save=save, chunk_bytes=given["chunk_bytes"],
            **{_RESULTS[name]: True for name in names},
        )  # fmt: skip

    fp32 = cells["cast_lm_head_to_fp32"]
    with torch.autocast(hidden.device.type, enabled=False) if fp32 else nullcontext():
        found = head(hidden.float() if fp32 else hidden, loss=loss)
    found = found if isinstance(found, tuple) else (found,)
    return dict(zip(("log_probs", *names), found, strict=True))


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
        mask = targets != _IGNORED
        found = _values(head, hidden[mask], targets[mask], cells, given)
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
    _prepare_head(model)
    put(_forward(model, trl, cells, given))


def use_fused_head(trainer: Any, *, save: str = "stats", chunk_bytes: int | None = None) -> PatchReport:
    """Let a trainer of TRL compute log-probabilities, entropies and losses with :func:`rtkernels.linear_logprob`.

    For ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer`` and ``RLOOTrainer`` of TRL 1.15 and newer, and
    for others that use TRL's ``add_fused_lm_head``. Call it when the trainer has been built; :func:`patch` the model
    before or after. The policy's and the reference's heads are replaced, in this trainer only.
    :func:`unpatch` undoes it. Calling it again changes the options.

    Args:
        trainer: The trainer.
        save: What is kept for the backward pass, as in :func:`rtkernels.linear_logprob`: "stats" (least memory),
            "logits" (fewest products), or "projected" for a frozen head, which is "stats" where the head is not
            frozen or a trainer needs more results.
        chunk_bytes: Size of the slabs of logits, as in :func:`rtkernels.linear_logprob`.

    Returns:
        The report. `left_alone` has the models that keep TRL's head, with the reason; a warning says so, too.

    Raises:
        ArgumentError: `trainer` has no model, or an option is unknown.
        RtkError: The trainer's model has no fused head of TRL: it computes its loss another way.
    """
    model = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"trainer is a {type(trainer).__name__} without a model; expected a trainer of TRL")
    if save not in _SAVES:
        raise ArgumentError(f"save is {save!r}; expected one of {', '.join(_SAVES)}")
    given = {"save": save, "chunk_bytes": chunk_bytes}
    inner = _unwrapped(model)
    if find(inner, is_trl) is None and find(inner, is_ours) is None:
        raise RtkError(
            f"the model of this {type(trainer).__name__} has no fused head of TRL ({FUSED}=True), which SFT, DPO, KTO, "
            f"GRPO and RLOO trainers of TRL 1.15 and newer give it when they are built. Trainers that compute their "
            f"loss from logits, such as CPO and ORPO, are left as they are"
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
    if (found := find(model, is_ours)) is not None:
        function, put = found
        put(getattr(function, ORIGINAL))
    for head in losses._heads(model):
        own = getattr(head.__dict__.get("forward"), "_rtkernels_own", None)
        if own is not None:
            head.forward = own
        if replace.replaced(head) == losses._KIND:
            replace.restore(head)
