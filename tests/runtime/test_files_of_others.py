"""Attacks by another user of the machine on files of this package other than cubins (test_cache_trust.py).

Generated sources, the host compiler's files, CuPy's directory, and names that lead out of the cache.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch
from support.interpreter import run_python

import rtkernels
from rtkernels import cache, emulator
from rtkernels.emulator import _build
from rtkernels.errors import ArgumentError, SourceError, ToolkitError
from rtkernels.runtime.build import nvrtc, places, sources, trust
from rtkernels.runtime.launch.kernel import Kernel

ROOT = Path(__file__).resolve().parents[2]
STRANGER, OTHER = 54321, 54322  # nobody on this machine

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")

# Runs when a library with it in it is loaded, as it was in the attack.
PLANTED = """#pragma once
#include "{real}"
extern "C" int open(const char*, int, ...);
__attribute__((constructor)) static void owned() {{ open("{marker}", 0101, 0644); }}
"""


def plant(folder: Path, marker: Path) -> None:
    """Write a header that shadows ours in a folder."""
    (folder / "pointwise").mkdir(parents=True)
    header = folder / "pointwise" / "functors.cuh"
    header.write_text(PLANTED.format(real=sources.root() / "pointwise" / "functors.cuh", marker=marker))


def give(path: Path, user: int = STRANGER) -> None:
    for item in (path, *path.rglob("*")):
        os.chown(item, user, user, follow_symlinks=False)


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A directory for temporary files such as ``/tmp``."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


# --- generated sources ----------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("where", ["temporary", "cache"])
def test_planted_headers_are_not_compiled(temporary, tmp_path, monkeypatch, where):
    """A guessable folder that another user created first, with a header that has the name of one of ours."""
    marker, own = tmp_path / "owned", os.environ["RTKERNELS_CACHE_DIR"]
    if where == "temporary":
        (tmp_path / "file").touch()
        monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(tmp_path / "file" / "cannot be made"))
        theirs = temporary / f"rtkernels-pointwise-{os.getuid()}"
    else:
        theirs = tmp_path / "cache"
        monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(theirs))
    folder = theirs if where == "temporary" else theirs / "pointwise"
    plant(folder, marker)
    give(theirs)
    before = tree(theirs)
    operator = rtkernels.pointwise(f"planted_{where}", "a * 3.0f + s0")
    x = torch.arange(6, dtype=torch.float32)
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", own)  # which spares a compilation of the emulator
    assert torch.equal(operator(x, 1.0), x * 3 + 1)
    assert not marker.exists()
    assert tree(theirs) == before
    (unit,) = {kernel.unit for kernel in operator.op.kernels}
    assert sources.closure(unit)["pointwise/functors.cuh"] == sources.read("pointwise/functors.cuh")


VICTIM = """
import os, sys
import torch, rtkernels, rtkernels.emulator._launch, torch.fx.experimental.symbolic_shapes
from rtkernels.runtime.operator import registry
registry.ops()
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
operator = rtkernels.pointwise("victim", "a * 2.0f")
print(operator(torch.ones(3)).tolist())
"""


@pytest.mark.slow
@needs_root
def test_attack_by_another_user_in_a_shared_temporary_directory(temporary, tmp_path):
    """The same with two users: one plants, the other one, who has no home to write to, runs an operator."""
    for folder in (ROOT / "cuda_src", Path(torch.__file__).parent, temporary):
        for item in (folder, *folder.parents):
            if not item.stat().st_mode & stat.S_IXOTH and item != tmp_path and item not in tmp_path.parents:
                pytest.skip(f"other users cannot read {item}")
    shared = places.fresh_directory("test")  # pytest's own folder is private
    try:
        os.chmod(shared, 0o1777)
        marker = shared / "owned"
        theirs = shared / f"rtkernels-pointwise-{STRANGER}"
        plant(theirs, marker)
        theirs.chmod(0o777)
        give(theirs, OTHER)
        kept = {name: text for name, text in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")}
        env = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/", "TMPDIR": str(shared)}
        done = run_python("-c", VICTIM, str(STRANGER), env=env, cwd=shared)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[2.0, 2.0, 2.0]"
        assert not marker.exists()
        assert {path.name for path in shared.iterdir()} == {theirs.name}  # and nothing of ours is left
    finally:
        places.shutil.rmtree(shared)


@pytest.mark.parametrize("mode", ["rw", "ro", "off"])
def test_generated_sources_are_not_written(temporary, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("RTKERNELS_CACHE_DIR")
    monkeypatch.setenv("RTKERNELS_CACHE", mode)
    (tmp_path / "home").mkdir()
    before = tree(tmp_path)
    operator = rtkernels.pointwise(f"unwritten_{mode}", "a + 1.0f")
    assert sources.closure(operator.op.kernels[0].unit)
    assert tree(tmp_path) == before


def test_generated_units_have_the_same_key_in_every_process():
    text = '#include "common/abi.cuh"\n// generated\n'
    assert sources.generate("same", text) == sources.generate("same", text)
    assert sources.generate("same", text) != sources.generate("same", text + " ")
    with pytest.raises(SourceError, match="was not generated in this process"):
        sources.closure("generated/never-0.cu")


@pytest.mark.parametrize("name", ["aé", "a" * 101, "a/b", "../a", "a-b", "A", ""])
def test_names_of_pointwise_operators(name):
    with pytest.raises(ArgumentError, match=r"name is .*; expected a C identifier"):
        rtkernels.pointwise(name, "a")


# --- headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["common/abi.cuh", "execution.h", "ptx/barrier.cuh"])
def test_a_header_beside_a_unit_does_not_shadow_ours(tmp_path, name):
    """Neither for NVRTC nor in the emulator, which looks for headers by itself."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("#pragma once\n")
    unit = tmp_path / "unit.cu"
    unit.write_text(f'#include "{name}"\nnamespace rtk {{ template <int N> __global__ void shadowed(i64 n) {{}} }}\n')
    with pytest.raises(SourceError, match="give the first another name"):
        _build.kernel("shadowed", str(unit), "rtk::shadowed<1>", 80)
    if (sources.root() / name).exists():
        with pytest.raises(SourceError, match="give the first another name"):
            sources.closure(str(unit))


