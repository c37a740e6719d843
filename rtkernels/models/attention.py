"""Attention of transformers' models by ours, through its attention interface.

The interface is a table of functions by name; a model's configuration has the name. Registering a name changes no other
model. Masks: where transformers needs none (causal, without padding) ours is by lengths alone; where it makes one, of
booleans or numbers, it is added to the scores. A single new token per sequence, as in ``generate``, reads the cache by
``attention_decode``; in place of a mask it gets the number of keys, int32 ``[batch, 1, 1, 1]``, which may be known on
the device only, as with a static cache.

For a batch without padding transformers finds out whether its positions are those of packed sequences, on the device,
and waits for the answer: every forward begins with a device that has nothing to do. Where positions are the model's own
there is nothing to find out, and :func:`_before` says so by a mask of four dimensions, which transformers hands on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import RtkError
from rtkernels.models import replace
from rtkernels.models.fused_layers import form_of
from rtkernels.models.recognize import NotRecognized
from rtkernels.runtime.torch_private import is_dynamo_compiling

NAME = "rtkernels"
WHOLE = "rtkernels_masked"  # the same with masks that are always made, for models that need them: see _needs_masks
_BEFORE = "_rtkernels_attention_before"
_HOOK = "_rtkernels_attention_hook"
# Hashes of the forwards of models that use attention_mask for nothing but a causal mask, and whether they choose by the
# type of each layer if it has a window, or by the window that the configuration has.
_MODELS = {
    "7d6ea2c2b23e0906": None,  # Llama, GLM, GLM4, OLMo, OLMo2, Ernie 4.5, HunYuan: none has a window
    "a4e04405d94dd416": "layer_types",  # Qwen2, Qwen3, SmolLM3
    "a20c59e141641c74": "sliding_window",  # Mistral, Phi-3
    "e6823f08e7c2e423": "sliding_window",  # Mixtral, Qwen3-MoE
}


def attention_mask(**options: Any) -> Tensor | None:
    """Return what :func:`attention_forward` takes as its mask.

    Arguments are those of transformers' mask interface; the names used here are those of 5.17, and where one of them
    is missing, as in other versions, a mask is made as for torch's attention.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    offset, padding, batch = options.get("q_offset"), options.get("attention_mask"), options.get("batch_size")
    known = offset is not None and batch is not None and options.get("q_length") == 1
    plain = options.get("mask_function") is causal_mask_function and options.get("local_size") is None
    begins = isinstance(options.get("kv_offset"), int) and options["kv_offset"] == 0
    if known and plain and begins and not is_dynamo_compiling() and (padding is None or _is_unpadded(padding)):
        if isinstance(offset, Tensor):
            return (offset + 1).to(torch.int32).reshape(1).repeat(batch).view(batch, 1, 1, 1)
        return torch.full((batch, 1, 1, 1), offset + 1, dtype=torch.int32, device=options.get("device"))
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**options)


