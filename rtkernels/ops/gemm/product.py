"""What a matrix product is, as plain data: the same description serves every operator and every backend.

``out[m, n] = act(sum over k of a[m, k] * scale_a * b[n, k] * scale_b + bias[n] + add[m, n])``, in fp32, rounded once.

A backend (``ops/shared/backend.py``) returns the launches. Its steps name the tensors of a product ``a``, ``b``,
``scale_a``, ``scale_b``, ``global_scale``, ``bias``, ``add``, ``ends`` (or ``sizes``, ``row_groups``), ``out`` and, of
a quantised result, ``out_scale``; operators that use products call their arguments and results so.
"""

from __future__ import annotations

from typing import NamedTuple

FLOAT16 = ("bf16", "fp16")
FP8 = ("e4m3", "e5m2")
INTEGERS = ("int8", "uint8", "int4", "uint4")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1, "int8": 1, "uint8": 1, "int32": 4,
         "int4": 0.5, "uint4": 0.5, "e2m1": 0.5}  # fmt: skip


class Matrix(NamedTuple):
    """An operand or result as it lies in memory.

    ``token``: element type (a key of ``BYTES``; 4-bit types have two elements in a byte, the first in its low half).
    ``pitch``: elements from one row to the next. ``across``: rows of memory are those of the summed dimension (a is
    stored [k, m], b is stored [k, n]); else a is [m, k] and b is [n, k]. ``aligned``: address, pitch and the distance
    between groups are multiples of 16 bytes. ``group_pitch``: elements from one group to the next, 0 without groups.
    ``halves``: the address is a multiple of 16 bytes, and the pitch one of 8, not of 16.
    """

    token: str
    pitch: int
    across: bool = False
    aligned: bool = True
    group_pitch: int = 0
    halves: bool = False


class Scales(NamedTuple):
    """The scales of an operand; they multiply codes.

    One scale covers `rows` rows (of a: of m, of b: of n) and `depth` elements of k; 0 means all of them. Scale (i, j)
    lies `row_pitch * i + depth_pitch * j` elements behind the first; `group_pitch` from group to group of b.
    ``token``: "fp32", "e8m0" or "ue4m3" (one byte). ``swizzled``: in 128 x 4 blocks of 512 bytes (then pitches are 0).
    ``aligned``: address and the larger pitch are multiples of 16 bytes.
    """

    rows: int
    depth: int
    row_pitch: int = 0
    depth_pitch: int = 0
    token: str = "fp32"
    swizzled: bool = False
    aligned: bool = True
    group_pitch: int = 0

    def of_rows(self, k: int) -> bool:
        """Return True for one number, or one for each row."""
        return self.token == "fp32" and not self.swizzled and self.rows in (0, 1) and not 0 < self.depth < k


class Groups(NamedTuple):
    """How a grouped product is cut; `count` groups, sizes on the device.

    ``kind``:

    "rows"      a [rows, k] and out [rows, n] hold the groups one behind the other, b is [count, n, k]. ``ends`` is
                int32 [count]: the row behind each group. Rows behind the last group are left alone.
    "labels"    the same with ``row_groups`` int32 [rows]: the group of each row, -1 for padding, groups in order, each
                beginning at a multiple of `align` rows.
    "masked"    a [count, m, k], out [count, m, n]: only the first ``sizes[g]`` (int32 [count]) rows of group g count.
    "depth"     out [count, m, n] = a_g [m, k_g] @ b_g [n, k_g]: k is cut, ``ends`` is int32 [count] over k. Groups
                without k are 0, or left as they are if the result is added to `out`.

    ``align``: every group (except "masked") begins at a multiple of so many rows (or of k); 1 if that is not promised.
    ``expected``: of "masked", how many rows a group is likely to have (0: unknown), a hint.
    """

    kind: str
    count: int
    align: int = 1
    expected: int = 0


class Product(NamedTuple):
    """One product. Sizes are per group, for dimensions that groups do not split, else totals ("rows": m is all rows).

    ``scale_a``, ``scale_b``: None without scales. ``sums``: "fp32" (fp8 products go to fp32 registers every 128 of k),
    "fast" (the tensor cores add over all of k), "fp16" (they add in fp16), "int32". ``bias``, ``add``: tokens of their
    elements or None; ``add_pitch``: elements between rows of `add`. ``act``: None, "relu", "silu", "gelu_tanh", "gelu".
    ``accumulate``: the result is added to `out` instead of written. ``gate``: None, or the activation of a gated
    product: b has 2n rows, those of the gate first, and out[m, n] = act(gate) * up. ``quantized``: None, or how
    the result leaves as codes of `out.token` with scales ``out_scale``: "1x128" (fp32 [m, n / 128], whose strides are
    (1, m rounded up to 4)), "row" (fp32 [m]) or "1x16" (ue4m3 [m, n / 16], linear; out.token is "e2m1").
    ``global_scale``: how many fp32 numbers of the tensor of that name multiply the sums before bias: 0,
    1, or for a gated product 2 (of the gate, of the other half).
    """

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    scale_a: Scales | None = None
    scale_b: Scales | None = None
    sums: str = "fp32"
    bias: str | None = None
    add: str | None = None
    add_pitch: int = 0
    act: str | None = None
    accumulate: bool = False
    gate: str | None = None
    quantized: str | None = None
    groups: Groups | None = None
    global_scale: int = 0

    @property
    def title(self) -> str:
        """Sizes and types, for messages."""
        return f"{self.m} x {self.n} x {self.k} of {self.a.token} and {self.b.token} to {self.out.token}"
