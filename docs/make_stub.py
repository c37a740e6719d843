"""Write ``rtkernels/__init__.pyi``, which type checkers and editors read: ``python docs/make_stub.py``.

Most names are imported there from their modules. A function is written out if what it returns depends on its arguments
(`RESULTS`), or if options of it are one of a few words (`WORDS`); its parameters are those of its source.
``tests/contracts/test_types.py`` compares both tables with what calls return and accept.
"""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rtkernels._public import MODULES, NAMES, OPS  # noqa: E402

# ---- results that depend on arguments -------------------------------------------------------------------------------

PAIR, TRIPLE, FOUR = (f"tuple[{', '.join(['Tensor'] * n)}]" for n in (2, 3, 4))
ABSENT = "absent"  # None, or False

Case = tuple[dict[str, str], str]  # parameters that decide: ABSENT, or the type of what is given; then the result


def _switch(name: str, plain: str, given: str, kind: str = "Literal[True]") -> list[Case]:
    return [({name: ABSENT}, plain), ({name: kind}, given)]


def _two(first: str, second: str) -> list[Case]:
    """Two flags, each of which adds a tensor."""
    on = "Literal[True]"
    return [
        ({first: ABSENT, second: ABSENT}, "Tensor"), ({first: on, second: ABSENT}, PAIR),
        ({first: ABSENT, second: on}, PAIR), ({first: on, second: on}, TRIPLE),
    ]  # fmt: skip


def _norm(statistics: str, added: int, x_bias: str) -> list[Case]:
    """``rms_norm`` and ``layer_norm``: of training, then with the options of inference."""
    modulated = dict.fromkeys(("scale", "shift", "channel_scale"), ABSENT)
    summed = dict.fromkeys(("gate", x_bias, "style", "residual_out"), ABSENT)
    codes = {"quant": ABSENT, "keep": ABSENT, "scale_out": ABSENT}
    off, on = {statistics: ABSENT}, {statistics: "Literal[True]"}
    given = {"residual": "Tensor"}
    with_statistics = {2: (PAIR, TRIPLE), 3: (TRIPLE, FOUR)}[added + 1]
    return [
        ({"residual": ABSENT, **off, **summed, **codes}, "Tensor"),
        ({**given, **off, **modulated, **summed, **codes}, PAIR),
        ({"residual": ABSENT, **on, **modulated, **summed, **codes}, with_statistics[0]),
        ({**given, **on, **modulated, **summed, **codes}, with_statistics[1]),
        ({**off, "quant": 'torch.dtype | Literal["nvfp4"]'}, "NormOut"),
        ({**off, "quant": "Quant", "keep": "Literal[True]"}, "NormOut"),
        ({**off, "quant": "Quant"}, "Tensor | NormOut"),
        *(({**off, **codes, name: "Tensor"}, "NormOut") for name in ("gate", x_bias, "style")),
        *(({**off, **codes, **given, name: "Tensor"}, "NormOut") for name in (*modulated, "residual_out")),
        ({}, "Tensor | tuple[Tensor, ...] | NormOut"),
    ]


