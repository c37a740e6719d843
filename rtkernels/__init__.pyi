# Written by docs/make_stub.py from the sources and the tables there.
# ruff: noqa

from typing import Literal, overload

from collections.abc import Sequence
from rtkernels import aten as aten
from rtkernels import cache as cache
from rtkernels import calibration as calibration
from rtkernels import compat as compat
from rtkernels import errors as errors
from rtkernels import interop as interop
from rtkernels import losses as losses
from rtkernels import models as models
from rtkernels import nn as nn
from rtkernels import optim as optim
from rtkernels.aten import disable as disable
from rtkernels.aten import enable as enable
from rtkernels.aten import report as report
from rtkernels.aten import use as use
from rtkernels.aten.invariant import batch_invariant as batch_invariant
from rtkernels.aten.invariant import set_batch_invariant as set_batch_invariant
from rtkernels.calibration import Calibration as Calibration
from rtkernels.custom.pointwise import pointwise as pointwise
from rtkernels.emulator import emulate as emulate
from rtkernels.errors import ArgumentError as ArgumentError
from rtkernels.errors import KernelCompileError as KernelCompileError
from rtkernels.errors import NotWarmError as NotWarmError
from rtkernels.errors import RtkError as RtkError
from rtkernels.errors import SourceError as SourceError
from rtkernels.errors import ToolkitError as ToolkitError
from rtkernels.errors import UnsupportedDeviceError as UnsupportedDeviceError
from rtkernels.ops.act.glu_combined import GluOut as GluOut
from rtkernels.ops.act.glu_fp8 import GluFp8
from rtkernels.ops.act.glu_fp8 import GluFp8Gradients
from rtkernels.ops.act.glu_smooth_fp8 import GluSmoothFp8
from rtkernels.ops.act.glu_smooth_fp8 import GluSmoothFp8Gradients
from rtkernels.ops.attention.append_kv_cache import append_kv_cache as append_kv_cache
from rtkernels.ops.attention.chunk_attention import chunk_attention as chunk_attention
from rtkernels.ops.attention.gated_delta_rule import gated_delta_rule_step as gated_delta_rule_step
from rtkernels.ops.attention.indexer import indexer_logits as indexer_logits
from rtkernels.ops.attention.indexer import indexer_topk as indexer_topk
from rtkernels.ops.attention.lightning import lightning_attention_step as lightning_attention_step
from rtkernels.ops.attention.quantize_heads import quantize_v as quantize_v
from rtkernels.ops.attention.sdpa import sdpa as sdpa
from rtkernels.ops.attention.ssd import ssd_step as ssd_step
from rtkernels.ops.gemm.fp8_linear import Fp8Weight
from rtkernels.ops.index.embedding import embedding as embedding
from rtkernels.ops.index.embedding import embedding_grad_ as embedding_grad_
from rtkernels.ops.index.id_bounds import id_bounds as id_bounds
from rtkernels.ops.index.row_moves import scatter_add as scatter_add
from rtkernels.ops.layout.patchify import repeat_heads as repeat_heads
from rtkernels.ops.layout.transpose import transpose_experts as transpose_experts
from rtkernels.ops.loss.cross_entropy import check_labels as check_labels
from rtkernels.ops.moe.moe_index import moe_index as moe_index
from rtkernels.ops.moe.moe_index import moe_row_id_map as moe_row_id_map
from rtkernels.ops.moe.moe_index import moe_rows as moe_rows
from rtkernels.ops.moe.moe_index_layout import MoeIndex as MoeIndex
from rtkernels.ops.moe.moe_permute import MoePermuted
from rtkernels.ops.moe.moe_permute import moe_unpermute as moe_unpermute
from rtkernels.ops.moe.moe_permute_fp8 import MoePermutedFp8
from rtkernels.ops.moe.moe_permute_smooth import moe_permute_smooth as moe_permute_smooth
from rtkernels.ops.moe.moe_permute_smooth_t import moe_permute_smooth_t as moe_permute_smooth_t
from rtkernels.ops.multi.multi_clip import multi_clip_ as multi_clip_
from rtkernels.ops.multi.multi_tensor import Tensors
from rtkernels.ops.multi.multi_tensor import multi_clip_norm_ as multi_clip_norm_
from rtkernels.ops.multi.multi_tensor import multi_copy_ as multi_copy_
from rtkernels.ops.multi.multi_tensor import multi_scale_ as multi_scale_
from rtkernels.ops.multi.multi_tensor import tensor_list as tensor_list
from rtkernels.ops.norm.norm_fp8 import NormFp8
from rtkernels.ops.norm.norm_modulated import NormOut as NormOut
from rtkernels.ops.norm.rwkv_key import rwkv_key as rwkv_key
from rtkernels.ops.pointwise.add_residual import add_bias as add_bias
from rtkernels.ops.pointwise.add_residual import add_residual as add_residual
from rtkernels.ops.pointwise.add_residual import channel_mul as channel_mul
from rtkernels.ops.pointwise.euler_step import cfg_combine as cfg_combine
from rtkernels.ops.pointwise.euler_step import euler_step as euler_step
from rtkernels.ops.pointwise.inplace import add_ as add_
from rtkernels.ops.pointwise.inplace import scale_ as scale_
from rtkernels.ops.quant.column_absmax import column_absmax as column_absmax
from rtkernels.ops.quant.hadamard import dequantize_fp8_hadamard as dequantize_fp8_hadamard
from rtkernels.ops.quant.hadamard import hadamard as hadamard
from rtkernels.ops.quant.nvfp4 import dequantize_mxfp4 as dequantize_mxfp4
from rtkernels.ops.quant.nvfp4 import dequantize_mxfp8 as dequantize_mxfp8
from rtkernels.ops.quant.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4
from rtkernels.ops.quant.nvfp4 import nvfp4_scale_bytes as nvfp4_scale_bytes
from rtkernels.ops.quant.nvfp4 import nvfp4_swizzle as nvfp4_swizzle
from rtkernels.ops.quant.nvfp4 import nvfp4_unswizzle as nvfp4_unswizzle
from rtkernels.ops.quant.quantize_fp8 import QuantizedBoth
from rtkernels.ops.quant.quantize_fp8_experts import QuantizedExperts
from rtkernels.ops.quant.smooth_quant import SmoothQuantized
from rtkernels.ops.quant.smooth_quant import smooth_factors as smooth_factors
from rtkernels.ops.quant.smooth_shard import quantize_fp8_shard_ as quantize_fp8_shard_
from rtkernels.ops.reduce.nonzero_mv import nonzero_mv as nonzero_mv
from rtkernels.ops.reduce.row_dot import row_dot as row_dot
from rtkernels.ops.reduce.softmax import log_softmax as log_softmax
from rtkernels.ops.reduce.softmax import softmax as softmax
from rtkernels.ops.rope.rope_table import rope_table as rope_table
from rtkernels.ops.router.rms_norm_router import NormRouter
from rtkernels.ops.router.router_loss import router_z_loss as router_z_loss
from rtkernels.ops.router.topk import topk as topk
from rtkernels.ops.router.topk_router import Routing
from rtkernels.ops.shared.explain import explain as explain
from rtkernels.ops.shared.row_quant import Quant as Quant
from rtkernels.ops.shared.tune import record_problems as record_problems
from rtkernels.ops.shared.tune import tune as tune
from rtkernels.runtime.launch.capabilities import Workspace as Workspace
from rtkernels.runtime.launch.capabilities import capabilities as capabilities
from rtkernels.runtime.warm import warm as warm
from torch import Tensor
from typing import Any
import torch

__version__: str

def group_rms_norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, groups: int, eps: float | None = None, layout:
    Literal['same', 'sequence_first'] = 'same', act: Literal['sigmoid', 'silu'] = 'sigmoid', gate_first: bool = False,
    out: Tensor | None = None
) -> Tensor:
    """Normalise each group of channels by its root mean square and gate the result."""

