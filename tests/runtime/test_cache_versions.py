"""The NVRTC version in the cache: entries of several, of another than the installed one, and no NVRTC at all."""

from __future__ import annotations

import pytest
from support.cache_stub import (
    KERNEL,
    SM90A,
    UNIT,
    cache_key,
    flip_a_bit,
    install_compiler,
    install_sources,
    load,
    load_anew,
)

from rtkernels import cache
from rtkernels.cli import doctor
from rtkernels.errors import NotWarmError, ToolkitError
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc


@pytest.fixture
def sources(tmp_path, monkeypatch):
    return install_sources(tmp_path, monkeypatch)


@pytest.fixture
def compiler(cache_dir, sources, monkeypatch):
    """An empty cache, test sources, and a compiler that counts."""
    return install_compiler(monkeypatch)


def test_cache_two_nvrtc_versions_make_two_entries(compiler, cache_dir):
    first = load()
    compiler.version = (12, 9)
    second = load()
    assert first.image != second.image
    assert len(list((cache_dir / "v2" / "sm_90a").iterdir())) == 2
    compiler.version = (13, 0)
    assert load_anew().image == first.image
    assert len(compiler.calls) == 2


def test_cache_message_no_compile(compiler, monkeypatch):
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    with pytest.raises(NotWarmError) as caught:
        load()
    key = cache_key(UNIT, [KERNEL], SM90A, (), (13, 0))
    message = str(caught.value)
    assert message.startswith(f"scale: {KERNEL} for sm_90a is not in the cache (key {key[:32]})")
    assert "RTKERNELS_NO_COMPILE is set" in message
    assert message.endswith("`rtkernels warm --arch sm_90a --op scale`")
    assert (caught.value.key, caught.value.command) == (key, "rtkernels warm --arch sm_90a --op scale")
    assert compiler.calls == []


def test_cache_no_compile_uses_what_is_there(compiler, monkeypatch):
    load()
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    assert load_anew().source == "disk"


def test_cache_message_compile_not_allowed(compiler):
    with pytest.raises(NotWarmError, match=r"it cannot be compiled here \(CUDA graph capture\)\. Build it"):
        load(compile_allowed=False)
    load()
    assert load_anew(compile_allowed=False).source == "disk"


def _lose_nvrtc(monkeypatch):
    def missing():
        raise ToolkitError("NVRTC cannot be loaded (test)")

    monkeypatch.setattr(nvrtc, "version", missing)


def test_cache_without_nvrtc_takes_any_version(compiler, monkeypatch, caplog):
    for compiler.version in ((12, 9), (13, 0), (12, 8)):
        load()
    _lose_nvrtc(monkeypatch)
    monkeypatch.setenv("RTKERNELS_LOG", "info")
    entry = load_anew()
    assert entry.source == "disk"
    assert entry.meta["nvrtc"] == [13, 0]
    assert "NVRTC cannot be loaded: using" in caplog.text
    assert "built with NVRTC 13.0" in caplog.text
    assert load().source == "memory"


def test_cache_without_nvrtc_takes_nothing_else(compiler, sources, monkeypatch):
    load()
    (sources / "common" / "k.cuh").write_text("#pragma once\n")
    _lose_nvrtc(monkeypatch)
    with pytest.raises(ToolkitError, match=r"NVRTC cannot be loaded \(test\)"):
        load_anew()
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    with pytest.raises(NotWarmError, match="is not in the cache"):
        load_anew()


def test_cache_no_compile_takes_an_entry_of_another_nvrtc(compiler, cache_dir, tmp_path, monkeypatch, caplog):
    """A cache warmed with NVRTC 13.4 serves where 13.2 is installed, in the user's directory and in an extra one."""
    compiler.version = (13, 4)
    made = load()
    compiler.version = (13, 2)
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    monkeypatch.setenv("RTKERNELS_LOG", "info")
    entry = load_anew()
    assert (entry.source, entry.image, entry.meta["nvrtc"]) == ("disk", made.image, [13, 4])
    assert "NVRTC 13.2 may not compile: using" in caplog.text
    assert "built with NVRTC 13.4" in caplog.text
    assert build_cache.peek(UNIT, [KERNEL], SM90A, op="scale") == made.path.parent
    cache_dir.rename(tmp_path / "extra")
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(tmp_path / "extra"))
    assert load_anew().source == "extra"
    assert len(compiler.calls) == 1


def test_cache_no_compile_prefers_what_the_installed_nvrtc_could_have_made(compiler, monkeypatch):
    for compiler.version in ((12, 9), (13, 1), (13, 4), (14, 0)):
        load()
    compiler.version = (13, 2)
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    for best in ([13, 1], [13, 4], [12, 9], [14, 0]):
        entry = load_anew()
        assert entry.meta["nvrtc"] == best
        flip_a_bit(entry.path.parent)
    with pytest.raises(NotWarmError):
        load_anew()


def test_cache_no_compile_takes_no_other_sources_or_flags(compiler, sources, monkeypatch):
    compiler.version = (13, 4)
    load()
    compiler.version = (13, 2)
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    for change in ({"target": targets.parse("sm_80")}, {"flags": ["--use_fast_math"]}):
        with pytest.raises(NotWarmError):
            load_anew(**change)
    (sources / "common" / "k.cuh").write_text("#pragma once\n")
    with pytest.raises(NotWarmError):
        load_anew()


def test_cache_of_another_nvrtc_is_not_used_where_compiling_is_allowed(compiler):
    compiler.version = (13, 4)
    load()
    compiler.version = (13, 2)
    assert load_anew().source == "compiled"
    assert build_cache.peek(UNIT, [KERNEL], SM90A, op="scale") is not None


def test_cache_message_names_both_nvrtc_versions(compiler):
    compiler.version = (13, 4)
    load()
    compiler.version = (13, 2)
    with pytest.raises(NotWarmError, match=r"the cache has it from NVRTC 13\.4; NVRTC 13\.2 is installed"):
        load_anew(compile_allowed=False)
    assert build_cache.peek(UNIT, [KERNEL], SM90A, op="scale") is None


def test_doctor_says_that_entries_of_another_nvrtc_exist(compiler, cache_dir, tmp_path, monkeypatch):
    compiler.version = (13, 4)
    load()
    cache_dir.rename(tmp_path / "extra")
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(tmp_path / "extra"))
    assert cache.info()["nvrtc"] == {"13.4": 1}
    probes = {name: doctor._PROBES[name] for name in doctor._PROBES if not name.startswith("test_")}
    monkeypatch.setattr(doctor, "_PROBES", {**probes, "test_compile": dict, "test_launch": dict})
    monkeypatch.setitem(doctor._PROBES, "nvrtc", lambda: {"version": "13.2"})
    (note,) = [text for text in doctor.collect()["notes"] if "another NVRTC" in text]
    assert "(1 with 13.4) than the 13.2 installed" in note
    assert "RTKERNELS_NO_COMPILE=1" in note