_STATISTICS = [f"return_{name}" for name in ("entropy", "lse", "log_sum_sq", "mean_logit", "top1")]
_NVFP4 = {"x": "Tensor | tuple[Tensor, ...]", "up": "Tensor | tuple[Tensor, ...] | None = None"}  # codes and scales
RESULTS: dict[str, list[Case]] = {
    "rms_norm": _norm("return_rstd", 1, "bias"),
    "layer_norm": _norm("return_statistics", 2, "x_bias"),
    "glu": [
        ({**_NVFP4, "quant": ABSENT}, "Tensor"),
        ({**_NVFP4, "quant": 'torch.dtype | Literal["nvfp4"]'}, "GluOut"),
        ({**_NVFP4, "quant": "Quant", "keep": "Literal[True]"}, "GluOut"),
        (_NVFP4, "Tensor | GluOut"),
    ],
    "rope": _switch("k", "Tensor", PAIR, "Tensor"),
    "cross_entropy": _two("return_lse", "return_accuracy"),
    "linear_cross_entropy": _two("return_lse", "return_accuracy"),
    "linear_logprob": [
        *(({**dict.fromkeys(_STATISTICS, ABSENT), **case}, result) for case, result in _two(*_STATISTICS[:2])),
        ({}, "Tensor | tuple[Tensor, ...]"),
    ],
    "quantize_fp8": [
        ({"layout": 'Literal["both"]'}, "QuantizedBoth"),
        ({"with_transposed": "Literal[True]"}, "QuantizedBoth"),
        ({"layout": 'Literal["row"] = "row"', "with_transposed": ABSENT}, PAIR),
    ],
    "quantize_fp8_hadamard": [
        ({"layout": 'Literal["both"]'}, "QuantizedBoth"),
        ({"layout": 'Literal["row"] = "row"'}, PAIR),
    ],
    "moe_permute": [
        ({"probs": ABSENT, "scale": ABSENT}, "Tensor"),
        ({"probs": "Tensor"}, "MoePermuted"),
        ({"scale": "Tensor"}, "MoePermuted"),
    ],
    **{name: _switch("quant_out", "Tensor", PAIR, "WORDS") for name in ("gated_mm", "scaled_mm")},
    **{name: _switch("scale", "Tensor", PAIR, "Tensor") for name in ("index_select", "sort_chunks")},
    "transpose": [({"x": "Tensor"}, "Tensor"), ({"x": "Sequence[Tensor]"}, "list[Tensor]")],
    **{
        name: _switch("return_lse", "Tensor", PAIR)
        for name in (
            *("attention", "attention_decode", "attention_quantized", "attention_varlen", "sage_attention"),
            *("mla_attention", "mla_decode", "sparse_mla"),
        )
    },
    **{
        name: _switch("return_state", "Tensor", PAIR)
        for name in ("lightning_attention", "gated_delta_rule", "ssd", "causal_conv1d")
    },
    **{name: _switch("per_tensor", "Tensor", PAIR) for name in ("multi_count_zeros", "multi_norm")},
}

# ---- options that are one of a few words ----------------------------------------------------------------------------

_PRODUCT_ACTS = "relu silu gelu_tanh gelu"
_GLU_ACTS = "silu gelu_tanh gelu_erf relu relu2 sigmoid none swiglu_oai quick_gelu"
_RECIPES = "auto none tensor row block_1x128_128x128 block_1x128_1x128 block_128x128_128x128 tile mx32 nvfp4"
_PACKED = "int4 uint4 e2m1"
_FP8_RECIPES = "block row tensor hadamard"

