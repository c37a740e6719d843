"""Torch's own operators on the kernels of this package: ``rtkernels.enable()`` switches it on, for unmodified code.

A *family module* (``pointwise.py``, ``copy.py``, ``reduce.py``, ...; ``table.FAMILIES`` lists them) contributes rows::

    from rtkernels.aten.table import NotHandled, Overload

    _FLOAT64 = NotHandled("float64")

    def _amax(self, dim=(), keepdim=False):
        if self.dtype == torch.float64:
            return _FLOAT64
        return AMAX.call(self, ...)

    def rows():
        yield Overload("amax", "red", _amax, default=True, opinfo=("amax",))

The handler takes what the schema of the aten overload takes (``torch.ops.aten.amax.default._schema``), with the same
names and defaults: the dispatcher passes arguments that differ from their defaults only. It returns the result, or a
``NotHandled`` with a short reason, and then torch's own kernel runs. What a handler may rely on, and must keep:

* It runs below autograd: derivative formulas of torch stay in force, and their aten ops come here in turn. It must
  not record gradients itself, so it calls operators (``FORWARD.call``) or kernels, not public functions; it returns
  fresh tensors, never an input (in-place and ``out=`` forms return the tensor that was written).
* Tensors are plain, strided, on one device (CUDA, or the CPU while ``rtkernels.emulate()`` is on), except that 0-d
  CPU tensors may come beside others; lazy negatives and conjugates are resolved. Python scalars come as numbers.
* Whatever it does not do exactly as torch does (dtype, rank, memory format, an invalid argument) is a ``NotHandled``
  before the first launch and before anything is written: torch computes it, or raises its own error. An
  ``ArgumentError`` and a kernel that cannot be had (not compiled while a graph is captured, no NVRTC) go the same
  way, by themselves.
* It never reads values of tensors on the host (unless the shape of the result depends on them), launches on torch's
  current stream and takes its memory from torch: then it is safe in CUDA graphs.
* aten ops that a handler calls go to torch, not to other handlers.
* With ``replays=True`` a call that is like one before does not reach it: what that launched is launched again, on the
  new tensors (``replay.py``). Its launches must follow from metadata and numbers alone, and go through primitives,
  ``elementwise.run`` or the ``launch`` of an operator. Memory that comes from elsewhere is noticed, and the handler is
  called each time; a value that the host reads, or a kernel of torch that changes the result of a launch, is not.
* With ``passes=("alpha",)`` a replay takes any float for `alpha`: the handler gives it to its launches as it is, and
  looks at its type only.
* Composites (CompositeImplicitAutograd) lose their gradient when they get a kernel: a row for one is refused unless
  it says ``composite="no gradient"``, for results that have none (``isclose``).

Kernels belong to an ``Op`` without public functions (``Op("aten_reduce", public=(), kernels=(...), torch_ops=())``)
and to tier "aten"; the registry finds those of the family modules too.
"""

from rtkernels.aten.enable import disable as disable
from rtkernels.aten.enable import enable as enable
from rtkernels.aten.enable import enabled as enabled
from rtkernels.aten.enable import use as use
from rtkernels.aten.report import report as report
from rtkernels.aten.report import reset as reset
from rtkernels.aten.table import NotHandled as NotHandled
from rtkernels.aten.table import Overload as Overload
from rtkernels.aten.table import overloads as overloads
