"""The instructions behind ``cuda_src/ptx``: their rounding, saturation, shapes and the order of their operands.

The emulator has its own versions of these headers, so this reads the real ones, in the PTX of NVRTC.
"""

from __future__ import annotations

import re

import pytest
from support.source_tree import source_tree

from rtkernels.errors import ToolkitError
from rtkernels.runtime import targets
from rtkernels.runtime.build import nvrtc, sources

# Function -> (type of its result, types of its arguments, its instructions). Numbers are arguments, = is the result.
_FUNCTIONS = {
    "ptx/cvt.cuh": {
        "cvt_bf16x2": ("u32", "float float", "cvt.rn.bf16x2.f32 =, 1, 0;"),
        "cvt_f16x2": ("u32", "float float", "cvt.rn.f16x2.f32 =, 1, 0;"),
        "cvt_f16_to_f32": ("float", "u16", "cvt.f32.f16 =, 0;"),
        "cvt_e4m3x2": ("u16", "float float", "cvt.rn.satfinite.e4m3x2.f32 =, 1, 0;"),
        "cvt_e5m2x2": ("u16", "float float", "cvt.rn.satfinite.e5m2x2.f32 =, 1, 0;"),
        "cvt_e4m3x2_to_f16x2": ("u32", "u16", "cvt.rn.f16x2.e4m3x2 =, 0;"),
    },
    "ptx/math.cuh": {
        "ex2": ("float", "float", "ex2.approx.ftz.f32 =, 0;"),
        "rcp": ("float", "float", "rcp.approx.ftz.f32 =, 0;"),
        "sqrt_fast": ("float", "float", "sqrt.approx.ftz.f32 =, 0;"),
        "canonical": ("float", "float", "add.f32 =, 0, 0f00000000;"),
        "max_nan": ("float", "float float", "max.NaN.f32 =, 0, 1;"),
    },
    "ptx/packed.cuh": {
        "finite_or_nan_bf16x2": ("u32", "u32", "fma.rn.bf16x2 =, 0, ?, 0;"),
        "finite_or_nan_f16x2": ("u32", "u32", "fma.rn.f16x2 =, 0, ?, 0;"),
        "max_magnitude_bf16x2": ("u32", "u32 u32", "abs.bf16x2 m, 1; max.bf16x2 =, 0, m;"),
        "max_magnitude_f16x2": ("u32", "u32 u32", "abs.f16x2 m, 1; max.f16x2 =, 0, m;"),
        "max_magnitudes_bf16x2": ("u32", "u32 u32", "max.xorsign.abs.bf16x2 =, 0, 1;"),
        "max_bf16x2": ("u32", "u32 u32", "max.bf16x2 =, 0, 1;"),
        "max_f16x2": ("u32", "u32 u32", "max.f16x2 =, 0, 1;"),
        "max_nan_bf16x2": ("u32", "u32 u32", "max.NaN.bf16x2 =, 0, 1;"),
        "max_nan_f16x2": ("u32", "u32 u32", "max.NaN.f16x2 =, 0, 1;"),
        "fma_bf16x2": ("u32", "u32 u32 u32", "fma.rn.bf16x2 =, 0, 1, 2;"),
        "fma_f16x2": ("u32", "u32 u32 u32", "fma.rn.f16x2 =, 0, 1, 2;"),
    },
    "ptx/integer.cuh": {
        "mad_wide": ("u64", "u32 u32 u64", "mad.wide.u32 =, 0, 1, 2;"),
        "mul_hi": ("u32", "u32 u32", "mul.hi.u32 =, 0, 1;"),
    },
}
_SUM_TYPES = {"d": "float", "i": "i32", "u": "u32"}
_WGMMA = "wgmma.mma_async.sync.aligned."
# Statement -> how its instruction begins and, behind the operands, ends. Operands are arrays of registers: a and b, and
# of sums d4, d64, ... (floats), i4 (integers) and u2 (pairs of halves).
_PRODUCTS = {
    "ptx/mma.cuh": {
        "mma_m16n8k16_bf16(d4, a, b)": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ", ""),
        "mma_m16n8k16_f16(d4, a, b)": ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 ", ""),
        "mma_m16n8k8_tf32(d4, a, b)": ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 ", ""),
        "mma_m16n8k32_e4m3(d4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 ", ""),
        "mma_m16n8k8_bf16(d4, a[0], a[1], b[0])": ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 ", ""),
        "mma_m16n8k8_f16(d4, a[0], a[1], b[0])": ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 ", ""),
        "mma_m16n8k16_f16_sums(u2, a, b)": ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 ", ""),
        "mma_m16n8k32_e4m3_e5m2(d4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 ", ""),
        "mma_m16n8k32_e5m2_e4m3(d4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 ", ""),
        "mma_m16n8k32_e5m2(d4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 ", ""),
        "mma_m16n8k32_s8(i4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 ", ""),
        "mma_m16n8k32_s8_u8(i4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 ", ""),
        "mma_m16n8k32_u8_s8(i4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 ", ""),
        "mma_m16n8k32_u8(i4, a, b)": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 ", ""),
        "mma_m16n8k64_s4(i4, a, b)": ("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 ", ""),
        "mma_m16n8k64_s4_u4(i4, a, b)": ("mma.sync.aligned.m16n8k64.row.col.s32.s4.u4.s32 ", ""),
        "mma_m16n8k64_u4_s4(i4, a, b)": ("mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32 ", ""),
        "mma_m16n8k64_u4(i4, a, b)": ("mma.sync.aligned.m16n8k64.row.col.s32.u4.u4.s32 ", ""),
    },
    "ptx/wgmma.cuh": {
        "wgmma_registers<bf16>(d64, a, w, 1)": (_WGMMA + "m64n128k16.f32.bf16.bf16 ", "p, 1, 1, 1;"),
        "wgmma_registers<fp16>(d64, a, w, 1)": (_WGMMA + "m64n128k16.f32.f16.f16 ", "p, 1, 1, 1;"),
        "wgmma_registers<bf16>(d128, a, w, 1)": (_WGMMA + "m64n256k16.f32.bf16.bf16 ", "p, 1, 1, 1;"),
    },
}


