"""Use rtkernels' functions inside ``jax.jit``, with XLA's memory and on XLA's stream.

``as_jax`` turns a public function into a function of JAX arrays, through XLA's foreign function interface. Its C
structs are declared with ctypes below, so nothing has to be built. The handler views XLA's buffers as torch tensors and
calls the function with the result buffers as ``out=``. Needs the package ``jax``.

    import rtkernels.jax as rj
    y = jax.jit(lambda x, w: rj.rms_norm(x, w, eps=1e-6))(x, w)

Shapes and dtypes of results are found by running the function on tensors without data. Gradients (``differentiable=``)
are computed by torch: the backward pass runs the function again, with gradients. Compile kernels before the first
jitted call (``rtkernels warm``), or that call waits for the compiler. The handler holds the GIL on a thread of XLA.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rtkernels
from rtkernels.errors import ArgumentError

# Constants of XLA's interface.
_EXECUTE = 3  # a stage
_METADATA = 1  # a type of extension
_INTERNAL = 13  # an error code
_NAMES = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64", "bool"),
)
_TORCH = {name: getattr(torch, name) for name in _NAMES}


# ---- the C structs of xla/ffi/api/c_api.h ---------------------------------------------------------------------------


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [
    ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int32), ("next", ctypes.POINTER(_Extension)),
]  # fmt: skip


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
    )  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", _Version),
        ("internal", ctypes.c_void_p), ("error_create", ctypes.c_void_p), ("error_message", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p), ("register", ctypes.c_void_p), ("stream_get", ctypes.c_void_p),
    )  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int32)), ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )  # fmt: skip


class _CallFrame(ctypes.Structure):  # later fields are not read
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p), ("stage", ctypes.c_int32), ("args", _Buffers), ("rets", _Buffers),
    )  # fmt: skip


class _ErrorArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("message", ctypes.c_char_p),
        ("code", ctypes.c_int32),
    )  # fmt: skip


class _StreamArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )  # fmt: skip


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
_MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArgs))
_GetStream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamArgs))


# ---- handlers -------------------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Memory:
    """GPU memory with the ``__cuda_array_interface__`` that torch reads."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _tensor(buffer: _Buffer, spec: Spec, on_gpu: bool) -> Tensor:
    """Return a tensor that shares the memory of XLA's buffer."""
    nbytes = spec.dtype.itemsize
    for size in spec.shape:
        nbytes *= size
    if nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cuda" if on_gpu else "cpu")
    if on_gpu:
        memory = torch.as_tensor(_Memory(buffer.data, nbytes), dtype=torch.uint8, device="cuda")
    else:
        memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(buffer.data), dtype=torch.uint8)
    return memory.view(spec.dtype).view(spec.shape)


def _handler(run: Callable[..., None], inputs: Sequence[Spec], results: Sequence[Spec], on_gpu: bool) -> Any:
    """Return the handler that XLA calls. It runs ``run(*inputs, *results)`` on its stream and never raises."""

    def execute(frame: _CallFrame) -> None:
        given = [_tensor(frame.args.items[i].contents, spec, on_gpu) for i, spec in enumerate(inputs)]
        given += [_tensor(frame.rets.items[i].contents, spec, on_gpu) for i, spec in enumerate(results)]
        if not on_gpu:
            run(*given)
            return
        asked = _StreamArgs(ctypes.sizeof(_StreamArgs), None, frame.context, None)
        if _GetStream(frame.api.contents.stream_get)(ctypes.byref(asked)):
            raise RuntimeError("XLA gave no stream")
        device = given[0].device if given else torch.device("cuda")
        with torch.cuda.stream(torch.cuda.ExternalStream(asked.stream or 0, device=device)):
            run(*given)

    def call(pointer: Any) -> int | None:
        frame = pointer.contents
        extension = frame.extension
        if extension and extension.contents.type == _METADATA:
            found = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
            ours = frame.api.contents.version if frame.api else None
            found.version.major, found.version.minor = (ours.major, ours.minor) if ours else (0, 1)
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            execute(frame)
        except BaseException as error:  # an exception cannot pass through XLA
            message = f"{type(error).__name__}: {error}".encode()
            arguments = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, _INTERNAL)
            return _MakeError(frame.api.contents.error_create)(ctypes.byref(arguments))
        return None

    return _Handler(call)


_targets: dict[Any, str] = {}
_handlers: list[Any] = []  # XLA keeps their addresses forever
_lock = threading.Lock()