# Of every function with such a parameter that is a str; then of one function.
WORDS: dict[str, str] = {
    "act": _GLU_ACTS, "recipe": _RECIPES, "acc": "auto fp32 fast fp16 int32", "nibble": "low high",
    "b_layout": "auto nk kn",
    "backend": "auto rtkernels sm90 skinny unpack pad mma cluster decode tcgen05 swapped torch",
    "reuse": "inputs",
    "quant_out": "1x128 row 1x16", "layout": "row transposed both", "scale_layout": "row column",
    "precision": "fast high exact", "score": "softmax sigmoid", "reduction": "none mean batchmean sum",
    "output": "row transposed both", "rule": "ocp nv", "packed": _PACKED,
}  # fmt: skip
WORDS_OF: dict[tuple[str, str], str] = {
    ("causal_conv1d", "activation"): "silu", ("causal_conv1d_step", "activation"): "silu",
    ("group_rms_norm_gate", "act"): "sigmoid silu",
    ("act", "kind"): "gelu_tanh gelu_erf silu relu relu2 sigmoid quick_gelu",
    ("quantize_int8", "granularity"): "row tensor",
    ("group_rms_norm_gate", "layout"): "same sequence_first",
    ("glu", "layout"): "concat interleaved",
    ("glu_fp8_backward", "keep"): "fp8 dense both",
    ("glu_smooth_fp8_backward", "keep"): "fp8 dense both",
    **{(name, "layout"): "bshd sbhd bhsd" for name in ("mla_rope", "rope")},
    ("mla_rope", "output_layout"): "bshd sbhd bhsd",
    ("qk_norm_rope", "head_order"): "grouped plain",
    ("qk_norm_rope", "layout"): "sbhd bshd",
    ("qkv_split", "style"): "half interleaved",
    **{(name, "reduction"): "none mean sum" for name in ("cross_entropy", "linear_cross_entropy")},
    **{(name, "granularity"): "tensor row group group_t block channel" for name in ("quantize_fp8", "dequantize_fp8")},
    **{(name, "granularity"): "row channel" for name in ("quantize_fp8_smooth", "dequantize_fp8_smooth")},
    **{(name, "granularity"): "token block" for name in ("quantize_qk", "sage_attention")},
    **{(name, "layout"): "row both" for name in ("quantize_fp8", "quantize_fp8_hadamard")},
    ("linear_divergence", "save"): "stats gradients",
    ("linear_logprob", "save"): "stats logits projected",
    ("quantize_nvfp4", "scale_rule"): "rne ceil mse",
    ("quantize_nvfp4", "elem_rule"): "rne away zero",
    ("fp8_linear", "recipe"): f"{_FP8_RECIPES} smooth",
    ("fp8_weight", "recipe"): _FP8_RECIPES,
    ("decode_linear", "packed"): _PACKED,
    ("fp8_linear", "wgrad"): "fp8 bf16",
    **{
        (name, "act"): _PRODUCT_ACTS
        for name in ("decode_linear", "gated_mm", "grouped_mm", "grouped_mm_masked", "scaled_mm")
    },
    **{
        (name, "layout"): "blhd bhld"
        for name in ("attention", "merge_attention", "mla_attention", "sage_attention")
    },
    **{(name, "backend"): "auto sm90 mma" for name in ("attention", "attention_varlen", "mla_attention")},
    ("attention", "acc"): "fp32 fp16_qk fp16_pv fp16",
    ("sage_attention", "qk"): "int8 fp8",
    ("sage_attention", "pv"): "16 int8 fp8",
    ("patchify", "img_layout"): "nhwc nchw",
    ("patchify", "order"): "hwc chw",
}  # fmt: skip
NO_WORDS = {("rope_table", "device"), ("rope_table", "scaling"), ("check_labels", "device")}  # strings of any content


def words(function: str, parameter: str) -> list[str]:
    """Return what an option may be, besides None; [] if it is no word."""
    return WORDS_OF.get((function, parameter), WORDS.get(parameter, "")).split()


def _with_words(function: str, parameter: str, annotation: str) -> str:
    """Return an annotation with the words of an option in the place of ``str``."""
    parts = annotation.split(" | ")
    if "str" not in annotation or (function, parameter) in NO_WORDS:
        return annotation
    if parameter == "quant":
        return annotation.replace("str", 'Literal["nvfp4"]')
    found = words(function, parameter)
    if not found:
        raise ValueError(f"{function}: {parameter} is {annotation}, and no words of it are known")
    literal = f"Literal[{', '.join(map(repr, found))}]"
    return " | ".join(part.replace("str", literal) if "str" in part else part for part in parts)


# ---- from a module's source to its functions in the stub ------------------------------------------------------------


