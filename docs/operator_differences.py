"""What is meant to differ from torch under ``rtkernels.enable()``: the rows of a table in ``operators.md``.

Everything else that differs is a defect: ``tests/conformance`` compares results, layouts, version counters and errors
of every overload. A row names the test that shows the difference, or its limits.
"""

from __future__ import annotations

# Operators, what differs, why, the test.
DIFFERENCES = [
    (
        "`uniform_`, `normal_`, `exponential_`, `bernoulli_`, `rand`, `randn`, `rand_like`, `randn_like`, `normal`, "
        "`randperm`, `native_dropout`",
        "A seed gives other numbers than torch's; the same ones each time, also in replayed graphs.",
        "The numbers of an element follow from its position alone, not from the launch as torch's do.",
        "tests/aten/test_rng.py::test_same_seed_same_numbers",
    ),
    (
        "`div` with a rounding mode, `floor_divide`, `remainder`, `fmod`",
        "Integers divided by zero give 0.",
        "torch's result on CUDA is undefined, and depends on the device.",
        "tests/aten/test_special_cases.py::test_integers_divided_by_zero",
    ),
    (
        "`isclose`",
        "The version counter of the result is 0, torch's is 1.",
        "torch writes several times to its result; here one kernel does it all.",
        "tests/aten/test_special_cases.py::test_isclose_is_one_kernel",
    ),
    (
        "`native_layer_norm`, `native_group_norm`",
        "The mean of a row with infinities is infinite or NaN; `y` and `rstd` are NaN, as torch's are.",
        "Which of the two it is depends on the order of additions, in torch on the position of the element.",
        "tests/aten/test_special_cases.py::test_means_of_infinities_are_not_finite",
    ),
    (
        "`_softmax_backward_data`, `native_layer_norm_backward`, `native_group_norm_backward`, "
        "`_fused_rms_norm_backward`, `_weight_norm_interface_backward`, `glu_backward`, `mse_loss_backward`, `addcmul`",
        "bfloat16 and float16: results have one rounding; torch rounds some intermediate results, which may overflow.",
        "fp32 between load and store costs nothing and is more exact.",
        "tests/aten/test_special_cases.py::test_one_rounding",
    ),
    (
        "`addcmul`, `addr`",
        "A product that overflows is infinite also where the sum would not be.",
        "torch's compiler chooses which product and sum are rounded as one, from version to version.",
        "tests/aten/test_meant_to_differ.py::test_products_overflow_before_they_are_added",
    ),
    (
        "`_fused_rms_norm`",
        "In a row with an infinity finite elements become 0; torch has NaN for rows whose length is no multiple of 4.",
        "Sums of squares here, in torch two ways of computing a variance.",
        "tests/aten/test_special_cases.py::test_rms_norm_of_infinities",
    ),
    (
        "`_weight_norm_interface`",
        "Weights whose norm overflows are 0; torch has NaN where the product with the magnitude overflows as well.",
        "A row is scaled by one factor, without a division for each element.",
        "tests/aten/test_meant_to_differ.py::test_weights_beyond_a_norm",
    ),
    (
        "`sum`, `mean`, `cumsum`, `prod`, `var`, `std`, `linalg_vector_norm`, `native_group_norm`, "
        "`native_batch_norm`, `index_add`, `scatter_add`, `embedding_dense_backward`",
        "Where a part of a sum or product overflows (or underflows to 0) although the whole does not, or the other way "
        "round, infinities and NaN may differ. An infinity or NaN among the elements gives the same as torch.",
        "Another order of additions, which is always the same.",
        "tests/aten/test_special_values.py::test_infinities_in_sums",
    ),
    (
        "`cumsum`",
        "bfloat16 and float16: finite where torch's running sum overflows and comes back.",
        "Sums are fp32 and rounded once; torch rounds every step.",
        "tests/aten/test_scan.py::test_running",
    ),
    (
        "`cumsum`",
        "A leading -0.0 becomes 0.0.",
        "Sums begin at 0.0, as torch's do for more than one dimension.",
        "tests/aten/test_meant_to_differ.py::test_sums_begin_at_zero",
    ),
    (
        "`var_mean.correction`, `std_mean.correction`",
        "The mean of elements with an infinity is infinite or NaN; `mean` gives the infinity.",
        "A mean is updated by differences; which it is depends on the order, in torch as well.",
        "tests/aten/test_meant_to_differ.py::test_means_beside_variances_of_infinities",
    ),
    (
        "`nll_loss_forward`, `nll_loss2d_forward`",
        "Without a reduction the total weight is 0.",
        "torch's CUDA kernels leave it as it was allocated.",
        "tests/aten/test_meant_to_differ.py::test_total_weight_without_a_reduction",
    ),
    (
        "`amax`, `amin`, `max`, `min`, `linalg_vector_norm`",
        "Without `dim` in `max` and `min`: of zeros of both signs the maximum is 0.0, the minimum -0.0.",
        "torch's depends on the order in which threads meet them.",
        "tests/aten/test_meant_to_differ.py::test_extremes_of_zeros_have_a_sign",
    ),
    (
        "`sort`, `topk`, `_unique2`",
        "NaN with a set sign bit are last, as all NaN are.",
        "torch's radix sorts put them first or last by the length of a row.",
        "tests/aten/test_meant_to_differ.py::test_nan_of_either_sign_is_last",
    ),
    (
        "`sort`, `topk`",
        "Equal elements keep their order, also without `stable`.",
        "torch leaves it open.",
        "tests/aten/test_sort.py::test_stable_sort",
    ),
    (
        "`_unique2`",
        "Of zeros of both signs the first one is kept, with its sign.",
        "torch leaves it open: its sort is not stable for all sizes.",
        "tests/aten/test_special_values_sort.py::test_unique",
    ),
    (
        "`index_add`, `scatter_add`, `_index_put_impl_`",
        "bfloat16 and float16: sums are fp32, rounded once, and the same each time.",
        "torch adds with atomics in the dtype of the tensor, and loses small numbers beside large sums.",
        "tests/aten/test_rows_by_index.py::test_sums_of_any_layout",
    ),
    (
        "`slice_scatter`, `select_scatter`",
        "`storage_offset` of the result is 0; values and strides are torch's.",
        "torch copies the memory before the first element, too.",
        "tests/aten/test_meant_to_differ.py::test_scattered_slices_have_memory_of_their_own",
    ),
    (
        "all",
        "`torch.library` registrations of the overloads that were taken stay while other threads run, switched off: "
        "a call then takes some microseconds longer than before `enable()`.",
        "The dispatcher frees what is unregistered, while another thread may be executing it.",
        "tests/aten/test_switching.py::test_overrides_that_are_off",
    ),
]


def lines() -> list[str]:
    """Return the section of ``operators.md``."""
    found = [
        "", "## What is meant to differ", "",
        "Values, dtypes, layouts, version counters, aliases and errors are those of torch's CUDA kernels, within",
        "rounding. What differs on purpose:", "",
        "| operators | what differs | why | test |", "|---|---|---|---|",
    ]  # fmt: skip
    return [*found, *(f"| {' | '.join([*row[:3], f'`{row[3]}`'])} |" for row in DIFFERENCES), ""]
