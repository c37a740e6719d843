"""``patch(model)``, its report, and ``unpatch(model)``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import attention as attentions
from rtkernels.models import (
    chosen_experts,
    chosen_keys,
    gated_norms,
    group_norms,
    mixers,
    modulated,
    recognize,
    replace,
    rope_view,
)
from rtkernels.models import experts as expert_layers
from rtkernels.models import fp8 as quantized
from rtkernels.models import fused_layers as fusing
from rtkernels.models import loss as losses
from rtkernels.models import router as routers
from rtkernels.models.fp8_linear import Recipe, check_recipe
from rtkernels.models.fused_head import restore_fused_head
from rtkernels.models.generation import replace_generation, restore_generation
from rtkernels.models.others import check_accelerate, check_foreign, foreign
from rtkernels.models.patch_report import PatchReport
from rtkernels.models.patcher import Patcher
from rtkernels.runtime.torch_private import is_dynamo_compiling

_REPORT = "_rtkernels_report"
_FIRST = "_rtkernels_first_call"
_OLDEST = (5, 0)
_MODULES = ("norm", "mlp", "experts", "router")  # kinds that replace the forward of a module
KINDS = ("norm", "mlp", "rope", "experts", "mixer", "router", "loss", "attention", "fp8", "fused")


def check_transformers() -> None:
    """Raise an RtkError if transformers is missing or too old."""
    try:
        import transformers
    except ImportError as error:
        raise RtkError("rtkernels.models needs the transformers library: pip install transformers") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
    if version < _OLDEST:
        raise RtkError(f"transformers is {transformers.__version__}; rtkernels.models needs 5.0 or newer")


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside DataParallel, DDP and PEFT wrappers."""
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
    """Update the report of a model that another library patched after us; return the warning, or ""."""
    others = {path: who for path, who, _ in foreign(model)}
    if not others:
        return ""
    for i, site in enumerate(known.sites):
        if site.reason is None and site.name in others:
            known.sites[i] = site._replace(reason=f"{others[site.name]} replaced its forward after patch")
    who, first = next(iter(others.values())), next(iter(others)) or "model"
    return f"{who} patched this model after rtkernels: {len(others)} modules ({first}, ...) compute with {who}"


def _notice_changes(model: nn.Module, known: PatchReport) -> None:
    """Update the report of a model whose modules were changed, so that they compute with their own forward again."""
    modules = dict(model.named_modules())
    for i, site in enumerate(known.sites):
        module = modules.get(site.name)
        if site.reason is None and site.kind in _MODULES and type(module).__name__ == site.module:
            if replace.replaced(module) is None:
                known.sites[i] = site._replace(reason="it was changed after patch")


def _first_call(model: nn.Module, args: Any) -> None:
    """Warn at the model's first call if another library patched it after us.

    This forward pre-hook is a module-level function so that the model can be pickled.
    """
    if is_dynamo_compiling():
        return
    handle, known = model.__dict__.pop(_FIRST, None), model.__dict__.get(_REPORT)
    if handle is not None:
        handle.remove()
    if known is not None and known.options["fp8"] is not None:
        check_accelerate()
    if known is not None and (sentence := _notice_others(model, known)):
        warnings.warn(f"rtkernels.models: {sentence}", stacklevel=2)


