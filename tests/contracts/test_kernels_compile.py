"""Every kernel variant compiles for every supported architecture, without spills and within its register ceiling.

One in 72 of the variants for sm_80 and sm_90a, one in 288 for the others, by hashes of names; with ``--full`` all.
What was compiled comes from the kernel cache: a second run with the same ``RTKERNELS_CACHE_DIR`` compiles what changed.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
from support import kernel_structs, pieces
from support.places import CEILINGS_ARE_FOR, allowed_spills, compiled_for

from rtkernels.runtime import targets
from rtkernels.runtime.build import cache, nvrtc, sources
from rtkernels.runtime.build.nvrtc import Resources
from rtkernels.runtime.launch.device import shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator import registry

ROOT = Path(__file__).resolve().parents[2]
OFTEN = ("sm_80", "sm_90a")
# Bytes of kernels that still have to be fixed (NVRTC 13.0): a gated norm 24 on sm_80 with float16 and a weight in
# float32; gradients of KDA 12 on sm_100a.
KNOWN_SPILLS = {"group_rms_norm_gate_fwd": 24, "kda_grads": 12}
KERNELS = {f"{op.name}.{kernel.name}": kernel for op, kernel in registry.kernels()}


@pytest.mark.parametrize("target", targets.CI_TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name: str, target: str, request: pytest.FixtureRequest) -> None:
    kernel, wanted = KERNELS[name], targets.parse(target)
    variants = kernel.variants(wanted)
    if not kernel.supports(wanted):
        assert not variants
        return
    if not variants:  # a target may have too little shared memory for a kernel; then others serve it
        assert callable(kernel._variants), f"{name} supports {target} but names no variant to build for it"
        return
    expressions = [kernel.expression(variant) for variant in variants]
    if not request.config.getoption("--full"):
        part = request.config.getoption("--part")
        # Attention takes seconds each, products more.
        step = (72 if target in OFTEN else 288) * {"gemm": 8, "attention": 4}.get(str(kernel.unit).partition("/")[0], 1)
        step *= 8 if kernel.tier == "aten" else 1  # variants of a small number of templates
        step *= 8 if kernel.op == "aten_pointwise" else 1  # of four, by hundreds of functors and dtypes
        expressions = [e for e in expressions if zlib.crc32(f"{e} {target}".encode()) % step == part % step]
        if not expressions:
            return
    entry = cache.load(kernel.unit, expressions, compiled_for(target), kernel.flags, op=kernel.op)
    assert set(entry.names) == set(expressions)
    for expression in expressions:
        used = Resources(**entry.meta["resources"][expression])
        spilled = max(used.spill_stores, used.spill_loads)
        allowed = max(allowed_spills(), KNOWN_SPILLS.get(kernel.name, 0))
        assert spilled <= allowed, f"{expression} spills {spilled} bytes on {target}"
        if nvrtc.version() == CEILINGS_ARE_FOR:
            assert used.registers <= kernel.max_registers, (
                f"{expression} uses {used.registers} registers on {target}; expected at most {kernel.max_registers}, "
                f"the max_registers of its record in op {kernel.op}"
            )
        assert used.shared <= shared_limit(wanted), f"{expression} has {used.shared} bytes of static shared memory"


def test_register_ceilings_were_checked() -> None:
    """Make it visible in a summary that the ceilings above were left out."""
    if (version := nvrtc.version()) != CEILINGS_ARE_FOR:
        needed, found = (".".join(map(str, v)) for v in (CEILINGS_ARE_FOR, version))
        pytest.skip(f"register ceilings and no spills at all are for NVRTC {needed}; this is {found}")


@pytest.mark.parametrize("name", ("norm_fp8.norm_fp8_ring", "glu_fp8.glu_fp8_bwd_stream"))
def test_kernels_of_the_h100_compile_without_its_own_instructions(name: str) -> None:
    """What serves sm_90a alone among the targets above serves sm_90 too, which lacks some instructions."""
    kernel, target = KERNELS[name], targets.parse("sm_90")
    for variant in kernel.variants(target):
        expression = kernel.expression(variant)
        used = nvrtc.compile_unit(kernel.unit, [expression], target).resources[expression]
        assert max(used.spill_stores, used.spill_loads) <= allowed_spills()


# On sm_90a. A kernel or template argument of its own has to gain 5 %; run-time arguments make room for it. Of
# attention, 22 are 8-bit attention by wgmma (1.6 x what mma.sync takes), 24 gradients of heads of more than 128
# elements (3.5 x); of products, clusters for few rows (1.5 x), 10 for 9 to 16 rows (1.2 to 1.35 x), 10 tiles of
# 192 and 224 columns (1.03 to 1.08 x where others leave the last round half empty) and the copy of rows that are not
# multiples of 16 bytes (25 x); of pages, 8 are attention by wgmma (2 x) and 12 that of 8-bit caches; of attention, 6
# are gradients of split heads (1.3 to 7 x); of quantised attention, 6 are heads of 192 and 4 values with a scale
# per column (1.18 x);
# of norms, 6 each are gradients of rows of 8200 to 16384 columns (1.5 x) and 5 long rows of layer_norm (1.16 x);
# of softmax, 3 are for few rows (1.2 to 3.6 x); of cross entropy, 15 are for probabilities and weighted smoothing;
# causal convolutions have their taps in registers, for 2 to 8 taps; gated units have an activation of each name, and a
# clamped silu; scans of delta rules two widths of columns (few heads fill the GPU with 32, many are faster with 64);
# of products, 18 are 8-bit rows that are odd multiples of 8 bytes apart (1.2 to 1.5 x), tiles of 192 x 192 (1.27 x) and
# 64 x 64 (1.27 x), and gated ones of 192 x 128 (1.18 x); of decoding products, 8 stream the weights of up to 4 rows
# (1.12 to 1.15 x a token), and 4 those of NVFP4; of products, 17 have weights as wgmma's left operand, for 9 to 256
# rows of 16 or 8 bits, and 22 load even and odd rows of b separately (1.16 to 1.29 x beside
# the same tile without that); of quantize_fp8, 12 are int8 codes, whose other kernels take twice as long as a copy; of
# pages, 16 are caches of 8 bits by wgmma; of scans of delta rules, 36 are by wgmma (1.2 to 1.5 x), 4 chain
# segments of few long sequences (1.9 to 3 x), and 4 steps take raw gates or states of 16 bits (one launch for seven).
# Of decoding products, 16 have weights of 8 or 4 bits as wgmma's left operand, and one prepares their tokens.
MANY_VARIANTS = {
    "aten_pointwise": 700, "scaled_mm": 247, "attention": 124, "quantize_fp8": 83, "glu": 92, "layer_norm": 65,
    "reduction": 60, "rms_norm": 63, "norm_fp8": 40, "qk_norm_rope": 30, "quantized": 46, "sorting": 34,
    "router_gemm": 33, "group_rms_norm_gate": 50, "cross_entropy": 39, "rope": 30, "softmax": 27, "paged": 45,
    "combine": 26, "norm_modulated": 26, "causal_conv1d": 129, "gated_delta_rule": 102,
    "decode_linear": 47,
}  # fmt: skip
FEW_VARIANTS = 24


@pytest.mark.parametrize("op", sorted({name.partition(".")[0] for name in KERNELS}))
def test_there_are_not_too_many_variants(op: str) -> None:
    target = targets.parse("sm_90a")
    count = sum(len(kernel.variants(target)) for name, kernel in KERNELS.items() if name.startswith(f"{op}."))
    problem = pieces.variant_count(op, count, MANY_VARIANTS.get(op, FEW_VARIANTS))
    assert not problem, problem


@pytest.mark.parametrize("name", KERNELS)
def test_variants_are_plain_and_distinct(name: str) -> None:
    kernel: Kernel = KERNELS[name]
    for target in map(targets.parse, targets.CI_TARGETS):
        variants = kernel.variants(target)
        assert len(set(variants)) == len(variants), f"{name} names a variant twice"
        for variant in variants:
            plain = all(type(value) in (str, int, bool) for value in variant)
            assert plain, f"{name} has variant {variant}; expected strings, integers and booleans"


@pytest.mark.every_op
def test_every_unit_belongs_to_a_kernel() -> None:
    from support import device_probe, probe

    known = {kernel.unit for kernel in (*KERNELS.values(), *probe.KERNELS, *device_probe.KERNELS)}
    lone = sorted(set(sources.units()) - known)
    assert not lone, (
        f"no record names cuda_src/{lone[0]}. Write Kernel({lone[0]!r}, ...) in the op's module, and put it into "
        f"Op(kernels=...)"
    )
    gone = sorted(known - set(sources.units()))
    assert not gone, f"a Kernel names cuda_src/{gone[0]}, which does not exist"


def test_device_code_includes_no_toolkit_header() -> None:
    for unit in sources.units():
        assert not sources.toolkit_headers(unit), unit


# Kernels of more than this many arguments take one struct. Of those that do not, attention_sm90_bwd was 3 to 5 % slower
# with one (4 x 4096 queries of 32 heads of 128, H200) and spilled 4 bytes with a soft cap; attention_sm90_quant spilled
# 12 bytes in two of 18 variants.
MANY_ARGUMENTS = 32
STILL_SEPARATE = {"attention_sm90_bwd": 39, "attention_sm90_quant": 37}


@pytest.mark.every_op
def test_many_arguments_are_one_struct() -> None:
    many = {k.name: len(k.args) for k in KERNELS.values() if len(k.args) > MANY_ARGUMENTS and not k.struct}
    more = {name: count for name, count in many.items() if count > STILL_SEPARATE.get(name, 0)}
    assert not more, (
        f"{more}: kernels of more than {MANY_ARGUMENTS} arguments take them as one struct. Write Kernel(..., "
        f"struct=True), and in the kernel `const __grid_constant__ SomeArguments<T> args`; see cuda_src/rope/rope.cu"
    )
    gone = sorted(STILL_SEPARATE.keys() - many.keys())
    assert not gone, f"remove {', '.join(gone)} from STILL_SEPARATE"


def test_members_of_a_struct_are_those_of_its_bases_then_its_own() -> None:
    text = """