@pytest.mark.parametrize("where", ["current", "temporary"])
def test_headers_are_not_looked_for_where_others_may_write(temporary, tmp_path, monkeypatch, where):
    folder = temporary if where == "temporary" else tmp_path / "here"
    folder.mkdir(exist_ok=True)
    (folder / "evil.cuh").write_text("#pragma once\n")
    monkeypatch.chdir(folder)
    unit = sources.generate("including", '#include "evil.cuh"\nnamespace rtk { __global__ void including() {} }\n')
    with pytest.raises(SourceError, match="no such file"):
        sources.closure(unit)
    with pytest.raises(SourceError, match="neither in the emulator nor in cuda_src"):
        _build.kernel("including", unit, "rtk::including", 80)


# --- temporary files ----------------------------------------------------------------------------------------------


def only(monkeypatch, *folders):
    monkeypatch.setattr(places, "_temporary_bases", lambda: list(map(str, folders)))


def test_scratch_is_private_and_goes(temporary):
    umask = os.umask(0)
    try:
        with places.scratch("test") as folder:
            assert folder.parent == temporary
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(umask)
    assert tree(temporary) == set()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_scratch_is_not_where_others_can_exchange_it(tmp_path, monkeypatch, mode):
    """Without the sticky bit anybody who can write to a directory can rename its files."""
    monkeypatch.setattr(trust, "_is_private_group", lambda path, status: False)
    open_folder, good = tmp_path / "open", tmp_path / "good"
    for folder in (open_folder, good):
        folder.mkdir()
    open_folder.chmod(mode)
    only(monkeypatch, open_folder, good)
    assert places.fresh_directory("test").parent == good
    assert tree(open_folder) == set()
    only(monkeypatch, open_folder)
    with pytest.raises(ToolkitError, match=r"set TMPDIR to one\. Refused: .*can write to it"):
        places.fresh_directory("test")


@needs_root
def test_scratch_is_not_in_directories_of_others(tmp_path, monkeypatch):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    give(folder)
    (tmp_path / "link").symlink_to(folder)
    for base in (folder, tmp_path / "link"):
        only(monkeypatch, base)
        with pytest.raises(ToolkitError, match=f"it belongs to user {STRANGER}"):
            places.fresh_directory("test")


@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_scratch_takes_no_name_that_is_there(temporary, tmp_path, monkeypatch, kind):
    """Somebody guesses the name, or sees it and acts first."""
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    taken = temporary / f"rtkernels-test-{'00' * 12}"
    if kind == "link":
        (tmp_path / "victim").mkdir()
        taken.symlink_to(tmp_path / "victim")
    else:
        taken.mkdir() if kind == "directory" else taken.touch()
    only(monkeypatch, temporary)
    with pytest.raises(ToolkitError, match=r"File exists|not a directory"):
        places.fresh_directory("test")
    with pytest.raises(ToolkitError, match=r"File exists|not a directory"):
        monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
        taken.rename(temporary / f"rtkernels-log-test-{'00' * 12}")
        places.keep_log("test", "text")
    assert not (tmp_path / "victim").exists() or tree(tmp_path / "victim") == set()