def _target(key: Any, run: Callable[..., None], inputs: Sequence[Spec], results: Sequence[Spec]) -> str:
    """Return the name of a handler, registered with XLA at its first use."""
    with _lock:
        name = _targets.get(key)
        if name is None:
            name = f"rtkernels_{len(_targets)}_{key[0]}"
            for platform, on_gpu in (("cpu", False), ("CUDA", True)):
                handler = _handler(run, inputs, results, on_gpu)
                _handlers.append(handler)
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform)
            _targets[key] = name
        return name


# ---- as_jax ---------------------------------------------------------------------------------------------------------


def _spec(array: Any) -> Spec:
    name = str(array.dtype)
    if name not in _TORCH:
        raise ArgumentError(f"an array has dtype {name}; expected one of {', '.join(_TORCH)}")
    return Spec(tuple(array.shape), _TORCH[name])


def _as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


def _results_of(call: Callable[..., Any], inputs: Sequence[Spec]) -> tuple[list[Spec], bool]:
    """Return shapes and dtypes of the results of a call, and whether all are contiguous, as XLA arrays are."""
    with FakeTensorMode(), torch.no_grad():
        results = _as_list(call(*(torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for spec in inputs)))
        return [Spec(tuple(t.shape), t.dtype) for t in results], all(t.is_contiguous() for t in results)


def as_jax(
    function: Callable[..., Any], *, differentiable: Sequence[int] = (), name: str | None = None
) -> Callable[..., Any]:
    """Return a function of JAX arrays that can be called inside ``jax.jit``.

    Args:
        function: A public function of rtkernels, or any function of torch tensors that returns one or more tensors.
        differentiable: Positions of the array arguments that get a gradient; `function` must be differentiable in them.
        name: Name of the result. Default: the name of `function`.

    Returns:
        A function that takes arrays by position (None for omitted ones) and options by name, like `function`. It
        returns one array, or a tuple of the results that are not None.
    """
    name = name or function.__name__
    takes_out = "out" in inspect.signature(function).parameters

    def wrapped(*arrays: Any, **options: Any) -> Any:
        given = [i for i, array in enumerate(arrays) if array is not None]
        key = (name, function, tuple(given), len(arrays), tuple(sorted(options.items())))
        present = [jnp.asarray(arrays[i]) for i in given]

        def call(*tensors: Tensor, out: Any = None) -> Any:
            everything: list[Any] = [None] * len(arrays)
            for i, tensor in zip(given, tensors, strict=True):
                everything[i] = tensor
            return function(*everything, **options) if out is None else function(*everything, **options, out=out)

        forward = _forward(key, call, takes_out)
        wanted = [k for k, i in enumerate(given) if i in differentiable]
        if not wanted:
            return forward(*present)
        return _with_gradient(key, call, forward, wanted)(*present)

    wrapped.__name__ = wrapped.__qualname__ = name
    wrapped.__doc__ = f"``{function.__name__}`` of rtkernels on JAX arrays; options by name.\n\n{function.__doc__}"
    return wrapped


def _foreign(key: Any, run: Callable[..., None], inputs: Sequence[Spec], results: Sequence[Spec]) -> Callable[..., Any]:
    target = _target((*key, tuple(inputs), tuple(results)), run, inputs, results)
    shapes = [jax.ShapeDtypeStruct(r.shape, jnp.dtype(str(r.dtype).removeprefix("torch."))) for r in results]
    return jax.ffi.ffi_call(target, shapes)


def _forward(key: Any, call: Callable[..., Any], takes_out: bool) -> Callable[..., Any]:
    def forward(*arrays: Any) -> Any:
        inputs = [_spec(array) for array in arrays]
        results, dense = _results_of(call, inputs)

        @torch.no_grad()
        def run(*tensors: Tensor) -> None:
            given, outs = tensors[: len(inputs)], tensors[len(inputs) :]
            if takes_out and dense and len(outs) == 1:
                call(*given, out=outs[0])
                return
            for out, result in zip(outs, _as_list(call(*given)), strict=True):
                out.copy_(result)

        outputs = _foreign(key, run, inputs, results)(*arrays)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return forward