def _shared_products() -> dict[str, tuple[str, str]]:
    """Return those of ``wgmma_shared``: a thread has half as many sums as the product has columns."""
    text = sources.read("ptx/wgmma.cuh").decode()
    found = {}
    for sums in re.findall(r"^RTK_WGMMA_SHARED_OF\(\"\d+\", (\d+)", text, re.MULTILINE) or ["64"]:
        for kind, name in (("bf16", "bf16"), ("fp16", "f16")):
            begins = f"{_WGMMA}m64n{2 * int(sums)}k16.f32.{name}.{name} "
            for flag, across in (("false", 0), ("true", 1)):
                statement = f"wgmma_shared<{kind}, {flag}>(d{sums}, w, w + 1, 1)"
                found[statement] = (begins, f"p, 1, 1, 0, {across};")
    return found


_PRODUCTS["ptx/wgmma.cuh"] |= _shared_products()


def _typed_products() -> dict[str, tuple[str, str]]:
    """Return those of ``wgmma_typed``: fp8 and integers of all pairs, 16 bits in all orders, of some widths."""
    found = {}
    for a, b, sums in (("e4m3", "e4m3", 128), ("e4m3", "e5m2", 64), ("e5m2", "e4m3", 64), ("e5m2", "e5m2", 32)):
        statement = f"wgmma_typed<{a}, {b}, false, false>(d{sums}, w, w + 1, 1)"
        found[statement] = (f"{_WGMMA}m64n{2 * sums}k32.f32.{a}.{b} ", "p, 1, 1;")
    for a, b, sums in (("s8", "s8", 128), ("s8", "u8", 64), ("u8", "s8", 64), ("u8", "u8", 32)):
        statement = f"wgmma_typed<{a}, {b}, false, false>(i{sums}, w, w + 1, 1)"
        found[statement] = (f"{_WGMMA}m64n{2 * sums}k32.s32.{a}.{b} ", "p;")
    for kind, name in (("bf16", "bf16"), ("fp16", "f16")):
        for across_a, across_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            flags = ", ".join("true" if flag else "false" for flag in (across_a, across_b))
            statement = f"wgmma_typed<{kind}, {kind}, {flags}>(d128, w, w + 1, 1)"
            found[statement] = (f"{_WGMMA}m64n256k16.f32.{name}.{name} ", f"p, 1, 1, {across_a}, {across_b};")
    return found


_PRODUCTS["ptx/wgmma_types.cuh"] = _typed_products()
_UNIT = "probe/instructions.cu"


