"""A mask that is known by its form: causal, a window, padding at one side, packed sequences.

transformers creates masks from functions of indices. :func:`form_of_mask` reads the form from the function, the 2-D
padding mask and the offsets, so attention gets a window, lengths or ``cu_seqlens`` instead of a matrix. A form that is
not proved gives None: then the mask is created as a matrix, as for torch's attention.

Functions are recognised by the code object of transformers' own factories, and a factory counts only if its function
gives what this module expects on a small grid. Padding masks and packed positions are read on the host once for each
mask, where transformers waits for them as well, and never inside a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rtkernels
from rtkernels.models.lazy import Lazy
from rtkernels.runtime.invariance import level
from rtkernels.runtime.torch_private import has_address, is_dynamo_compiling

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # transformers' names, from its collator


class Packing(NamedTuple):
    """Sequences one after another in the rows of a flattened batch: arguments of ``attention_varlen``."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class MaskForm(Lazy):
    """Stands for a boolean mask ``[batch, 1, queries, keys]``, which is created only if an operation reads it.

    Query i attends to keys ``i + shift - left`` to ``i + shift + right``, -1 for no limit, with ``shift = seen -
    queries``; further to keys from ``starts[b]`` on, to those below ``ends[b]``, and to those of its own sequence.
    """

    def __init__(
        self, batch: int, queries: int, keys: int, device: torch.device, *, seen: int | Tensor | None = None,
        left: int = -1, right: int = 0, starts: list[int] | None = None, ends: list[int] | None = None,
        packing: Packing | None = None,
    ) -> None:  # fmt: skip
        self._result = self._place = None
        self.batch, self.queries, self.keys, self.device = batch, queries, keys, device
        self.seen = keys if seen is None else seen
        self.left, self.right = -1 if left >= keys - 1 and right <= 0 else left, right  # a window of all keys is none
        self.starts, self.ends, self.packing = starts, ends, packing
        self._arguments: dict[str, Tensor] = {}

    # ---- as a tensor ----

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.queries, self.keys))

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask on a device or in a dtype; the same form if both are its own."""
        return self if args[:1] in ((self.device,), (torch.bool,)) else self.tensor().to(*args, **kwargs)

    def contiguous(self) -> MaskForm:
        return self

    def _make(self) -> Tensor:
        i = _range(self.queries, self.device)[:, None] + (self.seen - self.queries)
        j = _range(self.keys, self.device)
        mask = torch.ones(self.batch, 1, self.queries, self.keys, dtype=torch.bool, device=self.device)
        if self.left >= 0:
            mask = mask & (j >= i - self.left)
        if self.right >= 0:
            mask = mask & (j <= i + self.right)
        if self.starts is not None:
            mask = mask & (j >= self._integers("starts", self.starts).view(-1, 1, 1, 1))
        if self.ends is not None:
            mask = mask & (j < self._integers("ends", self.ends).view(-1, 1, 1, 1))
        if self.packing is not None:
            rows, columns = (
                torch.searchsorted(cu[1:].contiguous(), _range(self.batch * n, cu.device), right=True)
                for cu, n in ((self.packing.cu_q, self.queries), (self.packing.cu_k, self.keys))
            )
            rows, columns = rows.view(self.batch, 1, self.queries, 1), columns.view(self.batch, 1, 1, self.keys)
            mask = mask & (rows == columns)
        return mask

    def _integers(self, name: str, values: list[int]) -> Tensor:
        """Return int32 values on the device, copied there once for all layers."""
        if name not in self._arguments:
            self._arguments[name] = torch.tensor(values, dtype=torch.int32, device=self.device)
        return self._arguments[name]

    def __repr__(self) -> str:
        return f"MaskForm(shape={tuple(self.shape)}, left={self.left}, right={self.right})"

    # ---- in attention ----

    @property
    def limits_keys(self) -> bool:
        """True if the mask is more than causal or full."""
        limited = (self.starts, self.ends, self.packing) != (None, None, None)
        return limited or self.left >= 0 or self.right > 0

    @property
    def is_implied(self) -> bool:
        """True if torch's attention needs no mask: it is causal from the first key on, or one query attends to all."""
        if self.limits_keys or not isinstance(self.seen, int):
            return False
        if self.right < 0:
            return self.seen == self.keys
        return self.seen == (self.queries if self.queries > 1 else self.keys)

    def describes(self, query: Tensor, key: Tensor) -> bool:
        """Return True if the mask has the sizes of q and k ``[batch, heads, length, width]``."""
        return query.shape[0] == key.shape[0] == self.batch and (query.shape[2], key.shape[2]) == (
            self.queries,
            self.keys,
        )

    def packed(self, packing: Packing) -> MaskForm:
        """Return the mask with packed sequences."""
        sizes = self.batch, self.queries, self.keys, self.device
        return MaskForm(*sizes, seen=self.seen, left=self.left, right=self.right, packing=packing)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **limits: Any) -> Tensor:
        """Return the attention of q, k and v ``[batch, length, heads, width]`` under this mask."""
        window = None if self.left < 0 and self.right <= 0 else (self.left, self.right)
        limits |= {"causal": self.right == 0, "window": window}
        seen = self.seen
        if self.is_one_row and not torch.is_grad_enabled():
            return rtkernels.attention_decode(query, key, value, self.lengths(limited=True), **limits)
        if isinstance(seen, int) and seen < self.keys:  # the rest of a static cache is empty
            key, value = key[:, :seen], value[:, :seen]
        if self.packing is not None or self.starts is not None:
            packing = self.packing or self._padding(key.shape[1])
            flat = (t.flatten(0, 1) for t in (query, key, value))
            return rtkernels.attention_varlen(*flat, *packing, **limits).unflatten(0, query.shape[:2])
        if isinstance(seen, Tensor):
            limits["seqused_k"] = self.lengths(limited=False)
        if self.ends is not None:
            ends = self._integers("ends", self.ends)
            if window is None and self.right < 0:
                limits["seqused_k"] = ends
            elif self.right != 0 or not level():  # a causal mask hides padding behind a sequence from its tokens
                limits["kv_limit"] = ends[:, None].expand(-1, self.queries).contiguous()
        return rtkernels.attention(query, key, value, **limits)

    @property
    def is_one_row(self) -> bool:
        """True if there is one query, and its keys are the first ones of the cache, or the last of these."""
        whole = self.packing is None and self.starts is None and (self.ends is None or self.left < 0)
        return self.queries == 1 and self.right == 0 and whole

    def lengths(self, limited: bool) -> Tensor:
        """Return how many keys each sequence has, int32 on the device; `limited`: without padding behind them."""
        name = "limited" if limited else "lengths"
        if name not in self._arguments:
            if isinstance(self.seen, Tensor):
                lengths = self.seen.to(torch.int32).reshape(1).repeat(self.batch)
            else:
                lengths = torch.full((self.batch,), self.seen, dtype=torch.int32, device=self.device)
            if limited and self.ends is not None:
                lengths = torch.minimum(lengths, self._integers("ends", self.ends))
            self._arguments[name] = lengths
        return self._arguments[name]

    def _padding(self, keys: int) -> Packing:
        """Return the sequences behind padding at the left. Queries in the padding attend to nothing: they give 0.

        A sequence is three here: keys of the padding without queries, its queries without keys, then all others.
        """
        queries, shift, starts = self.queries, keys - self.queries, self.starts or []
        cu_q, cu_k = [0], [0]
        for row, start in enumerate(starts):
            padding = min(max(start - shift, 0), queries)
            cu_q += [row * queries, row * queries + padding, (row + 1) * queries]
            cu_k += [row * keys + start, row * keys + start, (row + 1) * keys]
        return Packing(self._integers("cu_q", cu_q), self._integers("cu_k", cu_k), queries, keys)


