"""Keys, values and states at fixed addresses, with lengths that only the device knows.

A row of the batch occupies its layer's memory from index 0, whatever padding its prompt had: the prompt's keys are
moved there, and they are rotated already. Layers with a window are rings of as many keys as the window has; attention
does not depend on the order of keys, so it needs only their number. Linear attention, convolutions and state space
models have states of one size, which every step updates in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import rtkernels
from rtkernels.errors import RtkError

_HALVES = (torch.bfloat16, torch.float16)


_KEYS = {DynamicLayer, DynamicSlidingWindowLayer}
_STATES = {cache_utils.LinearAttentionLayer}
_BOTH = {cache_utils.LinearAttentionAndFullAttentionLayer, cache_utils.LinearAttentionAndSlidingWindowAttentionLayer}
_NOTHING = {kind for name in ("DummyLayer",) if (kind := getattr(cache_utils, name, None)) is not None}


_INITIALIZED = {name: f"is_{name}_initialized" for name in ("conv_states", "recurrent_states")}


def windows_of(cache: DynamicCache) -> list[int | None] | None:
    """Return the window of every layer with keys (None: all keys), or None if a layer is of an unknown kind."""
    if any(type(layer) not in _KEYS | _STATES | _BOTH | _NOTHING for layer in cache.layers):
        return None
    return [getattr(layer, "sliding_window", None) for layer in cache.layers if type(layer) in _KEYS | _BOTH]


def states_of(cache: Cache) -> list[Tensor]:
    """Return the states of all layers, which steps update in place."""
    return [
        state for layer in cache.layers for name in _INITIALIZED for state in getattr(layer, name, {}).values()
        if state is not None
    ]  # fmt: skip


class Lengths:
    """Where the next key of each row goes, and how many keys it then has, for layers of one window."""

    def __init__(self, window: int | None, rows: int, places: Tensor) -> None:
        self.window, self.rows = window, rows
        self.slots, self.seen = places

    def update(self, length: Tensor) -> None:
        """Compute both from the number of tokens that each row already has."""
        if self.window is None:
            self.slots.copy_(length)
            torch.add(length, 1, out=self.seen)
        else:
            torch.remainder(length, self.rows, out=self.slots)
            torch.add(length, 1, out=self.seen)
            self.seen.clamp_(max=self.rows)


class FixedLayer(CacheLayerMixin):
    """The keys and values of a layer, ``[batch, rows, heads, width]``."""

    is_croppable = False

    def __init__(self, like: DynamicLayer | FixedLayer, lengths: Lengths) -> None:
        super().__init__()
        self.lengths, self.is_sliding, self.sliding_window = lengths, lengths.window is not None, lengths.window
        batch, heads, _, width = like.keys.shape
        shape, options = (batch, lengths.rows, heads), {"dtype": like.keys.dtype, "device": like.keys.device}
        self.k, self.v = (torch.zeros(*shape, t.shape[3], **options) for t in (like.keys, like.values))
        self.keys, self.values = self.k.transpose(1, 2), self.v.transpose(1, 2)
        widths = width, like.values.shape[3]
        self.by_op = like.keys.dtype in _HALVES and all(w % 8 == 0 and w <= 256 for w in widths)
        self.index = torch.arange(batch, dtype=torch.int64, device=like.keys.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RtkError("a cache of fixed capacity is allocated before it is used")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] != 1 or key_states.dtype != self.k.dtype:
            raise RtkError(
                f"a step has keys {tuple(key_states.shape)} of {key_states.dtype}; expected one {self.k.dtype}"
            )
        k, v = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.by_op:
            rtkernels.append_kv_cache(k, v, self.k, self.v, self.lengths.slots)
        else:
            place = self.index, self.lengths.slots.long()
            self.k[place], self.v[place] = k[:, 0], v[:, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.lengths.rows, 0

    def get_seq_length(self) -> int:
        raise RtkError("the model reads the number of cached tokens on the host, which only the device knows")

    def get_max_length(self) -> int:
        return self.lengths.rows

    get_max_cache_shape = get_max_length


class StateLayer(cache_utils.LinearAttentionLayer):
    """The states of a layer like another, which a step updates in place; transformers' methods do so."""

    def __init__(self, like: Any) -> None:
        self.allocate(like)

    def allocate(self, like: Any) -> None:
        """Set the attributes of transformers' class. What the other layer does not have stays None."""
        super().__init__(like.number_of_states)
        self.dtype, self.device = like.dtype, like.device
        for name in ("conv_kernel_size", "has_previous_state", *_INITIALIZED.values()):
            setattr(self, name, dict(getattr(like, name)))
        for name in _INITIALIZED:
            states = getattr(like, name).items()
            setattr(self, name, {i: None if old is None else torch.zeros_like(old) for i, old in states})