def whole_mask(**options: Any) -> Tensor | None:
    """Return a mask as for torch's attention, also where it is causal and nothing else."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**options, "allow_is_causal_skip": False})


def _is_unpadded(mask: Tensor) -> bool:
    """Return True if no token is masked. Waits for the device, as transformers does here; not while it is recorded."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(mask.all())


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return ``[batch, queries, heads, width]`` of q, k and v ``[batch, heads, length, width]``, and None.

    What ours does not compute (dropout, fp32, arguments that only the model's own function reads) goes to torch's
    attention, or where that does not either, to the model's own function.

    Raises:
        RtkError: Neither of them computes it.
    """
    lengths = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        lengths, attention_mask = attention_mask.view(-1) if attention_mask.numel() else None, None
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and queries > 1
    ours = not dropout and query.dtype in (torch.bfloat16, torch.float16) and _fits(query, key, value)
    own, only_own = _own_function(_class_of(module)), _read_by_own(module, kwargs, s_aux)
    if only_own or not ours:
        if lengths is not None:
            columns = torch.arange(keys, dtype=torch.int64, device=query.device)
            attention_mask = (columns < lengths[:, None])[:, None, None]
        given = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if not only_own and softcap is None and s_aux is None:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            return ALL_ATTENTION_FUNCTIONS["sdpa"](
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
                **kwargs,
            )  # fmt: skip
        if own is None:
            what = ", ".join(sorted(only_own)) or ("softcap" if s_aux is None else "s_aux")
            raise RtkError(
                f"attention=True: {type(module).__name__} uses {what}, with dropout or in {query.dtype}, which neither "
                f"rtkernels.attention nor torch's computes; patch without attention="
            )
        mask = _added(_with_causal(attention_mask, query, key, causal), query.dtype)
        return own(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    limits = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if queries == 1 and attention_mask is None and position_bias is None and not torch.is_grad_enabled():
        if lengths is None:
            lengths = torch.full((query.shape[0],), keys, dtype=torch.int32, device=query.device)
        caches = key.transpose(1, 2), value.transpose(1, 2)
        return rtkernels.attention_decode(query.transpose(1, 2), *caches, lengths, **limits), None
    if causal and keys > queries:  # the first tokens of a static cache: the rest of it is empty
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    bias = attention_mask
    if position_bias is not None:
        mask = _with_causal(bias, query, key, causal)
        bias, causal = _added(mask, query.dtype), False
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        elif bias.dtype not in (query.dtype, torch.float32):
            bias = bias.to(query.dtype)
    # Heads inside of tokens, as the projections before and behind it have them: no copies.
    heads = (t.transpose(1, 2) for t in (query, key, value))
    return rtkernels.attention(*heads, causal=causal, bias=bias, seqused_k=lengths, **limits), None


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if heads are as many and as wide as ours takes them."""
    widths = query.shape[3], value.shape[3]
    grouped = key.shape[1] == value.shape[1] and query.shape[1] % max(key.shape[1], 1) == 0
    return grouped and all(width % 8 == 0 and width <= 256 for width in widths)


def _class_of(module: nn.Module) -> type[nn.Module]:
    return replace.original_of(type(module))


@cache
def _own_function(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the attention that a class's own file has, None if it has none."""
    return getattr(inspect.unwrap(cls.forward), "__globals__", {}).get("eager_attention_forward")


# What ours reads, and what is in the mask already.
_READ = frozenset({
    "module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "scaling",
    "dropout", "softcap", "position_bias", "sliding_window", "is_causal", "kwargs", "s_aux",
})  # fmt: skip


@cache
def _only_own(cls: type[nn.Module]) -> tuple[frozenset[str], bool]:
    """Return the arguments that only a class's own attention reads, and whether that reads sinks of the module."""
    code = getattr(_own_function(cls), "__code__", None)
    if code is None:
        return frozenset(), False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frozenset(names) - _READ, "sinks" in code.co_names


def _read_by_own(module: nn.Module, kwargs: dict[str, Any], s_aux: Tensor | None) -> set[str]:
    """Return what a call has that only the model's own attention would read."""
    names, sinks = _only_own(_class_of(module))
    found = {name for name in names if kwargs.get(name) is not None}
    return found | {"sinks"} if sinks and s_aux is None and getattr(module, "sinks", None) is not None else found


def _with_causal(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """Return a mask that has the causal one in it, which is only made if there is no other."""
    if mask is not None or not causal:
        return mask
    queries, keys = (torch.arange(t.shape[2], dtype=torch.int64, device=t.device) for t in (query, key))
    return (queries[:, None] >= keys)[None, None]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as numbers that are added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


# ---- batches without padding ----------------------------------------------------------------------------------------


@cache
def _no_mask(device: torch.device) -> Tensor:
    """Return what stands for no mask: empty, with four dimensions."""
    return torch.empty(0, 0, 0, 0, dtype=torch.int32, device=device)


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Pass :func:`_no_mask` to a model whose mask would be None; where it may be another, nothing changes."""
    if is_dynamo_compiling():  # which asks nothing of the device
        return None
    config, tokens = model.config, kwargs.get("input_ids") if not args else args[0]
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    given = any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", "past_key_values"))
    if given or len(args) > 1 or not isinstance(tokens, Tensor):
        return None
    options = ((kwargs.get(name), getattr(config, name, False)) for name in ("use_cache", "output_attentions"))
    if any(default if value is None else value for value, default in options):
        return None
    if config._attn_implementation != NAME or not getattr(config, "is_causal", True) or _has_window(config, model):
        return None
    return args, {**kwargs, "attention_mask": _no_mask(tokens.device)}


def _form(model: nn.Module) -> str:
    return form_of(inspect.unwrap(type(model).forward))


def _has_window(config: Any, model: nn.Module) -> bool:
    """Return True if a layer may have a window, or if the model's forward is no longer one of those known here."""
    where = _MODELS.get(_form(model), "unknown")
    if where == "unknown":
        return True
    if where == "layer_types":
        return any(kind != "full_attention" for kind in config.layer_types)
    return where is not None and getattr(config, where, None) is not None


def _constants(code: CodeType) -> Iterator[tuple[set[str], set[Any]]]:
    """Yield the names that a function reads and its constants, then those of functions inside of it."""
    found: set[Any] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found |= {c for c in constant if isinstance(c, str)}
        else:
            found.add(constant)
    yield {*code.co_names, *code.co_varnames}, found


@cache
def _names_and_constants(cls: type[nn.Module]) -> tuple[tuple[set[str], set[Any]], ...]:
    """Return what the methods of a class of transformers and the functions of its file read, each by itself."""
    if not cls.__module__.startswith("transformers.models."):
        return ()
    functions = [getattr(cls, method, None) for method in dir(cls) if method != "__init__"]
    functions += [f for f in getattr(inspect.unwrap(cls.forward), "__globals__", {}).values() if inspect.isfunction(f)]
    found: list[tuple[set[str], set[Any]]] = []
    for function in functions:
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is not None and code.co_filename.endswith(f"{cls.__module__.rpartition('.')[2]}.py"):
            found += _constants(code)
    return tuple(found)


def _asks(cls: type[nn.Module], name: str) -> bool:
    """Return True if a class's code, or a function of its file, asks whether the attention has this name.

    Sparse attention does: it puts its choice of keys into the mask for the names it knows, and hands it to others.
    """
    return any("_attn_implementation" in names and name in given for names, given in _names_and_constants(cls))


def _needs_masks(module: nn.Module, name: str) -> bool:
    """Return True if a module needs masks that are causal and nothing else, which are otherwise left out.

    Its code reads the mask, and asks transformers not to leave it out (an indexer of sparse attention); or the model
    was eager, which has all masks, and the module says that it is not causal: without a mask it would not be.
    """
    if any("allow_is_causal_skip" in given for _, given in _names_and_constants(_class_of(module))):
        return True
    return name == "eager" and getattr(module, "is_causal", None) is False


def _uses_interface(model: nn.Module) -> bool:
    return getattr(model, "_supports_attention_backend", False) or getattr(model, "_supports_sdpa", False)


def _names_in(config: Any) -> dict[int, tuple[Any, str | None]]:
    """Return a configuration and those inside of it, by identity, with the name of the attention that each has."""
    found = {id(config): (config, config._attn_implementation)}
    for inner in vars(config).values():
        if hasattr(inner, "_attn_implementation"):
            found |= _names_in(inner)
    return found


def _give_back(names: Iterable[tuple[Any, str | None]]) -> None:
    """Let configurations have the names that they had; each by itself, as setting one changes those inside of it."""
    for config, name in names:
        config.__dict__["_attn_implementation_internal"] = name


def _names_of(model: nn.Module) -> dict[int, tuple[Any, str | None]]:
    found: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            found |= _names_in(module.config)
    return found


def replace_attention(model: nn.Module) -> None:
    """Let a model's attention be ours, in those of its parts that use transformers' interface.

    Raises:
        NotRecognized: The model does not use the interface, or asks for the name of its attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before is None or not _uses_interface(model):
        raise NotRecognized("it does not use the attention interface of transformers")
    names = _names_of(model)
    for module in model.modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None) or before
        if _asks(_class_of(module), name):
            who = _class_of(module).__name__
            raise NotRecognized(f"{who} does something else where the attention is not called {name}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionInterface.register(WHOLE, attention_forward)
    AttentionMaskInterface.register(WHOLE, whole_mask)
    masked = [
        module.config
        for module in model.modules()
        if id(getattr(module, "config", None)) in names and _needs_masks(module, names[id(module.config)][1] or before)
    ]
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:  # one of its parts accepts no other
        _give_back(names.values())
        raise NotRecognized(f"transformers refuses it: {error}") from None
    parts = [module for module in model.modules() if hasattr(module, "_supports_sdpa") and hasattr(module, "config")]
    ours = {id(part.config) for part in parts if _uses_interface(part)}
    for part in parts:
        if not _uses_interface(part) and id(part.config) not in ours:
            _give_back(pair for key, pair in names.items() if key in _names_in(part.config))
    _give_back((config, WHOLE) for config in masked if config._attn_implementation == NAME)
    model.__dict__[_BEFORE] = list(names.values())
    model.__dict__[_HOOK] = [
        module.register_forward_pre_hook(_before, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "rotary_emb") and hasattr(module, "layers") and _form(module) in _MODELS
    ]


def restore_attention(model: nn.Module) -> None:
    """Undo :func:`replace_attention`."""
    for handle in model.__dict__.pop(_HOOK, ()):
        handle.remove()
    _give_back(model.__dict__.pop(_BEFORE, ()))