# ---- functions of indices -------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What a mask function allows: keys to each side (-1: all), and ids of packed sequences with their positions."""

    left: int = -1
    right: int = -1
    packed: Tensor | None = None
    positions: Tensor | None = None


def _smaller(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _both(a: _Seen | None, b: _Seen | None) -> _Seen | None:
    """Return the intersection, None if it is not known or has ids of two packings."""
    if a is None or b is None or (a.packed is not None and b.packed is not None):
        return None
    if a.positions is not None and b.positions is not None:
        return None
    packed, positions = (x if x is not None else y for x, y in ((a.packed, b.packed), (a.positions, b.positions)))
    return _Seen(_smaller(a.left, b.left), _smaller(a.right, b.right), packed, positions)


def _of_positions(inside: Any, positions: Any) -> _Seen | None:
    known = read_function(inside)
    if known is None or known.packed is not None or known.positions is not None or not isinstance(positions, Tensor):
        return None
    return known._replace(positions=positions)


def _intersection(functions: Any) -> _Seen | None:
    known: _Seen | None = _Seen()
    for function in functions:
        known = _both(known, read_function(function))
    return known


def _window(size: Any, both_sides: bool) -> _Seen | None:
    if type(size) is not int or size < 1:
        return None
    return _Seen(size, size) if both_sides else _Seen(left=size - 1)


def _ids(packed: Any) -> _Seen | None:
    return _Seen(packed=packed) if isinstance(packed, Tensor) and packed.dim() == 2 else None


@cache
def _factories() -> dict[CodeType, Callable[..., _Seen | None]]:
    """Return readers of closures by the code of transformers' mask functions, those that do what is expected here."""
    from transformers import masking_utils as given

    n = 7
    i, j = _range(n, "cpu").view(1, 1, n, 1), _range(n, "cpu").view(1, 1, 1, n)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int64, device="cpu")
    places = torch.tensor([[0, 1, 2, 5, 6, 7, 8]], dtype=torch.int64, device="cpu")
    of = ids[0].view(1, 1, n, 1) == ids[0]
    causal, full = (getattr(given, name, None) for name in ("causal_mask_function", "bidirectional_mask_function"))
    trials: list[tuple[str, tuple[Any, ...], Tensor, Callable[..., _Seen | None]]] = [
        ("sliding_window_overlay", (3,), j > i - 3, lambda sliding_window: _window(sliding_window, False)),
        ("sliding_window_bidirectional_overlay", (2,), (i - j).abs() <= 2,
         lambda sliding_window: _window(sliding_window, True)),
        ("packed_sequence_mask_function", (ids,), of, lambda packed_sequence_mask: _ids(packed_sequence_mask)),
        ("and_masks", (causal, lambda b, h, q, k: k > 1), (j <= i) & (j > 1),
         lambda mask_functions: _intersection(mask_functions)),
        ("remap_positions_for_packed_sequence", (causal, places), places[0] <= places[0].view(1, 1, n, 1),
         lambda mask_function, position_ids: _of_positions(mask_function, position_ids)),
    ]  # fmt: skip
    found: dict[CodeType, Callable[..., _Seen | None]] = {}
    plain = ((causal, j <= i, _Seen(right=0)), (full, torch.ones(1, 1, n, n, dtype=torch.bool, device="cpu"), _Seen()))
    for function, wanted, seen in plain:
        if function is not None and _gives(function, wanted, zero, i, j):
            found[function.__code__] = lambda seen=seen: seen
    for name, arguments, wanted, reader in trials:
        factory = getattr(given, name, None)
        function = None if factory is None else factory(*arguments)
        names = reader.__code__.co_varnames[: reader.__code__.co_argcount]
        if function is not None and set(function.__code__.co_freevars) == set(names):
            if _gives(function, wanted, zero, i, j):
                found[function.__code__] = reader
    return found