class _Module:
    """A source file: its functions, and where the names in their signatures come from."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = ROOT.joinpath("rtkernels", *name.split(".")).with_suffix(".py")
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.origin: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                self.origin.update({a.asname or a.name: f"from {node.module} import {a.name}" for a in node.names})
            elif isinstance(node, ast.Import):
                self.origin.update({a.asname or a.name: f"import {a.name}" for a in node.names})
        for node in self.tree.body:
            found = [node.name] if isinstance(node, ast.ClassDef) else []
            found += [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
            self.origin.update({name: f"from rtkernels.{self.name} import {name}" for name in found})

    def function(self, name: str) -> ast.FunctionDef | None:
        found = (node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
        return next(found, None)

    def imports(self, annotation: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(annotation, mode="eval")):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id) and node.id not in ("Literal", *NAMES):
                yield self.origin[node.id]


def _parameters(name: str, node: ast.FunctionDef, case: dict[str, str]) -> list[str]:
    """Return the parameters of an overload."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    written = [_parameter(name, a, d, case) for a, d in zip(positional, defaults, strict=True)]
    named = [_parameter(name, a, d, case) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*written, *(["*"] if named else []), *named]


def _parameter(name: str, argument: ast.arg, default: ast.expr | None, case: dict[str, str]) -> str:
    declared = ast.unparse(argument.annotation)
    decided = case.get(argument.arg)
    if decided == ABSENT:
        kind = "Literal[False] = False" if declared == "bool" else "None = None"
        return f"{argument.arg}: {kind}"
    if decided == "WORDS":
        declared, default = declared.removesuffix(" | None"), None
    elif decided is not None:
        return f"{argument.arg}: {decided}"
    kind = _with_words(name, argument.arg, declared)
    return f"{argument.arg}: {kind}" + (f" = {ast.unparse(default)}" if default is not None else "")


def _wrapped(parameters: list[str]) -> list[str]:
    return [f"    {line}" for line in textwrap.wrap(", ".join(parameters), 114, break_on_hyphens=False)]


def _written(name: str, module: _Module) -> tuple[list[str], set[str]] | None:
    """Return a function as the stub has it, with the imports it needs; None if an import of it says all."""
    node = module.function(name)
    if node is None:
        return None
    plain = ast.unparse(node.returns)
    cases = list(RESULTS.get(name, [])) or [({}, plain)]
    if set(cases[-1][0]) & {p.arg for p in node.args.kwonlyargs}:  # what is known only when the call is made
        cases.append(({}, plain))
    texts = [(_parameters(name, node, case), result) for case, result in cases]
    if name not in RESULTS and "Literal[" not in str(texts):
        return None
    lines, imports = [], set()
    for i, (parameters, result) in enumerate(texts):
        annotations = [result, *(p.partition(": ")[2].partition(" = ")[0] for p in parameters if p != "*")]
        imports |= {line for a in annotations for line in module.imports(a)}
        head = ["@overload"] if len(texts) > 1 else []
        doc = [f'    """{ast.get_docstring(node).splitlines()[0]}"""'] if i == 0 else []
        close = f") -> {result}:" + ("" if doc else " ...")
        lines += [*head, f"def {name}(", *_wrapped(parameters), close, *doc]
    return lines, imports


def stub() -> str:
    """Return the text of ``__init__.pyi``."""
    imports = {f"from rtkernels import {name} as {name}" for name in MODULES}
    modules = {module: _Module(module) for module in set(OPS.values())}
    functions: list[str] = []
    for name, module in NAMES.items():
        found = _written(name, modules[module]) if name in OPS else None
        if found is None:
            imports.add(f"from rtkernels.{module} import {name} as {name}")
        else:
            functions += ["", *found[0]]
            imports |= found[1]
    lines = ["# Written by docs/make_stub.py from the sources and the tables there.", "# ruff: noqa"]
    lines += ["", "from typing import Literal, overload", "", *sorted(imports), "", "__version__: str", *functions]
    return "\n".join([*lines, ""])


def write() -> None:
    """Write ``__init__.pyi`` anew."""
    (ROOT / "rtkernels" / "__init__.pyi").write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    write()
