"""Wrap codes and scales of this package as Transformer Engine tensors, for its products.

Needs the package ``transformer_engine``.
"""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError


def blockwise(codes: Any, like: torch.Tensor, quantizer: Any = None) -> Any:
    """Return a ``Float8BlockwiseQTensor`` that shares the memory of codes and scales.

    Args:
        codes: A result with ``q``, ``scale``, ``q_t`` and ``scale_t`` (some may be None) and one scale per 128 values,
            from ``rms_norm_fp8``, ``glu_fp8`` or ``quantize_fp8(layout="both")`` with ``scale_layout="column"``.
        like: A tensor with the shape and dtype of the result.
        quantizer: Transformer Engine's quantizer, if the result will be quantised again.

    Raises:
        ArgumentError: `codes` has neither q nor q_t in an fp8 dtype.
    """
    import transformer_engine_torch as codes_of_te
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    kinds = {
        torch.float8_e4m3fn: codes_of_te.DType.kFloat8E4M3,
        torch.float8_e5m2: codes_of_te.DType.kFloat8E5M2,
    }
    by_rows, transposed = getattr(codes, "q", None), getattr(codes, "q_t", None)
    given = by_rows if by_rows is not None else transposed
    if given is None or given.dtype not in kinds:
        raise ArgumentError("codes has neither q nor q_t of an fp8 dtype; expected a result of a quantiser")
    return Float8BlockwiseQTensor(
        shape=like.shape,
        dtype=like.dtype,
        rowwise_data=None if by_rows is None else by_rows.view(torch.uint8),
        rowwise_scale_inv=getattr(codes, "scale", None),
        columnwise_data=None if transposed is None else transposed.view(torch.uint8),
        columnwise_scale_inv=getattr(codes, "scale_t", None),
        fp8_dtype=kinds[given.dtype],
        quantizer=quantizer,
        is_2D_scaled=False,
    )
