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
        "`_fused_rms_norm_backward`, `_weight_norm_interface_backward`, `glu_backward`, `addcmul`",
        "bfloat16 and float16: results have one rounding; torch rounds some intermediate results, which may overflow.",
        "fp32 between load and store costs nothing and is more exact.",
        "tests/aten/test_special_cases.py::test_one_rounding",
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
