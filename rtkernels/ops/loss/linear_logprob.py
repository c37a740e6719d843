"""Log-probabilities of tokens, and statistics of their distribution, from hidden states: no logits are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_logprob_tiles as tiles
from rtkernels.ops.loss import logprob_plan as plans
from rtkernels.ops.loss.cross_entropy_parallel import vocabulary_range
from rtkernels.ops.loss.cross_entropy_plan import SOFTCAP, as_autocast, check_vocabulary, refuse_group
from rtkernels.ops.loss.linear_logprob_checks import check_inputs, check_numbers
from rtkernels.ops.loss.linear_logprob_head import candidates
from rtkernels.ops.loss.linear_logprob_operators import BACKWARD, BACKWARD_SAVED, FINISH, PARTS, add_gradients
from rtkernels.ops.loss.linear_logprob_parallel import all_parts, complete
from rtkernels.ops.loss.linear_logprob_projected import BACKWARD as PROJECTED_BACKWARD
from rtkernels.ops.loss.linear_logprob_projected import PROJECT
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Among, Within, check_number
from rtkernels.runtime.operator.autograd import constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.kinds import meta_of
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

BITS = (plans.ENTROPY, plans.LSE, plans.SQUARES, plans.MEAN, plans.TOP1)
SAVES = ("stats", "logits", "projected")


class Call(NamedTuple):
    """The options of a call.

    Attributes:
        numbers: ignore_index, logit_scale, softcap, temperature, fp32_logits, chunk_bytes, then the first column of
            this process and the size of the vocabulary, as operators take them.
        wanted: Bits of ``logprob_plan``.
        save: What gradients are computed from.
        group: Over which the vocabulary is split, or None.
    """

    numbers: tuple[Any, ...]
    wanted: int
    save: str
    group: Any

    @property
    def score_numbers(self) -> tuple[Any, ...]:
        """Numbers without those of products."""
        return *self.numbers[:4], *self.numbers[6:]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ids, bias, temperatures, call):
        ctx.set_materialize_grads(False)
        ctx.needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        ctx.call = call
        ctx.starts = start_of(weight, "a head"), start_of(bias, "a head")
        *results, saved = forward(hidden, weight, ids, bias, temperatures, call)
        entropy, squares = results[1], results[3]
        ctx.save_for_backward(hidden, weight, ids, bias, temperatures, entropy, squares, *saved)
        ctx.mark_non_differentiable(results[5])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogprob, dentropy, dlse, dsquares, dmean, _top1):
        call = ctx.call  # compiled graphs have gradients also of results that were not requested
        of_rows = zip((dentropy, dlse, dsquares, dmean), BITS[:4], strict=True)
        incoming = (dlogprob, *(g if call.wanted & bit else None for g, bit in of_rows))
        if all(g is None for g in incoming):
            return (None,) * 6
        if call.save == "logits" and not is_dynamo_compiling():
            check_overwritten(ctx)
        hidden, weight, ids, bias, temperatures, entropy, squares, stats, targets, *more = ctx.saved_tensors
        entropy = entropy if call.wanted & plans.ENTROPY else None
        if call.save == "projected":
            top, sums = more
            dhidden = PROJECTED_BACKWARD(
                hidden, weight, ids, temperatures, *incoming[:3], top, stats, entropy, targets, sums,
                *call.score_numbers,
            )  # fmt: skip
            return complete(dhidden, hidden.dtype, call.group), *(None,) * 5
        squares = squares if call.wanted & plans.SQUARES else None
        tensors = (hidden, weight, ids, bias, temperatures, *incoming, stats, entropy, squares, targets)
        options = (*call.numbers, *ctx.needs, call.group is not None)
        if any(ctx.starts):
            return added_gradients(ctx, tensors, options, more[0] if call.save == "logits" else None)
        if call.save == "logits":
            grads = BACKWARD_SAVED(*tensors, *options, more[0])
        else:
            grads = BACKWARD(*tensors, *options)
        dhidden, dweight, dbias = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
        if call.group is not None and dhidden is not None:
            dhidden = complete(dhidden, hidden.dtype, call.group)
        return dhidden, dweight, None, dbias, None, None


def added_gradients(ctx: Any, tensors: tuple[Any, ...], options: tuple[Any, ...], logits: Tensor | None) -> Any:
    """Return gradients, of which those of parameters with a main_grad are added to that (level 3)."""
    hidden = tensors[0]
    found = add_gradients(ctx.starts, *tensors, *options, logits)
    dhidden, dweight, dbias = (
        start.added() if start is not None else grad if need else None
        for start, grad, need in zip((None, *ctx.starts), found, ctx.needs, strict=True)
    )
    if ctx.call.group is not None and dhidden is not None:
        dhidden = complete(dhidden, hidden.dtype, ctx.call.group)
    return dhidden, dweight, None, dbias, None, None


def check_overwritten(ctx: Any) -> None:
    """Raise if a backward pass has overwritten the logits before."""
    if getattr(ctx, "overwritten", False):
        raise RuntimeError(
            "linear_logprob(save='logits') was differentiated before (retain_graph=True), and gradients were written "
            "over its logits: use save='stats'"
        )
    ctx.overwritten = True


def forward(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperatures: Tensor | None, call: Call
) -> tuple[Any, ...]:
    """Return logprob, entropy, lse, log_sum_sq, mean_logit and top1, then a tuple of what gradients need."""
    tensors, wanted = (hidden, weight, ids, bias, temperatures), call.wanted
    if call.save == "projected":
        parts, targets, sums = PROJECT(*tensors, *call.numbers, wanted)
        more = (parts[0], sums)
    else:
        parts, targets, logits = PARTS(*tensors, *call.numbers, call.save == "logits", wanted)
        more = (logits,) if call.save == "logits" else ()
    ignore_index, *_, vocabulary = call.numbers
    logprob, *of_rows, stats = FINISH(
        *all_parts(parts, targets, call.group), ids, ignore_index, vocabulary, candidates(hidden, ids), wanted
    )
    shape = hidden.shape[:-1]
    of_rows = [t.view(shape) if wanted & bit else t for t, bit in zip(of_rows, BITS, strict=True)]
    return logprob, *of_rows, (stats, targets, *more)


def _check_projected(trains_head: bool, wants_more: bool) -> None:
    if trains_head:
        raise ArgumentError("save is 'projected' and weight or bias requires a gradient; expected a frozen head")
    if wants_more:
        raise ArgumentError("save is 'projected' with log_sum_sq or mean_logit; expected 'stats' or 'logits'")


_OPTIONS = {
    "save": Among(SAVES, "one of 'stats', 'logits', 'projected'"), "logit_scale": Within("float"),
    "softcap": SOFTCAP,
    "chunk_bytes": Within("int", "chunk_bytes >= 1", "at least 1, or None"),
}  # fmt: skip


def _of_shards(
    *, hidden: Any, weight: Any, ids: Any, bias: Any, temperature: Any, group: Any, vocab_start: Any, vocab_size: Any,
    **options: Any,
) -> Any:  # fmt: skip
    from rtkernels.ops.loss.linear_logprob_shards import linear_logprob_of_shards

    check_vocabulary(group, vocab_start, vocab_size)
    refuse_group(group)
    return linear_logprob_of_shards(linear_logprob, hidden, weight, ids, bias, temperature, options)


# The operator has a rule for chunk_bytes=0, so that compiled code does not depend on the number of rows.
@public(options=_OPTIONS, defaults={"chunk_bytes": 0}, sharded=("hidden weight", _of_shards))
def linear_logprob(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    logit_scale: float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0,
    return_entropy: bool = False, return_lse: bool = False, return_log_sum_sq: bool = False,
    return_mean_logit: bool = False, return_top1: bool = False, fp32_logits: bool = False,
    save: str = "stats", chunk_bytes: int | None = None, group: Any = None,
    vocab_start: int | None = None, vocab_size: int | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Return log-probabilities of tokens under ``softmax(hidden @ weight.T + bias)``, without storing all logits.

    With ``a = logit_scale * (hidden @ weight.T + bias)``, ``c = softcap * tanh(a / softcap)`` (or a) and the scores
    ``z = c / temperature``, in fp32:

    - ``logprob = z[ids] - lse``, with ``lse = log(sum(exp(z)))``;
    - ``entropy = lse - sum(p * z)``, with ``p = exp(z - lse)``;
    - ``log_sum_sq = log(sum(p^2))``, and ``mean_logit = sum(z) / vocabulary``.

    All of these are differentiable once in hidden, weight and bias. Logits are computed in slabs of the vocabulary.
    Gradients of weight and bias are rounded once; that of hidden is summed in fp32 and rounded once. Results are the
    same in every run.

    Args:
        hidden: ``[..., hidden size]``, bfloat16, float16 or float32.
        weight: ``[vocabulary, hidden size]``, in the same dtype (under autocast both are cast). For DTensors, hidden
            may be sharded by rows, and weight and bias by the vocabulary; results are DTensors.
        ids: ``[...]``, or ``[..., k]`` for k candidates in one pass; int32 or int64. An id outside the vocabulary is
            reported as in ``cross_entropy``.
        bias: ``[vocabulary]``, or None.
        ignore_index: An id with this value gives 0 and has no gradient. If all ids of a row have it, so do the other
            results of the row. NaN in hidden there is NaN in the gradient of weight, as with a linear layer of torch.
        logit_scale: Factor of the logits.
        softcap: Limit of the scaled logits, or None.
        temperature: A positive number, or float32 ``[...]`` with one for each row. It has no gradient.
        return_entropy: Also return the entropy, in nats.
        return_lse: Also return the log-sum-exp of the scores.
        return_log_sum_sq: Also return the logarithm of the sum of squared probabilities.
        return_mean_logit: Also return the mean of the scores.
        return_top1: Also return whether the first id of a row is the first column with the largest score.
        fp32_logits: Do not round logits of 16-bit inputs to their dtype. Slabs take twice the memory.
        save: What is kept for gradients: ``"stats"``, a few numbers for each row, so that logits are computed again;
            ``"logits"``, all of them, which the backward pass overwrites, so that only one is possible;
            ``"projected"``, for a weight and bias without gradients, a projection of the probabilities for each row,
            so that the backward pass needs no product. It has no gradients of log_sum_sq and mean_logit, and rounds
            the probabilities of 16-bit inputs themselves: of an id with a probability near 1, that leaves an error of
            2^-9 (float16: 2^-12) of its row of the weight.
        chunk_bytes: Memory for the logits of a slab. Default: about 256 MiB.
        group: A torch.distributed process group over which the vocabulary is split: every process passes its rows of
            weight and bias, and all hidden states and ids. Each gets the same results, the complete gradient of hidden
            states, and the gradients of its own rows. Costs one all-gather of 24 bytes and 4 for each candidate per row
            of hidden, and one all-reduce of its gradient.
        vocab_start: With `group`: the first row of this process. Needed unless the parts are equal and in the order of
            ranks.
        vocab_size: With `vocab_start`: the size of the whole vocabulary.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        logprob, float32 of the shape of ids; or a tuple with the requested ones of entropy, lse, log_sum_sq and
        mean_logit (float32) and top1 (bool) behind it, in this order, of the shape of hidden without its last
        dimension.
    """
    check_vocabulary(group, vocab_start, vocab_size)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    temperatures = None
    if isinstance(temperature, Tensor):
        if is_grad_enabled() and temperature.requires_grad:
            raise ArgumentError("temperature requires a gradient; expected none: it is not differentiable")
        temperatures, temperature = temperature, 1.0
    numbers = logit_scale, softcap or 0.0, check_number("temperature", temperature)
    numbers = tuple(map(constant, numbers)) if is_dynamo_compiling() else numbers
    bits = plans.ENTROPY, plans.LSE, plans.SQUARES, plans.MEAN, plans.TOP1
    returned = return_entropy, return_lse, return_log_sum_sq, return_mean_logit, return_top1
    wanted = sum(bit for bit, flag in zip(bits, returned, strict=True) if flag)
    check_inputs(*map(meta_of, (hidden, weight, ids, bias, temperatures)))
    check_numbers(*numbers, chunk_bytes)
    span = (0, weight.shape[0]) if group is None else vocabulary_range(weight.shape[0], group, vocab_start, vocab_size)
    differentiates = is_grad_enabled() and needs_grad(hidden, weight, bias)
    if save == "projected" and differentiates:
        _check_projected(needs_grad(weight, bias), return_log_sum_sq or return_mean_logit)
    call = Call(
        (ignore_index, *numbers, fp32_logits, chunk_bytes, *span), wanted, save if differentiates else "stats", group
    )
    if differentiates:
        results = _LinearLogprob.apply(hidden, weight, ids, bias, temperatures, call)
    else:
        *results, _ = forward(hidden, weight, ids, bias, temperatures, call)
    extra = tuple(t for t, is_wanted in zip(results[1:], returned, strict=True) if is_wanted)
    return (results[0], *extra) if extra else results[0]


OP = Op(
    "linear_logprob", public=("linear_logprob",), kernels=(*plans.KERNELS, *tiles.KERNELS),
    torch_ops=(PARTS, FINISH, BACKWARD, BACKWARD_SAVED, PROJECT, PROJECTED_BACKWARD),
)  # fmt: skip
