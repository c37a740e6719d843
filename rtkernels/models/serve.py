"""``serve(model, weights=...)``: a model for inference with weights of 8 or 4 bits, and the report about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import fp8_checkpoint, servable
from rtkernels.models.fp8 import _is_fp8
from rtkernels.models.patch_report import Site
from rtkernels.models.served import BLOCK, ServedExperts, ServedLinear
from rtkernels.nn.quantized_linear import FORMATS, QuantizedLinear
from rtkernels.ops.quant import pack

WEIGHTS = ("fp8", "int4", "nvfp4")
_REPORT = "_rtkernels_served"
_HALVES = (torch.bfloat16, torch.float16)
# Layers that read the same tensor, and whose codes are multiplied as one matrix.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EXPERTS = "experts have fp8 weights in every format"


class ServeReport(NamedTuple):
    """The result of :func:`serve`; prints as a table.

    `sites` lists linear layers and experts: the format of their weights as `kind` ("fp8", "int4", "nvfp4", "16 bits"),
    and as `reason` why it is not the one that was asked for, None if it is. `weights` is the latter.
    """

    weights: str
    sites: list[Site]

    @property
    def coded(self) -> Counter[str]:
        """Number of modules of each format."""
        return Counter(site.kind for site in self.sites)

    @property
    def left_alone(self) -> list[Site]:
        """The modules with another format than the one that was asked for."""
        return [site for site in self.sites if site.reason is not None]

    def __str__(self) -> str:
        lines = [f"{kind:8} {count:5} modules" for kind, count in self.coded.items()]
        reasons = Counter((site.kind, site.module, site.reason) for site in self.left_alone)
        lines += [f"  {kind}: {count} x {module}: {reason}" for (kind, module, reason), count in reasons.items()]
        return "\n".join(lines)

    __repr__ = __str__


def serve(
    model_or_path: nn.Module | str | Path, *, weights: str = "fp8", device: Any = None, head: bool = False
) -> nn.Module:
    """Return a model for inference whose linear layers and experts have weights of 8 or 4 bits.

    Weights are rounded to the nearest codes. Patch the result with :func:`rtkernels.models.patch` to replace the rest
    of the model; ``fused_layers=True, attention=True`` lets steps of ``generate()`` read codes at the speed of memory.
    :func:`serve_report` says which layers have which weights, and why.

    =========  =====================================================  ================================================
    weights    codes                                                  activations of products
    =========  =====================================================  ================================================
    ``fp8``    e4m3, a float32 scale per 128 x 128 weights            e4m3 in groups of 128; 16 bits up to 16 rows
    ``int4``   two in a byte, a float32 scale per 128 of a row        16 bits
    ``nvfp4``  e2m1, two in a byte, an e4m3 scale per 16 of a row     16 bits
               and a float32 one for the weight
    =========  =====================================================  ================================================

    Experts have fp8 weights in every format, and so have layers whose columns are no multiple of 128 for ``int4``, or
    of 16 for ``nvfp4``. Embeddings, norms, routers and layers with fewer than 128 rows or columns
    stay in 16 bits, and so do layers with hooks or another forward than ``nn.Linear``'s, and those whose weight the
    model itself reads. Parameters have no gradients; layers of fp8 weights pass gradients on to their inputs, those of
    4-bit weights do not. Only models with fp8 weights can be written (:func:`export_fp8`); ``save_pretrained`` raises.

    Args:
        model_or_path: A transformers model, which is changed in place. For ``fp8`` also a folder with a checkpoint, as
            in :func:`serve_fp8`, or a model whose layers transformers loaded from one.
        weights: The format, as above.
        device: The device of the result. Default: the model's device, or the CPU for a folder.
        head: The head multiplies fp8 codes, in every format. If its weight is shared with the embedding, the embedding
            keeps the 16-bit weight.

    Raises:
        ArgumentError: `weights` is none of these, `model_or_path` is neither a model nor such a folder, it was patched
            with fp8 layers, or 4-bit weights are asked of a model that is not in 16 bits or has no memory.
        RtkError: A layer cannot be served: its experts are none of ours, or its weights are infinite (4 bits: or NaN).
    """
    if weights not in WEIGHTS:
        raise ArgumentError(f"weights is {weights!r}; expected one of {', '.join(map(repr, WEIGHTS))}")
    if weights == "fp8":
        return serve_fp8(model_or_path, device=device, head=head)
    if not isinstance(model_or_path, nn.Module):
        what = repr(str(model_or_path)) if isinstance(model_or_path, (str, Path)) else type(model_or_path).__name__
        raise ArgumentError(
            f"model_or_path is {what}; expected a model of transformers for weights={weights!r}: load it in 16 bits "
            f"with from_pretrained"
        )
    model = model_or_path
    _check_patch(model)
    _convert(model, weights)
    # What is left in 16 bits: experts, the head if it is asked for, and layers of other sizes.
    return _served(fp8_checkpoint.convert_fp8(model, device, head), weights)


def serve_fp8(model_or_path: nn.Module | str | Path, *, device: Any = None, head: bool = False) -> nn.Module:
    """Return a model for inference in which linear layers and experts multiply fp8 codes: ``serve(weights="fp8")``.

    Weights are stored as codes, which halves the model's memory. Inputs are quantised in groups of 128 in each layer.
    Parameters have no gradients; linear layers pass gradients on to their inputs. Patch the result with
    :func:`rtkernels.models.patch` to replace the rest of the model.

    Args:
        model_or_path: A folder with a checkpoint in the layout of the DeepSeek-V3 and Qwen3 fp8 checkpoints, as
            :func:`export_fp8` writes it. Or a transformers model, which is changed in place: layers that transformers
            loaded from such a checkpoint keep their codes, 16-bit layers are quantised.
        device: The device of the result. Default: the model's device, or the CPU for a folder.
        head: The head multiplies fp8 codes, too. In a small model it is a quarter of what a decoding step reads. If its
            weight is shared with the embedding, the embedding keeps the 16-bit weight.

    Raises:
        ArgumentError: `model_or_path` is neither a model nor such a folder, or it was patched with fp8 layers.
        RtkError: The checkpoint lacks tensors, a layer cannot be served in fp8, or its weights are infinite.
    """
    _check_patch(model_or_path)
    return _served(fp8_checkpoint.convert_fp8(model_or_path, device, head), "fp8")


def serve_report(model: nn.Module) -> ServeReport | None:
    """Return the report of :func:`serve` for a model, None if it was not served."""
    return model.__dict__.get(_REPORT)


def _check_patch(model: Any) -> None:
    """Refuse a model that ``patch(fp8=...)`` changed: its norms write codes for layers that would be replaced."""
    if isinstance(model, nn.Module) and any(_is_fp8(module) for module in model.modules()):
        raise ArgumentError("model_or_path was patched with fp8 layers; call unpatch(model), serve it, patch it again")


def _served(model: nn.Module, weights: str) -> nn.Module:
    """Return a converted model with its report, and without a ``save_pretrained`` that would write codes alone."""
    model.__dict__[_REPORT] = _report(model, weights)
    changed = any(isinstance(m, (ServedLinear, ServedExperts, QuantizedLinear)) for m in model.modules())
    if changed and hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = _refuse_to_save
    return model


def _refuse_to_save(*args: Any, **options: Any) -> None:
    raise RtkError(
        "save_pretrained would write codes that from_pretrained takes for weights; export_fp8(model, path) writes a "
        "model with fp8 weights"
    )


# ---- 4 bits ---------------------------------------------------------------------------------------------------------


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers with 16-bit weights whose codes are to be of 4 bits."""
    quantized, _ = fp8_checkpoint._plan(model)
    for name, module in model.named_modules():
        if f"{name}.weight" in quantized and isinstance(module, nn.Linear) and module.weight.element_size() > 1:
            yield name, module


