"""Write ``docs/operators.md``: which of torch's operators run on our kernels, and why the others do not.

``python docs/make_operators.py`` writes the page anew from the table of ``rtkernels.aten``. The list below is that of
the 184 operators of FlagGems 3.0, to say for each of them what happens here.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import operator_differences  # noqa: E402

from bench.measure import aten_file  # noqa: E402
from bench.report import aten as chosen  # noqa: E402
from rtkernels.aten import table  # noqa: E402
from rtkernels.aten.measured import DEFAULT  # noqa: E402

# Family, expectation (W: faster than torch's is realistic, P: as fast, S: leave it to torch), how many of the 184
# names the line accounts for, overloads.
LISTED = """
attn S 1: _flash_attention_forward
row W 1: _softmax _softmax_backward_data
row W 1: _log_softmax _log_softmax_backward_data
row W 1: native_layer_norm native_layer_norm_backward
row W 1: native_group_norm native_group_norm_backward
row W 1: native_batch_norm native_batch_norm_backward
row W 1: rms_norm
row W 1: _weight_norm_interface _weight_norm_interface_backward
row P 1: nll_loss_forward nll_loss_backward
row P 0: nll_loss2d_forward nll_loss2d_backward
red W 1: mse_loss
ew P 2: abs abs_
ew P 2: neg neg_
ew P 1: angle
ew P 0: atan atan_
ew P 2: bitwise_not bitwise_not_
ew P 2: cos cos_
ew P 2: sin sin_
ew P 2: erf erf_
ew P 2: exp exp_
ew P 0: exp2 exp2_
ew P 1: log
ew P 1: log_sigmoid
ew P 1: logical_not
ew P 2: reciprocal reciprocal_
ew P 2: rsqrt rsqrt_
ew P 0: sqrt sqrt_
ew P 2: relu relu_
ew P 2: sigmoid sigmoid_ sigmoid_backward
ew P 2: silu silu_ silu_backward
ew P 2: tanh tanh_ tanh_backward
ew P 2: gelu gelu_ gelu_backward
ew P 1: elu elu_ elu_backward
ew P 0: celu celu_
ew P 0: softplus
ew P 1: threshold threshold_backward
ew P 1: glu glu_backward
ew P 1: nan_to_num
ew W 1: isinf
ew P 1: isnan
ew W 1: isfinite
copy P 1: _to_copy
ew P 2: add.Tensor add_.Tensor
ew P 2: sub.Tensor sub_.Tensor
ew P 2: mul.Tensor mul_.Tensor
ew P 2: div.Tensor div.Scalar div_.Tensor div_.Scalar
ew P 0: div.Tensor_mode div.Scalar_mode div_.Tensor_mode div_.Scalar_mode
- S 0: divide.Tensor divide.Scalar divide.Tensor_mode divide.Scalar_mode divide_.Tensor divide_.Scalar
    divide_.Tensor_mode divide_.Scalar_mode
