"""The kernels of log-probabilities and their launches."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.ops.loss.label_report import report
from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES, WIDTH, divisor, group_threads
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_UNIT = "loss/logprob.cu"
_THREADS = 256
_MANY_THREADS = 512  # if there are few rows
_BATCH = 4  # vectors that a thread of logprob_parts requests together
_GRADIENT_THREADS = 128
_CHUNKS = 4  # vectors of a thread of logprob_gradient
_ROW_THREADS = 128  # of a block with a thread for each row
ENTROPY, LSE, SQUARES, MEAN, TOP1 = 1, 2, 4, 8, 16  # bits of the option `wanted`

_IDS = "ids_int64:i64 k:i64 ignore_index:i64 first:i64 vocabulary:i64"
_SCORES = "scale:f64 softcap:f64 temperature:f64"
PARTS = Kernel(
    _UNIT, "logprob_parts", template="T ENTROPY SQUARES", max_registers=64,
    args="x:ptr ids:ptr temperatures:ptr parts:ptr targets:ptr report:ptr rows:i64 cols:i64 x_stride:i64 "
    f"{_IDS} threads_per_row:i64 wanted:i64 begins:i64 {_SCORES}",
    variants=[(t, entropy, squares) for (t,) in TYPES for entropy in (False, True) for squares in (False, True)],
)  # fmt: skip
FINISH = Kernel(
    _UNIT, "logprob_finish", template="T", max_registers=64, variants=[("fp32",)],
    args="parts:ptr targets:ptr ids:ptr logprob:ptr entropy:ptr lse:ptr log_sum_sq:ptr mean_logit:ptr top1:ptr "
    "stats:ptr n:i64 rows:i64 k:i64 ids_int64:i64 ignore_index:i64 vocabulary:i64",
)  # fmt: skip
TERMS = Kernel(
    _UNIT, "logprob_terms", template="T", max_registers=64, variants=[("fp32",)],
    args="dlogprob:ptr dentropy:ptr dlse:ptr dsquares:ptr dmean:ptr ids:ptr stats:ptr entropy:ptr log_sum_sq:ptr "
    "terms:ptr rows:i64 k:i64 ids_int64:i64 ignore_index:i64 vocabulary:i64",
)  # fmt: skip
GRADIENT = Kernel(
    _UNIT, "logprob_gradient", template="T D", max_registers=64,
    args="x:ptr dx:ptr ids:ptr temperatures:ptr terms:ptr targets:ptr dlogprob:ptr rows:i64 cols:i64 x_stride:i64 "
    f"dx_stride:i64 {_IDS} threads_per_row:i64 segments:i64 by_segments:i64 {_SCORES}",
    variants=[(t, t) for (t,) in TYPES] + [("fp32", "bf16"), ("fp32", "fp16")],
)  # fmt: skip
KERNELS = (PARTS, FINISH, TERMS, GRADIENT)


def _group(vectors: int, limit: int, each: int) -> int:
    """Threads of a row, with `each` vectors or more; 16 or more, so that each column outside of the vectors has one."""
    return max(16, group_threads(-(-vectors // each), limit))


def _is_int64(ids: Meta) -> int:
    return int(ids.dtype == torch.int64)


def _plan_parts(
    logits: Meta, ids: Meta, ignore_index: int, vocabulary: int, wanted: int, logit_scale: float, softcap: float,
    temperature: float, device: int,
) -> Steps:  # fmt: skip
    rows, cols = logits.shape
    limit = _MANY_THREADS if choice_rows(rows) <= 2 * device_info(device).sm_count else _THREADS
    vectors = cols // WIDTH[logits.token]
    batches = max(1, -(-vectors // (limit * _BATCH)))  # all of about as many vectors
    threads = _group(vectors, limit, batches * _BATCH)
    variant = (logits.token, bool(wanted & ENTROPY), bool(wanted & SQUARES))
    launch = PARTS.bind(variant, device, *plans.row_grid(rows, threads))
    tensors = "logits", "ids", "temperatures", "parts", "targets", "report"
    sizes = rows, cols, logits.row_stride, _is_int64(ids), ids.shape[1], ignore_index, "first", vocabulary, threads
    numbers = wanted & (MEAN | TOP1), "begins", logit_scale, softcap, temperature
    return Steps(Step(launch, *tensors, *sizes, *numbers), kept={"report": report(device).tensor})


def _plan_terms(dlogprob: Meta | None, ids: Meta, ignore_index: int, vocabulary: int, device: int) -> Steps:
    rows, k = ids.shape
    launch = TERMS.bind(("fp32",), device, -(-rows // _ROW_THREADS), _ROW_THREADS)
    tensors = "dlogprob dentropy dlse dsquares dmean ids stats entropy log_sum_sq terms".split()
    return Steps(Step(launch, *tensors, rows, k, _is_int64(ids), ignore_index, vocabulary))


def _plan_gradient(
    logits: Meta, dlogits: Meta, ids: Meta, ignore_index: int, vocabulary: int, logit_scale: float, softcap: float,
    temperature: float, device: int,
) -> Steps:  # fmt: skip
    rows, cols = logits.shape
    vectors = cols // WIDTH[logits.token]
    threads = _group(vectors, _GRADIENT_THREADS, _CHUNKS)
    segments = max(1, -(-vectors // (threads * _CHUNKS)))
    launch = GRADIENT.bind((logits.token, dlogits.token), device, *plans.row_grid(rows, threads, segments))
    tensors = "logits", "dlogits", "ids", "temperatures", "terms", "targets", "dlogprob"
    sizes = rows, cols, logits.row_stride, dlogits.row_stride, _is_int64(ids), ids.shape[1], ignore_index, "first"
    numbers = vocabulary, threads, segments, divisor(segments), logit_scale, softcap, temperature
    return Steps(Step(launch, *tensors, *sizes, *numbers))


def plan_finish(
    parts: Meta, ids: Meta, ignore_index: int, vocabulary: int, k: int, wanted: int, device: int
) -> Steps:  # fmt: skip
    """Return the launch of logprob_finish."""
    n, _, rows = parts.shape
    launch = FINISH.bind(("fp32",), device, -(-rows // _ROW_THREADS), _ROW_THREADS)
    bits = {"entropy": ENTROPY, "lse": LSE, "log_sum_sq": SQUARES, "mean_logit": MEAN, "top1": TOP1}
    of_rows = [name if wanted & bit else 0 for name, bit in bits.items()]
    tensors = "parts", "targets", "ids", "logprob", *of_rows, "stats"
    return Steps(Step(launch, *tensors, n, rows, k, _is_int64(ids), ignore_index, vocabulary))


def _optional(name: str) -> Dense:
    return Dense(name, None, optional=True)


_LOGITS, _IDS_ARGUMENT = Argument("logits", None), Dense("ids", None)
_TEMPERATURES = Dense("temperatures", None, optional=True)
_NUMBERS = "int ignore_index, int vocabulary, {}float logit_scale, float softcap, float temperature, int first{}"
# Dense ids [rows, k]; logits [rows, columns] whose rows begin at multiples of 16 bytes. No checks.
ADD_PARTS = Primitive(
    "logprob_parts",
    (_LOGITS, _IDS_ARGUMENT, _TEMPERATURES, InPlace("parts", None), InPlace("targets", None)),
    _NUMBERS.format("int wanted, ", ", int begins"), results="", plan=_plan_parts, numbers="first begins",
)  # fmt: skip
MAKE_TERMS = Primitive(
    "logprob_terms",
    (_IDS_ARGUMENT, *map(_optional, ("dlogprob", "dentropy", "dlse", "dsquares", "dmean")), Dense("stats", None),
     *map(_optional, ("entropy", "log_sum_sq"))),
    "int ignore_index, int vocabulary", results="terms", plan=_plan_terms,
    outputs=lambda ids: (Memory((6, ids.shape[0]), torch.float32),),
)  # fmt: skip
MAKE_GRADIENT = Primitive(
    "logprob_gradient",
    (_LOGITS, InPlace("dlogits", None, over="logits"), _IDS_ARGUMENT, _TEMPERATURES, Dense("terms", None),
     Dense("targets", None), Dense("dlogprob", None, optional=True)),
    _NUMBERS.format("", ""), results="", plan=_plan_gradient, numbers="first",
)  # fmt: skip


def raise_if_bad(tensor: Tensor) -> None:
    """Raise an ArgumentError if a finished kernel has reported a bad id."""
    report(tensor.get_device()).raise_if_bad()
