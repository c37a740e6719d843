"""The sources: where they are, the include closure, the include rules."""

from __future__ import annotations

import hashlib
import os
import re

import pytest

from rtkernels.errors import SourceError
from rtkernels.runtime.build import sources


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An empty source root; the fixture writes files into it."""
    monkeypatch.setattr(sources, "_root_override", tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_sources_real_root_has_only_allowed_includes():
    for unit in sources.units():
        assert next(iter(sources.closure(unit))) == unit
        assert set(sources.toolkit_headers(unit)) <= set(sources.TOOLKIT_HEADERS)


def test_sources_closure_is_unit_first_then_headers_in_include_order(tree):
    tree("norm/k.cu", '#include "common/b.cuh"\n  #  include "common/a.cuh"  // why\nint k;\n')
    tree("common/a.cuh", "#pragma once\n")
    tree("common/b.cuh", '#pragma once\n/* x */ #include "common/c.cuh"\n')
    tree("common/c.cuh", '#pragma once\n#include "common/b.cuh"\n')
    closure = sources.closure("norm/k.cu")
    assert list(closure) == ["norm/k.cu", "common/b.cuh", "common/c.cuh", "common/a.cuh"]
    assert closure["common/a.cuh"] == b"#pragma once\n"


def test_sources_commented_includes_and_strings_do_not_count(tree):
    tree("k.cu", '// #include "no.cuh"\n/*\n#include "no.cuh"\n*/\nchar const* s = "/*";\n#include "a.cuh"\n')
    tree("a.cuh", "")
    assert list(sources.closure("k.cu")) == ["k.cu", "a.cuh"]


def test_sources_toolkit_headers_of_the_whole_closure(tree):
    tree("k.cu", '#include "a.cuh"\n#include <cuda_fp16.h>\n')
    tree("a.cuh", "#include <cuda_fp8.h>\n#include <cuda_fp16.h>\n")
    assert sources.toolkit_headers("k.cu") == ("cuda_fp16.h", "cuda_fp8.h")


def test_sources_edits_are_seen_even_with_equal_size_and_time(tree):
    path = tree("k.cu", "int a;\n")
    assert sources.closure("k.cu")["k.cu"] == b"int a;\n"
    before = path.stat().st_mtime_ns
    path.write_text("int b;\n")
    os.utime(path, ns=(before, before))
    assert sources.closure("k.cu")["k.cu"] == b"int b;\n"


def test_sources_unchanged_file_is_read_once(tree):
    path = tree("k.cu", "int a;\n")
    os.utime(path, (1e9, 1e9))
    assert sources.read("k.cu") is sources.read("k.cu")


def test_sources_digests(tree):
    tree("k.cu", "int a;\n")
    closure = sources.closure("k.cu")
    assert sources.digests(closure) == {"k.cu": hashlib.sha256(b"int a;\n").hexdigest()}
    assert sources.digests({"k.cu": b"other"}) == {"k.cu": hashlib.sha256(b"other").hexdigest()}


def test_sources_units_are_sorted_relative_names(tree):
    for name in ("norm/b.cu", "act/a.cu", "common/x.cuh"):
        tree(name, "")
    assert sources.units() == ["act/a.cu", "norm/b.cu"]


def test_sources_flatten_replaces_first_includes(tree):
    tree("k.cu", '#include "a.cuh"\n#include "b.cuh"\n#include <cuda_fp16.h>\nint k;\n')
    tree("a.cuh", "#pragma once\nint a;\n")
    tree("b.cuh", '#pragma once\n#include "a.cuh"\nint b;\n')
    text = sources.flatten(sources.closure("k.cu"))
    assert re.findall(r"int \w;", text) == ["int a;", "int b;", "int k;"]
    assert re.findall(r"^#.*", text, re.MULTILINE) == ["#include <cuda_fp16.h>"]


@pytest.mark.parametrize(
    "directive",
    [
        "#include <vector>",
        "#include <cuda_runtime.h>",
        "#include HEADER",
        "#include_next <cuda_fp16.h>",
        "#import <cuda_fp16.h>",
        '%:include "a.cuh"',
        '#include "/etc/passwd"',
        '#include "a\\b.cuh"',
        '#include \\\n"a.cuh"',
    ],
)
def test_sources_message_forbidden_include(tree, directive):
    tree("norm/k.cu", f"int x;\n{directive}\n")
    tree("a.cuh", "")
    with pytest.raises(SourceError) as caught:
        sources.closure("norm/k.cu")
    assert str(caught.value).startswith("norm/k.cu:2: ")
    assert 'only #include "path/below/cuda_src" and <cuda_fp16.h>' in str(caught.value)


@pytest.mark.parametrize("name", ["../a.cuh", "common/../a.cuh", "common/./a.cuh", "common//a.cuh"])
def test_sources_message_dots_in_include(tree, name):
    tree("a.cuh", "")
    tree("k.cu", f'#include "{name}"\n')
    with pytest.raises(SourceError, match=r"relative to cuda_src, without|only #include"):
        sources.closure("k.cu")


def test_sources_message_missing_header(tree, tmp_path):
    tree("norm/k.cu", '\n\n#include "norm/gone.cuh"\n')
    where = re.escape(str(tmp_path))
    with pytest.raises(SourceError, match=rf'norm/k\.cu:3: #include "norm/gone\.cuh": no such file; .* {where}'):
        sources.closure("norm/k.cu")


def test_sources_message_missing_unit(tree):
    with pytest.raises(SourceError, match=r"cannot read the CUDA source 'norm/none\.cu' in .*: No such file"):
        sources.closure("norm/none.cu")


def test_sources_message_not_utf8(tree, tmp_path):
    (tmp_path / "k.cu").write_bytes(b"int a;\xff\n")
    with pytest.raises(SourceError, match=r"k\.cu: not valid UTF-8 at byte 6"):
        sources.closure("k.cu")


def test_sources_message_missing_root(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "pkg" / "runtime/build/sources.py"))
    with pytest.raises(SourceError, match=r"CUDA sources .* are missing: no common/abi\.cuh .* reinstall"):
        sources.root()


def test_sources_root_prefers_the_one_in_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "pkg" / "runtime/build/sources.py"))
    for base in (tmp_path, tmp_path / "pkg"):
        (base / "cuda_src" / "common").mkdir(parents=True)
        (base / "cuda_src" / "common" / "abi.cuh").touch()
        assert sources.root() == base / "cuda_src"