- S 0: true_divide.Tensor true_divide.Scalar true_divide_.Tensor true_divide_.Scalar
ew P 2: floor_divide floor_divide.Scalar floor_divide_.Tensor floor_divide_.Scalar
ew P 2: remainder.Tensor remainder.Scalar remainder.Scalar_Tensor remainder_.Tensor remainder_.Scalar
ew P 2: pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar pow_.Tensor pow_.Scalar
ew P 1: maximum
ew P 1: minimum
ew P 2: clamp clamp_
ew P 0: clamp.Tensor clamp_.Tensor
ew P 0: clamp_min clamp_min_
ew P 2: lerp.Tensor lerp.Scalar lerp_.Tensor lerp_.Scalar
ew P 0: addcmul
ew P 0: addcdiv
ew P 2: eq.Tensor eq.Scalar ne.Tensor ne.Scalar
ew P 4: lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
ew W 1: isclose
red W 1: allclose
ew P 3: logical_and logical_or logical_xor
ew P 2: bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and_.Tensor bitwise_and_.Scalar
ew P 2: bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or_.Tensor bitwise_or_.Scalar
ew P 0: bitwise_left_shift bitwise_right_shift
ew P 1: where.self where.self_out
- S 0: where.ScalarSelf where.ScalarOther
ew P 2: masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor
ew P 2: fill.Scalar fill.Tensor fill_.Scalar fill_.Tensor
ew P 1: polar
red W 1: sum sum.out sum.dim_IntList sum.IntList_out
red W 1: mean mean.dim
red W 1: prod prod.dim_int
red W 1: amax
red W 1: max max.dim
red W 1: min min.dim
red W 1: argmax
red W 1: argmin
red W 1: all all.dim all.dims
red W 1: any any.dim any.dims
red W 1: count_nonzero
red W 1: linalg_vector_norm
red W 1: var_mean.correction
red W 0: std.correction
red P 0: trace
gemm S 1: dot
gemm S 1: vdot
scan W 1: cumsum cumsum.out
scan W 1: cummax
scan W 1: cummin
scan W 1: nonzero
scan W 1: masked_select
scan W 1: repeat_interleave.Tensor
- S 0: repeat_interleave.self_Tensor repeat_interleave.self_int
idx W 1: gather
idx W 0: gather_backward
idx P 2: scatter.src scatter.reduce scatter_.src scatter_.reduce
idx W 1: index_select
idx W 1: index_add index_add_
idx W 2: index_put index_put_
idx W 1: embedding
idx W 0: embedding_backward
sort W 1: isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor
sort W 1: _unique2
copy P 1: diagonal_backward
sort W 1: sort sort.stable
sort W 1: topk
sort P 1: quantile
sort P 1: randperm
rng P 1: multinomial
rng P 1: native_dropout native_dropout_backward
rng P 2: rand rand_like
rng P 2: randn randn_like
rng P 1: normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor
rng P 1: uniform_
rng P 1: exponential_
ew S 6: zeros zeros_like ones ones_like full full_like
ew S 1: arange arange.start arange.start_step
ew S 1: linspace logspace
ew S 1: eye eye.m
- S 1: contiguous
copy W 1: cat
copy P 1: stack
- S 2: hstack vstack
copy P 1: repeat
- S 1: tile
copy P 1: flip
copy P 0: constant_pad_nd
- S 1: pad
- S 1: diag
copy P 1: diag_embed
copy P 1: triu
copy P 2: slice_scatter select_scatter
- S 1: kron
- S 2: resolve_conj resolve_neg
gemm S 1: mm mm.out
gemm S 1: addmm addmm.out
gemm S 1: bmm
gemm P 1: mv addmv addmv.out
ew P 0: addr
win P 0: avg_pool2d avg_pool2d_backward
win P 0: max_pool2d_with_indices max_pool2d_backward
win P 1: upsample_nearest2d
win P 0: _upsample_bicubic2d_aa
"""

# The other 17 names of the 184: no overrides there either.
FUNCTIONS = {
    "index": "family idx: `index.Tensor` with one tensor of indices",
    "apply_rotary_pos_emb": "`rtkernels.rope`",
    "concat_and_cache_mla": "`rtkernels.compat.flaggems.concat_and_cache_mla`",
    "conv1d": "`rtkernels.conv`: depthwise, patches; the others cuDNN",
    "conv2d": "`rtkernels.conv`: depthwise, patches; the others cuDNN",
    "cross_entropy_loss": "`rtkernels.cross_entropy`",
    "flash_attn_varlen_func": "`rtkernels.attention_varlen`",
    "flash_mla": "`rtkernels.mla_decode`",
    "fused_add_rms_norm": "`rtkernels.rms_norm` with a residual",
    "gelu_and_mul": "`rtkernels.glu`",
    "instance_norm": "`rtkernels.compat.flaggems.instance_norm`",
    "outer": "composite over `mul.Tensor`",
    "reshape_and_cache": "`rtkernels.compat.flaggems.reshape_and_cache`",
    "reshape_and_cache_flash": "`rtkernels.compat.flaggems.reshape_and_cache_flash`",
    "scaled_dot_product_attention": "`rtkernels.sdpa`; torch's backends otherwise",
    "silu_and_mul": "`rtkernels.glu`",
    "skip_layer_norm": "`rtkernels.layer_norm` with a residual",
}

# Why an overload is left to torch.
REASONS = {
    "_flash_attention_forward": "torch's attention backends; `rtkernels.attention` by name",
    "rms_norm": "composite: `_fused_rms_norm`, which it reaches on CUDA devices, is taken",
    "log_sigmoid": "composite: `log_sigmoid_forward` is taken",
    "quantile": "composite: `sort` is what costs",
    "gather_backward": "composite: `scatter_add` is taken",
    "embedding_backward": "composite: `embedding_dense_backward` is taken",
    "bitwise_left_shift": "no such overload in aten; `.Tensor`, `.Tensor_Scalar` and `.Scalar_Tensor` are taken",
    "bitwise_right_shift": "no such overload in aten; `.Tensor`, `.Tensor_Scalar` and `.Scalar_Tensor` are taken",
    "floor_divide.Scalar": "composite over `floor_divide`",
    "floor_divide_.Scalar": "composite over `floor_divide_.Tensor`",
    "scatter.reduce": "torch's: without an order there is no determinism; rows of sums are `index_add`, `scatter_add`",
    "scatter_.reduce": "torch's: without an order there is no determinism; rows of sums are `index_add`, `scatter_add`",
    "multinomial": "torch's: it is made of `exponential_`, `argmax` and `topk`, which are taken",
    "_upsample_bicubic2d_aa": "resizes images for input, one kernel in torch: no part of a model's step",
    "max_pool2d_backward": "no backward of aten's; `max_pool2d_with_indices_backward` is",
}
COMPOSITES = {
    "contiguous": "`clone`", "divide": "`div`", "true_divide": "`div`", "hstack": "`cat`", "vstack": "`cat`",
    "tile": "`repeat`", "pad": "`constant_pad_nd`", "diag": "`diag_embed`", "where": "`where.self`",
    "repeat_interleave": "`repeat_interleave.Tensor`",
    "kron": "`mul.Tensor`", "resolve_conj": "`clone`", "resolve_neg": "`clone`",
}  # fmt: skip
FAMILY_REASONS = {
    "gemm": "cuBLAS, which takes 0.91 to 1.05 of our time at ten sizes; `rtkernels.scaled_mm` and others by name",
    "attn": "torch's attention backends",
    "creation": "memset-class: only the host's time counts",
}
_CREATION = {"zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange", "linspace", "logspace", "eye"}


INTRODUCTION = """
<!-- Written by docs/make_operators.py from the table of rtkernels.aten. -->
# Torch's operators on our kernels

