"""``patch(model)``: what it replaces, what it leaves alone and why, and the way back."""

from __future__ import annotations

import sys
import warnings
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
from rtkernels.models.fp8_linear import Recipe, check_recipe
from rtkernels.models.known import Known
from rtkernels.models.loss_probe import takes_labels
from rtkernels.models.others import check_foreign, foreign
from rtkernels.models.probe import NotRecognized, Recognized
from rtkernels.runtime.torch_private import is_dynamo_compiling

_REPORT = "_rtkernels_report"
_FIRST = "_rtkernels_first_call"
_OLDEST = (5, 0)
KINDS = ("norm", "mlp", "rope", "experts", "router", "loss", "attention", "fp8", "fused")


class Site(NamedTuple):
    """A place in the model that was looked at. `reason` says why it was left alone, None if it was replaced."""

    kind: str
    name: str
    module: str
    reason: str | None


class PatchReport:
    """What :func:`patch` did. Printed, it is a table; `sites` has every place, `asked` the kinds looked for."""

    def __init__(self, sites: list[Site], asked: tuple[str, ...], options: dict[str, Any]) -> None:
        self.sites, self.asked, self.options = sites, asked, options

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
    """Return the model inside of wrappers (DataParallel, DDP, PEFT), or the model."""
    if isinstance(model, str):
        raise ArgumentError(
            f"model is {model!r}; expected a model: replacing by name would change all models of this process. To "
            f"patch while building, call rtkernels.models.patched(lambda: AutoModelForCausalLM.from_pretrained(...))"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if hasattr(model, "_orig_mod"):
        raise ArgumentError("model was compiled by torch.compile; expected one that was not: patch first, then compile")
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) and hasattr(model, "peft_config") else model


def _notice_others(model: nn.Module, known: PatchReport) -> str:
    """Correct the report of a model that others patched after us; return a sentence for a warning, or ""."""
    others = {path: who for path, who, _ in foreign(model)}
    if not others:
        return ""
    for i, site in enumerate(known.sites):
        if site.reason is None and site.name in others:
            known.sites[i] = site._replace(reason=f"{others[site.name]} replaced its forward after patch")
    who, first = next(iter(others.values())), next(iter(others)) or "model"
    return f"{who} patched this model after rtkernels: {len(others)} modules ({first}, ...) compute with {who}"


def _first_call(model: nn.Module, args: Any) -> None:
    """Warn at the first call of a model if others patched it after us; a hook, of the file so that it pickles."""
    if is_dynamo_compiling():
        return
    handle, known = model.__dict__.pop(_FIRST, None), model.__dict__.get(_REPORT)
    if handle is not None:
        handle.remove()
    if known is not None and (sentence := _notice_others(model, known)):
        warnings.warn(f"rtkernels.models: {sentence}", stacklevel=2)


