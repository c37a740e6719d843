"""Writing new keys and values into a cache, with rotation and quantisation on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.cache import Cache, check_cache, check_scale
from rtkernels.ops.attention.checks import HALVES, Heads, strides
from rtkernels.ops.attention.decode_plan import CODES
from rtkernels.ops.attention.mma_plan import ANY_TYPE
from rtkernels.ops.shared.positions import check_indices, check_positions
from rtkernels.runtime import env
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, check_same
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_MAX_WIDTH = 1024  # of a head; a latent of 512 is one head
_DTYPES = (*HALVES, torch.float32)
_KERNEL = Kernel(
    "attention/append_kv_cache.cu", "append_kv_cache", template="T CODES", max_registers=64, struct=True, tier="serve",
    args="k:ptr v:ptr k_cache:ptr v_cache:ptr lengths:ptr table:ptr slots:ptr positions:ptr cosines:ptr sines:ptr "
    "k_scale:ptr v_scale:ptr tokens:i64 length:i64 heads:i64 d_k:i64 d_v:i64 capacity:i64 pages:i64 page_size:i64 "
    "table_row:i64 k_batch:i64 k_row:i64 k_head:i64 v_batch:i64 v_row:i64 v_head:i64 k_cache_page:i64 k_cache_row:i64 "
    "k_cache_head:i64 k_cache_step:i64 v_cache_page:i64 v_cache_row:i64 v_cache_head:i64 v_cache_step:i64 "
    "k_scale_head:i64 v_scale_head:i64 angles:i64 angle_row:i64 angle_rows:i64 angle_type:i64 interleaved:i64",
    variants=[(t, codes) for t in ("bf16", "fp16", "fp32") for codes in (0, 1, 2)],
)  # fmt: skip


class _WrittenCache(Cache):
    """A cache that is written: also one in which neighbouring elements of a head are apart."""

    written = True

    def fits_kernel(self, meta: Meta) -> bool:
        return super().fits_kernel(meta) or (meta.stride[-1] > 1 and min(meta.stride) >= 0)


def _check(
    k: Meta, v: Meta, k_cache: Meta, v_cache: Meta, lengths: Meta | None, page_table: Meta | None, slots: Meta | None,
    positions: Meta | None, cos: Meta | None, sin: Meta | None, k_scale: Meta | None, v_scale: Meta | None,
) -> None:  # fmt: skip
    for name, meta in (("k", k), ("v", v)):
        if meta.dim() != 4:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected [batch, tokens, heads, width]")
    check_same("v", tuple(v.shape[:3]), tuple(k.shape[:3]), "shape but for the last dimension", of="k")
    check_same("v", v.dtype, k.dtype, "dtype", of="k")
    if (lengths is None) is (slots is None):
        raise ArgumentError("seqlens and slots are both given, or neither; expected one of them")
    given = lengths if lengths is not None else Meta(torch.int32, k.shape[:1], (1,), k.device, 0)
    check_cache(
        k,
        k_cache,
        v_cache,
        given,
        page_table if slots is None else Meta(torch.int32, (k.shape[0], 1), (1, 1), 0, 0),
        widest=_MAX_WIDTH,
    )
    if slots is not None and not k_cache.shape[1] and k.numel():
        raise ArgumentError(f"k_cache has shape {tuple(k_cache.shape)}; expected pages of one token or more")
    if v_cache.shape[-1] != v.shape[-1] or k_cache.shape[2] != k.shape[2]:
        raise ArgumentError(
            f"caches have {k_cache.shape[2]} heads of {k_cache.shape[-1]} and {v_cache.shape[-1]} elements; expected "
            f"{k.shape[2]} of {k.shape[-1]} and {v.shape[-1]}"
        )
    for name, meta in (("slots", slots), ("positions", positions)):
        if meta is not None and (meta.dtype != torch.int32 or tuple(meta.shape) != tuple(k.shape[:2])):
            raise ArgumentError(f"{name} is {meta.dtype} {tuple(meta.shape)}; expected int32 [batch, tokens]")
    for name, meta in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, meta, k.shape[2])
        if (meta is None) is (k_cache.dtype in CODES):
            expected = "scales" if k_cache.dtype in CODES else "None"
            raise ArgumentError(
                f"{name} is {'None' if meta is None else 'given'}; expected {expected} for {k_cache.dtype}"
            )
    if (cos is None) is not (sin is None):
        raise ArgumentError("cos and sin go together; expected both or none")
    if cos is not None:
        check_same("sin", tuple(sin.shape), tuple(cos.shape), "shape", of="cos")
        check_same("sin", sin.dtype, cos.dtype, "dtype", of="cos")
        if cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= k.shape[-1] or cos.shape[1] % 2:
            raise ArgumentError(
                f"cos has shape {tuple(cos.shape)}; expected [positions, angles], angles an even number up to half of "
                f"{k.shape[-1]}"
            )
        if not cos.shape[0] and k.numel():
            raise ArgumentError(f"cos has shape {tuple(cos.shape)}; expected one position or more")
        if slots is not None and positions is None:
            raise ArgumentError("positions is None; expected them where slots and cos are given")


def _capacity(k_cache: Any, page_table: Any) -> int:
    return k_cache.shape[1] * (page_table.shape[1] if page_table is not None else 1)


def _step(cache: Meta) -> int:
    return 1 if cache.shape[-1] == 1 else cache.stride[-1]


def _plan(k, v, k_cache, v_cache, page_table, cos, k_scale, v_scale, interleaved, device):
    tokens, heads = k.shape[0] * k.shape[1], k.shape[2]
    if tokens * heads == 0:
        return Steps()
    launch = _KERNEL.bind(
        (DTYPE_TOKEN[k.dtype], CODES.get(k_cache.dtype, 0)), device, (-(-tokens * heads // 8), 2), 256
    )
    numbers = (
        *(tokens, k.shape[1], heads, k.shape[3], v.shape[3], _capacity(k_cache, page_table), *k_cache.shape[:2]),
        *(page_table.shape[1] if page_table is not None else 0, *strides(k)[:3], *strides(v)[:3]),
        *(*strides(k_cache)[:3], _step(k_cache), *strides(v_cache)[:3], _step(v_cache)),
        *(int(meta is not None and meta.numel() > 1) for meta in (k_scale, v_scale)),
        *((cos.shape[1], *reversed(cos.shape), ANY_TYPE[DTYPE_TOKEN[cos.dtype]]) if cos is not None else (0,) * 4),
        int(interleaved),
    )
    names = (
        "k",
        "v",
        "k_cache",
        "v_cache",
        "lengths",
        "page_table",
        "slots",
        "positions",
        "cos",
        "sin",
        "k_scale",
        "v_scale",
    )
    return Steps(Step(launch, *names, *numbers))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Return x [batch, tokens, heads, width] in fp32, the first ``2 * angles`` elements of a head rotated."""
    x, angles = x.float(), cos.shape[1]
    c, s = (table[position.clamp(0, cos.shape[0] - 1)].float().unsqueeze(2) for table in (cos, sin))
    part, rest = x[..., : 2 * angles], x[..., 2 * angles :]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :angles], part[..., angles:])
    first, second = a * c - b * s, b * c + a * s
    joined = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([joined, rest], -1)