def _with_gradient(
    key: Any, call: Callable[..., Any], forward: Callable[..., Any], wanted: Sequence[int]
) -> Callable[..., Any]:
    def backward(arrays: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
        dys = [dy] if not isinstance(dy, tuple) else list(dy)
        inputs, gradients = [_spec(array) for array in arrays], [_spec(d) for d in dys]
        results = [inputs[k] for k in wanted]

        def run(*tensors: Tensor) -> None:
            given = list(tensors[: len(inputs)])
            dy_tensors = tensors[len(inputs) : len(inputs) + len(gradients)]
            with torch.enable_grad():
                for k in wanted:
                    given[k] = given[k].detach().requires_grad_()
                outputs = _as_list(call(*given))
                pairs = [(y, d) for y, d in zip(outputs, dy_tensors, strict=True) if y.requires_grad]
                found = torch.autograd.grad(
                    [y for y, _ in pairs], [given[k] for k in wanted], [d for _, d in pairs], allow_unused=True
                )
            for out, gradient in zip(tensors[len(inputs) + len(gradients) :], found, strict=True):
                out.zero_() if gradient is None else out.copy_(gradient)

        outputs = _foreign((f"{key[0]}_backward", *key[1:]), run, [*inputs, *gradients], results)(*arrays, *dys)
        by_place = dict(zip(wanted, outputs, strict=True))
        return tuple(by_place.get(k, _no_gradient(array)) for k, array in enumerate(arrays))

    function = jax.custom_vjp(forward)
    function.defvjp(lambda *arrays: (forward(*arrays), arrays), backward)
    return function


def _no_gradient(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    import numpy

    return numpy.zeros(array.shape, jax.dtypes.float0)


# ---- functions ------------------------------------------------------------------------------------------------------

rms_norm = as_jax(rtkernels.rms_norm, differentiable=(0, 1))
layer_norm = as_jax(rtkernels.layer_norm, differentiable=(0, 1, 2))
glu = as_jax(rtkernels.glu, differentiable=(0, 1))
rope = as_jax(rtkernels.rope, differentiable=(0,))
softmax = as_jax(rtkernels.softmax, differentiable=(0,))
quantize_fp8 = as_jax(rtkernels.quantize_fp8)
dequantize_fp8 = as_jax(rtkernels.dequantize_fp8)
scaled_mm = as_jax(rtkernels.scaled_mm)


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    return rtkernels.quantize_fp8(x, scale.reshape(()))[0]


_quantize_static = as_jax(_codes, name="quantize_fp8_static")


def quantize_fp8_static(x: Any, scale: Any) -> Any:
    """Return ``fp8(x / scale)`` as float8_e4m3fn in x's shape; scale is one float32 element."""
    return _quantize_static(x, scale)


def _product(q: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, *, layout: str) -> Tensor:
    scales = scale_x.reshape(()), scale_w.reshape(())
    w = w.view(torch.float8_e4m3fn) if w.dtype == torch.uint8 else w
    return rtkernels.scaled_mm(q, w, *scales, out_dtype=torch.bfloat16, b_layout=layout)


_fp8_product = as_jax(_product, name="fp8_product")


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def fp8_gemm(x: Any, w_bf16: Any, w_fp8: Any, scale_x: Any, scale_w: Any, layout: str = "nk") -> Any:
    """Return ``x @ w.T`` from fp8 codes (``x @ w`` for layout "kn"), with gradients of x and w_bf16 in bfloat16.

    Args:
        x: bfloat16 ``[..., k]``; quantised with scale_x.
        w_bf16: bfloat16 ``[n, k]``; used for the gradient of x, and receives the weight gradient.
        w_fp8: The codes of w, float8_e4m3fn ``[n, k]``, or uint8 with the same bits.
        scale_x: One float32 element, the scale of x.
        scale_w: One float32 element, the scale of w_fp8.
        layout: "nk", or "kn" if w_bf16 and w_fp8 are ``[k, n]``.

    Returns:
        bfloat16 ``[..., n]``.
    """
    if layout not in ("nk", "kn"):
        raise ArgumentError(f"layout is {layout!r}; expected 'nk' or 'kn'")
    return _fp8_product(quantize_fp8_static(x, scale_x), w_fp8, scale_x, scale_w, layout=layout)


def _fp8_gemm_forward(*given: Any) -> tuple[Any, tuple[Any, ...]]:
    return fp8_gemm(*given), given[:5]


def _fp8_gemm_backward(layout: str, arrays: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    x, w, w_fp8, scale_x, scale_w = arrays
    dx = jnp.einsum(f"...n,{layout}->...k", dy, w)
    dw = jnp.einsum(f"...n,...k->{layout}", dy, x).astype(w.dtype)
    return dx, dw, _no_gradient(w_fp8), jnp.zeros_like(scale_x), jnp.zeros_like(scale_w)


fp8_gemm.defvjp(_fp8_gemm_forward, _fp8_gemm_backward)