`rtkernels.enable()` lets unmodified torch code run on kernels of this package; `with rtkernels.use(...)` does so for a
block, `rtkernels.disable()` ends it. Names are overloads (`sum.dim_IntList`), operators (`sum`) or families (`red`);
`rtkernels.aten.overloads()` lists them, `rtkernels.report()` prints what was taken and what went to torch, and why.

A user can choose without changing the program: `RTKERNELS_ENABLE=row,sum,-amax` is what `enable()` and `use()` take
when the call names nothing. `-name` leaves an operator to torch; exclusions alone are taken from the default set. A
file of names is `@path` there, and `@path` or a `pathlib.Path` in a call: one name per line or several with commas,
`-name` to exclude, `#` for comments, or lists of YAML under the headings `include:` and `exclude:`. An unknown name is
an error that says where it is.

What a kernel does not cover (float64 and complex, more than six dimensions that do not merge, sparse tensors, invalid
arguments) goes to torch's own kernel. Gradients are torch's formulas. Where the time of the host decides for torch,
small tensors go to it as well: `rtkernels.aten.table.MIN_ELEMENTS` has the sizes. A call that is like one before in
shapes, strides, dtypes and numbers does not run our Python code for it a second time: what that launched is launched
again.

{count} overloads can be taken; {default} of them are the default set of `enable()` (`rtkernels/aten/measured.py`): all
of torch's samples agree on the GPU, and over FlagGems' core shapes the geometric mean of torch's time over ours is 1.05
or more, host included ([measured](#measured)). Where torch launches one kernel that reads memory at full speed, ours
is no faster, so that most plain pointwise operators are not in the set; `include="ew"` and the like take them all the
same. `clone` is not in the set either: models call it so often that the host's time of an override is more than the
time that the device saves.

Under `torch.compile` the backends `eager` and `aot_eager` call aten operators, and ours with them; `inductor` writes
its own kernels, so that ours run only where it calls an aten operator. `rtkernels.pointwise(name, expression)` gives an
operator from a C expression, which inductor calls as it is.

Overrides count for the whole process: a backward runs in threads of its own. Any thread may switch them while others
call operators. Inside of `rtkernels.emulate()` CPU
tensors are taken too, by the emulator: that is how tests run without a GPU.

## The 184 operators of FlagGems 3.0

| overloads | family | here |
|---|---|---|
"""


def listed() -> list[tuple[str, str, int, list[str]]]:
    """Return family, expectation, number of names and overloads of every line."""
    found: list[tuple[str, str, int, list[str]]] = []
    for line in LISTED.strip().splitlines():
        if line.startswith("    "):
            found[-1][3].extend(line.split())
            continue
        head, _, names = line.partition(": ")
        family, expected, count = head.split()
        found.append((family, expected, int(count), names.split()))
    return found


def reason(name: str, family: str) -> str:
    """Return why torch keeps an overload; empty if nothing says so."""
    base = name.partition(".")[0]
    if name in REASONS:
        return REASONS[name]
    plain = base.removesuffix("_")
    if family == "-":
        return f"composite: would lose its gradient; it reaches {COMPOSITES[plain]}"
    if plain in _CREATION:
        return FAMILY_REASONS["creation"]
    return FAMILY_REASONS.get(family, "")


MEASURED = """
## Measured

Runs of `python -m bench aten --quick` on an {gpu}, torch {torch}, bfloat16 and float32{before}
(`bench/results/aten/h200.json`); times of calls in a row, host included ("operator mode"). Torch's time over ours,
geometric mean over the shapes: of our kernel at every size; with smaller calls given back to torch, which costs
{extra:.1f} µs of that host's time each; the slowest case then; and the elements from which on the kernel is taken. In a
fresh process `enable()` took {enable:.0f} ms there, all imports included. Host's µs of a small call, torch's and ours:
{host}.

Default set: {count} overloads, geometric mean {mean:.2f}, the slowest `{slowest}` {least:.2f}.

| overload | kernel at every size | from a threshold on | slowest case | threshold |
|---|---|---|---|---|
"""


FLAGGEMS = """

FlagGems' time over ours where both have an overload, bfloat16, two sizes of each (64 x 64 and 4096 x 4096, or those of
norms), each in units of torch's time in the same process; FlagGems with three of its configurations to choose from.
{count} overloads, geometric mean {operator:.2f} for calls in a row and {kernel:.2f} on the device at the larger size.
Below 1: {slower}. On the device alone: {device}.{failed}
"""


BOUNDS = """

Shares of what memory allows (`bench/measure/aten_bounds.py`), launch included: sums of rows and of columns against the
time of reading their bytes, and `x + y` of classes V (dense), R (rows with gaps) and T (one operand transposed) against
a copy of as many bytes.

| case | ours | torch's | our µs |
|---|---|---|---|
"""


def _below_one(means: dict[str, float]) -> str:
    return ", ".join(f"`{name}` {ratio:.2f}" for name, ratio in sorted(means.items()) if ratio < 1.0) or "none"


def measured() -> list[str]:
    """Return the section on times, losses included."""
    result = chosen.load()
    about, host = result["environment"], result["host"]
    earlier = " and ".join(result.get("cases_of_before", {}).get("families", ()))
    choice, cases, extra = chosen.choice(result), chosen.cases_of(result), chosen.given_back_us(result)
    default = {name: choice[name][1] for name in DEFAULT}
    slowest = min(default, key=default.__getitem__)
    small = [f"`{name[6:]}` {us:.1f} and {host[f'rtkernels {name[6:]}']:.1f}" for name, us in host.items()
             if name.startswith("torch ")]  # fmt: skip
    head = MEASURED.format(
        gpu=about["gpu"], torch=about["torch"], extra=extra, enable=host["enable default ms"], host=", ".join(small),
        before=f"; cases of {earlier} are of a run before" if earlier else "", count=len(default), slowest=slowest,
        mean=aten_file.mean(list(default.values())), least=default[slowest],
    )  # fmt: skip
    lines = head.rstrip().splitlines()
    for name, (alone, best, size) in sorted(choice.items(), key=lambda item: -item[1][1]):
        where = "never" if size == chosen.NEVER else f"{size}"
        mark = ", default" if name in DEFAULT else ""
        worst = min(chosen.ratios(cases[name], size, extra))
        lines.append(f"| `{name}`{mark} | {alone:.2f} | {best:.2f} | {worst:.2f} | {where} |")
    operator, kernel = (aten_file.flaggems_ratios(result["cases"], mode) for mode in ("operator", "kernel"))
    if operator:
        means = {name: aten_file.mean(list(cases.values())) for name, cases in operator.items()}
        device = {name: aten_file.mean(list(cases.values())) for name, cases in kernel.items()}
        failed = sorted({case["overload"] for case in result["cases"] if "error" in case.get("flaggems", {})})
        lines += FLAGGEMS.format(
            count=len(means), operator=aten_file.mean(list(means.values())),
            kernel=aten_file.mean(list(device.values())), slower=_below_one(means), device=_below_one(device),
            failed=f" FlagGems failed in a case of {', '.join(f'`{name}`' for name in failed)}." if failed else "",
        ).rstrip().splitlines()  # fmt: skip
    if result.get("bounds"):
        lines += BOUNDS.rstrip().splitlines()
        for name, found in result["bounds"].items():
            lines.append(f"| {name} | {found['share']:.2f} | {found['torch']:.2f} | {found['us']:.1f} |")
    return [*lines, ""]


def page() -> str:
    """Return the text of ``operators.md``."""
    rows = table.table()
    default = [name for name, row in rows.items() if row.default]
    known = set(rows) | set(table.ONLY_ON_CUDA)
    lines = INTRODUCTION.format(count=len(known), default=len(default)).strip().splitlines()
    for family, _, _, names in listed():
        taken = [name for name in names if name in rows]
        left = [name for name in names if name not in rows]
        why = {reason(name, family) for name in left}
        here = (
            "taken"
            if not left
            else "; ".join(sorted(why))
            if not taken
            else f"taken; torch: {', '.join(left)} ({'; '.join(sorted(why))})"
        )
        if taken and any(rows[name].default for name in taken):
            here += "; default"
        lines.append(f"| {', '.join(names)} | {family} | {here} |")
    lines += [f"| {name} | by name | {what} |" for name, what in FUNCTIONS.items()]
    more = sorted(known - {name for *_, names in listed() for name in names})
    lines += ["", "## Also taken", "", ", ".join(f"`{name}`" for name in more)]
    lines += operator_differences.lines()
    lines += measured()
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "operators.md").write_text(page(), encoding="utf-8")
