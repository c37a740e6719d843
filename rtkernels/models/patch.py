"""``patch(model)``: what it replaces, what it leaves alone and why, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import attention as attentions
from rtkernels.models import experts as expert_layers
from rtkernels.models import fp8 as quantized
from rtkernels.models import fused_layers as fusing
from rtkernels.models import loss as losses
from rtkernels.models import recognize, replace, rope_view
from rtkernels.models import router as routers
from rtkernels.models.recognize import NotRecognized, Recognized

_REPORT = "_rtkernels_report"
_OLDEST = (5, 0)
KINDS = ("norm", "mlp", "rope", "experts", "router", "loss", "attention", "fp8", "fused")


class Site(NamedTuple):
    """A place in the model that was looked at. `reason` says why it was left alone, None if it was replaced."""

    kind: str
    name: str
    module: str
    reason: str | None


class PatchReport:
    """What :func:`patch` did. Printed, it is a table; `sites` has every place."""

    def __init__(self, sites: list[Site], asked: tuple[str, ...]) -> None:
        self.sites, self.asked = sites, asked

    @property
    def replaced(self) -> Counter[str]:
        """How many places of each kind were replaced."""
        return Counter(site.kind for site in self.sites if site.reason is None)

    @property
    def left_alone(self) -> list[Site]:
        """The places that were not."""
        return [site for site in self.sites if site.reason is not None]

    def __str__(self) -> str:
        lines = [f"{'kind':8} {'replaced':>8} {'left':>5}"]
        left = Counter(site.kind for site in self.left_alone)
        lines += [f"{kind:8} {self.replaced[kind]:8} {left[kind]:5}" for kind in self.asked]
        reasons = Counter((site.kind, site.module, site.reason) for site in self.left_alone)
        for (kind, module, reason), count in reasons.items():
            lines.append(f"  {kind}: {count} x {module}: {reason}")
        return "\n".join(lines)

    __repr__ = __str__


def _check_transformers() -> None:
    try:
        import transformers
    except ImportError as error:
        raise RtkError("rtkernels.models needs the transformers library: pip install transformers") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
    if version < _OLDEST:
        raise RtkError(f"transformers is {transformers.__version__}; rtkernels.models needs 5.0 or newer")


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside of a PEFT wrapper, or the model."""
    if isinstance(model, str):
        raise ArgumentError(
            f"model is {model!r}; expected a model: replacing by name would change all models of this process. To "
            f"patch while building, call rtkernels.models.patched(lambda: AutoModelForCausalLM.from_pretrained(...))"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) and hasattr(model, "peft_config") else model


def _check_foreign(model: nn.Module) -> None:
    if getattr(model, "use_kernels", False):
        raise RtkError(
            "model uses kernels of the hub (use_kernels=True), which replace the same modules: turn them off"
        )
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if forward is not None and "liger" in getattr(forward, "__module__", ""):
            raise RtkError(f"{name} was patched by Liger; build the model anew and patch it with one of the two")
        if type(module).__module__.startswith("liger_kernel"):
            raise RtkError(f"{name} is a {type(module).__name__} of Liger; build the model without Liger first")


