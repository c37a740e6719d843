"""Which calls of ``generate()`` decode here, and what a captured step depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin

from rtkernels.models import replace
from rtkernels.models.attention import NAME
from rtkernels.models.fused_layers import form_of
from rtkernels.models.generation import fields, select
from rtkernels.models.generation.cache import windows_of
from rtkernels.nn.fp8_linear import KeepsCodes
from rtkernels.runtime.torch_private import dispatch_modes

_READ = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
_PASSED = {"tokenizer", "assistant_tokenizer"}  # given to criteria before the loop; models ignore them
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_LAYERS = {
    "full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp",
}  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, FunctionType, BuiltinFunctionType)
_HOOKS = ("rtkernels.", "transformers.utils.output_capturing")  # the latter stay and rest after output_attentions=True
_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
_FORMS = {"dcbb5e7989623417"}  # of models whose prepare_inputs_for_generation only sets logits_to_keep


def reason_against(
    model: Any, ids: Tensor, given: Any, config: Any, synced: bool, kwargs: dict[str, Any]
) -> str | None:
    """Return why transformers' own loop must decode, None if ours can."""
    return (
        _of_options(config, synced)
        or _of_inputs(ids, kwargs)
        or _of_model(model, ids)
        or _of_cache(kwargs.get("past_key_values"), model)
        or select.reason_against(given, ids)
    )


def _of_options(config: Any, synced: bool) -> str | None:
    for name in _OUTPUTS:
        if getattr(config, name, False):
            return f"{name} is set"
    if synced:
        return "synced_gpus is set"
    if config.is_assistant:
        return "it is the assistant of another model"
    if config.compile_config is not None:
        return "compile_config is set"
    if config._pad_token_tensor is not None and config._pad_token_tensor.numel() != 1:
        return "there are several padding tokens"
    if (name := fields.unknown(config)) is not None:
        return f"{name} is set, an option that is not known here"
    return None


def _of_inputs(ids: Tensor, kwargs: dict[str, Any]) -> str | None:
    others = sorted(name for name, value in kwargs.items() if value is not None and name not in _READ | _PASSED)
    if others:
        return f"{others[0]} is given"
    if not kwargs.get("use_cache"):
        return "use_cache is off"
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if ids.dim() != 2 or not ids.numel():
        return f"input_ids has shape {tuple(ids.shape)}"
    if positions is None or positions.dim() != 2 or positions.shape[1] != ids.shape[1]:
        return "the model's position_ids are not one number per token"
    if mask is not None and tuple(mask.shape) != tuple(ids.shape):
        return "attention_mask does not have the shape of input_ids"
    if mask is not None and not bool(((mask[:, 1:] != 0) >= (mask[:, :-1] != 0)).all() & (mask[:, -1] != 0).all()):
        return "attention_mask has zeros that are not left padding"
    return None


def _of_model(model: Any, ids: Tensor) -> str | None:
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if dispatch_modes():
        return "a dispatch mode is active, which would not see replays"
    if torch.is_autocast_enabled(ids.device.type):
        return "autocast is on"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        return "the model's attention is not ours"
    for name in _METHODS:
        own = getattr(type(model), name)
        is_known = own is getattr(GenerationMixin, name) or _form_of(own) in _FORMS
        if not is_known or name in model.__dict__:
            return f"the model has a {name} of its own"
    if any(tensor.device != ids.device for tensor in _tensors(model)):
        return f"parts of the model are not on {ids.device}, where input_ids is"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "there are hooks for all modules"
    for name, module in model.named_modules():
        if module.training:
            return f"{name} is in training mode"
        if "forward" in module.__dict__:
            return f"{name or 'the model'} has a forward on the instance"
        if module.__dict__.get("_compiled_call_impl") is not None:
            return f"{name or 'the model'} is compiled"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith(_HOOKS) for hook in hooks):
            return f"{name or 'the model'} has hooks"
    return None


@cache
def _form_of(method: Callable[..., Any]) -> str:
    return form_of(method)


def _of_cache(kept: Any, model: Any) -> str | None:
    if kept is None:
        return "the model has a cache of its own"
    if type(kept) is not DynamicCache or getattr(kept, "offloading", False):
        return f"the cache is a {type(kept).__name__}{', offloaded' if getattr(kept, 'offloading', False) else ''}"
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    others = sorted(set(kinds) - _LAYERS)
    if others or windows_of(kept) is None or not kept.layers:
        return f"layers of the kind {others[0] if others else 'of this cache'} have no ring, list of keys or states"
    if not windows_of(kept):
        return "no layer has keys"
    if getattr(kept, "_is_user_defined", False) or kept.get_seq_length():
        return "past_key_values is given"
    windows = {window for window in windows_of(kept) or () if window is not None}
    if len(windows) > 1:
        return "layers have different windows"
    return "a window is too short" if any(window < 2 for window in windows) else None


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def stamp(model: nn.Module) -> Hashable:
    """Return what a captured step depends on besides values: if it changes, graphs are dropped.

    These are the modules, their classes and their attributes that are numbers, strings or functions, the numbers in
    their configurations, and the addresses, shapes and dtypes of parameters and buffers. Modules that are neither
    torch's nor transformers' (adapters) also have settings in collections, and tensors that are no buffers. Weights
    that are written in place are read by the next replay; only where codes of a weight or tables of angles are kept
    does its version count, too. Settings of torch that decide how it computes are part of it.
    """
    parts: list[Hashable] = [*_settings_of_torch()]
    configs: dict[int, Any] = {}
    for module in model.modules():
        cls = type(module)
        parts += (id(module), cls)
        config = module.__dict__.get("config")
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            parts += (f"{name}={value}" for name, value in getattr(config, "__dict__", {}).items() if _is_plain(value))
        kind = replace.replaced(module)
        versions = issubclass(cls, KeepsCodes) or (kind is not None and kind.kind == "decode_rotary")
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                version = tensor._version if versions and not tensor.is_inference() else 0
                parts += (_memory(tensor), version)
        settings = vars(module).items()
        if cls.__module__.startswith(("torch.", "transformers.")):
            parts += (item for item in settings if type(item[1]) in _PLAIN)
        else:
            parts += (f"{name}={value}" for name, value in settings if _is_plain(value))
            parts += (_memory(value) for name, value in settings if isinstance(value, Tensor) and name[0] != "_")
    return tuple(parts)


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _settings_of_torch() -> tuple[Hashable, ...]:
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), cuda.matmul.fp32_precision,
        cuda.matmul.allow_bf16_reduced_precision_reduction, cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


def _is_plain(value: Any) -> bool:
    """Return True for numbers, strings, dtypes and functions, and for collections of nothing else."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, _PLAIN)