def _unit() -> tuple[str, list[str]]:
    """Return the text of a unit with one kernel for each function, and their names."""
    lines = [f'#include "{header}"' for header in (*_FUNCTIONS, *_PRODUCTS)] + ["namespace rtk {"]
    kernels = []
    for table in _FUNCTIONS.values():
        for name, (result, types, _) in table.items():
            given = [f"{kind} x{i}" for i, kind in enumerate(types.split())]
            call = f"ptx::{name}({', '.join(f'x{i}' for i in range(len(given)))})"
            lines.append(f"__global__ void of_{name}({', '.join(given)}, {result}* out) {{ *out = {call}; }}")
            kernels.append(f"of_{name}")
    for table in _PRODUCTS.values():
        for statement in table:
            kernel = f"product_{len(kernels)}"
            kind, count = re.search(r"\(([diu])(\d+),", statement).groups()
            sums = f"{_SUM_TYPES[kind]} {kind}{count}[{count}]"
            lines.append(
                f"__global__ void {kernel}(float* out, const u32* in, u64 w) {{ {sums}; u32 a[4], b[2];"
                f" for (int k = 0; k < {count}; ++k) {kind}{count}[k] = out[k];"
                f" for (int k = 0; k < 4; ++k) a[k] = in[k]; b[0] = in[4], b[1] = in[5];"
                f" ptx::{statement}; for (int k = 0; k < {count}; ++k) out[k] = {kind}{count}[k]; }}"
            )
            kernels.append(kernel)
    return "\n".join([*lines, "}", ""]), kernels


def _bodies(text: str) -> dict[str, str]:
    """Return the PTX of each kernel by its plain name."""
    found = {}
    for part in re.split(r"\.entry ", text)[1:]:
        mangled = re.match(r"\w+", part)[0]
        name = re.match(r"_ZN3rtk(\d+)", mangled)
        at = name.end()
        found[mangled[at : at + int(name[1])]] = part
    return found


def _plain(body: str) -> str:
    """Return the inline instructions of a kernel, registers replaced by the number of the argument they came from."""
    place = dict(re.findall(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", body))
    inline = " ".join(re.findall(r"// begin inline asm\n(.*?)// end inline asm", body, re.DOTALL))
    outputs = set(re.findall(r"%\w+", inline)) - set(place)
    inline = re.sub(r"%\w+", lambda m: place.get(m[0], "=" if m[0] in outputs else m[0]), inline)
    return " ".join(inline.replace("{", " ").replace("}", " ").replace(".reg .b32 m;", " ").split())


def check_instructions() -> None:
    """Compile the headers and check the instructions of every function.

    Raises:
        AssertionError: Names the function, what it should be, and what it is.
    """
    text, kernels = _unit()
    with source_tree({_UNIT: text}):
        ptx = nvrtc.ptx(_UNIT, [f"rtk::{kernel}" for kernel in kernels], targets.parse("sm_90a"))
    bodies = _bodies(ptx)
    for table in _FUNCTIONS.values():
        for name, (_, _, wanted) in table.items():
            got = _plain(bodies[f"of_{name}"])
            pattern = re.escape(wanted).replace(r"\?", r"\S+")
            assert re.fullmatch(pattern, got), f"{name} should be {wanted!r}, and is {got!r}"
    for kernel, (statement, (begins, ends)) in zip(
        (kernel for kernel in kernels if kernel.startswith("product")),
        ((s, w) for table in _PRODUCTS.values() for s, w in table.items()),
        strict=True,
    ):
        lines = [line.strip() for line in bodies[kernel].splitlines() if "mma" in line and "entry" not in line]
        assert len(lines) == 1, f"{statement}: {lines}"
        assert lines[0].startswith(begins) and lines[0].endswith(ends), f"{statement} is {lines[0]!r}"


@pytest.mark.one_in(1000)
def test_instructions() -> None:
    try:
        nvrtc.version()
    except ToolkitError as error:
        pytest.skip(str(error))
    check_instructions()


@pytest.mark.parametrize("header", [*_FUNCTIONS, *_PRODUCTS])
def test_every_function_is_in_the_table(header: str) -> None:
    text = sources.read(header).decode()
    if header in _FUNCTIONS:
        assert set(re.findall(r"RTK_DEVICE \w+ (\w+)\(", text)) == set(_FUNCTIONS[header])
    else:
        # Names, or where a macro makes them its uses: `RTK_MMA_F32(name, "instruction")`.
        names = set(re.findall(r"^RTK_MMA\w+\((\w+),", text, re.MULTILINE))
        names |= set(re.findall(r"RTK_DEVICE void (w?g?mma_(?:m\d|shared|registers|typed)\w*)\(", text))
        assert names == {re.match(r"\w+", statement)[0] for statement in _PRODUCTS[header]}