@torch.no_grad()
def _convert(model: nn.Module, weights: str) -> None:
    """Replace linear layers by layers with 4-bit weights."""
    group = FORMATS[weights].groups[0]
    found = {name: m for name, m in _linears(model) if m.in_features % group == 0}
    for name, module in found.items():  # before anything changes
        if module.weight.dtype not in _HALVES or module.weight.device.type == "meta":
            dtype = str(module.weight.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"model_or_path has {name} with a weight of {dtype} on {module.weight.device}; expected bfloat16 or "
                f"float16 with memory, for weights={weights!r}"
            )
        if not bool(module.weight.isfinite().all()):
            raise RtkError(f"{name} has weights that are not finite, which {weights} codes cannot hold")
    shared = _global_scales(found) if weights == "nvfp4" else {}
    for name, module in found.items():
        layer = QuantizedLinear.from_linear(module, weights, global_scale=shared.get(name))
        path, _, child = name.rpartition(".")
        setattr(model.get_submodule(path), child, layer)


def _global_scales(linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """Return the global scales of layers that are multiplied as one matrix."""
    found: dict[str, Tensor] = {}
    for path in {name.rpartition(".")[0] for name in linears}:
        for children in _TOGETHER:
            names = [f"{path}.{child}" for child in children]
            if all(name in linears for name in names):
                scale = pack.nvfp4_global_scale([linears[name].weight for name in names])
                found |= dict.fromkeys(names, scale)
    return found


# ---- the report -----------------------------------------------------------------------------------------------------


def _report(model: nn.Module, weights: str) -> ServeReport:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    experts, kept, sites = fp8_checkpoint._experts_of(model), servable.reasons(model), []
    for name, module in model.named_modules():
        reason = None
        if isinstance(module, ServedExperts):
            kind, reason = "fp8", None if weights == "fp8" else _EXPERTS
        elif name in experts:
            kind, reason = "16 bits", "its experts have biases or another layout, or sizes that are no multiples of 128"
        elif isinstance(module, QuantizedLinear):
            kind = module.weights
            reason = None if kind == weights else f"it had {kind} weights before"
        elif isinstance(module, ServedLinear):
            kind = "fp8"
            if module is head:
                reason = None if weights == "fp8" else "it is the head"
            elif weights != "fp8":
                reason = _why_not(module, weights) or "it had fp8 weights before"
        elif isinstance(module, nn.Linear):
            kind = "16 bits" if module.weight.element_size() == 2 else str(module.weight.dtype).removeprefix("torch.")
            reason = "it is the head" if module is head else kept.get(name) or _why_not(module, weights)
        else:
            continue
        sites.append(Site(kind, name, type(module).__name__, reason))
    return ServeReport(weights, sites)


def _why_not(linear: Any, weights: str) -> str | None:
    """Return why a layer that is no head has other weights."""
    if min(linear.out_features, linear.in_features) < BLOCK:
        return f"it has fewer than {BLOCK} rows or columns"
    group = BLOCK if weights == "fp8" else FORMATS[weights].groups[0]
    if weights != "fp8" and linear.in_features % group:
        return f"its {linear.in_features} columns are no multiple of {group}, the group of {weights}"
    return None
