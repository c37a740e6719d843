"""Use our attention in transformers models, through transformers' attention interface.

The interface is a table of functions by name; a model's configuration holds the name. Registering a name affects no
other model. Instead of a mask, ours gets its form (:mod:`rtkernels.models.mask_form`): causal, a window, padding at one
side, packed sequences, the number of keys in a static cache. Only a mask of no such form is a matrix, and is added to
the scores. A single new token per sequence, as in ``generate``, reads the cache with ``attention_decode``.
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
from rtkernels.models.known_masks import NAME, create_masks, has_known_masks, packing_in
from rtkernels.models.mask_form import MaskForm, form_of_mask
from rtkernels.models.recognize import NotRecognized

WHOLE = "rtkernels_masked"  # the same with masks always created, for models that need them: see _masked_name
ADDED = "rtkernels_added"  # and as numbers that are added to scores
_BEFORE = "_rtkernels_attention_before"
_HOOK = "_rtkernels_attention_hook"
_ACCEPTED = "_rtkernels_attention_accepted"  # of modules that can use the name, as their whole model was looked at
by_name: Callable[..., Any] | None = None  # after ``register()``: attention_forward behind a check of the class


def attention_mask(**options: Any) -> MaskForm | Tensor | None:
    """Return the mask argument of :func:`attention_forward`; arguments are those of transformers' mask interface."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    given = options.get("attention_mask")
    if isinstance(given, MaskForm):  # created already: transformers hands on what has four dimensions
        return given
    form = form_of_mask(options)
    if form is None:
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**options)
    may_omit = "allow_is_causal_skip" if form.right == 0 else "allow_is_bidirectional_skip"
    omits = options.get(may_omit, form.right == 0)
    if omits or form.queries > 1:
        return None if omits and form.is_implied else form
    # A compiled step of generate gets tensors: the number of keys, int32 [batch, 1, 1, 1], if that is all.
    is_number = form.is_one_row and form.left < 0
    return form.lengths(limited=True).view(-1, 1, 1, 1) if is_number else form.tensor()