inline constexpr int kDims = 2;
template <typename T>
struct Pointers {
    const T *x, *y;
    T* out;
};
struct Sizes {
    i64 n[kDims], rows;  // of the input

    RTK_DEVICE i64 all() const { return rows; }
};
template <typename T>
struct Arguments : Pointers<T> {
    Sizes sizes;
    double eps;
};
template <typename T>
struct OnlyBases : Pointers<T>, Sizes {};
"""
    pointers, sizes = ["const T* x", "const T* y", "T* out"], ["i64 n0", "i64 n1", "i64 rows"]
    assert kernel_structs.members(text, "Arguments<T>") == [*pointers, *sizes, "double eps"]
    assert kernel_structs.members(text, "OnlyBases<T>") == [*pointers, *sizes]


@pytest.mark.every_op
def test_kernel_parameters_match_their_records() -> None:
    """The packed argument buffer is read by position: a record that is one off would shift every argument.

    Names are compared as well: two strides that change places have the same kind.
    """
    import re

    for kernel in KERNELS.values():
        text = "".join(content.decode() for content in sources.closure(kernel.unit).values()).replace("\\\n", " ")
        signature = re.search(rf"\b{kernel.name}\(([^)]*)\)\s*\{{", text)
        assert signature, f"{kernel.name} is not defined in {kernel.unit}"
        listed = signature[1]
        for macro, body in re.findall(r"#define (RTK_\w+) +(.*)", text):  # parameters that several kernels share
            listed = re.sub(rf"\b{macro}\b", lambda _, body=body: body, listed)
        listed = " ".join(listed.split())
        if kernel.struct:
            maps, _, struct = listed.rpartition("const __grid_constant__ ")
            assert struct, f"{kernel!r} has struct=True, but cuda_src/{kernel.unit} has {listed}"
            listed = maps + ", ".join(kernel_structs.members(text, struct.rpartition(" ")[0]))
        problem = pieces.parameters(kernel, [part.strip() for part in listed.split(",")])
        assert not problem, problem


# Lengths that are known when a loop is compiled: numbers, template arguments and constants, which the code names so.
_KNOWN = r"(?:[-+*/%?:()<>= ]|\d+|sizeof|[A-Z][A-Z0-9_]*|(?:\w+::)*k[A-Z]\w*)+"
_KNOWN_LOOP = re.compile(rf"\s*for \(int (\w+) = {_KNOWN}; \1 < {_KNOWN}; (?:\+\+\1|\1 \+= {_KNOWN})\) ?(?:\{{|$)")


def _is_power_of_two(factor: str) -> bool:
    return factor.isdecimal() and int(factor).bit_count() == 1


def _badly_unrolled(text: str) -> list[tuple[int, str]]:
    """Return the pragmas, by line, that unroll loops of a run-time length by other factors than powers of two."""
    found, lines = [], text.splitlines()
    for at, line in enumerate(lines):
        if pragma := re.match(r"\s*#\s*pragma\s+unroll\b\s*(.*?)\s*(?://.*)?$", line):
            factor = re.sub(r"^\((.*)\)$", r"\1", pragma[1]).strip()
            if not factor or _is_power_of_two(factor):
                continue
            if factor.isdecimal() or not _KNOWN_LOOP.match(lines[at + 1]):
                found.append((at + 1, line.strip()))
        elif "_Pragma" in line:
            found.append((at + 1, line.strip()))
    return found


def test_loops_are_unrolled_by_powers_of_two() -> None:
    """NVRTC 13.0 leaves out the remainder of a loop whose length is a minimum, if the factor divides 2^32 - 1.

    So do 3, 5, 15 and 17. To the compiler ``min(a, b)`` is ``-1 - max(-1 - a, -1 - b)``, and it takes these -1 for
    multiples of 2^32 - 1, of which no power of two is a divisor. Constants as factors are for loops of a known length.
    """
    found = []
    for path in sorted((ROOT / "cuda_src").rglob("*.cu*")):
        bad = _badly_unrolled(path.read_text())
        found += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in bad]
    assert not found, "\n".join(found)


def test_bad_pragmas_are_found() -> None:
    known, unknown = "for (int c = 0; c < CHUNKS - 1; ++c) {", "for (int c = 0; c < count; ++c) {"
    for pragma in ("#pragma unroll 3", "#pragma unroll(6)", "# pragma unroll 12  // of a"):
        assert _badly_unrolled(f"{pragma}\n{unknown}") and _badly_unrolled(f"{pragma}\n{known}")
    for pragma in ("#pragma unroll kStep", "#pragma unroll kWide ? 3 : 1", "  #pragma unroll (N)"):
        assert _badly_unrolled(f"{pragma}\n{unknown}") and not _badly_unrolled(f"{pragma}\n{known}")
        assert _badly_unrolled(f"{pragma}\nfor (int c = lane; c < kAll; c += 32) {{")
        assert not _badly_unrolled(f"{pragma}\nfor (int c = 1; c < 2 * Tile::kAll; c += kStep)")
    for pragma in ("#pragma unroll", "#pragma unroll 1", "#pragma unroll 8  // of a"):
        assert not _badly_unrolled(f"{pragma}\n{unknown}")
    assert _badly_unrolled('_Pragma("unroll 2")')


@pytest.mark.parametrize("factor", ("", 2, 4, 8, 16))
def test_unrolled_loops_have_a_remainder(factor: int | str) -> None:
    """With the NVRTC here, copies of a body are a power of two and those of the remainder: an odd number."""
    source = f"""
        extern "C" __global__ void body(int a, int b) {{
            const int count = a < b ? a : b;
        #pragma unroll {factor}
            for (int i = 0; i < count; ++i) asm volatile("// body %0" :: "r"(i) : "memory");
        }}"""
    unit = "gemm/pad_rows.cu"  # any, whose text is replaced
    compiled = nvrtc.compile_unit(
        unit, ["body"], compiled_for("sm_90a"), sources={unit: source.encode()}, want_ptx=True
    )
    copies = str(compiled.ptx).count("// body")
    assert copies % 2 == 1 and (factor == "" or copies > int(factor))