class StateAndKeysLayer(StateLayer, FixedLayer):
    """A layer that has both."""

    def __init__(self, like: Any, lengths: Lengths) -> None:
        FixedLayer.__init__(self, like, lengths)
        self.allocate(like)


class FixedCache(Cache):
    """A cache of fixed capacity for one batch size.

    `masks` is the attention_mask of a step: int32 numbers of keys, which ``models.attention`` understands.
    """

    def __init__(self, like: DynamicCache | FixedCache, capacity: int) -> None:
        with_keys = [layer for layer in like.layers if _has_keys(layer)]
        first = with_keys[0].keys
        self.batch, self.capacity, self.device = first.shape[0], capacity, first.device
        windows = [getattr(layer, "sliding_window", None) for layer in with_keys]
        kinds = {window: capacity if window is None else min(window, capacity) for window in windows}
        self.places = torch.zeros(len(kinds), 2, self.batch, dtype=torch.int32, device=self.device)
        self.lengths = {
            window: Lengths(window, rows, places)
            for (window, rows), places in zip(kinds.items(), self.places, strict=True)
        }
        rings = [0 if window is None else rows for window, rows in kinds.items()]  # as ``step_token`` reads them
        self.rings = torch.tensor(rings, dtype=torch.int64, device=self.device)
        super().__init__(layers=[self._layer(layer) for layer in like.layers])
        masks = {
            "full_attention" if window is None else "sliding_attention": lengths.seen.view(-1, 1, 1, 1)
            for window, lengths in self.lengths.items()
        }
        self.masks: Tensor | dict[str, Tensor] = masks if len(masks) > 1 else next(iter(masks.values()))

    def _layer(self, like: Any) -> Any:
        lengths = self.lengths[getattr(like, "sliding_window", None)] if _has_keys(like) else None
        if isinstance(like, cache_utils.LinearAttentionLayer):
            return StateLayer(like) if lengths is None else StateAndKeysLayer(like, lengths)
        return type(like)() if lengths is None else FixedLayer(like, lengths)

    def begin(self, length: Tensor) -> None:
        """Prepare a step in which row ``i`` gets its token number ``length[i]``."""
        for lengths in self.lengths.values():
            lengths.update(length)

    def load(self, prompt: DynamicCache, start: Tensor, columns: int) -> None:
        """Copy the keys and states of a prompt of `columns` tokens; row ``i`` begins at column ``start[i]``."""
        self.set_states(states_of(prompt))
        first = start.view(-1, 1)
        for window, lengths in self.lengths.items():
            used = min(lengths.rows, columns)
            slot = torch.arange(used, dtype=torch.int64, device=self.device)
            last = columns - first - 1
            token = slot if window is None else last - (last - slot) % window
            for layer, old in zip(self.layers, prompt.layers, strict=True):
                if getattr(layer, "lengths", None) is lengths:
                    stored = old.keys.shape[2]
                    column = (token + first - (columns - stored)).clamp(0, stored - 1)
                    for new, values in ((layer.k, old.keys), (layer.v, old.values)):
                        _fill(new, values.transpose(1, 2)[layer.index[:, None], column])

    def take(self, smaller: FixedCache) -> None:
        """Copy the contents of a cache of less capacity."""
        self.set_states(states_of(smaller))
        for new, old in zip(self.layers, smaller.layers, strict=True):
            if _has_keys(new):
                _fill(new.k, old.k)
                _fill(new.v, old.v)

    def set_states(self, values: list[Tensor]) -> None:
        """Copy the states of another cache with the same layers."""
        for state, value in zip(states_of(self), values, strict=True):
            state.copy_(value)


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _fill(cache: Tensor, values: Tensor) -> None:
    """Write values to the front of a cache, and zeros behind them: attention with a mask multiplies them by zero."""
    cache[:, : values.shape[1]].copy_(values)
    cache[:, values.shape[1] :].zero_()
