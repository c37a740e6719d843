"""The cache of keys and values as an argument of operators."""

from __future__ import annotations

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.checks import MAX_WIDTH, Heads, check_cache_rows
from rtkernels.ops.attention.decode_plan import CODES
from rtkernels.runtime.layout import check_same
from rtkernels.runtime.operator.declared import Argument, Meta


class Cache(Argument):
    """[pages, page size, heads, width], or [batch, length, heads, width]. Never copied."""

    def check(self, given: dict[str, Meta | None]) -> None:
        super().check(given)
        meta = given[self.name]
        if meta.dim() != 4:
            raise ArgumentError(f"{self.name} has shape {tuple(meta.shape)}; expected 4 dimensions")
        if not self.fits_kernel(meta) and meta.numel():
            raise ArgumentError(
                f"{self.name} has strides {tuple(meta.stride)}; expected neighbouring elements of a head, other "
                f"strides and "
                f"the address multiples of 16 bytes"
            )

    def fits_kernel(self, meta: Meta) -> bool:
        """Return whether the kernels can use a cache with these strides."""
        return Heads(self.name).fits(meta)


def check_cache(
    q: Meta, k_cache: Meta, v_cache: Meta, lengths: Meta, page_table: Meta | None, widest: int = MAX_WIDTH
) -> None:
    """Raise an ArgumentError unless the tensors of a cache fit together and to q [batch, length, heads, width]."""
    if k_cache.dtype not in (q.dtype, *CODES):
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in (q.dtype, *CODES))
        raise ArgumentError(
            f"k_cache has dtype {str(k_cache.dtype).removeprefix('torch.')}; expected one of {expected}"
        )
    check_same("v_cache", v_cache.dtype, k_cache.dtype, "dtype", of="k_cache")
    check_same(
        "v_cache", tuple(v_cache.shape[:3]), tuple(k_cache.shape[:3]), "shape but for the last dimension", of="k_cache"
    )
    per_vector = 16 // k_cache.dtype.itemsize
    for name, meta in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not 0 < meta.shape[-1] <= widest or meta.shape[-1] % per_vector:
            raise ArgumentError(
                f"{name} has heads of {meta.shape[-1]} elements; expected a multiple of {per_vector} to {widest}"
            )
    if k_cache.shape[-1] != q.shape[-1]:
        raise ArgumentError(f"k_cache has heads of {k_cache.shape[-1]} elements; expected {q.shape[-1]}, those of q")
    check_cache_rows(q, k_cache, lengths, page_table, "k_cache")


def check_scale(name: str, scale: Meta | None, heads: int) -> None:
    """Raise an ArgumentError unless the scales of a cache are one number, or one for each head."""
    if scale is not None and tuple(scale.shape) not in ((), (1,), (heads,)):
        raise ArgumentError(f"{name} has shape {tuple(scale.shape)}; expected () or ({heads},), one for each head")