def test_the_host_compiler_has_no_other_temporary_directory(tmp_path, monkeypatch):
    """Its assembler reads what its first stage wrote, by name."""
    seen = []

    def run(command, **options):
        seen.append((options["env"]["TMPDIR"], os.path.dirname(command[-1])))
        raise InterruptedError

    monkeypatch.setenv("RTKERNELS_CACHE", "off")
    monkeypatch.setattr(_build.subprocess, "run", run)
    monkeypatch.setattr(_build, "_built", {})
    with pytest.raises(InterruptedError):
        _build._compile(["c++"], tmp_path / "out" / "kernel.so", "a kernel")
    assert seen == [(str(tmp_path / "out"), str(tmp_path / "out"))]


def test_cupy_directory_is_private_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    umask = os.umask(0)
    try:
        nvrtc._make_cupy_importable()
    finally:
        os.umask(umask)
    assert "CUPY_CACHE_DIR" not in os.environ
    for path in (tmp_path / ".cupy", tmp_path / ".cupy" / "kernel_cache"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


# --- names that lead out of the cache ------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["target", "op"])
@pytest.mark.parametrize("name", ["../../other", "..", "/etc", "*", "sm_*", "a/b", "", "[a]", ".", "tmp/..", 7, "a\0b"])
@pytest.mark.parametrize("mode", ["rw", "off"])
def test_cache_functions_take_names_only(cache_dir, tmp_path, monkeypatch, argument, name, mode):
    monkeypatch.setenv("RTKERNELS_CACHE", mode)
    other = tmp_path / "other"
    (other / "precious-1").mkdir(parents=True)
    (cache_dir / "v2" / "sm_90a" / "precious-1").mkdir(parents=True, mode=0o700)
    before = tree(tmp_path)
    names = {"target": "../../other", "op": "precious"} if name == "../../other" else {argument: name}
    for function in (cache.clear, cache.ls):
        with pytest.raises(ArgumentError, match=rf"(target|op) is {re.escape(repr(name))}, which cannot name"):
            function(**names)
    assert tree(tmp_path) == before


def test_cache_clear_does_not_follow_links(cache_dir, tmp_path):
    other = tmp_path / "other"
    (other / "precious-1").mkdir(parents=True)
    (cache_dir / "v2").mkdir(parents=True, mode=0o700)
    cache_dir.chmod(0o700)
    (cache_dir / "v2" / "sm_90a").symlink_to(other)
    assert cache.clear().entries == 0
    assert cache.prune(0).entries == 0
    assert (other / "precious-1").is_dir()


@pytest.mark.parametrize("limit", [-1, 1.5, "1", True, float("nan"), [1]])
def test_cache_prune_takes_a_whole_number(cache_dir, limit):
    with pytest.raises(ArgumentError, match="max_mb is"):
        cache.prune(limit)


def test_emulated_ops_cannot_lead_out_of_the_cache(tmp_path):
    unit = tmp_path / "unit.cu"
    unit.write_text('#include "common/abi.cuh"\nnamespace rtk { template <int N> __global__ void led(i64 n) {} }\n')
    kernel = Kernel(unit, "led", template="N", args="n:i64", variants=[(1,)], max_registers=32)
    kernel.op = "../../../led"
    with emulator.emulate(), pytest.raises(ArgumentError, match="cannot name a cache entry"):
        kernel.bind((1,), -1, 1, 32)(1)


# --- groups ------------------------------------------------------------------------------------------------------


def test_a_group_that_is_somebody_elses_primary_group_is_not_private(tmp_path, monkeypatch):
    """The members that a group lists are without those whose primary group it is."""
    tmp_path.chmod(0o775)
    status = os.lstat(tmp_path)

    class Account:
        pw_name = gr_name = "alice"
        pw_uid, pw_gid = status.st_uid, status.st_gid
        gr_gid = status.st_gid
        gr_mem = ()

    class Bob(Account):
        pw_name, pw_uid = "bob", STRANGER

    everybody = [Account]
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda number: Account)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda number: Account)
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: everybody)
    trust.forget()
    assert trust._is_private_group(tmp_path, status)
    everybody.append(Bob)
    trust.forget()
    assert not trust._is_private_group(tmp_path, status)
    trust.forget()
