"""Keys and values at fixed addresses, with lengths that only the device knows.

A row of the batch occupies its layer's memory from index 0, whatever padding its prompt had: the prompt's keys are
moved there, and they are rotated already. Layers with a window are rings of as many keys as the window has; attention
does not depend on the order of keys, so it needs only their number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import rtkernels
from rtkernels.errors import RtkError

_HALVES = (torch.bfloat16, torch.float16)


def windows_of(cache: DynamicCache) -> list[int | None] | None:
    """Return the window of every layer (None: all keys), or None if a layer is of another kind."""
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return None
    return [getattr(layer, "sliding_window", None) for layer in cache.layers]


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


class FixedCache(Cache):
    """A cache of fixed capacity for one batch size.

    `masks` is the attention_mask of a step: int32 numbers of keys, which ``models.attention`` understands.
    """

    def __init__(self, like: DynamicCache | FixedCache, capacity: int) -> None:
        first = like.layers[0].keys
        self.batch, self.capacity, self.device = first.shape[0], capacity, first.device
        windows = [getattr(layer, "sliding_window", None) for layer in like.layers]
        kinds = {window: capacity if window is None else min(window, capacity) for window in windows}
        self.places = torch.zeros(len(kinds), 2, self.batch, dtype=torch.int32, device=self.device)
        self.lengths = {
            window: Lengths(window, rows, places)
            for (window, rows), places in zip(kinds.items(), self.places, strict=True)
        }
        rings = [0 if window is None else rows for window, rows in kinds.items()]  # as ``step_token`` reads them
        self.rings = torch.tensor(rings, dtype=torch.int64, device=self.device)
        pairs = zip(like.layers, windows, strict=True)
        super().__init__(layers=[FixedLayer(layer, self.lengths[window]) for layer, window in pairs])
        masks = {
            "full_attention" if window is None else "sliding_attention": lengths.seen.view(-1, 1, 1, 1)
            for window, lengths in self.lengths.items()
        }
        self.masks: Tensor | dict[str, Tensor] = masks if len(masks) > 1 else next(iter(masks.values()))

    def begin(self, length: Tensor) -> None:
        """Prepare a step in which row ``i`` gets its token number ``length[i]``."""
        for lengths in self.lengths.values():
            lengths.update(length)

    def load(self, prompt: DynamicCache, start: Tensor, columns: int) -> None:
        """Copy the keys of a prompt of `columns` tokens; those of row ``i`` begin at column ``start[i]``."""
        first = start.view(-1, 1)
        for window, lengths in self.lengths.items():
            used = min(lengths.rows, columns)
            slot = torch.arange(used, dtype=torch.int64, device=self.device)
            last = columns - first - 1
            token = slot if window is None else last - (last - slot) % window
            for layer, old in zip(self.layers, prompt.layers, strict=True):
                if layer.lengths is lengths:
                    stored = old.keys.shape[2]
                    column = (token + first - (columns - stored)).clamp(0, stored - 1)
                    for new, values in ((layer.k, old.keys), (layer.v, old.values)):
                        _fill(new, values.transpose(1, 2)[layer.index[:, None], column])

    def take(self, smaller: FixedCache) -> None:
        """Copy the contents of a cache of less capacity."""
        for new, old in zip(self.layers, smaller.layers, strict=True):
            _fill(new.k, old.k)
            _fill(new.v, old.v)


def _fill(cache: Tensor, values: Tensor) -> None:
    """Write values to the front of a cache, and zeros behind them: attention with a mask multiplies them by zero."""
    cache[:, : values.shape[1]].copy_(values)
    cache[:, values.shape[1] :].zero_()