def _gives(function: Callable[..., Any], wanted: Tensor, zero: Tensor, i: Tensor, j: Tensor) -> bool:
    try:
        return bool((function(zero, zero, i, j).expand(wanted.shape) == wanted).all())
    except (TypeError, AttributeError, RuntimeError):
        return False


def read_function(function: Any) -> _Seen | None:
    """Return what a mask function of transformers allows, None if it is not one that is known here."""
    code = getattr(function, "__code__", None)
    reader = None if code is None else _factories().get(code)
    if reader is None:
        return None
    cells = function.__closure__ or ()
    return reader(**{name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)})


# ---- masks ----------------------------------------------------------------------------------------------------------


def _is_readable(given: Tensor) -> bool:
    """Return True if values can be read on the host: not while a graph is captured or a program is traced."""
    if not has_address(given) or given.device.type == "meta" or torch.jit.is_tracing():
        return False
    return not (given.is_cuda and torch.cuda.is_current_stream_capturing())


def _ends_of(padding: Tensor) -> tuple[list[int], list[int]] | None:
    """Return the first valid column and the one behind the last valid of each row; None if others lie between them."""
    rows = padding.to("cpu", torch.int64)
    count, columns = rows.sum(1), rows.shape[1]
    starts = torch.where(count > 0, rows.argmax(1), 0) if columns else count
    ends = torch.where(count > 0, columns - rows.flip(1).argmax(1), 0) if columns else count
    return (starts.tolist(), ends.tolist()) if torch.equal(ends - starts, count) else None