@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[False] =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: None =
    None, x_bias: None = None, scale: Tensor | None = None, shift: Tensor | None = None, style: None = None,
    channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False, residual_out: None = None,
    scale_out: None = None
) -> Tensor:
    """Normalise the last dimension to mean 0 and variance 1."""
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[False] =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: None =
    None, x_bias: None = None, scale: None = None, shift: None = None, style: None = None, channel_scale: None = None,
    quant: None = None, keep: Literal[False] = False, residual_out: None = None, scale_out: None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[True],
    out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: None = None,
    x_bias: None = None, scale: None = None, shift: None = None, style: None = None, channel_scale: None = None,
    quant: None = None, keep: Literal[False] = False, residual_out: None = None, scale_out: None = None
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[True], out:
    Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: None = None,
    x_bias: None = None, scale: None = None, shift: None = None, style: None = None, channel_scale: None = None,
    quant: None = None, keep: Literal[False] = False, residual_out: None = None, scale_out: None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None =
    None, gate: Tensor | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None
    = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant: torch.dtype | Literal["nvfp4"],
    keep: bool = False, residual_out: Tensor | None = None, scale_out: Tensor | None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None =
    None, gate: Tensor | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None
    = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant: Quant, keep: Literal[True],
    residual_out: Tensor | None = None, scale_out: Tensor | None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None =
    None, gate: Tensor | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None
    = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant: Quant, keep: bool = False,
    residual_out: Tensor | None = None, scale_out: Tensor | None = None
) -> Tensor | NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None =
    None, gate: Tensor, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None, style:
    Tensor | None = None, channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False,
    residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None =
    None, gate: Tensor | None = None, x_bias: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, style:
    Tensor | None = None, channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False,
    residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None =
    None, gate: Tensor | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None
    = None, style: Tensor, channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False,
    residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[False] =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: Tensor
    | None = None, x_bias: Tensor | None = None, scale: Tensor, shift: Tensor | None = None, style: Tensor | None =
    None, channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False, residual_out: Tensor
    | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[False] =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: Tensor
    | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor, style: Tensor | None =
    None, channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False, residual_out: Tensor
    | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[False] =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: Tensor
    | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None, style:
    Tensor | None = None, channel_scale: Tensor, quant: None = None, keep: Literal[False] = False, residual_out:
    Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: Literal[False] =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: Tensor
    | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None, style:
    Tensor | None = None, channel_scale: Tensor | None = None, quant: None = None, keep: Literal[False] = False,
    residual_out: Tensor, scale_out: None = None
) -> NormOut: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-05, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None, return_statistics: bool =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: Literal['inputs'] | None = None, gate: Tensor
    | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None, style:
    Tensor | None = None, channel_scale: Tensor | None = None, quant: Quant | torch.dtype | Literal["nvfp4"] | None =
    None, keep: bool = False, residual_out: Tensor | None = None, scale_out: Tensor | None = None
) -> Tensor | tuple[Tensor, ...] | NormOut: ...

def layer_norm_fp8(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float | None = None, offset: float =
    0, residual: Tensor | None = None, layout: Literal['row', 'transposed', 'both'] = 'row', pow2_scale: bool = False,
    scale_layout: Literal['row', 'column'] = 'row', rstd: Tensor | None = None, mean: Tensor | None = None, keep: bool
    = False, smooth: Tensor | None = None, calibrate: bool = False, out: tuple[Tensor | None, ...] | None = None
) -> NormFp8:
    """Normalise the last dimension to mean 0 and variance 1 and quantise the result to fp8 (e4m3)."""

@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: None = None, rstd:
    Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None,
    reuse: Literal['inputs'] | None = None, gate: None = None, bias: None = None, scale: Tensor | None = None, shift:
    Tensor | None = None, style: None = None, channel_scale: Tensor | None = None, quant: None = None, keep:
    Literal[False] = False, residual_out: None = None, scale_out: None = None
) -> Tensor:
    """Normalise the last dimension by its root mean square."""
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor, rstd:
    Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None,
    reuse: Literal['inputs'] | None = None, gate: None = None, bias: None = None, scale: None = None, shift: None =
    None, style: None = None, channel_scale: None = None, quant: None = None, keep: Literal[False] = False,
    residual_out: None = None, scale_out: None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: None = None, rstd:
    Tensor | None = None, return_rstd: Literal[True], out: Tensor | tuple[Tensor | None, ...] | None = None, reuse:
    Literal['inputs'] | None = None, gate: None = None, bias: None = None, scale: None = None, shift: None = None,
    style: None = None, channel_scale: None = None, quant: None = None, keep: Literal[False] = False, residual_out:
    None = None, scale_out: None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor, rstd:
    Tensor | None = None, return_rstd: Literal[True], out: Tensor | tuple[Tensor | None, ...] | None = None, reuse:
    Literal['inputs'] | None = None, gate: None = None, bias: None = None, scale: None = None, shift: None = None,
    style: None = None, channel_scale: None = None, quant: None = None, keep: Literal[False] = False, residual_out:
    None = None, scale_out: None = None
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None, reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None,
    scale: Tensor | None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor |
    None = None, quant: torch.dtype | Literal["nvfp4"], keep: bool = False, residual_out: Tensor | None = None,
    scale_out: Tensor | None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None, reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None,
    scale: Tensor | None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor |
    None = None, quant: Quant, keep: Literal[True], residual_out: Tensor | None = None, scale_out: Tensor | None =
    None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None, reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None,
    scale: Tensor | None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor |
    None = None, quant: Quant, keep: bool = False, residual_out: Tensor | None = None, scale_out: Tensor | None = None
) -> Tensor | NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None, reuse: Literal['inputs'] | None = None, gate: Tensor, bias: Tensor | None = None, scale: Tensor |
    None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant:
    None = None, keep: Literal[False] = False, residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None, reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor, scale: Tensor |
    None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant:
    None = None, keep: Literal[False] = False, residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None, reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None,
    scale: Tensor | None = None, shift: Tensor | None = None, style: Tensor, channel_scale: Tensor | None = None,
    quant: None = None, keep: Literal[False] = False, residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor, rstd:
    Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None,
    reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None, scale: Tensor,
    shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant: None = None,
    keep: Literal[False] = False, residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor, rstd:
    Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None,
    reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None, scale: Tensor |
    None = None, shift: Tensor, style: Tensor | None = None, channel_scale: Tensor | None = None, quant: None = None,
    keep: Literal[False] = False, residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor, rstd:
    Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None,
    reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None, scale: Tensor |
    None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor, quant: None = None,
    keep: Literal[False] = False, residual_out: Tensor | None = None, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor, rstd:
    Tensor | None = None, return_rstd: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None,
    reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None, scale: Tensor |
    None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None = None, quant:
    None = None, keep: Literal[False] = False, residual_out: Tensor, scale_out: None = None
) -> NormOut: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-06, offset: float = 0.0, residual: Tensor | None =
    None, rstd: Tensor | None = None, return_rstd: bool = False, out: Tensor | tuple[Tensor | None, ...] | None =
    None, reuse: Literal['inputs'] | None = None, gate: Tensor | None = None, bias: Tensor | None = None, scale:
    Tensor | None = None, shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None =
    None, quant: Quant | torch.dtype | Literal["nvfp4"] | None = None, keep: bool = False, residual_out: Tensor | None
    = None, scale_out: Tensor | None = None
) -> Tensor | tuple[Tensor, ...] | NormOut: ...

def rms_norm_fp8(
    x: Tensor, weight: Tensor | None = None, *, eps: float | None = None, offset: float = 0, residual: Tensor | None =
    None, layout: Literal['row', 'transposed', 'both'] = 'row', pow2_scale: bool = False, scale_layout: Literal['row',
    'column'] = 'row', rstd: Tensor | None = None, keep: bool = False, smooth: Tensor | None = None, calibrate: bool =
    False, out: tuple[Tensor | None, ...] | None = None
) -> NormFp8:
    """Normalise the last dimension by its root mean square and quantise the result to fp8 (e4m3)."""

