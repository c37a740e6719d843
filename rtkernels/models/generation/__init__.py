"""``generate()`` of a patched model: decoding steps with fixed addresses, captured in CUDA graphs.

``patch(model, attention=True)`` gives the model a ``_sample`` (``loop``) that runs the prompt as transformers does and
then repeats one function (``step``): embedding, layers, logits, selection of a token (``select``), stop tokens. It
reads nothing on the host, and the keys and values are in a cache of fixed capacity with lengths on the device
(``cache``). On CUDA the second step is captured and replayed from then on; the host follows a few steps behind. Calls
that this does not cover (``supported``) run transformers' own loop, and the report says why.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch import nn

from rtkernels.models.fused_layers import form_of
from rtkernels.runtime.torch_private import is_dynamo_compiling

STATE = "_rtkernels_generation"
_SAMPLE = {"afaba81c2228ab7e"}  # hashes of the loops of transformers that ours was written after: 5.17 to 5.23

_OTHERS = {"_beam_search": "beam search", "_assisted_decoding": "assisted generation"}


def replace_generation(model: nn.Module, report: Any) -> None:
    """Let a model decode with :mod:`rtkernels.models.generation.loop`; models without ``generate`` stay as they are."""
    original = type(model)
    own = getattr(original, "_sample", None)
    if own is None or not callable(getattr(model, "generate", None)):
        return
    if form_of(own) not in _SAMPLE:
        report.not_captured["the decoding loop of this class or of this version of transformers is not known here"] = 0
        return
    from rtkernels.models.decoding import replace_head, replace_rotary
    from rtkernels.models.generation.state import State

    replace_head(model)
    replace_rotary(model)
    model.__dict__[STATE] = State(report)
    model.__class__ = _subclass(original)


def restore_generation(model: nn.Module) -> None:
    """Undo :func:`replace_generation`, and free graphs and caches."""
    state = model.__dict__.pop(STATE, None)
    if state is not None:
        state.clear()
    if "_rtkernels_generates" in type(model).__dict__:
        model.__class__ = type(model)._rtkernels_generates


@cache
def _subclass(original: type[nn.Module]) -> type[nn.Module]:
    """Return a class that differs from the original in its decoding loop only."""

    @wraps(original._sample)
    def _sample(self, input_ids, *args, **kwargs):
        from rtkernels.models.generation import loop

        return loop.sample(original._sample, self, input_ids, *args, **kwargs)

    @wraps(original.generate)
    def generate(self, *args, **kwargs):
        state = None if is_dynamo_compiling() else self.__dict__.get(STATE)
        if state is None:
            return original.generate(self, *args, **kwargs)
        before = state.loops
        result = original.generate(self, *args, **kwargs)
        if state.loops == before:
            state.refuse("a function that is not transformers' decodes (custom_generate, or code from the hub)")
        return result

    members = {
        **{name: _reported(getattr(original, name), what) for name, what in _OTHERS.items() if hasattr(original, name)},
        "_sample": _sample,
        "generate": generate,
        "__reduce_ex__": _reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_rtkernels_generates": original,
    }
    return type(original.__name__, (original,), members)


def _reported(own: Any, what: str) -> Any:
    """Return a decoding loop of transformers that records in the report that it ran."""

    @wraps(own)
    def method(self, *args, **kwargs):
        if STATE in self.__dict__:
            self.__dict__[STATE].loops += 1
            self.__dict__[STATE].refuse(f"{what} is decoded by transformers")
        return own(self, *args, **kwargs)

    return method


def _reduce(self: nn.Module, protocol: int) -> Any:
    return _rebuilt, (self._rtkernels_generates,), self.__getstate__()


def _rebuilt(original: type[nn.Module]) -> nn.Module:
    cls = _subclass(original)
    return cls.__new__(cls)