@torch.inference_mode(False)
@torch.enable_grad()  # modules are tested with gradients, whatever mode the caller is in
def patch(
    model: nn.Module, *, norm: bool = True, mlp: bool = True, rope: bool = True, loss: bool = True,
    experts: bool = True, mixer: bool = True, router: bool = False, fused_layers: bool = False,
    attention: bool | None = None, fp8: bool | str | Recipe | None = None, strict: bool = False,
) -> PatchReport:  # fmt: skip
    """Make a ``transformers`` model compute with rtkernels' ops. Changes this model in place, and no other.

    Every norm, gated MLP, rotary embedding and expert layer, and the loss, is run on random inputs. It is replaced if
    one of our ops gives the same results and gradients. The report lists what was left alone and why. Parameters,
    ``state_dict``, pickling and ``save_pretrained`` do not change. Patch after the weights are loaded and before
    ``torch.compile``; PEFT and FSDP may be applied before or after. Patching a patched model again changes nothing.
    A warning is issued if nothing was replaced, or if an option that is off by default found nothing to replace.

    Args:
        model: A transformers 5 model, or a PEFT model around one, on any device including meta.
        norm: Replace RMS norms and layer norms.
        mlp: Replace the activation and product of gated MLPs.
        rope: Replace the rotation of queries and keys.
        loss: When training with labels, compute the loss from the hidden states and the head without storing logits.
            ``outputs.logits`` is computed when it is read.
        experts: Replace expert layers: permutation, products, gate and weighted sum.
        mixer: Replace what linear layers of hybrid models call: short convolutions, gated delta rules, Mamba-2's SSD.
        router: Replace the scoring and selection of experts. Off by default: if two experts have equal probabilities,
            which is common in 16 bits, a different one may be selected.
        fused_layers: Fuse residual additions into norms, q/k norms with the rotation, the q, k and v projections into
            one product, and gate and up into one product. A decoder layer or attention module is replaced only if the
            source of its forward is one of those known here. The weights of fused projections are moved into one block
            of memory and remain separate parameters.
        attention: Use :func:`rtkernels.attention` instead of the model's attention, and capture the decoding steps of
            ``generate()`` in CUDA graphs. By default (None) only in models with sinks (GPT-OSS) that use eager
            attention because transformers has no other for them, and without capturing. In other models it is about as
            fast in training as cuDNN's attention, and it has no dropout. In DeepSeek-V3.2 and GLM-MoE-DSA it replaces
            the indexer and, without gradients, the sparse attention, both without capturing.
        fp8: Multiply fp8 codes in linear layers, forward and backward. True or "block" (one scale per 128 activations
            and per 128 x 128 weights), "row", "tensor", or an :class:`Fp8Recipe` for more options. The head and layers
            too small to gain are left alone. Parameters and gradients keep their dtypes.
        strict: Raise an error instead of warning, and also if any module of a requested kind is left alone.

    Returns:
        The report of what was replaced and what was not.

    Raises:
        ArgumentError: `model` is not a ``torch.nn.Module``, or it is compiled; or `fp8` is not a known recipe.
        RtkError: transformers is missing or older than 5.0, another library patched the model, or `strict` is violated.
    """
    inner, recipe = _unwrapped(model), check_recipe(fp8)
    options = {"norm": norm, "mlp": mlp, "rope": rope, "loss": loss, "experts": experts, "router": router}
    options |= {"mixer": mixer, "fused_layers": fused_layers, "attention": attention, "fp8": recipe}
    known = inner.__dict__.get(_REPORT)
    if known is not None:
        _tell(_notice_others(inner, known) or _other_options(known, options), strict)
        return known
    check_transformers()
    check_foreign(inner, recipe is not None)
    patcher = Patcher()
    for name, module in list(inner.named_modules()):
        if replace.replaced(module) is not None:
            continue
        if norm and gated_norms.is_gated_norm(module):
            patcher.visit("norm", name, module, gated_norms.recognize)
        elif norm and modulated.is_modulated(module):
            patcher.visit("norm", name, module, modulated.recognize)
        elif norm and group_norms.is_group_norm(module):
            patcher.visit("norm", name, module, group_norms.recognize)
        elif norm and recognize.is_norm(module):
            patcher.visit("norm", name, module, recognize.norm)
        elif mixer and mixers.is_mixer(module):
            patcher.visit("mixer", name, module, mixers.recognize, by_class=True)
            if replace.replaced(module) is not None:
                for function, reason in mixers.left_alone(module).items():
                    patcher.record("mixer", name, module, f"{function}: {reason}")
        elif experts and chosen_experts.is_known(module):
            patcher.visit("experts", name, module, chosen_experts.recognize)
        elif experts and expert_layers.holds_experts(module):
            if not chosen_experts.is_inside(inner, name):
                patcher.visit("experts", name, module, expert_layers.recognize)
        elif router and routers.is_router(module):
            patcher.visit("router", name, module, routers.recognize)
        elif rope and rope_view.rotates(module):
            processor = module.__dict__.get("processor")
            more = None if processor is None else type(processor)
            patcher.visit("rope", name, module, rope_view.recognize, more, by_class=True)
        elif mlp and recognize.is_mlp(module):
            patcher.visit("mlp", name, module, recognize.mlp)
        elif mlp and recognize.is_activation(module) and not _is_inlined(inner, name):
            if not isinstance(patcher.answer("mlp", module, recognize.activation), str):
                patcher.visit("mlp", name, module, recognize.activation)
    by_itself = attention is None and attentions.replace_only_eager(inner)
    if by_itself:
        patcher.record("attention", "", inner, None)
    sparse = [(name, module) for name, module in inner.named_modules() if attention and chosen_keys.is_known(module)]
    if attention and not by_itself and not sparse:
        patcher.attempt("attention", "", inner, partial(attentions.replace_attention, inner))
    if recipe is not None:
        if _gathers_weights(inner):
            recipe = recipe._replace(save_weight=True)
        _replace_linears(inner, recipe, patcher, fused_layers)
    if fused_layers:
        for module in inner.modules():
            if fusing.is_layer(module):
                quantized.replace_norms(module, "served_norm")
        fusing.fuse(inner, patcher.record)
    for name, module in sparse:
        patcher.attempt("attention", name, module, partial(chosen_keys.replace_both, module))
    if loss and losses.takes_labels(inner):
        patcher.attempt("loss", "", inner, partial(losses.replace_loss, inner))
    asked = tuple(kind for kind in KINDS if options[_OPTIONS.get(kind, kind)] or (by_itself and kind == "attention"))
    result = PatchReport(patcher.sites, asked, options)
    inner.__dict__[_REPORT] = result
    if attention and result.replaced["attention"] and not sparse:
        replace_generation(inner, result)
    inner.__dict__[_FIRST] = inner.register_forward_pre_hook(_first_call)
    try:
        left = "not everything was replaced" if result.left_alone and strict else ""
        _tell(_in_vain(result, inner) or left, strict, f"\n{result}")
    except RtkError:
        unpatch(inner)
        raise
    return result