def _encoded(x: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    if cache.dtype not in CODES:
        return x.to(cache.dtype)
    codes = x.float() * (1.0 / scale.float().reshape(-1, 1))
    if cache.dtype == torch.int8:
        return codes.nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return codes.clamp(-448.0, 448.0).to(cache.dtype)


def _reference(
    k, v, k_cache, v_cache, lengths, page_table, slots, positions, cos, sin, k_scale, v_scale, interleaved
) -> None:
    batch, tokens = k.shape[:2]
    size = k_cache.shape[1]
    token = torch.arange(tokens, dtype=torch.int64, device=k.device).expand(batch, tokens)
    place = token if lengths is None else token + lengths.long().view(-1, 1)
    position = place if positions is None else positions.long()
    if slots is not None:
        page, place, fits = slots.long().div(size, rounding_mode="floor"), slots.long() % size, slots >= 0
    else:
        capacity = _capacity(k_cache, page_table)
        if not capacity:
            return
        fits = (place >= 0) & (place < capacity)
        place = place.clamp(0, capacity - 1)
        page = torch.arange(batch, dtype=torch.int64, device=k.device).view(-1, 1).expand(batch, tokens)
        if page_table is not None:
            page, place = page_table.long().gather(1, place // size), place % size
    fits = fits & (page >= 0) & (page < k_cache.shape[0])
    keys = k if cos is None else rotated(k, cos, sin, position, interleaved)
    page, place = page[fits], place[fits]
    k_cache[page, place] = _encoded(keys, k_cache, k_scale)[fits]
    v_cache[page, place] = _encoded(v, v_cache, v_scale)[fits]


APPEND = Operator(
    "append_kv_cache",
    (
        Heads("k", _DTYPES), Heads("v", _DTYPES), _WrittenCache("k_cache", None), _WrittenCache("v_cache", None),
        Dense("lengths", None, optional=True), Dense("page_table", None, optional=True), Dense("slots", None,
        optional=True), Dense("positions", None, optional=True), Dense("cos", FLOAT_DTYPES, optional=True),
        Dense("sin", FLOAT_DTYPES, optional=True), Rows("k_scale", (torch.float32,), optional=True),
        Rows("v_scale", (torch.float32,), optional=True),
    ),
    options="bool interleaved",
    results="",
    plan=_plan,
    reference=_reference,
    check=_check,
)  # fmt: skip


@public(no_gradients="k v k_cache v_cache")
def append_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor | None = None, *,
    page_table: Tensor | None = None, slots: Tensor | None = None, positions: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Write new keys and values into a cache, optionally rotating keys and quantising both.

    Computed in fp32 and rounded once. Positions are read on the device only; tokens that do not fit are skipped. With
    ``RTKERNELS_DEBUG=1`` such tokens raise an error, and each call waits for the device. Not differentiable.

    Args:
        k: bfloat16, float16 or float32 [batch, tokens, heads, width], or [batch, heads, width] for one token each.
            Width up to 1024.
        v: Like k; its heads may have a different width.
        k_cache: [pages, page size, heads, width] with a page_table or slots, else [batch, length, heads, width]; in k's
            dtype, float8_e4m3fn or int8. Overwritten. Strides as for ``attention_decode``, or any strides if elements
            of a head are not neighbours.
        v_cache: The same for v. Overwritten.
        seqlens: int32 [batch]: number of keys that each sequence already has; the new tokens follow them.
        page_table: int32 [batch, pages]: the pages of each sequence. Tokens of a page that the cache does not have are
            skipped, as those of sequences that only pad a batch.
        slots: int32 [batch, tokens] instead of seqlens: ``page * page size + index in the page``; negative for tokens
            to skip. Each slot may be named once: which of two tokens for one slot is kept is undefined.
        positions: int32 [batch, tokens]: positions for the rotation alone. Default: those that follow from seqlens.
        cos: [positions, angles], any floating-point dtype: rotates the first ``2 * angles`` elements of each key.
            Positions outside of it count as the nearest of its rows.
        sin: Like cos.
        interleaved: Pairs are neighbours, ``(0, 1), (2, 3)``; otherwise ``(i, i + angles)``.
        k_scale: float32 () or [heads], for an 8-bit cache: keys are the codes times this scale.
        v_scale: The same for values.

    Returns:
        None.
    """
    if k.dim() == 3:
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        slots, positions = (_column(t) for t in (slots, positions))
    if env.get("DEBUG"):
        _check_places(k, k_cache, seqlens, page_table, slots, positions, cos)
    APPEND.call(k, v, k_cache, v_cache, seqlens, page_table, slots, positions, cos, sin, _flat(k_scale), _flat(v_scale),
                interleaved)  # fmt: skip
    return None


def _check_places(
    k: Tensor, k_cache: Tensor, seqlens: Tensor | None, page_table: Tensor | None, slots: Tensor | None,
    positions: Tensor | None, cos: Tensor | None,
) -> None:  # fmt: skip
    """Check values that are known only on the device; the operator checks everything else."""
    if k.dim() != 4 or k_cache.dim() != 4:
        return
    pages, size = k_cache.shape[:2]
    if slots is not None:
        check_indices("slots", slots, pages * size, "those of the cache, or below 0", lowest=-(2**31))
    elif seqlens is not None and k.shape[1]:
        check_positions("seqlens", seqlens, 0, k.shape[1], size * (1 if page_table is None else page_table.shape[1]))
    if cos is not None and positions is not None:
        check_indices("positions", positions, cos.shape[0], "rows of cos")


def _column(t: Tensor | None) -> Tensor | None:
    return t.unsqueeze(1) if t is not None and t.dim() == 1 else t


def _flat(t: Any) -> Any:
    return t.reshape(1) if isinstance(t, Tensor) and t.dim() == 0 else t


OP = Op("append_kv_cache", public=("append_kv_cache",), kernels=(_KERNEL,), torch_ops=(APPEND,))
