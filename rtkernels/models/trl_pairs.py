"""TRL's CPO and ORPO trainers: losses of pairs without logits.

These trainers read the model's logits: for log-probabilities, for the likelihood of the chosen completions, and for the
mean that they log. While they call the model, its head returns lazy logits; what is read of them comes from hidden
states: ``linear_logprob``, ``linear_cross_entropy``. Anything else computes the logits.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import loss as losses
from rtkernels.models.lazy import Lazy
from rtkernels.models.lazy_logits import LazyLogits, Shaping
from rtkernels.models.patch_report import Site
from rtkernels.models.probe import NotRecognized
from rtkernels.models.trl_values import IGNORED, gathered, prepare_head, values

_MODULES = ("trl.experimental.cpo.cpo_trainer", "trl.experimental.orpo.orpo_trainer")
_FORWARD, _LOGPS = "concatenated_forward", "get_batch_logps"
_PARAMETERS = {
    _FORWARD: ["self", "model", "batch"],
    _LOGPS: ["logits", "labels", "average_log_prob", "is_encoder_decoder"],
}
# Trainers whose methods were replaced, for ``unpatch(model)``; an attribute of the model would be pickled with it.
_trainers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class PairLogits(Lazy):
    """The logits of all positions ``[..., vocabulary]``: slices of them, losses and their mean need no logits."""

    def __init__(self, hidden: Tensor, head: nn.Module, shaping: Shaping, context: Any, given: dict[str, Any]) -> None:
        self.hidden, self.head, self.shaping, self.context, self.given = hidden, head, shaping, context, given
        self._result: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def _of(self, hidden: Tensor) -> PairLogits:
        return PairLogits(hidden, self.head, self.shaping, self.context, self.given)

    def __getitem__(self, index: Any) -> Any:
        of_rows = _of_rows(index, len(self.shape))
        return self.tensor()[index] if of_rows is None else self._of(self.hidden[of_rows])

    def contiguous(self) -> PairLogits:
        return self

    def view(self, *shape: int) -> Any:
        if shape != (-1, self.shape[-1]):
            return self.tensor().view(*shape)
        return self._of(self.hidden.reshape(-1, self.hidden.shape[-1]))

    def detach(self) -> PairLogits:
        return self._of(self.hidden.detach())

    def _make(self) -> Tensor:
        with self.context():
            logits = self.head(self.hidden, materialize=True) * self.shaping.scale
        softcap = self.shaping.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def log_probs(self, labels: Tensor) -> Tensor:
        """Return the log-probabilities of labels ``[...]``, 0 without a gradient where they are ignored."""
        cells = {
            "outputs": (), "final_logit_softcapping": self.shaping.softcap, "logit_scale": self.shaping.scale,
            "temperature": 1.0, "cast_lm_head_to_fp32": False,
        }  # fmt: skip
        mask = labels != IGNORED
        with self.context():
            found = values(self.head, self.hidden[mask], labels[mask], cells, self.given)["log_probs"]
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    def cross_entropy(self, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """Return ``torch.nn.functional.cross_entropy`` of logits ``[rows, vocabulary]``."""

        def loss(module: nn.Module, hidden: Tensor) -> Tensor:
            weight, bias = gathered(module.weight), gathered(module.bias)
            scaled = hidden if self.shaping.scale == 1.0 else hidden * self.shaping.scale
            return rtkernels.linear_cross_entropy(
                scaled, weight, labels, bias=bias, ignore_index=ignore_index, softcap=self.shaping.softcap,
                reduction=reduction,
            )  # fmt: skip

        with self.context():
            return self.head(self.hidden, loss=loss)

    def mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean of all logits. Without arguments and gradients, no logits are computed."""
        if args or kwargs or (torch.is_grad_enabled() and self.hidden.requires_grad):
            return self.tensor().mean(*args, **kwargs)

        def average(module: nn.Module, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                weight, bias = gathered(module.weight), gathered(module.bias)
                rows = hidden.reshape(-1, hidden.shape[-1])
                if self.shaping.softcap is None:
                    mean = rows.mean(0, dtype=torch.float32) @ weight.mean(0, dtype=torch.float32)
                    mean = mean if bias is None else mean + bias.mean(dtype=torch.float32)
                    return mean * self.shaping.scale
                ids = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
                return rtkernels.linear_logprob(
                    rows, weight, ids, bias=bias, logit_scale=self.shaping.scale, softcap=self.shaping.softcap,
                    chunk_bytes=self.given["chunk_bytes"], return_mean_logit=True,
                )[1].mean()  # fmt: skip

        with self.context():
            return self.head(self.hidden, loss=average)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = dict(kwargs or {})
        if func is nn.functional.cross_entropy and isinstance(args[0], cls) and len(args) == 2 and args[0].dim() == 2:
            plain = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
            if all(named.get(name, value) == value for name, value in plain.items()) and not isinstance(args[1], cls):
                return args[0].cross_entropy(args[1], named.get("ignore_index", -100), named.get("reduction", "mean"))
        return super().__torch_function__(func, types, args, kwargs)


def _of_rows(index: Any, dims: int) -> tuple[slice, ...] | None:
    """Return an index of logits as one of hidden states; None if it is not made of slices, or selects columns."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in index) or len(index) > dims:
        return None
    missing = [slice(None)] * (dims - sum(part is not Ellipsis for part in index))
    parts: list[slice] = []
    for part in index:
        if part is Ellipsis:
            parts += missing
            missing = []
        else:
            parts.append(part)
    parts += missing
    return tuple(parts[:-1]) if parts[-1] == slice(None) else None


class _Lazily:
    """A model whose outputs have :class:`PairLogits`."""

    def __init__(self, model: nn.Module, inner: nn.Module, context: Any, given: dict[str, Any]) -> None:
        self._model, self._inner, self._context, self._given = model, inner, context, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with losses.lazy_head(self._inner):
            output = self._model(*args, **kwargs)
        logits = output.logits
        shaping = logits.shaping() if isinstance(logits, LazyLogits) else None
        if shaping is None:
            warnings.warn(
                "rtkernels.models.use_fused_head: the model computed its logits, so the loss comes from TRL's code",
                stacklevel=2,
            )
        else:
            output.logits = PairLogits(logits.hidden, logits.head, shaping, self._context, self._given)
        return output


def is_one(trainer: Any) -> bool:
    """Return True for a CPO or ORPO trainer of TRL, also of a subclass that has its methods."""
    function = getattr(type(trainer), _FORWARD, None)
    return getattr(function, "__globals__", {}).get("__name__") in _MODULES


def _check(trainer: Any, model: nn.Module) -> None:
    """Raise NotRecognized for a trainer or a model whose logits must be computed."""
    for name, wanted in _PARAMETERS.items():
        found = list(inspect.signature(getattr(type(trainer), name)).parameters)
        if found != wanted:
            raise NotRecognized(f"this version of TRL has {name}({', '.join(found)})")
    if trainer.is_encoder_decoder:
        raise NotRecognized("it has an encoder")
    prepare_head(model)
    heads = losses._heads(model)
    if any(map(losses._has_hooks, heads)):
        raise NotRecognized("its head has hooks, which see logits")
    losses.check_loss(model, model.get_output_embeddings(), heads[0].weight)


def use(trainer: Any, model: nn.Module, given: dict[str, Any]) -> Site:
    """Replace the methods of a trainer that read logits."""
    restore(model)
    try:
        _check(trainer, model)
    except NotRecognized as error:
        warnings.warn(f"rtkernels.models.use_fused_head: model keeps TRL's loss: {error}", stacklevel=3)
        return Site("head", "model", type(model).__name__, str(error))
    forward, logps = getattr(trainer, _FORWARD), getattr(trainer, _LOGPS)
    context = trainer.accelerator.autocast

    def concatenated_forward(model_: Any, batch: Any) -> Any:
        return forward(_Lazily(model_, model, context, given), batch)

    trainer.__dict__[_FORWARD] = concatenated_forward
    trainer.__dict__[_LOGPS] = _logps(logps)
    _trainers[model] = ref(trainer)
    return Site("head", "model", type(model).__name__, None)


def _logps(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def get_batch_logps(
        logits: Any, labels: Tensor, average_log_prob: bool = False, is_encoder_decoder: bool = False
    ) -> Tensor:
        if not isinstance(logits, PairLogits):
            return original(logits, labels, average_log_prob, is_encoder_decoder)
        shifted = labels[:, 1:]
        found = logits[:, :-1].log_probs(shifted).sum(-1)
        return found / (shifted != IGNORED).sum(-1) if average_log_prob else found

    return get_batch_logps


def restore(model: nn.Module) -> None:
    """Undo :func:`use` for the trainer of a model."""
    found = _trainers.pop(model, None)
    trainer = None if found is None else found()
    for name in () if trainer is None else (_FORWARD, _LOGPS):
        trainer.__dict__.pop(name, None)