def _is_inlined(model: nn.Module, name: str) -> bool:
    """Return True if a module belongs to a replaced MLP, which does not call it."""
    parent = replace.replaced(model.get_submodule(name.rpartition(".")[0]))
    return parent is not None and parent.kind in ("mlp", "named_mlp")


_OPTIONS = {"fused": "fused_layers"}  # options that are not named after their kind
_UNLESS_ASKED = ("router", "attention", "fp8", "fused")  # kinds that are off by default


def _tell(sentence: str, strict: bool, more: str = "") -> None:
    """Issue a warning to the caller of ``patch``, or raise an RtkError if `strict`; "" does nothing."""
    if sentence and strict:
        raise RtkError(f"strict=True, and {sentence}{more}")
    if sentence:
        warnings.warn(f"rtkernels.models.patch: {sentence}{more}", stacklevel=5)  # two of the frames are decorators


def _in_vain(result: PatchReport, model: nn.Module) -> str:
    """Return a warning if nothing was replaced, or nothing of an explicitly requested kind; else ""."""
    if not result.replaced:
        return f"nothing was replaced in this {type(model).__name__}, which computes as before"
    asked = [kind for kind in _UNLESS_ASKED if result.options[_OPTIONS.get(kind, kind)]]
    missing = [_OPTIONS.get(kind, kind) for kind in asked if not result.replaced[kind]]
    return f"{', '.join(f'{name}=' for name in missing)} found nothing to replace in this model" if missing else ""


def _other_options(known: PatchReport, options: dict[str, Any]) -> str:
    """Return a warning if a patched model is patched again with other options; else ""."""
    others = [f"{name}=" for name, value in options.items() if known.options.get(name, value) != value]
    if not others:
        return ""
    return f"the model is patched already: {', '.join(others)} had other values then; call unpatch(model) first"


def _gathers_weights(model: nn.Module) -> bool:
    """Return True if FSDP2 gathers weights for each pass: codes kept in between would undo the memory it saves."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def _replace_linears(model: nn.Module, recipe: Recipe, patcher: Patcher, fused: bool) -> None:
    """Replace the linear layers of a model except its head. Layers that are fused count as one layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = dict(model.named_modules())
    rows = fusing.rows_together(model) if fused else {}
    for name, module in modules.items():
        if any(part in name for part in recipe.skip):
            patcher.record("fp8", name, module, "it was named to be left alone") if type(module) is nn.Linear else None
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
            patcher.attempt("fp8", name, module, partial(quantized.replace_experts, module, recipe))


def patched(build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """Return ``build()`` after patching it.

    Args:
        build: A function without arguments that returns a model:
            ``lambda: AutoModelForCausalLM.from_pretrained(...)``.
        **options: Options of :func:`patch`.
    """
    model = build()
    patch(model, **options)
    return model


@contextmanager
def loss_only(model: nn.Module) -> Iterator[None]:
    """Within this context, a patched model that is given labels stores no logits in evaluation either.

    For evaluations that need only the loss. ``outputs.logits`` is computed when it is read.
    """
    inner = _unwrapped(model)
    inner.__dict__[losses.LOSS_ONLY] = True
    try:
        yield
    finally:
        inner.__dict__.pop(losses.LOSS_ONLY, None)


def unpatch(model: nn.Module) -> None:
    """Restore the original forwards, head and loss of a patched model, also what :func:`use_fused_head` replaced."""
    inner = _unwrapped(model)
    restore_fused_head(inner)
    known = inner.__dict__.pop(_REPORT, None)
    if known is None:
        return
    if sentence := _notice_others(inner, known):
        warnings.warn(f"rtkernels.models.unpatch: {sentence}, which stays", stacklevel=2)
    handle = inner.__dict__.pop(_FIRST, None)
    if handle is not None:
        handle.remove()
    losses.restore_loss(inner)
    restore_generation(inner)
    attentions.restore_attention(inner)
    for module in inner.modules():
        replace.restore(module)
        module.__dict__.pop(quantized.READERS, None)


def report(model: nn.Module) -> PatchReport | None:
    """Return the report of :func:`patch` for a model, None if it is not patched.

    Modules that were changed since then, or that another library (Liger, Unsloth) patched, are listed as left alone.
    """
    inner = _unwrapped(model)
    known = inner.__dict__.get(_REPORT)
    if known is not None:
        _notice_others(inner, known)
        _notice_changes(inner, known)
    return known