def whole_mask(**options: Any) -> Tensor | None:
    """Return a mask as for torch's attention, even if it is only causal."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**options, "allow_is_causal_skip": False})


def added_mask(**options: Any) -> Tensor | None:
    """Return a mask as for eager attention, as numbers that are added to scores."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["eager"](**options)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return ``[batch, queries, heads, width]`` of q, k and v ``[batch, heads, length, width]``, and None.

    Calls that ours does not support (dropout, fp32, arguments that only the model's own function reads) go to torch's
    attention, or if that does not support them either, to the model's own function.

    Raises:
        RtkError: None of them supports the call.
    """
    if kwargs.get("cache") is not None:
        raise RtkError('the paged cache of continuous batching needs attn_implementation="sdpa"; generate() works')
    lengths = None
    if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32:
        lengths, attention_mask = attention_mask.view(-1), None
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    form, attention_mask = _form_and_mask(attention_mask, query, key, bool(causal), kwargs)
    causal = causal and attention_mask is None and form is None and queries > 1
    ours = not dropout and query.dtype in (torch.bfloat16, torch.float16) and _fits(query, key, value)
    own, only_own = _own_function(_class_of(module)), _read_by_own(module, kwargs, s_aux)
    if form is not None and (only_own or not ours or position_bias is not None):
        is_causal = causal = form.is_implied and form.right == 0 and queries > 1
        attention_mask, form = None if form.is_implied else form.tensor(), None
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
    # [tokens, heads, width], the layout of the projections before and after it: no copies.
    if form is not None:
        return form.attend(*(t.transpose(1, 2) for t in (query, key, value)), **limits), None
    if queries == 1 and attention_mask is None and position_bias is None and not torch.is_grad_enabled():
        if lengths is None:
            lengths = torch.full((query.shape[0],), keys, dtype=torch.int32, device=query.device)
        caches = key.transpose(1, 2), value.transpose(1, 2)
        return rtkernels.attention_decode(query.transpose(1, 2), *caches, lengths, **limits), None
    if causal and keys > queries:  # the first tokens in a static cache: the rest of the cache is empty
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    bias = attention_mask
    if position_bias is not None:
        mask = _with_causal(bias, query, key, causal)
        bias, causal = _added(mask, query.dtype), False
        bias = position_bias if bias is None else position_bias + bias
    bias = None if bias is None else _bias(bias[..., : key.shape[2]], query.dtype)
    heads = (t.transpose(1, 2) for t in (query, key, value))
    return rtkernels.attention(*heads, causal=causal, bias=bias, seqused_k=lengths, **limits), None


def _form_and_mask(
    mask: Any, query: Tensor, key: Tensor, causal: bool, kwargs: dict[str, Any]
) -> tuple[MaskForm | None, Tensor | None]:
    """Return a mask as its form or as a matrix. Packed sequences may be known from arguments of flash attention."""
    if isinstance(mask, MaskForm) and not mask.describes(query, key):
        return None, mask.tensor()
    form = mask if isinstance(mask, MaskForm) else None
    packing = packing_in(kwargs, query) if form is mask and query.shape[2] == key.shape[2] else None
    if packing is None or (form is not None and form.limits_keys and form.left < 0):
        return form, None if form is mask else mask
    if form is None:
        form = MaskForm(1, query.shape[2], key.shape[2], query.device, right=0 if causal else -1)
    return form.packed(packing), None


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers that are added to scores: a matrix, read and written by every layer."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    return mask if mask.dtype in (dtype, torch.float32) else mask.to(dtype)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if ours supports the number and width of the heads."""
    widths = query.shape[3], value.shape[3]
    grouped = key.shape[1] == value.shape[1] and query.shape[1] % max(key.shape[1], 1) == 0
    return grouped and all(width % 8 == 0 and width <= 256 for width in widths)


def _class_of(module: nn.Module) -> type[nn.Module]:
    return replace.original_of(type(module))


@cache
def _own_function(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the attention function in a class's own file, None if there is none."""
    return getattr(inspect.unwrap(cls.forward), "__globals__", {}).get("eager_attention_forward")


# Arguments that ours reads, and those that are part of the mask already.
_READ = frozenset({
    "module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "scaling",
    "dropout", "softcap", "position_bias", "sliding_window", "is_causal", "kwargs", "s_aux",
})  # fmt: skip


@cache
def _only_own(cls: type[nn.Module]) -> tuple[frozenset[str], bool]:
    """Return the arguments that only a class's own attention reads, and whether it reads sinks of the module."""
    code = getattr(_own_function(cls), "__code__", None)
    if code is None:
        return frozenset(), False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frozenset(names) - _READ, "sinks" in code.co_names


def _read_by_own(module: nn.Module, kwargs: dict[str, Any], s_aux: Tensor | None) -> set[str]:
    """Return the arguments of a call that only the model's own attention would read."""
    names, sinks = _only_own(_class_of(module))
    found = {name for name in names if kwargs.get(name) is not None}
    if kwargs.get("output_attentions") and _own_function(_class_of(module)) is not None:  # ours returns no weights
        found.add("output_attentions")
    return found | {"sinks"} if sinks and s_aux is None and getattr(module, "sinks", None) is not None else found


def _with_causal(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """Return the mask; if there is none and attention is causal, create the causal mask."""
    if mask is not None or not causal:
        return mask
    queries, keys = (torch.arange(t.shape[2], dtype=torch.int64, device=t.device) for t in (query, key))
    return (queries[:, None] >= keys)[None, None]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as numbers that are added to scores; other masks unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


# ---- which modules can use it ----------------------------------------------------------------------------------------


def _constants(code: CodeType) -> Iterator[tuple[set[str], set[Any]]]:
    """Yield the names that a function reads and its constants, then those of nested functions."""
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
    """Return the names and constants that each method of a transformers class and each function of its file reads."""
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
    """Return True if a class's code, or a function of its file, compares the attention's name with this name.

    Sparse attention does: for the names it knows it puts its selection of keys into the mask, for others it passes it
    on.
    """
    return any("_attn_implementation" in names and name in given for names, given in _names_and_constants(cls))


def _masked_name(module: nn.Module, name: str) -> str | None:
    """Return the name to use for a module that needs masks even if they are only causal; None: they may be omitted.

    Either its code reads the mask and asks transformers not to omit it (an indexer of sparse attention), or asks if it
    is a tensor (DeepSeek-V4, which appends a bias for compressed keys: numbers, as it knows eager attention only). Or
    the model used eager attention, which creates all masks, and the module says that it is not causal: without a mask
    it would not be.
    """
    asks = {"isinstance", "attention_mask", "Tensor"}
    for names, given in _names_and_constants(_class_of(module)):
        if "allow_is_causal_skip" in given or asks <= names:
            return ADDED if name == "eager" else WHOLE
    return WHOLE if name == "eager" and getattr(module, "is_causal", None) is False else None


def is_accepted(module: nn.Module) -> bool:
    """Return True if :func:`replace_attention` has looked at the model of this module."""
    return module.__dict__.get(_ACCEPTED, False)


def _uses_interface(model: nn.Module) -> bool:
    return getattr(model, "_supports_attention_backend", False) or getattr(model, "_supports_sdpa", False)


def _names_in(config: Any) -> dict[int, tuple[Any, str | None]]:
    """Return a configuration and those nested in it, by identity, each with the name of its attention."""
    found = {id(config): (config, config._attn_implementation)}
    for inner in vars(config).values():
        if hasattr(inner, "_attn_implementation"):
            found |= _names_in(inner)
    return found


def _give_back(names: Iterable[tuple[Any, str | None]]) -> None:
    """Restore the attention names of configurations, one by one, because setting one changes those nested in it."""
    for config, name in names:
        config.__dict__["_attn_implementation_internal"] = name


def _names_of(model: nn.Module) -> dict[int, tuple[Any, str | None]]:
    found: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            found |= _names_in(module.config)
    return found


def replace_attention(model: nn.Module) -> None:
    """Use our attention in all parts of a model that use transformers' interface.

    Raises:
        NotRecognized: The model does not use the interface, or its code depends on the name of its attention.
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
    AttentionInterface.register(NAME, by_name or attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionInterface.register(WHOLE, attention_forward)
    AttentionMaskInterface.register(WHOLE, whole_mask)
    AttentionInterface.register(ADDED, attention_forward)
    AttentionMaskInterface.register(ADDED, added_mask)
    masked: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        key = id(getattr(module, "config", None))
        if key in names and (masks := _masked_name(module, names[key][1] or before)):
            masked[key] = module.config, ADDED if ADDED in (masks, masked.get(key, (None, ""))[1]) else masks
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:  # a part of the model accepts no other attention
        _give_back(names.values())
        raise NotRecognized(f"transformers refuses it: {error}") from None
    parts = [module for module in model.modules() if hasattr(module, "_supports_sdpa") and hasattr(module, "config")]
    ours = {id(part.config) for part in parts if _uses_interface(part)}
    for part in parts:
        if not _uses_interface(part) and id(part.config) not in ours:
            _give_back(pair for key, pair in names.items() if key in _names_in(part.config))
    _give_back((config, name) for config, name in masked.values() if config._attn_implementation == NAME)
    model.__dict__[_BEFORE] = list(names.values())
    for module in model.modules():
        module.__dict__[_ACCEPTED] = True
    model.__dict__[_HOOK] = [
        module.register_forward_pre_hook(create_masks, with_kwargs=True)
        for module in model.modules()
        if has_known_masks(module)
    ]


def replace_only_eager(model: nn.Module) -> bool:
    """Replace the attention of a model with sinks, eager as transformers has no other; return True if so."""
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != "eager" or getattr(config, "output_attentions", False):
        return False
    if getattr(model, "_supports_sdpa", True) or not getattr(model, "_supports_attention_backend", False):
        return False
    if not any(getattr(m, "sinks", None) is not None and _only_own(_class_of(m))[1] for m in model.modules()):
        return False
    try:
        replace_attention(model)
    except NotRecognized:
        return False
    return True


def restore_attention(model: nn.Module) -> None:
    """Undo :func:`replace_attention`."""
    for handle in model.__dict__.pop(_HOOK, ()):
        handle.remove()
    for module in model.modules():
        module.__dict__.pop(_ACCEPTED, None)
    _give_back(model.__dict__.pop(_BEFORE, ()))