def _range(count: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


def _packing_of(seen: _Seen, device: torch.device) -> Packing | None:
    """Return the sequences of a packed batch; None if tokens of one are apart, or are not at consecutive positions."""
    ids = seen.packed
    both = torch.stack((ids, ids if seen.positions is None else seen.positions.expand_as(ids))).to("cpu")
    ids, positions = both
    steps = ids.diff(dim=1)
    inside = positions.diff(dim=1)[steps == 0]
    if bool((steps < 0).any()) or (seen.positions is not None and bool((inside != 1).any())):
        return None
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = steps != 0
    begins = [*first.flatten().nonzero().flatten().tolist(), ids.numel()]
    longest = max((b - a for a, b in pairwise(begins)), default=0)
    cu = torch.tensor(begins, dtype=torch.int32, device=device)
    return Packing(cu, cu, longest, longest)


def form_of_mask(options: dict[str, Any]) -> MaskForm | None:
    """Return the form of the mask that transformers' mask interface is asked for, None if it is not known.

    Names are those of transformers 5.17; in versions without them no form is known.
    """
    names = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "device")
    if is_dynamo_compiling() or any(options.get(name) is None for name in names):
        return None
    batch, queries, keys, q_offset, kv_offset, function, device = (options[name] for name in names)
    seen_by = read_function(function)
    if seen_by is None or type(kv_offset) is not int or not isinstance(q_offset, (int, Tensor)):
        return None
    device, padding = torch.device(device), options.get("attention_mask")
    causal = seen_by.right == 0
    # A static cache adds to its offset in place when a layer writes to it, before the mask is used.
    seen = q_offset + queries - kv_offset if causal else keys
    if isinstance(seen, int) and (seen < queries or seen > keys):
        return None
    if not causal and (seen_by.right >= 0 or seen_by.left >= 0) and (queries != keys or q_offset != kv_offset):
        return None
    starts = ends = packing = None
    if padding is not None:
        if not isinstance(padding, Tensor) or padding.dim() != 2 or not _is_readable(padding):
            return None
        found = _ends_of(padding[:, kv_offset : kv_offset + keys])
        if found is None or len(found[0]) != batch:
            return None
        starts, ends = found
        last = seen if isinstance(seen, int) else keys
        starts = starts if any(starts) else None
        ends = ends if any(end < last for end in ends) else None
        if starts is not None and (ends is not None or isinstance(seen, Tensor) or queries == 1 or not causal):
            return None
    if seen_by.positions is not None and seen_by.packed is None:
        return None
    if seen_by.packed is not None:
        square = queries == keys == seen and tuple(seen_by.packed.shape) == (batch, keys)
        if padding is not None or not square or not _is_readable(seen_by.packed):
            return None
        packing = _packing_of(seen_by, device)
        if packing is None:
            return None
    return MaskForm(
        batch, queries, keys, device, seen=seen, left=seen_by.left, right=seen_by.right, starts=starts, ends=ends,
        packing=packing,
    )  # fmt: skip