class _Patcher:
    """One call of ``patch``: asks each class of modules one time."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._known: dict[Any, Recognized | str] = {}

    def visit(
        self, kind: str, name: str, module: nn.Module, find: Callable[[nn.Module], Recognized], more: Any = None
    ) -> None:
        """Replace a module if it is recognised. `more` is what the answer depends on, apart from the module."""
        key = (kind, type(module), _scalars(module), more)
        if key not in self._known:
            try:
                self._known[key] = find(module)
            except NotRecognized as error:
                self._known[key] = str(error)
        answer = self._known[key]
        try:
            replace.check_own_forward(module)
        except NotRecognized as error:
            answer = str(error)
        if isinstance(answer, Recognized):
            replace.replace(module, answer)
        self.note(kind, name, module, answer if isinstance(answer, str) else None)

    def change(self, kind: str, name: str, module: nn.Module, find: Callable[[nn.Module], Recognized]) -> None:
        """Replace what was replaced before by what suits it better, if something does."""
        try:
            replace.change(module, find(module))
        except NotRecognized as error:
            self.note(kind, name, module, str(error))
        else:
            self.note(kind, name, module, None)

    def note(self, kind: str, name: str, module: nn.Module, reason: str | None) -> None:
        self.sites.append(Site(kind, name, type(module).__name__, reason))


def _scalars(module: nn.Module) -> tuple[Any, ...]:
    """Return what two modules of one class may differ in: numbers, texts, functions, sizes of parameters, children."""
    plain = (bool, int, float, str, type(None))
    state = sorted(
        (k, v) for k, v in module.__dict__.items() if isinstance(v, plain) and k not in ("training", "layer_idx")
    )
    shapes = tuple((k, p is None or tuple(p.shape)) for k, p in module._parameters.items())
    children = tuple((k, type(c), getattr(c, "p", None)) for k, c in module._modules.items())
    functions = tuple((k, v) for k, v in module.__dict__.items() if callable(v) and not isinstance(v, nn.Module))
    return tuple(map(repr, state)), shapes, children, functions


@torch.inference_mode(False)
@torch.enable_grad()  # what a module computes is asked with gradients, whatever mode the caller is in
def patch(
    model: nn.Module, *, norm: bool = True, mlp: bool = True, rope: bool = True, loss: bool = True,
    experts: bool = True, router: bool = False, fused_layers: bool = False, attention: bool = False,
    fp8: bool | str | quantized.Recipe | None = None, strict: bool = False,
) -> PatchReport:  # fmt: skip
    """Let a model of the ``transformers`` library compute with our ops. Works in place, on this model only.

    Every norm, gated MLP, rotary embedding, expert layer and the loss is tried with random numbers and replaced if one
    of our ops gives the same results and gradients; the report says what was left alone and why. Parameters,
    ``state_dict``, pickling and ``save_pretrained`` stay as they are. Patch after the weights are loaded, before or
    after PEFT or FSDP, before ``torch.compile``. Patching twice changes nothing.

    Args:
        model: A model of transformers 5, or a PEFT model around one, on any device or on meta.
        norm: Replace RMS and layer norms.
        mlp: Replace activation and product of gated MLPs.
        rope: Replace the rotation of queries and keys.
        loss: In training with labels, compute the loss from hidden states and head without making logits. They are
            made if somebody looks at ``outputs.logits``.
        experts: Replace permutation, products, gate and sum of expert layers.
        router: Replace scores and choice of experts. Off by default: of experts with equal probabilities, which are not
            rare in 16 bits, another one may be chosen.
        fused_layers: Add residuals inside of norms, normalise and rotate q and k in one op, and multiply q, k and v,
            and gate and up, in one product. A decoder layer or attention is replaced if the text of its forward is
            one of those known here. Weights of such layers are moved into one block of memory each, as parameters
            of their own.
        attention: Use our attention in place of the model's. Off by default: where torch's is cuDNN's, the two are
            about equally fast, and ours has no dropout.
        fp8: Multiply fp8 codes in linear layers, forward and backward: True or "block" (scales of 128 values and of
            128 x 128 weights), "row", "tensor", or an :class:`Fp8Recipe` with more options. The head, and layers too
            small to gain, are left alone. Parameters and their gradients stay what they are.
        strict: Raise if a candidate of an asked kind is left alone.

    Returns:
        What was replaced and what was not.

    Raises:
        ArgumentError: `model` is no model.
        RtkError: transformers is missing or too old, the model was patched by others, or `strict` is not met.
    """
    inner, recipe = _unwrapped(model), quantized.check_recipe(fp8)
    known = inner.__dict__.get(_REPORT)
    if known is not None:
        return known
    _check_transformers()
    _check_foreign(inner)
    patcher = _Patcher()
    for name, module in list(inner.named_modules()):
        if replace.replaced(module) is not None:
            continue
        if norm and recognize.is_norm(module):
            patcher.visit("norm", name, module, recognize.norm)
        elif mlp and recognize.is_mlp(module):
            patcher.visit("mlp", name, module, recognize.mlp)
        elif experts and expert_layers.is_experts(module):
            patcher.visit("experts", name, module, expert_layers.recognize)
        elif router and routers.is_router(module):
            patcher.visit("router", name, module, routers.recognize)
        elif rope and rope_view.is_attention(module):
            patcher.visit("rope", name, module, rope_view.recognize)
    if attention:
        try:
            attentions.replace_attention(inner)
            patcher.note("attention", "", inner, None)
        except NotRecognized as error:
            patcher.note("attention", "", inner, str(error))
    if recipe is not None:
        _replace_linears(inner, recipe, patcher, fused_layers)
    if fused_layers:
        fusing.fuse(inner, patcher.note)
    if loss and hasattr(inner, "get_output_embeddings"):
        try:
            losses.replace_loss(inner)
            patcher.note("loss", "", inner, None)
        except NotRecognized as error:
            patcher.note("loss", "", inner, str(error))
    chosen = {"norm": norm, "mlp": mlp, "rope": rope, "experts": experts, "router": router, "loss": loss}
    chosen |= {"attention": attention, "fp8": recipe is not None, "fused": fused_layers}
    made = PatchReport(patcher.sites, tuple(kind for kind in KINDS if chosen[kind]))
    inner.__dict__[_REPORT] = made
    if strict and made.left_alone:
        unpatch(inner)
        raise RtkError(f"strict=True, and not everything was replaced:\n{made}")
    return made


def _replace_linears(model: nn.Module, recipe: quantized.Recipe, patcher: _Patcher, fused: bool) -> None:
    """Replace the linear layers of a model, except for its head; those that are fused count as one layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = dict(model.named_modules())
    rows = fusing.rows_together(model) if fused else {}
    for name, module in modules.items():
        if any(part in name for part in recipe.skip):
            patcher.note("fp8", name, module, "it was named to be left alone") if type(module) is nn.Linear else None
        elif type(module) is nn.Linear and module is not head:
            together = rows.get(module)
            patcher.visit("fp8", name, module, partial(quantized.recognize, recipe=recipe, rows=together), together)
    for name, module in modules.items():
        if recognize.is_mlp(module):
            quantized.replace_mlp(module, recipe)
        elif fusing.is_layer(module):
            quantized.replace_norms(module, recipe)
        elif expert_layers.is_experts(module) and not any(part in name for part in recipe.skip):
            patcher.change("fp8", name, module, partial(quantized.experts_kind, recipe=recipe))


def patched(build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """Return ``build()``, patched; options as for :func:`patch`."""
    model = build()
    patch(model, **options)
    return model


@contextmanager
def loss_only(model: nn.Module) -> Iterator[None]:
    """Within this context, a patched model makes no logits in evaluation either, if it is given labels.

    For evaluations that look at the loss alone; ``outputs.logits`` is made if somebody looks at it.
    """
    inner = _unwrapped(model)
    inner.__dict__[losses.LOSS_ONLY] = True
    try:
        yield
    finally:
        inner.__dict__.pop(losses.LOSS_ONLY, None)


def unpatch(model: nn.Module) -> None:
    """Give a model its own forwards, head and loss back."""
    inner = _unwrapped(model)
    if inner.__dict__.pop(_REPORT, None) is None:
        return
    losses.restore_loss(inner)
    attentions.restore_attention(inner)
    for module in inner.modules():
        replace.restore(module)
        module.__dict__.pop(quantized.READERS, None)


def report(model: nn.Module) -> PatchReport | None:
    """Return what :func:`patch` did to a model, None if it was not patched."""
    return _unwrapped(model).__dict__.get(_REPORT)