def act(
    x: Tensor, kind: Literal['gelu_tanh', 'gelu_erf', 'silu', 'relu', 'relu2', 'sigmoid', 'quick_gelu'], *, add:
    Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``kind(x + add)``."""

@overload
def glu(
    x: Tensor | tuple[Tensor, ...], up: Tensor | tuple[Tensor, ...] | None = None, *, act: Literal['silu',
    'gelu_tanh', 'gelu_erf', 'relu', 'relu2', 'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu', limit: float |
    None = None, weight: Tensor | None = None, reuse: Literal['inputs'] | None = None, layout: Literal['concat',
    'interleaved'] = 'concat', channel_scale: Tensor | None = None, quant: None = None, keep: bool = False, out:
    Tensor | None = None, scale_out: Tensor | None = None
) -> Tensor:
    """Return ``act(gate) * up * weight``, the gated activation of an MLP."""
@overload
def glu(
    x: Tensor | tuple[Tensor, ...], up: Tensor | tuple[Tensor, ...] | None = None, *, act: Literal['silu',
    'gelu_tanh', 'gelu_erf', 'relu', 'relu2', 'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu', limit: float |
    None = None, weight: Tensor | None = None, reuse: Literal['inputs'] | None = None, layout: Literal['concat',
    'interleaved'] = 'concat', channel_scale: Tensor | None = None, quant: torch.dtype | Literal["nvfp4"], keep: bool
    = False, out: Tensor | None = None, scale_out: Tensor | None = None
) -> GluOut: ...
@overload
def glu(
    x: Tensor | tuple[Tensor, ...], up: Tensor | tuple[Tensor, ...] | None = None, *, act: Literal['silu',
    'gelu_tanh', 'gelu_erf', 'relu', 'relu2', 'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu', limit: float |
    None = None, weight: Tensor | None = None, reuse: Literal['inputs'] | None = None, layout: Literal['concat',
    'interleaved'] = 'concat', channel_scale: Tensor | None = None, quant: Quant, keep: Literal[True], out: Tensor |
    None = None, scale_out: Tensor | None = None
) -> GluOut: ...
@overload
def glu(
    x: Tensor | tuple[Tensor, ...], up: Tensor | tuple[Tensor, ...] | None = None, *, act: Literal['silu',
    'gelu_tanh', 'gelu_erf', 'relu', 'relu2', 'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu', limit: float |
    None = None, weight: Tensor | None = None, reuse: Literal['inputs'] | None = None, layout: Literal['concat',
    'interleaved'] = 'concat', channel_scale: Tensor | None = None, quant: Quant | torch.dtype | Literal["nvfp4"] |
    None = None, keep: bool = False, out: Tensor | None = None, scale_out: Tensor | None = None
) -> Tensor | GluOut: ...

def glu_fp8(
    x: Tensor, up: Tensor | None = None, *, act: Literal['silu', 'gelu_tanh', 'gelu_erf', 'relu', 'relu2', 'sigmoid',
    'none', 'swiglu_oai', 'quick_gelu'] = 'silu', weight: Tensor | None = None, counts: Tensor | None = None, layout:
    Literal['row', 'transposed', 'both'] = 'row', pow2_scale: bool = False, scale_layout: Literal['row', 'column'] =
    'row', check_counts: bool = False, out: tuple[Tensor | None, ...] | None = None
) -> GluFp8:
    """Quantise ``y = act(gate) * up * weight`` to fp8 in one pass: by rows, transposed, or both."""

def glu_fp8_backward(
    dy: Tensor, x: Tensor, up: Tensor | None = None, *, act: Literal['silu', 'gelu_tanh', 'gelu_erf', 'relu', 'relu2',
    'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu', weight: Tensor | None = None, counts: Tensor | None =
    None, layout: Literal['row', 'transposed', 'both'] = 'both', pow2_scale: bool = False, scale_layout:
    Literal['row', 'column'] = 'row', keep: Literal['fp8', 'dense', 'both'] = 'fp8', weight_grad: bool | None = None,
    check_counts: bool = False, out: tuple[Tensor | None, ...] | None = None
) -> GluFp8Gradients:
    """Return the gradients of ``act(gate) * up * weight``; that of ``[gate | up]`` as fp8 codes, in x's dtype, or both."""

def glu_smooth_fp8(
    x: Tensor, smooth: Tensor | None, up: Tensor | None = None, *, act: Literal['silu', 'gelu_tanh', 'gelu_erf',
    'relu', 'relu2', 'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu', weight: Tensor | None = None, counts:
    Tensor | None = None, pow2_scale: bool = False, with_maxima: bool = False, check_counts: bool = False, divide:
    bool = True, out: tuple[Tensor | None, ...] | None = None
) -> GluSmoothFp8:
    """Quantise ``act(gate) * up * weight / smooth`` to fp8 with one scale per row."""

def glu_smooth_fp8_backward(
    dy: Tensor, x: Tensor, smooth: Tensor | None, up: Tensor | None = None, *, row_factor: Tensor | None = None, act:
    Literal['silu', 'gelu_tanh', 'gelu_erf', 'relu', 'relu2', 'sigmoid', 'none', 'swiglu_oai', 'quick_gelu'] = 'silu',
    weight: Tensor | None = None, counts: Tensor | None = None, layout: Literal['row', 'transposed', 'both'] = 'row',
    pow2_scale: bool = False, keep: Literal['fp8', 'dense', 'both'] = 'fp8', weight_grad: bool | None = None,
    check_counts: bool = False, divide: bool = False, pad_to: int = 1, out: tuple[Tensor | None, ...] | None = None
) -> GluSmoothFp8Gradients:
    """Return the gradients of ``act(gate) * up * weight``; that of ``[gate | up]`` as fp8 codes, in x's dtype, or both."""

def quantize_int8(
    x: Tensor, *, granularity: Literal['row', 'tensor'] = 'row', out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor to int8 codes and scales, symmetrically."""

def group_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, groups: int, eps: float | None = None,
    act: Literal['silu'] | None = None, out: Tensor | None = None
) -> Tensor:
    """Normalise groups of channels to mean 0 and variance 1, and apply silu on request."""

def mla_rope(
    q: Tensor, kv: Tensor, k_pos: Tensor, cos: Tensor, sin: Tensor, *, layout: Literal['bshd', 'sbhd', 'bhsd'] =
    'sbhd', output_layout: Literal['bshd', 'sbhd', 'bhsd'] | None = None, interleaved: bool = True,
    output_interleaved: bool = False, positions: Tensor | None = None, cu_seqlens: Tensor | None = None, cp_rank: int
    = 0, cp_size: int = 1, mscale: float = 1.0, in_place: bool = False, cu_seqlens_kv: Tensor | None = None, out:
    tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the rotary part of q and k and assemble the heads of k and v for multi-head latent attention."""

def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *, q_heads: int,
    kv_heads: int, head_order: Literal['grouped', 'plain'] = 'grouped', layout: Literal['sbhd', 'bshd'] = 'sbhd',
    rotary: int | None = None, interleaved: bool = False, silu: bool = False, eps: float = 1e-06, offset: float = 0.0,
    positions: Tensor | None = None, cu_seqlens: Tensor | None = None, sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False, cp_rank: int = 0, cp_size: int = 1, mscale: float = 1.0, cu_seqlens_kv: Tensor
    | None = None, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused qkv projection into heads, normalise those of q and k, and rotate them."""

def qkv_split(
    qkv: Tensor, num_heads: int, num_kv_heads: int, *, rope: tuple[Tensor, Tensor] | None = None, style:
    Literal['half', 'interleaved'] = 'half', q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float =
    1e-06, k_cache: Tensor | None = None, v_cache: Tensor | None = None, pos: Tensor | int | None = None, out:
    Sequence[Tensor | None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into heads of q, k and v; optionally normalise, rotate and write them into a cache."""

@overload
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, k: None = None, layout: Literal['bshd', 'sbhd', 'bhsd'] = 'bshd', rotary:
    int | None = None, interleaved: bool = False, positions: Tensor | None = None, cu_seqlens: Tensor | None = None,
    sections: tuple[int, int, int] | None = None, sections_interleaved: bool = False, cp_rank: int = 0, cp_size: int =
    1, mscale: float = 1.0, inverse: bool = False, in_place: bool = False, output_interleaved: bool | None = None,
    rotary_start: int = 0, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Rotate pairs of elements of every head by the angles of its token."""
@overload
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, k: Tensor, layout: Literal['bshd', 'sbhd', 'bhsd'] = 'bshd', rotary: int |
    None = None, interleaved: bool = False, positions: Tensor | None = None, cu_seqlens: Tensor | None = None,
    sections: tuple[int, int, int] | None = None, sections_interleaved: bool = False, cp_rank: int = 0, cp_size: int =
    1, mscale: float = 1.0, inverse: bool = False, in_place: bool = False, output_interleaved: bool | None = None,
    rotary_start: int = 0, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, k: Tensor | None = None, layout: Literal['bshd', 'sbhd', 'bhsd'] = 'bshd',
    rotary: int | None = None, interleaved: bool = False, positions: Tensor | None = None, cu_seqlens: Tensor | None =
    None, sections: tuple[int, int, int] | None = None, sections_interleaved: bool = False, cp_rank: int = 0, cp_size:
    int = 1, mscale: float = 1.0, inverse: bool = False, in_place: bool = False, output_interleaved: bool | None =
    None, rotary_start: int = 0, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float
    = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none', 'mean', 'sum'] = 'mean',
    return_lse: Literal[False] = False, return_accuracy: Literal[False] = False, one_pass: bool = False, in_place:
    bool = False, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None, out: Tensor |
    tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return the cross entropy of logits and labels, in fp32."""
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float
    = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none', 'mean', 'sum'] = 'mean',
    return_lse: Literal[True], return_accuracy: Literal[False] = False, one_pass: bool = False, in_place: bool =
    False, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None, out: Tensor |
    tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float
    = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none', 'mean', 'sum'] = 'mean',
    return_lse: Literal[False] = False, return_accuracy: Literal[True], one_pass: bool = False, in_place: bool =
    False, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None, out: Tensor |
    tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float
    = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none', 'mean', 'sum'] = 'mean',
    return_lse: Literal[True], return_accuracy: Literal[True], one_pass: bool = False, in_place: bool = False, group:
    Any = None, vocab_start: int | None = None, vocab_size: int | None = None, out: Tensor | tuple[Tensor | None, ...]
    | None = None
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float
    = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none', 'mean', 'sum'] = 'mean',
    return_lse: bool = False, return_accuracy: bool = False, one_pass: bool = False, in_place: bool = False, group:
    Any = None, vocab_start: int | None = None, vocab_size: int | None = None, out: Tensor | tuple[Tensor | None, ...]
    | None = None
) -> Tensor | tuple[Tensor, ...]: ...

def jsd(
    input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: Literal['none', 'mean', 'batchmean', 'sum'] =
    'batchmean', labels: Tensor | None = None, ignore_index: int = -100, from_logits: bool = False, temperature: float
    = 1.0, one_pass: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of predictions Q and a target P."""

def kl_div(
    input: Tensor, target: Tensor, *, log_target: bool = False, reduction: Literal['none', 'mean', 'batchmean', 'sum']
    = 'batchmean', labels: Tensor | None = None, ignore_index: int = -100, from_logits: bool = False, temperature:
    float = 1.0, one_pass: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return the divergence ``sum(P * (log P - log Q))`` of predictions Q from a target P, like torch's ``kl_div``."""

@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none',
    'mean', 'sum'] = 'mean', return_lse: Literal[False] = False, return_accuracy: Literal[False] = False, chunk_rows:
    int | None = None, fp32_weight_grad: bool = False, group: Any = None, vocab_start: int | None = None, vocab_size:
    int | None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return ``cross_entropy(hidden @ weight.T + bias, labels)`` without storing all logits."""
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none',
    'mean', 'sum'] = 'mean', return_lse: Literal[True], return_accuracy: Literal[False] = False, chunk_rows: int |
    None = None, fp32_weight_grad: bool = False, group: Any = None, vocab_start: int | None = None, vocab_size: int |
    None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none',
    'mean', 'sum'] = 'mean', return_lse: Literal[False] = False, return_accuracy: Literal[True], chunk_rows: int |
    None = None, fp32_weight_grad: bool = False, group: Any = None, vocab_start: int | None = None, vocab_size: int |
    None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none',
    'mean', 'sum'] = 'mean', return_lse: Literal[True], return_accuracy: Literal[True], chunk_rows: int | None = None,
    fp32_weight_grad: bool = False, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Literal['none',
    'mean', 'sum'] = 'mean', return_lse: bool = False, return_accuracy: bool = False, chunk_rows: int | None = None,
    fp32_weight_grad: bool = False, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def linear_logprob(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, logit_scale:
    float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0, return_entropy: Literal[False] =
    False, return_lse: Literal[False] = False, return_log_sum_sq: Literal[False] = False, return_mean_logit:
    Literal[False] = False, return_top1: Literal[False] = False, fp32_logits: bool = False, save: Literal['stats',
    'logits', 'projected'] = 'stats', chunk_bytes: int | None = None, group: Any = None, vocab_start: int | None =
    None, vocab_size: int | None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return log-probabilities of tokens under ``softmax(hidden @ weight.T + bias)``, without storing all logits."""
@overload
def linear_logprob(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, logit_scale:
    float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0, return_entropy: Literal[True],
    return_lse: Literal[False] = False, return_log_sum_sq: Literal[False] = False, return_mean_logit: Literal[False] =
    False, return_top1: Literal[False] = False, fp32_logits: bool = False, save: Literal['stats', 'logits',
    'projected'] = 'stats', chunk_bytes: int | None = None, group: Any = None, vocab_start: int | None = None,
    vocab_size: int | None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, logit_scale:
    float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0, return_entropy: Literal[False] =
    False, return_lse: Literal[True], return_log_sum_sq: Literal[False] = False, return_mean_logit: Literal[False] =
    False, return_top1: Literal[False] = False, fp32_logits: bool = False, save: Literal['stats', 'logits',
    'projected'] = 'stats', chunk_bytes: int | None = None, group: Any = None, vocab_start: int | None = None,
    vocab_size: int | None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, logit_scale:
    float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0, return_entropy: Literal[True],
    return_lse: Literal[True], return_log_sum_sq: Literal[False] = False, return_mean_logit: Literal[False] = False,
    return_top1: Literal[False] = False, fp32_logits: bool = False, save: Literal['stats', 'logits', 'projected'] =
    'stats', chunk_bytes: int | None = None, group: Any = None, vocab_start: int | None = None, vocab_size: int | None
    = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, logit_scale:
    float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0, return_entropy: bool = False,
    return_lse: bool = False, return_log_sum_sq: bool = False, return_mean_logit: bool = False, return_top1: bool =
    False, fp32_logits: bool = False, save: Literal['stats', 'logits', 'projected'] = 'stats', chunk_bytes: int | None
    = None, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None, out: Tensor |
    tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, ...]: ...

def linear_divergence(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor | None = None, teacher_weight: Tensor |
    None = None, *, beta: float = 0.0, temperature: float = 1.0, student_bias: Tensor | None = None, teacher_bias:
    Tensor | None = None, teacher_ids: Tensor | None = None, teacher_logprobs: Tensor | None = None, tail: bool =
    True, labels: Tensor | None = None, ignore_index: int = -100, save: Literal['stats', 'gradients'] | None = None,
    chunk_bytes: int | None = None, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None,
    out: Tensor | None = None
) -> Tensor:
    """Return the divergence of a student's next-token distribution Q from a teacher's P, for distillation."""

def dequantize_fp8(
    q: Tensor, scale: Tensor, *, granularity: Literal['tensor', 'row', 'group', 'group_t', 'block', 'channel'] =
    'tensor', dtype: torch.dtype = torch.bfloat16, scale_layout: Literal['row', 'column'] = 'row', code_dtype:
    torch.dtype | None = None, group_size: int = 128, out: Tensor | None = None
) -> Tensor:
    """Undo :func:`quantize_fp8`: return ``q * scale``."""

def quantize_mxfp4(
    x: Tensor, *, rule: Literal['ocp', 'nv'] = 'ocp', swizzled: bool = False, out: Tensor | None = None, scale_out:
    Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP4: e2m1 codes, two in a byte, with one power-of-two scale per 32 codes."""

def quantize_mxfp8(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, rule: Literal['ocp', 'nv'] = 'ocp', swizzled: bool =
    False, out: Tensor | None = None, scale_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP8: fp8 codes with one power-of-two scale per 32 codes."""

def quantize_nvfp4(
    x: Tensor, *, global_scale: Tensor | float | None = None, swizzled: bool = False, scale_rule: Literal['rne',
    'ceil', 'mse'] = 'rne', elem_rule: Literal['rne', 'away', 'zero'] = 'rne', channel_scale: Tensor | None = None,
    out: Tensor | None = None, scale_out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to NVFP4: e2m1 codes, two in a byte, one e4m3 scale per 16 codes, and one float32 global scale."""

def dequantize_fp8_smooth(
    q: Tensor, scale: Tensor, smooth: Tensor | None = None, *, divide: bool = False, row_factor: Tensor | None = None,
    counts: Tensor | None = None, granularity: Literal['row', 'channel'] = 'row', rows: int | None = None, dtype:
    torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Undo :func:`quantize_fp8_smooth`: return ``q * scale`` without the factors."""

@overload
def quantize_fp8(
    x: Tensor, scale: Tensor | float | None = None, *, granularity: Literal['tensor', 'row', 'group', 'group_t',
    'block', 'channel'] = 'tensor', dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False, scale_layout:
    Literal['row', 'column'] = 'row', layout: Literal["both"], with_transposed: bool = False, group_size: int = 128,
    out: tuple[Tensor | None, ...] | None = None
) -> QuantizedBoth:
    """Quantise a tensor to fp8 codes and scales."""
@overload
def quantize_fp8(
    x: Tensor, scale: Tensor | float | None = None, *, granularity: Literal['tensor', 'row', 'group', 'group_t',
    'block', 'channel'] = 'tensor', dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False, scale_layout:
    Literal['row', 'column'] = 'row', layout: Literal['row', 'both'] = 'row', with_transposed: Literal[True],
    group_size: int = 128, out: tuple[Tensor | None, ...] | None = None
) -> QuantizedBoth: ...
@overload
def quantize_fp8(
    x: Tensor, scale: Tensor | float | None = None, *, granularity: Literal['tensor', 'row', 'group', 'group_t',
    'block', 'channel'] = 'tensor', dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False, scale_layout:
    Literal['row', 'column'] = 'row', layout: Literal["row"] = "row", with_transposed: Literal[False] = False,
    group_size: int = 128, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def quantize_fp8(
    x: Tensor, scale: Tensor | float | None = None, *, granularity: Literal['tensor', 'row', 'group', 'group_t',
    'block', 'channel'] = 'tensor', dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False, scale_layout:
    Literal['row', 'column'] = 'row', layout: Literal['row', 'both'] = 'row', with_transposed: bool = False,
    group_size: int = 128, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor] | QuantizedBoth: ...

def quantize_fp8_experts(
    x: Tensor, counts: Tensor, *, layout: Literal['row', 'transposed', 'both'] = 'both', dtype: torch.dtype =
    torch.float8_e4m3fn, pow2_scale: bool = False, output: Literal['row', 'transposed', 'both'] | None = None, out:
    tuple[Tensor | None, ...] | None = None
) -> QuantizedExperts:
    """Quantise rows sorted by expert to fp8, in groups of 128 along rows, along columns, or both from one read."""

@overload
def quantize_fp8_hadamard(
    x: Tensor, block: int = 128, *, transposed: bool = False, dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale:
    bool = False, layout: Literal["both"], out: tuple[Tensor | None, ...] | None = None
) -> QuantizedBoth:
    """Quantise the :func:`hadamard` transform of a tensor to fp8 with one scale per row, or per column and transposed."""
@overload
def quantize_fp8_hadamard(
    x: Tensor, block: int = 128, *, transposed: bool = False, dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale:
    bool = False, layout: Literal["row"] = "row", out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def quantize_fp8_hadamard(
    x: Tensor, block: int = 128, *, transposed: bool = False, dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale:
    bool = False, layout: Literal['row', 'both'] = 'row', out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor] | QuantizedBoth: ...

def quantize_fp8_smooth(
    x: Tensor, smooth: Tensor | None = None, *, divide: bool = False, row_factor: Tensor | None = None, counts: Tensor
    | None = None, granularity: Literal['row', 'channel'] = 'row', dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False, with_amax: bool = False, pad_to: int = 1, divide_rows: bool = False, out: tuple[Tensor |
    None, ...] | None = None
) -> SmoothQuantized:
    """Quantise ``z = x * smooth * row_factor`` to fp8 with one scale per row or per column."""

@overload
def moe_permute(
    x: Tensor, index: MoeIndex, *, probs: None = None, scale: None = None, dense_probs: bool | None = None, out:
    Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Copy the rows of tokens to the rows of their experts: ``y[index.rows[t, j]] = x[t]``."""
@overload
def moe_permute(
    x: Tensor, index: MoeIndex, *, probs: Tensor, scale: Tensor | None = None, dense_probs: bool | None = None, out:
    Tensor | tuple[Tensor | None, ...] | None = None
) -> MoePermuted: ...
@overload
def moe_permute(
    x: Tensor, index: MoeIndex, *, probs: Tensor | None = None, scale: Tensor, dense_probs: bool | None = None, out:
    Tensor | tuple[Tensor | None, ...] | None = None
) -> MoePermuted: ...
@overload
def moe_permute(
    x: Tensor, index: MoeIndex, *, probs: Tensor | None = None, scale: Tensor | None = None, dense_probs: bool | None
    = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | MoePermuted: ...

def moe_permute_fp8(
    x: Tensor, index: MoeIndex, *, layout: Literal['row', 'transposed', 'both'] = 'both', dtype: torch.dtype =
    torch.float8_e4m3fn, pow2_scale: bool = False, probs: Tensor | None = None, dense_probs: bool | None = None,
    output: Literal['row', 'transposed', 'both'] | None = None, out: tuple[Tensor | None, ...] | None = None
) -> MoePermutedFp8:
    """Copy the rows of tokens to the rows of their experts as fp8 codes with block scales, in one pass."""

def fp8_linear(
    x: Any, weight: Tensor, bias: Tensor | None = None, *, recipe: Literal['block', 'row', 'tensor', 'hadamard',
    'smooth'] = 'block', main_grad: Tensor | None = None, out_dtype: torch.dtype | None = None, grad_dtype:
    torch.dtype | None = None, pow2_scale: bool = False, rotation: int = 64, smooth: Tensor | None = None,
    scale_layout: Literal['row', 'column'] = 'row', weight_codes: Fp8Weight | None = None, save_weight: bool = False,
    wgrad: Literal['fp8', 'bf16'] = 'fp8', backend: Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad',
    'mma', 'cluster', 'decode', 'tcgen05', 'swapped', 'torch'] = 'auto', out: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` computed from fp8 codes, as are both gradients."""

def fp8_weight(
    weight: Tensor, *, recipe: Literal['block', 'row', 'tensor', 'hadamard'] = 'block', pow2_scale: bool = False,
    rotation: int = 64, transposed: bool = True
) -> Fp8Weight:
    """Quantise a weight once for several calls of :func:`fp8_linear`, which otherwise quantises it in every call."""

def load_balancing_loss(
    logits: Tensor, indices: Tensor | None = None, *, counts: Tensor | None = None, k: int | None = None, score:
    Literal['softmax', 'sigmoid'] | None = 'softmax', coefficient: float = 1.0, sequence_dim: int | None = None, out:
    Tensor | None = None
) -> Tensor:
    """Return the auxiliary loss that spreads tokens over experts: ``coefficient * experts * sum over e of f_e P_e``."""

def rms_norm_router(
    x: Tensor, weight: Tensor | None, router_weight: Tensor, *, eps: float | None = None, offset: float = 0,
    precision: Literal['fast', 'high', 'exact'] = 'high', pow2_scale: bool = False, scale_layout: Literal['row',
    'column'] = 'row', out: tuple[Tensor | None, ...] | None = None
) -> NormRouter:
    """Normalise rows, quantise them to fp8 (e4m3) and multiply them by a router's weight."""

def router_gemm(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, precision: Literal['fast', 'high', 'exact'] = 'high',
    main_grad: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` in fp32: the logits of a router."""

def topk_router(
    logits: Tensor, k: int, *, score: Literal['softmax', 'sigmoid'] = 'softmax', score_first: bool = True, bias:
    Tensor | None = None, num_groups: int = 1, top_groups: int | None = None, group_k: int | None = None, renormalize:
    bool = False, scale: float = 1.0, eps: float = 1e-20, dense_probs: bool = False, routing_map: bool = False, out:
    tuple[Tensor | None, ...] | None = None
) -> Routing:
    """Select k experts for every token (every row of logits), and return their probabilities."""

@overload
def gated_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *, act:
    Literal['relu', 'silu', 'gelu_tanh', 'gelu'] = 'silu', recipe: Literal['auto', 'none', 'tensor', 'row',
    'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128', 'tile', 'mx32', 'nvfp4'] = 'auto', bias:
    Tensor | None = None, out_dtype: torch.dtype | None = None, acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32']
    = 'auto', packed: Literal['int4', 'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None,
    Literal['int4', 'uint4', 'e2m1'] | None] | None = None, nibble: Literal['low', 'high'] = 'low', global_scale:
    Tensor | float | None = None, quant_out: None = None, b_layout: Literal['auto', 'nk', 'kn'] = 'auto', backend:
    Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster', 'decode', 'tcgen05', 'swapped',
    'torch'] = 'auto', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return ``act(gate) * up`` with ``[gate, up] = a @ b.T * scales + bias``, computed in fp32 and rounded once."""
@overload
def gated_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *, act:
    Literal['relu', 'silu', 'gelu_tanh', 'gelu'] = 'silu', recipe: Literal['auto', 'none', 'tensor', 'row',
    'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128', 'tile', 'mx32', 'nvfp4'] = 'auto', bias:
    Tensor | None = None, out_dtype: torch.dtype | None = None, acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32']
    = 'auto', packed: Literal['int4', 'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None,
    Literal['int4', 'uint4', 'e2m1'] | None] | None = None, nibble: Literal['low', 'high'] = 'low', global_scale:
    Tensor | float | None = None, quant_out: Literal['1x128', 'row', '1x16'], b_layout: Literal['auto', 'nk', 'kn'] =
    'auto', backend: Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster', 'decode',
    'tcgen05', 'swapped', 'torch'] = 'auto', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *, act:
    Literal['relu', 'silu', 'gelu_tanh', 'gelu'] = 'silu', recipe: Literal['auto', 'none', 'tensor', 'row',
    'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128', 'tile', 'mx32', 'nvfp4'] = 'auto', bias:
    Tensor | None = None, out_dtype: torch.dtype | None = None, acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32']
    = 'auto', packed: Literal['int4', 'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None,
    Literal['int4', 'uint4', 'e2m1'] | None] | None = None, nibble: Literal['low', 'high'] = 'low', global_scale:
    Tensor | float | None = None, quant_out: Literal['1x128', 'row', '1x16'] | None = None, b_layout: Literal['auto',
    'nk', 'kn'] = 'auto', backend: Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster',
    'decode', 'tcgen05', 'swapped', 'torch'] = 'auto', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

def grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, *, offs: Tensor | None = None,
    m_indices: Tensor | None = None, align: int = 1, recipe: Literal['auto', 'none', 'tensor', 'row',
    'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128', 'tile', 'mx32', 'nvfp4'] = 'auto', act:
    Literal['relu', 'silu', 'gelu_tanh', 'gelu'] | None = None, out_dtype: torch.dtype | None = None, out: Tensor |
    None = None, accumulate: bool = False, zero_padding: bool = False, acc: Literal['auto', 'fp32', 'fast', 'fp16',
    'int32'] = 'auto', packed: Literal['int4', 'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None,
    Literal['int4', 'uint4', 'e2m1'] | None] | None = None, b_layout: Literal['auto', 'nk', 'kn'] = 'auto', backend:
    Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster', 'decode', 'tcgen05', 'swapped',
    'torch'] = 'auto'
) -> Tensor:
    """Return the product of each row with the matrix of its group: ``out[i] = a[i] @ b[group of i].T``."""

def grouped_mm_masked(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, masked_m: Tensor | None =
    None, *, expected_m: int = 0, recipe: Literal['auto', 'none', 'tensor', 'row', 'block_1x128_128x128',
    'block_1x128_1x128', 'block_128x128_128x128', 'tile', 'mx32', 'nvfp4'] = 'auto', act: Literal['relu', 'silu',
    'gelu_tanh', 'gelu'] | None = None, out_dtype: torch.dtype | None = None, out: Tensor | None = None, acc:
    Literal['auto', 'fp32', 'fast', 'fp16', 'int32'] = 'auto', packed: Literal['int4', 'uint4', 'e2m1'] |
    tuple[Literal['int4', 'uint4', 'e2m1'] | None, Literal['int4', 'uint4', 'e2m1'] | None] | None = None, b_layout:
    Literal['auto', 'nk', 'kn'] = 'auto', backend: Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad',
    'mma', 'cluster', 'decode', 'tcgen05', 'swapped', 'torch'] = 'auto'
) -> Tensor:
    """Return ``a[g, :masked_m[g]] @ b[g].T`` for each group; the other rows of the result are uninitialised."""

def grouped_wgrad(
    dy: Tensor, x: Tensor, scale_dy: Tensor | None = None, scale_x: Tensor | None = None, *, offs: Tensor, out: Tensor
    | None = None, accumulate: bool = True, align: int | None = None, out_dtype: torch.dtype = torch.float32, recipe:
    Literal['auto', 'none', 'tensor', 'row', 'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128',
    'tile', 'mx32', 'nvfp4'] = 'auto', acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32'] = 'auto', backend:
    Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster', 'decode', 'tcgen05', 'swapped',
    'torch'] = 'auto'
) -> Tensor:
    """Return the weight gradients of a grouped product: ``out[g] += dy_g.T @ x_g`` over the rows of group g."""

@overload
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *, recipe:
    Literal['auto', 'none', 'tensor', 'row', 'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128',
    'tile', 'mx32', 'nvfp4'] = 'auto', bias: Tensor | None = None, add: Tensor | None = None, act: Literal['relu',
    'silu', 'gelu_tanh', 'gelu'] | None = None, out_dtype: torch.dtype | None = None, out: Tensor | None = None,
    accumulate: bool = False, acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32'] = 'auto', packed: Literal['int4',
    'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None, Literal['int4', 'uint4', 'e2m1'] | None] | None
    = None, nibble: Literal['low', 'high'] = 'low', global_scale: Tensor | float | None = None, quant_out: None =
    None, b_layout: Literal['auto', 'nk', 'kn'] = 'auto', backend: Literal['auto', 'rtkernels', 'sm90', 'skinny',
    'unpack', 'pad', 'mma', 'cluster', 'decode', 'tcgen05', 'swapped', 'torch'] = 'auto'
) -> Tensor:
    """Return ``act(a @ b.T * scales + bias + add)``, computed in fp32 after the products and rounded once."""
@overload
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *, recipe:
    Literal['auto', 'none', 'tensor', 'row', 'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128',
    'tile', 'mx32', 'nvfp4'] = 'auto', bias: Tensor | None = None, add: Tensor | None = None, act: Literal['relu',
    'silu', 'gelu_tanh', 'gelu'] | None = None, out_dtype: torch.dtype | None = None, out: Tensor | None = None,
    accumulate: bool = False, acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32'] = 'auto', packed: Literal['int4',
    'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None, Literal['int4', 'uint4', 'e2m1'] | None] | None
    = None, nibble: Literal['low', 'high'] = 'low', global_scale: Tensor | float | None = None, quant_out:
    Literal['1x128', 'row', '1x16'], b_layout: Literal['auto', 'nk', 'kn'] = 'auto', backend: Literal['auto',
    'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster', 'decode', 'tcgen05', 'swapped', 'torch'] =
    'auto'
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *, recipe:
    Literal['auto', 'none', 'tensor', 'row', 'block_1x128_128x128', 'block_1x128_1x128', 'block_128x128_128x128',
    'tile', 'mx32', 'nvfp4'] = 'auto', bias: Tensor | None = None, add: Tensor | None = None, act: Literal['relu',
    'silu', 'gelu_tanh', 'gelu'] | None = None, out_dtype: torch.dtype | None = None, out: Tensor | None = None,
    accumulate: bool = False, acc: Literal['auto', 'fp32', 'fast', 'fp16', 'int32'] = 'auto', packed: Literal['int4',
    'uint4', 'e2m1'] | tuple[Literal['int4', 'uint4', 'e2m1'] | None, Literal['int4', 'uint4', 'e2m1'] | None] | None
    = None, nibble: Literal['low', 'high'] = 'low', global_scale: Tensor | float | None = None, quant_out:
    Literal['1x128', 'row', '1x16'] | None = None, b_layout: Literal['auto', 'nk', 'kn'] = 'auto', backend:
    Literal['auto', 'rtkernels', 'sm90', 'skinny', 'unpack', 'pad', 'mma', 'cluster', 'decode', 'tcgen05', 'swapped',
    'torch'] = 'auto'
) -> Tensor | tuple[Tensor, Tensor]: ...

def decode_linear(
    a: Tensor, b: Tensor, scale_b: Tensor | None = None, *, bias: Tensor | None = None, act: Literal['relu', 'silu',
    'gelu_tanh', 'gelu'] | None = None, gated: bool = False, norm_weight: Tensor | None = None, eps: float = 1e-06,
    offset: float = 0.0, add: Tensor | None = None, factor: float = 1.0, packed: Literal['int4', 'uint4', 'e2m1'] |
    None = None, constant: bool = False, global_scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return a linear layer of a few tokens, in one launch with the norm before it and the residual sum after it."""

@overload
def index_select(
    x: Tensor, indices: Tensor, *, scale: None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return the rows ``x[indices]``, optionally with their scales."""
@overload
def index_select(
    x: Tensor, indices: Tensor, *, scale: Tensor, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def index_select(
    x: Tensor, indices: Tensor, *, scale: Tensor | None = None, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def sort_chunks(
    x: Tensor, counts: Tensor, order: Tensor, *, scale: None = None, out: Tensor | tuple[Tensor | None, ...] | None =
    None
) -> Tensor:
    """Split the rows of x into chunks and reorder the chunks, as needed after an all-to-all between experts."""
@overload
def sort_chunks(
    x: Tensor, counts: Tensor, order: Tensor, *, scale: Tensor, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def sort_chunks(
    x: Tensor, counts: Tensor, order: Tensor, *, scale: Tensor | None = None, out: Tensor | tuple[Tensor | None, ...]
    | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

def patchify(
    img: Tensor, patch: int | tuple[int, int], *, img_layout: Literal['nhwc', 'nchw'] = 'nhwc', order: Literal['hwc',
    'chw'] = 'hwc', lut: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Split images into patches, one row per patch, as a convolution with stride = kernel size reads them."""

@overload
def transpose(
    x: Tensor, dim0: int = -2, dim1: int = -1, *, pad_to: int = 1, out: Tensor | Sequence[Tensor | None] | None = None
) -> Tensor:
    """Return a contiguous copy of a tensor with two dimensions swapped."""
@overload
def transpose(
    x: Sequence[Tensor], dim0: int = -2, dim1: int = -1, *, pad_to: int = 1, out: Tensor | Sequence[Tensor | None] |
    None = None
) -> list[Tensor]: ...

@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: int | tuple[int |
    None, int | None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, kv_limit: Tensor | Sequence[int] | None = None, seqused_k: Tensor | None =
    None, return_lse: Literal[False] = False, out: Tensor | None = None, layout: Literal['blhd', 'bhld'] = 'blhd',
    acc: Literal['fp32', 'fp16_qk', 'fp16_pv', 'fp16'] = 'fp32', backend: Literal['auto', 'sm90', 'mma'] = 'auto'
) -> Tensor:
    """Return ``softmax(scale * q @ k^T) @ v`` for every head, without storing the matrix of scores."""
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: int | tuple[int |
    None, int | None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, kv_limit: Tensor | Sequence[int] | None = None, seqused_k: Tensor | None =
    None, return_lse: Literal[True], out: Tensor | None = None, layout: Literal['blhd', 'bhld'] = 'blhd', acc:
    Literal['fp32', 'fp16_qk', 'fp16_pv', 'fp16'] = 'fp32', backend: Literal['auto', 'sm90', 'mma'] = 'auto'
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: int | tuple[int |
    None, int | None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, kv_limit: Tensor | Sequence[int] | None = None, seqused_k: Tensor | None =
    None, return_lse: bool = False, out: Tensor | None = None, layout: Literal['blhd', 'bhld'] = 'blhd', acc:
    Literal['fp32', 'fp16_qk', 'fp16_pv', 'fp16'] = 'fp32', backend: Literal['auto', 'sm90', 'mma'] = 'auto'
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, scale: float |
    None = None, causal: bool = True, window: int | tuple[int | None, int | None] | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, return_lse:
    Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return the attention of new queries over a cache whose lengths and pages are read on the device only."""
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, scale: float |
    None = None, causal: bool = True, window: int | tuple[int | None, int | None] | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, return_lse:
    Literal[True], out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, scale: float |
    None = None, causal: bool = True, window: int | tuple[int | None, int | None] | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, return_lse: bool =
    False, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention_quantized(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor | None = None, *, scale: float
    | None = None, causal: bool = False, window: int | Sequence[int | None] | None = None, block_q: int = 1, block_k:
    int = 1, seqused_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0, max_seqlen_k: int = 0, out_dtype: torch.dtype = torch.bfloat16, return_lse: Literal[False]
    = False, out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return the attention of 8-bit queries and keys, with 16-bit or 8-bit values."""
@overload
def attention_quantized(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor | None = None, *, scale: float
    | None = None, causal: bool = False, window: int | Sequence[int | None] | None = None, block_q: int = 1, block_k:
    int = 1, seqused_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0, max_seqlen_k: int = 0, out_dtype: torch.dtype = torch.bfloat16, return_lse: Literal[True],
    out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_quantized(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor | None = None, *, scale: float
    | None = None, causal: bool = False, window: int | Sequence[int | None] | None = None, block_q: int = 1, block_k:
    int = 1, seqused_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0, max_seqlen_k: int = 0, out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, *, scale: float | None = None, causal: bool = False, window: int | tuple[int | None, int |
    None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor
    | None = None, return_lse: Literal[False] = False, out: Tensor | None = None, backend: Literal['auto', 'sm90',
    'mma'] = 'auto'
) -> Tensor:
    """Return the attention of packed sequences; each sequence attends only to itself."""
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, *, scale: float | None = None, causal: bool = False, window: int | tuple[int | None, int |
    None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor
    | None = None, return_lse: Literal[True], out: Tensor | None = None, backend: Literal['auto', 'sm90', 'mma'] =
    'auto'
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, *, scale: float | None = None, causal: bool = False, window: int | tuple[int | None, int |
    None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor
    | None = None, return_lse: bool = False, out: Tensor | None = None, backend: Literal['auto', 'sm90', 'mma'] =
    'auto'
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, scale: float | None = None, initial_state: Tensor | None =
    None, cu_seqlens: Tensor | None = None, return_state: Literal[False] = False, out: Tensor | tuple[Tensor | None,
    ...] | None = None, group: Any = None, zigzag: bool | None = None
) -> Tensor:
    """Return causal linear attention with an exponential decay per head."""
@overload
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, scale: float | None = None, initial_state: Tensor | None =
    None, cu_seqlens: Tensor | None = None, return_state: Literal[True], out: Tensor | tuple[Tensor | None, ...] |
    None = None, group: Any = None, zigzag: bool | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, scale: float | None = None, initial_state: Tensor | None =
    None, cu_seqlens: Tensor | None = None, return_state: bool = False, out: Tensor | tuple[Tensor | None, ...] | None
    = None, group: Any = None, zigzag: bool | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None, layout: Literal['blhd',
    'bhld'] = 'blhd', out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attentions over parts of the keys into the attention over all keys, using their log-sum-exps."""

@overload
def mla_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, scale: float | None = None, causal: bool = True,
    clip_value: float | None = None, return_lse: Literal[False] = False, layout: Literal['blhd', 'bhld'] = 'blhd',
    backend: Literal['auto', 'sm90', 'mma'] = 'auto', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return multi-head latent attention with keys and values expanded from the latent, the form used in training."""
@overload
def mla_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, scale: float | None = None, causal: bool = True,
    clip_value: float | None = None, return_lse: Literal[True], layout: Literal['blhd', 'bhld'] = 'blhd', backend:
    Literal['auto', 'sm90', 'mma'] = 'auto', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, scale: float | None = None, causal: bool = True,
    clip_value: float | None = None, return_lse: bool = False, layout: Literal['blhd', 'bhld'] = 'blhd', backend:
    Literal['auto', 'sm90', 'mma'] = 'auto', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def mla_decode(
    q: Tensor, kv_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, value_width: int = 512, scale:
    float | None = None, causal: bool = True, return_lse: Literal[False] = False, out: Tensor | tuple[Tensor | None,
    ...] | None = None
) -> Tensor:
    """Return the attention of new tokens over a cache of latents, which are the keys and values of all heads."""
@overload
def mla_decode(
    q: Tensor, kv_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, value_width: int = 512, scale:
    float | None = None, causal: bool = True, return_lse: Literal[True], out: Tensor | tuple[Tensor | None, ...] |
    None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_decode(
    q: Tensor, kv_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, value_width: int = 512, scale:
    float | None = None, causal: bool = True, return_lse: bool = False, out: Tensor | tuple[Tensor | None, ...] | None
    = None
) -> Tensor | tuple[Tensor, Tensor]: ...

def quantize_qk(
    q: Tensor, k: Tensor, *, dtype: torch.dtype = torch.int8, granularity: Literal['token', 'block'] = 'token',
    smooth_k: bool = True, scale: float | None = None, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q and k as 8-bit codes with scales, as ``attention_quantized`` takes them. Not differentiable."""

@overload
def sage_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: int | tuple[int |
    None, int | None] | None = None, qk: Literal['int8', 'fp8'] = 'int8', pv: Literal['16', 'int8', 'fp8'] = '16',
    granularity: Literal['token', 'block'] = 'token', smooth_k: bool = True, return_lse: Literal[False] = False,
    layout: Literal['blhd', 'bhld'] = 'blhd', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return attention computed with 8-bit q and k, and optionally 8-bit v."""
@overload
def sage_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: int | tuple[int |
    None, int | None] | None = None, qk: Literal['int8', 'fp8'] = 'int8', pv: Literal['16', 'int8', 'fp8'] = '16',
    granularity: Literal['token', 'block'] = 'token', smooth_k: bool = True, return_lse: Literal[True], layout:
    Literal['blhd', 'bhld'] = 'blhd', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def sage_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: int | tuple[int |
    None, int | None] | None = None, qk: Literal['int8', 'fp8'] = 'int8', pv: Literal['16', 'int8', 'fp8'] = '16',
    granularity: Literal['token', 'block'] = 'token', smooth_k: bool = True, return_lse: bool = False, layout:
    Literal['blhd', 'bhld'] = 'blhd', out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal['silu'] | None = 'silu',
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: Literal[False] = False, out:
    Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Convolve each channel with its own short causal filter over time, and apply silu."""
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal['silu'] | None = 'silu',
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: Literal[True], out: Tensor |
    tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal['silu'] | None = 'silu',
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: bool = False, out: Tensor |
    tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: Literal['silu'] | None = 'silu',
    out: Tensor | None = None
) -> Tensor:
    """Return ``causal_conv1d`` for one more token per sequence, and shift it into the states."""

@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *, scale: float | None = None, initial_state:
    Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: Literal[False] = False, l2norm: bool =
    False, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_sigmoid:
    bool = False, beta_scale: float = 1.0, state_layout: Literal['kv', 'vk'] = 'kv', out: Tensor | tuple[Tensor |
    None, ...] | None = None, group: Any = None, zigzag: bool | None = None
) -> Tensor:
    """Return linear attention by the gated delta rule."""
@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *, scale: float | None = None, initial_state:
    Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: Literal[True], l2norm: bool = False, A_log:
    Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_sigmoid: bool = False,
    beta_scale: float = 1.0, state_layout: Literal['kv', 'vk'] = 'kv', out: Tensor | tuple[Tensor | None, ...] | None
    = None, group: Any = None, zigzag: bool | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *, scale: float | None = None, initial_state:
    Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: bool = False, l2norm: bool = False, A_log:
    Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_sigmoid: bool = False,
    beta_scale: float = 1.0, state_layout: Literal['kv', 'vk'] = 'kv', out: Tensor | tuple[Tensor | None, ...] | None
    = None, group: Any = None, zigzag: bool | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_state: Literal[False] = False, out: Tensor | tuple[Tensor | None, ...] |
    None = None
) -> Tensor:
    """Return the state space model of Mamba-2 ("SSD"): linear attention with a decay per token."""
@overload
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_state: Literal[True], out: Tensor | tuple[Tensor | None, ...] | None =
    None
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_state: bool = False, out: Tensor | tuple[Tensor | None, ...] | None =
    None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float | None = None, value_width: int = 512, positions: Tensor |
    None = None, sinks: Tensor | None = None, return_lse: Literal[False] = False, out: Tensor | tuple[Tensor | None,
    ...] | None = None
) -> Tensor:
    """Return latent attention of each token over the keys that its indices choose (DeepSeek sparse attention)."""
@overload
def sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float | None = None, value_width: int = 512, positions: Tensor |
    None = None, sinks: Tensor | None = None, return_lse: Literal[True], out: Tensor | tuple[Tensor | None, ...] |
    None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float | None = None, value_width: int = 512, positions: Tensor |
    None = None, sinks: Tensor | None = None, return_lse: bool = False, out: Tensor | tuple[Tensor | None, ...] | None
    = None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def multi_count_zeros(
    tensors: Tensors, *, per_tensor: Literal[False] = False, group: Any = None, out: Tensor | tuple[Tensor | None,
    ...] | None = None
) -> Tensor:
    """Return the number of zeros in all tensors together (of either sign; NaN and subnormals do not count)."""
@overload
def multi_count_zeros(
    tensors: Tensors, *, per_tensor: Literal[True], group: Any = None, out: Tensor | tuple[Tensor | None, ...] | None
    = None
) -> tuple[Tensor, Tensor]: ...
@overload
def multi_count_zeros(
    tensors: Tensors, *, per_tensor: bool = False, group: Any = None, out: Tensor | tuple[Tensor | None, ...] | None =
    None
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def multi_norm(
    tensors: Tensors, ord: float = 2.0, *, per_tensor: Literal[False] = False, group: Any = None, root: bool = True,
    out: Tensor | tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Return the norm of all elements of all tensors together: l2, l1 or the largest magnitude."""
@overload
def multi_norm(
    tensors: Tensors, ord: float = 2.0, *, per_tensor: Literal[True], group: Any = None, root: bool = True, out:
    Tensor | tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def multi_norm(
    tensors: Tensors, ord: float = 2.0, *, per_tensor: bool = False, group: Any = None, root: bool = True, out: Tensor
    | tuple[Tensor | None, ...] | None = None
) -> Tensor | tuple[Tensor, Tensor]: ...

def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int | tuple[int, ...] = 1, padding: int |
    tuple[int, ...] | Literal['same', 'valid'] = 0, dilation: int | tuple[int, ...] = 1, groups: int = 1, out: Tensor
    | None = None
) -> Tensor:
    """Return a convolution in one, two or three dimensions, as ``torch.nn.functional.conv1d`` to ``conv3d``."""
