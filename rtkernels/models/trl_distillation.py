"""TRL's distillation trainer: the divergence of student and teacher from :func:`rtkernels.linear_divergence`.

The trainer runs the bodies of both models and hands hidden states and heads to a function of its module. Its method
gets another function of this name; nothing else of TRL changes.
"""

from __future__ import annotations

import inspect
import warnings
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import RtkError
from rtkernels.models.patch_report import Site
from rtkernels.models.probe import NotRecognized
from rtkernels.models.trl_values import autocasts, gathered

_MODULE, _METHOD, _FUNCTION = "trl.trainer.distillation_trainer", "_compute_loss", "_chunked_divergence_loss"
# Factors of logits in a model's configuration, as TRL reads them.
_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
_trainers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _divergence(
    student_hidden_states: Tensor, teacher_hidden_states: Tensor, student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor, completion_mask: Tensor, beta: float, num_items_in_batch: Any = None,
    student_lm_head_bias: Tensor | None = None, teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None, teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0, *, save: str = "stats", chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what TRL's function does: the loss, the sum of the student's entropies, and how many positions count."""
    if student_logit_scale != teacher_logit_scale or student_logit_scale <= 0:
        raise RtkError(
            f"logits are scaled by {student_logit_scale} (student) and {teacher_logit_scale} (teacher); expected one "
            "positive factor: call unpatch(trainer.model)"
        )
    if student_final_logit_softcapping is not None or teacher_final_logit_softcapping is not None:
        raise RtkError("logits have a soft cap; expected none: call unpatch(trainer.model)")
    warmth = temperature / student_logit_scale
    counts = completion_mask.reshape(-1) != 0
    student = _head(student_hidden_states, student_lm_head_weight, student_lm_head_bias, counts)
    with torch.no_grad():
        teacher = _head(teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias, counts)
    trains_head = any(t is not None and t.requires_grad for t in student[1:])
    keeps = student[0].dtype != torch.float16 and (save == "logits" or (save == "projected" and not trains_head))
    each = rtkernels.linear_divergence(
        *student[:2], *teacher[:2], beta=beta, temperature=warmth, student_bias=student[2], teacher_bias=teacher[2],
        save="gradients" if keeps else "stats", chunk_bytes=chunk_bytes,
    )  # fmt: skip
    with torch.no_grad():
        ids = torch.zeros(len(student[0]), dtype=torch.int64, device=each.device)
        _, entropy = rtkernels.linear_logprob(
            *student[:2], ids, bias=student[2], temperature=warmth, fp32_logits=True, chunk_bytes=chunk_bytes,
            return_entropy=True,
        )  # fmt: skip
    number = counts.sum()
    items = number.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    items = items.to(each.device) if isinstance(items, Tensor) else items
    return each.sum() / items, entropy.sum(), number


def _head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the rows that count, the weight and the bias in the dtype of the product."""
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts(hidden) else hidden.dtype
    weight, bias = gathered(weight), gathered(bias)
    rows = hidden.reshape(-1, hidden.shape[-1])[counts].to(dtype)
    return rows, weight.to(dtype), None if bias is None else bias.to(dtype)


def is_one(trainer: Any) -> bool:
    """Return True for a distillation trainer of TRL that has student and teacher on this machine."""
    function = getattr(type(trainer), _METHOD, None)
    return (
        isinstance(function, FunctionType)
        and function.__globals__.get("__name__") == _MODULE
        and _FUNCTION in function.__code__.co_names
    )


def _check(trainer: Any, models: dict[str, nn.Module]) -> None:
    """Raise NotRecognized unless our function takes what TRL's is given."""
    theirs = inspect.signature(getattr(type(trainer), _METHOD).__globals__[_FUNCTION]).parameters
    own = [name for name, p in inspect.signature(_divergence).parameters.items() if p.kind != p.KEYWORD_ONLY]
    if list(theirs) != own:
        raise NotRecognized(f"this version of TRL has {_FUNCTION}({', '.join(theirs)})")
    scales = []
    for name, model in models.items():
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        if getattr(config, "final_logit_softcapping", None) is not None:
            raise NotRecognized(f"the logits of its {name} have a soft cap, which linear_divergence has not")
        if hasattr(head.weight, "ds_id"):
            raise NotRecognized(f"ZeRO-3 splits the head of its {name}")
        scales.append([getattr(config, scale, None) for scale in _SCALES])
    if scales[0] != scales[1]:
        raise NotRecognized("the logits of its student and its teacher have different factors")


def use(trainer: Any, student: nn.Module, teacher: nn.Module, given: dict[str, Any]) -> Site:
    """Let the loss of a trainer come from our function."""
    restore(student)
    try:
        _check(trainer, {"student": student, "teacher": teacher})
    except NotRecognized as error:
        warnings.warn(f"rtkernels.models.use_fused_head: model keeps TRL's loss: {error}", stacklevel=3)
        return Site("head", "model", type(student).__name__, str(error))
    method = getattr(type(trainer), _METHOD)

    def divergence(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _divergence(*args, **kwargs, **given)

    names = {**method.__globals__, _FUNCTION: divergence}
    ours = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    trainer.__dict__[_METHOD] = MethodType(ours, trainer)
    _trainers[student] = ref(trainer)
    return Site("head", "model", type(student).__name__, None)


def restore(model: nn.Module) -> None:
    """Undo :func:`use` for the trainer of a student."""
    found = _trainers.pop(model, None)
    trainer = None if found is None else found()
    if trainer is not None:
        trainer.__dict__.pop(_METHOD, None)