class _Patcher:
    """One call of ``patch``: asks each class of modules one time."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._known = Known()

    def visit(
        self, kind: str, name: str, module: nn.Module, find: Callable[[nn.Module], Recognized], more: Any = None,
        by_class: bool = False,
    ) -> None:  # fmt: skip
        """Replace a module if it is recognised; `more` and `by_class` as in :meth:`Known.ask`."""
        answer = self._known.ask(kind, module, find, more, by_class)
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


@torch.inference_mode(False)
@torch.enable_grad()  # what a module computes is asked with gradients, whatever mode the caller is in
def patch(
    model: nn.Module, *, norm: bool = True, mlp: bool = True, rope: bool = True, loss: bool = True,
    experts: bool = True, router: bool = False, fused_layers: bool = False, attention: bool = False,
    fp8: bool | str | Recipe | None = None, strict: bool = False,
) -> PatchReport:  # fmt: skip
    """Let a model of the ``transformers`` library compute with our ops. Works in place, on this model only.

    Every norm, gated MLP, rotary embedding, expert layer and the loss is tried with random numbers and replaced if one
    of our ops gives the same results and gradients; the report says what was left alone and why. Parameters,
    ``state_dict``, pickling and ``save_pretrained`` stay as they are. Patch after the weights are loaded, before or
    after PEFT or FSDP, before ``torch.compile``. Patching twice changes nothing. A warning says so where nothing was
    replaced at all, or nothing of a kind that is off unless asked for.

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
        strict: Raise if a candidate of an asked kind is left alone, and in place of warnings.

    Returns:
        What was replaced and what was not.

    Raises:
        ArgumentError: `model` is no model.
        RtkError: transformers is missing or too old, the model was patched by others, or `strict` is not met.
    """
    inner, recipe = _unwrapped(model), check_recipe(fp8)
    options = {"norm": norm, "mlp": mlp, "rope": rope, "loss": loss, "experts": experts, "router": router}
    options |= {"fused_layers": fused_layers, "attention": attention, "fp8": recipe}
    known = inner.__dict__.get(_REPORT)
    if known is not None:
        _tell(_notice_others(inner, known) or _other_options(known, options), strict)
        return known
    _check_transformers()
    check_foreign(inner)
    patcher = _Patcher()
    for name, module in list(inner.named_modules()):
        if replace.replaced(module) is not None:
            continue
        if norm and recognize.is_norm(module):
            patcher.visit("norm", name, module, recognize.norm)
        elif experts and expert_layers.holds_experts(module):
            patcher.visit("experts", name, module, expert_layers.recognize)
        elif router and routers.is_router(module):
            patcher.visit("router", name, module, routers.recognize)
        elif rope and rope_view.rotates(module):
            processor = module.__dict__.get("processor")
            more = None if processor is None else type(processor)
            patcher.visit("rope", name, module, rope_view.recognize, more, by_class=True)
        elif mlp and recognize.is_mlp(module):
            patcher.visit("mlp", name, module, recognize.mlp)
    if attention:
        try:
            attentions.replace_attention(inner)
            patcher.note("attention", "", inner, None)
        except NotRecognized as error:
            patcher.note("attention", "", inner, str(error))
    if recipe is not None:
        if _gathers_weights(inner):
            recipe = recipe._replace(save_weight=True)
        _replace_linears(inner, recipe, patcher, fused_layers)
    if fused_layers:
        for module in inner.modules():
            if fusing.is_layer(module):
                quantized.replace_norms(module, "served_norm")
        fusing.fuse(inner, patcher.note)
    if loss and takes_labels(inner):
        try:
            losses.replace_loss(inner)
            patcher.note("loss", "", inner, None)
        except NotRecognized as error:
            patcher.note("loss", "", inner, str(error))
    asked = tuple(kind for kind in KINDS if options[_OPTIONS.get(kind, kind)])
    made = PatchReport(patcher.sites, asked, options)
    inner.__dict__[_REPORT] = made
    inner.__dict__[_FIRST] = inner.register_forward_pre_hook(_first_call)
    try:
        left = "not everything was replaced" if made.left_alone and strict else ""
        _tell(_in_vain(made, inner) or left, strict, f"\n{made}")
    except RtkError:
        unpatch(inner)
        raise
    return made


_OPTIONS = {"fused": "fused_layers"}  # names of options that are not those of the kind
_UNLESS_ASKED = ("router", "attention", "fp8", "fused")  # kinds that are off by default


def _tell(sentence: str, strict: bool, more: str = "") -> None:
    """Warn the caller of ``patch``, or raise an RtkError if it is `strict`; nothing if there is no sentence."""
    if sentence and strict:
        raise RtkError(f"strict=True, and {sentence}{more}")
    if sentence:
        warnings.warn(f"rtkernels.models.patch: {sentence}{more}", stacklevel=5)  # two of them are decorators


def _in_vain(made: PatchReport, model: nn.Module) -> str:
    """Return a sentence if nothing was replaced, or nothing of a kind that somebody has asked for; else ""."""
    if not made.replaced:
        return f"nothing was replaced in this {type(model).__name__}, which computes as before"
    missing = [_OPTIONS.get(kind, kind) for kind in _UNLESS_ASKED if kind in made.asked and not made.replaced[kind]]
    return f"{', '.join(f'{name}=' for name in missing)} found nothing to replace in this model" if missing else ""


def _other_options(known: PatchReport, options: dict[str, Any]) -> str:
    """Return a sentence if a model that is patched is to be patched with other options; else ""."""
    others = [f"{name}=" for name, value in options.items() if known.options.get(name, value) != value]
    if not others:
        return ""
    return f"the model is patched already: {', '.join(others)} had other values then; call unpatch(model) first"


def _gathers_weights(model: nn.Module) -> bool:
    """Return True if FSDP2 gathers weights for each pass: codes that are kept in between would undo what it saves."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def _replace_linears(model: nn.Module, recipe: Recipe, patcher: _Patcher, fused: bool) -> None:
    """Replace the linear layers of a model, except for its head; those that are fused count as one layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = dict(model.named_modules())
    rows = fusing.rows_together(model) if fused else {}
    for name, module in modules.items():
        if any(part in name for part in recipe.skip):
            patcher.note("fp8", name, module, "it was named to be left alone") if type(module) is nn.Linear else None
        elif type(module) is nn.Linear and module is not head:
            together = rows.get(module)
            find = partial(quantized.recognize, recipe=recipe, rows=together)
            patcher.visit("fp8", name, module, find, (recipe, together))
    for name, module in modules.items():
        if recognize.is_mlp(module):
            quantized.replace_mlp(module, recipe)
        elif fusing.is_layer(module) and recipe.by_codes:
            quantized.replace_norms(module)
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
    known = inner.__dict__.pop(_REPORT, None)
    if known is None:
        return
    if sentence := _notice_others(inner, known):
        warnings.warn(f"rtkernels.models.unpatch: {sentence}, which stays", stacklevel=2)
    handle = inner.__dict__.pop(_FIRST, None)
    if handle is not None:
        handle.remove()
    losses.restore_loss(inner)
    attentions.restore_attention(inner)
    for module in inner.modules():
        replace.restore(module)
        module.__dict__.pop(quantized.READERS, None)


def report(model: nn.Module) -> PatchReport | None:
    """Return what :func:`patch` did to a model, None if it was not patched.

    Modules that others (Liger, Unsloth) patched since then are left alone, in its words.
    """
    inner = _unwrapped(model)
    known = inner.__dict__.get(_REPORT)
    if known is not None:
        _notice_others(inner, known)
    return known
