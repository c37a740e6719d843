"""The kernel cache: keys, hits, trust, modes, eviction, and everything that may damage it.

Most tests replace NVRTC by a stub that counts, so that they test the cache and not the compiler. What other
processes may do to it is in ``test_cache_processes.py``.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from support.cache_stub import (
    KERNEL,
    SM80,
    SM90A,
    UNIT,
    cache_key,
    edit_meta,
    flip_a_bit,
    install_compiler,
    install_sources,
    load,
    load_anew,
    tree,
)

from rtkernels import cache
from rtkernels.errors import ArgumentError, KernelCompileError
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import sources as sources_module
from rtkernels.runtime.build import store


@pytest.fixture
def sources(tmp_path, monkeypatch):
    return install_sources(tmp_path, monkeypatch)


@pytest.fixture
def compiler(cache_dir, sources, monkeypatch):
    """An empty cache, test sources, and a compiler that counts."""
    return install_compiler(monkeypatch)


# --- hits and keys ------------------------------------------------------------------------------------------


def test_cache_real_compile_then_memory_then_disk(cache_dir, sources):
    pytest.importorskip("cupy")
    first = load()
    assert first.source == "compiled"
    assert first.image.startswith(b"\x7fELF")
    assert load().source == "memory"
    again = load_anew()
    assert again.source == "disk"
    assert (again.image, again.path, again.names) == (first.image, first.path, first.names)
    assert again.meta["resources"][KERNEL]["registers"] > 0
    assert build_cache.stats.compiles == 0


def test_cache_real_ptx_entry(cache_dir, sources):
    pytest.importorskip("cupy")
    entry = load(target=targets.parse("compute_80"))
    assert entry.path.name == "kernel.ptx"
    assert load_anew(target=targets.parse("compute_80")).source == "disk"


def test_cache_layout_and_meta(compiler, cache_dir, sources):
    entry = load()
    key = cache_key(UNIT, [KERNEL], SM90A, (), (13, 0))
    assert entry.path == cache_dir / "v2" / "sm_90a" / f"scale-{key[:32]}" / "kernel.cubin"
    assert sorted(path.name for path in entry.path.parent.iterdir()) == ["kernel.cu.gz", "kernel.cubin", "meta.json"]
    meta = json.loads((entry.path.parent / "meta.json").read_text())
    assert meta == entry.meta
    assert meta["key"] == key
    assert (meta["op"], meta["target"], meta["nvrtc"]) == ("scale", "sm_90a", [13, 0])
    assert list(meta["sources"]) == [UNIT, "common/k.cuh"]
    assert str(sources) not in json.dumps(meta)
    listing = gzip.decompress((entry.path.parent / "kernel.cu.gz").read_bytes()).decode()
    assert KERNEL in listing
    assert "inline constexpr int kK = 2;" in listing
    assert list((cache_dir / "v2" / "tmp").iterdir()) == []


def test_cache_meta_is_written_last(compiler, monkeypatch):
    written = []
    write = store.write
    monkeypatch.setattr(store, "write", lambda path, *rest: (written.append(path.name), write(path, *rest)))
    load()
    assert written[-1] == "meta.json"


def test_cache_key_depends_on_everything_that_matters(compiler, sources, monkeypatch):
    def key(expressions=(KERNEL,), target=SM90A, flags=(), version=(13, 0)):
        return cache_key(UNIT, expressions, target, flags, version)

    base = key()
    variants = {
        base,
        key(expressions=["rtk::scale<double>"]),
        key(target=SM80),
        key(flags=["--use_fast_math"]),
        key(version=(12, 9)),
    }
    monkeypatch.setenv("RTKERNELS_LINEINFO", "1")
    variants.add(key())
    monkeypatch.delenv("RTKERNELS_LINEINFO")
    (sources / "common" / "k.cuh").write_text("#pragma once\nnamespace rtk { inline constexpr int kK = 3; }\n")
    variants.add(key())
    assert len(variants) == 7
    assert all(len(variant) == 64 for variant in variants)


def test_cache_key_does_not_depend_on_place_time_or_order(compiler, sources, tmp_path, monkeypatch):
    both = [KERNEL, "rtk::scale<double>"]
    before = cache_key(UNIT, both, SM90A, (), (13, 0))
    elsewhere = shutil.copytree(sources, tmp_path / "elsewhere" / "cuda_src")
    os.utime(elsewhere / UNIT, (1e9, 1e9))
    monkeypatch.setattr(sources_module, "_root_override", elsewhere)
    monkeypatch.chdir(tmp_path)
    assert cache_key(UNIT, both[::-1], SM90A, (), (13, 0)) == before


def test_cache_edited_header_is_a_new_entry(compiler, sources):
    first = load()
    (sources / "common" / "k.cuh").write_text("#pragma once\nnamespace rtk { inline constexpr int kK = 5; }\n")
    second = load()
    assert second.source == "compiled"
    assert second.path != first.path
    assert b"kK = 5" in second.image


def test_cache_compiles_what_was_hashed(compiler, sources, monkeypatch):
    """An edit between hashing and compiling must not end up under the old key."""
    hashed = sources_module.digests

    def edit_after(files):
        found = hashed(files)
        (sources / "common" / "k.cuh").write_text("edited in between")
        return found

    monkeypatch.setattr(sources_module, "digests", edit_after)
    assert b"edited in between" not in load().image


def test_cache_compile_error_passes_through_and_leaves_nothing(cache_dir, sources):
    pytest.importorskip("cupy")
    (sources / "common" / "k.cuh").write_text("#error no\n")
    with pytest.raises(KernelCompileError, match=r"scale: norm/scale\.cu does not compile for sm_90a"):
        load()
    assert cache.ls() == []


def test_cache_peek_finds_without_building(compiler):
    assert build_cache.peek(UNIT, [KERNEL], SM90A, op="scale") is None
    entry = load()
    assert build_cache.peek(UNIT, [KERNEL], SM90A, op="scale") == entry.path.parent


def test_cache_message_bad_op_name(compiler):
    with pytest.raises(ArgumentError, match=r"op name '\.\./x' cannot name a cache entry"):
        build_cache.load(UNIT, [KERNEL], SM90A, op="../x")


def test_cache_threads_compile_once(compiler):
    start = threading.Barrier(8)
    found = []

    def work():
        start.wait()
        found.append(load())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.calls) == 1
    assert len({entry.image for entry in found}) == 1
    assert build_cache.stats.memory_hits == 7


# --- damaged entries ----------------------------------------------------------------------------------------


def _replace_by_file(directory):
    shutil.rmtree(directory)
    directory.write_text("not a directory")


def _drop_checksum(directory):
    meta = json.loads((directory / "meta.json").read_text())
    del meta["checksum"]
    (directory / "meta.json").write_text(json.dumps(meta))


def _replace_by_loop(directory):
    shutil.rmtree(directory)
    directory.symlink_to(directory)


def _loop(file):
    file.unlink()
    file.symlink_to(file)


def _directory(file):
    file.unlink()
    (file / "inside").mkdir(parents=True)


def _pipe(file):
    file.unlink()
    os.mkfifo(file)


DAMAGE = {
    "truncated image": (lambda d: os.truncate(d / "kernel.cubin", 10), "kernel.cubin does not match its checksum"),
    "bit flip": (flip_a_bit, "kernel.cubin does not match its checksum"),
    "empty image": (lambda d: os.truncate(d / "kernel.cubin", 0), "kernel.cubin does not match its checksum"),
    "no image": (lambda d: (d / "kernel.cubin").unlink(), "kernel.cubin is missing"),
    "no meta": (lambda d: (d / "meta.json").unlink(), "meta.json is missing"),
    "truncated meta": (lambda d: os.truncate(d / "meta.json", 50), "meta.json is not valid JSON"),
    "empty meta": (lambda d: os.truncate(d / "meta.json", 0), "meta.json is not valid JSON"),
    "binary meta": (lambda d: (d / "meta.json").write_bytes(b"\xff\xfe\0"), "meta.json is not valid JSON"),
    "deep meta": (lambda d: (d / "meta.json").write_text("[" * 100_000), "meta.json is not valid JSON"),
    "meta of another shape": (lambda d: (d / "meta.json").write_text("[1]"), "meta.json is incomplete"),
    "meta without names": (lambda d: edit_meta(d, names={}), "its kernel names are incomplete"),
    "another format": (lambda d: edit_meta(d, format=99), "its format is 99"),
    "another key": (lambda d: edit_meta(d, key="0" * 64), "it belongs to another key"),
    "another base key": (lambda d: edit_meta(d, base_key="0" * 64), "it belongs to another key"),
    "altered meta": (lambda d: edit_meta(d, seal=False, names={KERNEL: "x"}), "meta.json does not match its checksum"),
    "meta without checksum": (_drop_checksum, "meta.json is incomplete: 'checksum'"),
    "a file": (_replace_by_file, "{entry}: it is a file, not a directory"),
    "a loop of links": (_replace_by_loop, "{entry}: it is a symbolic link, not a directory"),
    "meta is a loop": (lambda d: _loop(d / "meta.json"), "meta.json is not a regular file"),
    "meta is a directory": (lambda d: _directory(d / "meta.json"), "meta.json is not a regular file"),
    "meta is a pipe": (lambda d: _pipe(d / "meta.json"), "meta.json is not a regular file"),
    "image is a loop": (lambda d: _loop(d / "kernel.cubin"), "kernel.cubin is not a regular file"),
    "image is a directory": (lambda d: _directory(d / "kernel.cubin"), "kernel.cubin is not a regular file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_cache_damaged_entry_is_moved_aside_and_compiled_again(compiler, cache_dir, caplog, kind):
    damage, reason = DAMAGE[kind]
    first = load()
    damage(first.path.parent)
    again = load_anew()
    assert again.source == "compiled"
    assert (again.image, again.path) == (first.image, first.path)
    assert build_cache.stats.quarantined == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"damaged cache entry {first.path.parent}: {reason.format(entry=first.path.parent)}" in caplog.text
    assert "moved to " in caplog.text
    assert [path.name.startswith("bad-scale-") for path in (cache_dir / "v2" / "tmp").iterdir()] == [True]
    assert load_anew().source == "disk"


def test_cache_foreign_entry_under_our_name(compiler):
    ours, foreign = load(), load("rtk::scale<double>")
    shutil.rmtree(ours.path.parent)
    shutil.copytree(foreign.path.parent, ours.path.parent)
    again = load_anew()
    assert again.source == "compiled"
    assert again.image == ours.image


def test_cache_damaged_entry_that_cannot_be_moved(compiler, caplog, monkeypatch):
    first = load()
    flip_a_bit(first.path.parent)

    def refuse(source, destination):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    again = load_anew()
    assert again.image == first.image
    assert again.path is None
    assert "it is ignored, but cannot be moved away (Permission denied)" in caplog.text


def test_cache_unreadable_entry_is_a_miss_not_damage(compiler, caplog, monkeypatch):
    first = load()

    def refuse(path, owners):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "read_file", refuse)
    assert load_anew().image == first.image
    assert build_cache.stats.quarantined == 0
    assert "cannot read the kernel cache" in caplog.text


def test_cache_someone_else_won(compiler, monkeypatch, caplog):
    """The entry appears between the look under the lock and the rename: theirs stays, our bytes are used."""
    first = load()
    monkeypatch.setattr(store, "touch", lambda directory: None)
    monkeypatch.setattr(build_cache, "_probe", lambda *args, **options: None)
    again = load_anew()
    assert again.source == "compiled"
    assert again.path == first.path
    assert list(first.path.parents[2].joinpath("tmp").iterdir()) == []
    assert caplog.records == []


# --- disks that do not take anything -------------------------------------------------------------------------


def test_cache_unwritable_place_means_memory_only_and_one_warning(compiler, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for expression in (KERNEL, "rtk::scale<double>"):
        entry = load(expression)
        assert entry.source == "compiled"
        assert entry.path is None
    assert load().source == "memory"
    assert len(caplog.records) == 1
    assert f"is not used: {tmp_path / 'file'}: it is a file, not a directory" in caplog.text
    assert "set RTKERNELS_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_cache_failing_disk(compiler, cache_dir, monkeypatch, caplog, call, number):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        entry = load()
    assert entry.source == "compiled"
    assert entry.path is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(number) in caplog.text
    assert list(cache_dir.glob("v2/tmp/*")) == list(cache_dir.glob("v2/sm_90a/*")) == []
    assert load_anew().path is not None


def test_cache_short_writes_are_continued(compiler, monkeypatch):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        load()
    assert load_anew().source == "disk"


def test_cache_no_home_directory(compiler, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("RTKERNELS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert load().path is None
    assert "no home directory" in caplog.text
    assert cache.path() is None
    assert cache.info()["problem"] == "no home directory"


# --- modes, extra caches -----------------------------------------------------------------------------------


def test_cache_read_only_mode(compiler, cache_dir, monkeypatch):
    load()
    os.utime(next(cache_dir.rglob("meta.json")), (1e9, 1e9))
    before = tree(cache_dir)
    monkeypatch.setenv("RTKERNELS_CACHE", "ro")
    assert load_anew().source == "disk"
    assert load(target=SM80).path is None
    assert cache.clear() == cache.prune(0) == cache.Removed(0, 0)
    assert tree(cache_dir) == before


def test_cache_off_mode(compiler, cache_dir, monkeypatch):
    load()
    monkeypatch.setenv("RTKERNELS_CACHE", "off")
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(cache_dir))
    entry = load_anew()
    assert (entry.source, entry.path) == ("compiled", None)
    assert load().source == "memory"


def test_cache_extra_is_used_and_never_written(compiler, cache_dir, tmp_path, monkeypatch, caplog):
    first, other = load(), load("rtk::scale<double>")
    extra = tmp_path / "extra"
    cache_dir.rename(extra)
    flip_a_bit(extra / other.path.parent.relative_to(cache_dir))
    before = tree(extra)
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", f"{tmp_path / 'none'}{os.pathsep}{extra}")
    entry = load_anew()
    assert entry.source == "extra"
    assert entry.image == first.image
    assert entry.path.is_relative_to(extra)
    assert build_cache.stats.extra_hits == 1
    assert load("rtk::scale<double>").source == "compiled"
    assert build_cache.stats.quarantined == 0
    assert "none is no directory that this user can reach, ignored" in caplog.text
    assert "does not match its checksum; it is ignored" in caplog.text
    assert tree(extra) == before


def test_cache_user_directory_comes_before_extra(compiler, cache_dir, tmp_path, monkeypatch):
    load()
    shutil.copytree(cache_dir, tmp_path / "extra")
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(tmp_path / "extra"))
    assert load_anew().source == "disk"


def test_cache_into_a_given_directory(compiler, cache_dir, tmp_path):
    load()
    entry = load(directory=tmp_path / "out")
    assert entry.source == "compiled"
    assert entry.path.is_relative_to(tmp_path / "out")
    assert load(directory=tmp_path / "out").source == "disk"


# --- size, time of use, maintenance -------------------------------------------------------------------------


def _fill(compiler, count):
    """Make entries of 400 kB, the first one least recently used."""
    compiler.image_size = 400_000
    entries = [load(f"rtk::scale<{number}>") for number in range(count)]
    for number, entry in enumerate(entries):
        used = time.time() - 1000 * (count - number)
        os.utime(entry.path.parent / "meta.json", (used, used))
    return entries


def test_cache_cap_evicts_least_recently_used_once_per_process(compiler, monkeypatch):
    entries = _fill(compiler, 4)
    monkeypatch.setenv("RTKERNELS_CACHE_MAX_MB", "1")
    build_cache.forget()
    newest = load("rtk::scale<4>")
    assert [entry.path.exists() for entry in (*entries, newest)] == [False, False, False, True, True]
    load("rtk::scale<5>")
    assert newest.path.exists()
    assert entries[3].path.exists()


def test_cache_memory_hit_of_an_evicted_entry_has_no_path(compiler):
    load()
    cache.clear()
    entry = load()
    assert (entry.source, entry.path) == ("memory", None)


@pytest.mark.parametrize(("age", "touched"), [(3600, False), (2 * 86_400, True)])
def test_cache_use_is_noted_at_most_daily(compiler, age, touched):
    meta = load().path.parent / "meta.json"
    before = time.time() - age
    os.utime(meta, (before, before))
    load_anew()
    assert (meta.stat().st_mtime > before + 1) == touched


def test_cache_prune(compiler):
    entries = _fill(compiler, 3)
    assert cache.prune(0) == cache.Removed(0, 0)
    removed = cache.prune(1)
    assert removed.entries == 1
    assert removed.size > 400_000
    assert [entry.path.exists() for entry in entries] == [False, True, True]


def test_cache_prune_sweeps_old_leftovers_only(compiler, cache_dir, monkeypatch):
    load()
    (cache_dir / "v2" / "tmp" / "leftover").mkdir()
    cache.prune()
    assert (cache_dir / "v2" / "tmp" / "leftover").exists()
    monkeypatch.setattr(store, "LEFTOVER_AFTER_S", -1)
    cache.prune()
    assert not (cache_dir / "v2" / "tmp" / "leftover").exists()
    assert len(cache.ls()) == 1


def test_cache_ls_info_and_path(compiler, cache_dir):
    assert cache.ls() == []
    load()
    load(target=SM80)
    first, second = cache.ls()
    assert (first.op, first.target, second.target) == ("scale", "sm_80", "sm_90a")
    assert first.meta["expressions"] == [KERNEL]
    assert first.problem is None
    assert first.size == sum(path.stat().st_size for path in first.path.iterdir())
    assert [entry.target for entry in cache.ls(target="sm_80")] == ["sm_80"]
    info = cache.info()
    assert info["path"] == cache.path() == cache_dir
    assert (info["mode"], info["problem"], info["entries"]) == ("rw", None, 2)
    assert info["targets"] == {"sm_80": 1, "sm_90a": 1}
    assert info["max_size"] == 512_000_000
    assert info["stats"]["compiles"] == 2


def test_cache_verify_finds_and_repairs(compiler):
    load()
    damaged = load(target=SM80)
    flip_a_bit(damaged.path.parent)
    found = cache.verify()
    assert found.checked == 2
    assert [(entry.path, entry.problem) for entry in found.bad] == [
        (damaged.path.parent, "kernel.cubin does not match its checksum")
    ]
    assert cache.verify(repair=True).bad == found.bad
    assert cache.verify() == cache.Verified(1, [])


def test_cache_clear_all_or_some_and_keeps_locks(compiler, cache_dir):
    load()
    load(target=SM80)
    locks = list((cache_dir / "v2" / "locks").iterdir())
    assert len(locks) == 2
    assert cache.clear(op="other") == cache.Removed(0, 0)
    assert cache.clear(target="sm_80").entries == 1
    assert [entry.target for entry in cache.ls()] == ["sm_90a"]
    assert cache.clear().entries == 1
    assert cache.ls() == []
    assert list((cache_dir / "v2" / "locks").iterdir()) == locks
