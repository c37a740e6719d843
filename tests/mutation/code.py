"""Reading device sources as text: what is code, which of it runs, and how far an expression reaches.

The sources are formatted: binary operators stand between spaces, brackets of template arguments do not. That is all
the grammar this needs.
"""

from __future__ import annotations

import re
from functools import cache

_COMMENT_OR_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
_COMPILE_TIME = re.compile(r"\bif constexpr \(|\b__launch_bounds__\(|\bstatic_assert\(|\basm\b[^(]*\(|\bdecltype\(")
_TEMPLATE_ARGUMENTS = re.compile(r"\b[A-Za-z_]\w*<")
_FUNCTION = re.compile(r"\)\s*(?:const\s*)?(?:(?:->|:)[^{;]*)?$")
# Statements whose values the compiler needs, and those that say nothing about results.
_NOT_MUTATED = re.compile(
    r"\b(?:constexpr|static_assert|using|typename|template|extern|asm|case|__shared__|__align__|alignas|goto"
    r"|\w*prefetch\w*|\w*evict\w*|launch_dependents|setmaxnreg\w*|settled|pressure|forget)\b"
)
_SKIPPED_FUNCTION = re.compile(r"\bconstexpr\b|prefetch|\bdelete\b")

# Binary operators, loosest binding first; between spaces.
LEVELS = (
    ("=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>=", "%="), ("?", ":"), ("||",), ("&&",), ("|",), ("^",),
    ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
_LEVEL = {operator: level for level, operators in enumerate(LEVELS) for operator in operators}
_SPACED = re.compile(r"(?<=[ \n])(?:<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/|&^%]=|<<|>>|[-+*/%<>=?:&|^])(?=[ \n])")
_OPEN, _CLOSE = "([{", ")]}"


def level(operator: str) -> int:
    """Return how tightly a binary operator binds."""
    return _LEVEL[operator]


def _blank(text: str, start: int, end: int) -> str:
    kept = "".join(c if c == "\n" else " " for c in text[start:end])
    return text[:start] + kept + text[end:]


def closing(text: str, at: int) -> int:
    """Return where the bracket that opens at a position is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if not depth:
            return i
    return len(text) - 1


def opening(text: str, at: int) -> int:
    """Return where the bracket that closes at a position is opened."""
    depth = 0
    for i in range(at, -1, -1):
        depth += (text[i] in _CLOSE) - (text[i] in _OPEN)
        if not depth:
            return i
    return 0


def uncommented(text: str) -> str:
    """Return code without its comments, in one line."""
    return " ".join(_COMMENT_OR_LITERAL.sub(lambda m: " " if m[0][0] == "/" else m[0], text).split())


@cache
def plain(text: str) -> str:
    """Return a source with comments, literals, directives and compile-time conditions blanked, at equal positions."""
    code = _COMMENT_OR_LITERAL.sub(lambda m: "".join(c if c == "\n" else " " for c in m[0]), text)
    code = _DIRECTIVE.sub(lambda m: "".join(c if c == "\n" else " " for c in m[0]), code)
    for match in list(_COMPILE_TIME.finditer(code)):
        code = _blank(code, match.end(), closing(code, match.end() - 1))
    code = code.replace("if constexpr (", "             (")
    return code


@cache
def without_template_arguments(code: str) -> str:
    """Return plain code with the arguments of templates replaced by letters: one name each."""
    chars = list(code)
    for match in _TEMPLATE_ARGUMENTS.finditer(code):
        depth, i = 0, match.end() - 1
        while i < len(code) and code[i] not in ";{":
            if code[i] == "<":
                depth += 1
            elif code[i] == ">" and code[i - 1] != "-":
                depth -= 1
            if not depth:
                break
            i += 1
        if depth:
            continue
        for j in range(match.end() - 1, i + 1):
            chars[j] = chars[j] if chars[j] == "\n" else "T"
    return "".join(chars)


@cache
def bodies(code: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges of function bodies whose code runs on the device, of plain code."""
    found = []
    i, start = 0, 0
    while i < len(code):
        c = code[i]
        if c in ";}":
            start = i + 1
        elif c == "{":
            header = code[start:i]
            end = closing(code, i)
            if re.search(r"\b(?:namespace|struct|class|union|enum)\b", re.sub(r"template\s*<.*?>\s*\n", "", header)):
                if re.search(r"\benum\b", header):
                    i = end
                start = i + 1
            else:
                if _FUNCTION.search(header) and not _SKIPPED_FUNCTION.search(header):
                    found.append((i + 1, end))
                i, start = end, end + 1
        i += 1
    return tuple(found)


def statement(code: str, at: int) -> tuple[int, int]:
    """Return the range of the statement around a position; a ``for`` has three in its brackets."""
    start = max(code.rfind(c, 0, at) for c in ";{}") + 1
    ends = [e for e in (code.find(c, at) for c in ";{}") if e >= 0]
    return start, min(ends)


def runs(code: str, at: int) -> bool:
    """Return whether a position of plain code is in a statement that computes something at run time."""
    start, end = statement(code, at)
    return not _NOT_MUTATED.search(code[start:end])


def expression(code: str, at: int, lowest: int) -> tuple[int, int]:
    """Return the range of the expression around a position with operators that bind at least so tightly.

    Args:
        code: Without template arguments.
        at: A position in the expression, outside of brackets that it should extend beyond.
        lowest: Level of the operator that binds least in it.
    """
    operators = spaced_operators(code)
    left = at
    while left > 0:
        c = code[left - 1]
        if c in _CLOSE:
            left = opening(code, left - 1)
            continue
        if c in _OPEN + ",;" or (code.startswith("return ", left - 7) and left >= 7):
            break
        operator = _operator_ending(operators, left)
        if operator is not None:
            if _LEVEL[operator] < lowest:
                break
            left -= len(operator)
            continue
        left -= 1
    right = at
    while right < len(code):
        c = code[right]
        if c in _OPEN:
            right = closing(code, right) + 1
            continue
        if c in _CLOSE + ",;":
            break
        if right in operators:
            if _LEVEL[operators[right]] < lowest:
                break
            right += len(operators[right])
            continue
        right += 1
    return left + len(code[left:right]) - len(code[left:right].lstrip()), left + len(code[left:right].rstrip())


def _operator_ending(operators: dict[int, str], end: int) -> str | None:
    for length in (3, 2, 1):
        if len(operators.get(end - length, "")) == length:
            return operators[end - length]
    return None


@cache
def spaced_operators(code: str) -> dict[int, str]:
    """Return position and text of every binary operator."""
    return {m.start(): m[0] for m in _SPACED.finditer(code)}
