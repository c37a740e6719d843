"""Whose kernels are loaded: owners and permissions of caches, of all directories above them, and of entries."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.cache_stub import KERNEL, SM80, edit_meta, install_compiler, install_sources, load, load_anew
from support.interpreter import run_python

from rtkernels import cache
from rtkernels.errors import ArgumentError, NotWarmError
from rtkernels.runtime.build import nvrtc, places, trust

ROOT = Path(__file__).resolve().parents[2]
STRANGER, OTHER = 54321, 54322  # nobody on this machine

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def compiler(cache_dir, tmp_path, monkeypatch):
    """An empty cache, test sources, and a compiler that counts."""
    install_sources(tmp_path, monkeypatch)
    return install_compiler(monkeypatch)


@pytest.fixture
def default_place(compiler, tmp_path, monkeypatch):
    """The default location, below a private XDG directory; not yet created."""
    monkeypatch.delenv("RTKERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "rtkernels"


@pytest.fixture
def shared(monkeypatch):
    """A directory that everybody can reach and only the caller can write to; the one pytest makes is private."""
    with tempfile.TemporaryDirectory(prefix="rtkernels-shared-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def give(path: Path, user: int = STRANGER) -> None:
    """Make a file, or a directory with all that is in it, another user's."""
    for item in (path, *path.rglob("*")):
        os.chown(item, user, user, follow_symlinks=False)


def planted(directory: Path) -> None:
    """Fill a cache with an entry whose image, ``planted``, does not come from the compiler; its checksums are valid."""
    entry = load(directory=directory)
    entry.path.write_bytes(b"planted")
    edit_meta(entry.path.parent, sha256=hashlib.sha256(b"planted").hexdigest())


# --- what we make -------------------------------------------------------------------------------------------


def test_cache_directories_are_private(default_place):
    umask = os.umask(0)
    try:
        entry = load()
    finally:
        os.umask(umask)
    for path in (entry.path.parent, *entry.path.parent.parents):
        if path == default_place.parent.parent:
            break
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in (default_place / "v2" / "tmp", default_place / "v2" / "locks"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.path.parent.iterdir()} == {0o600}


def test_cache_default_place_without_xdg(compiler, tmp_path, monkeypatch):
    monkeypatch.delenv("RTKERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.path() == tmp_path / ".cache" / "rtkernels"


@pytest.mark.parametrize(("mode", "expected_mode"), [(0o755, 0o755), (0o750, 0o750), (0o700, 0o700)])
def test_cache_named_place_is_readable_as_it_is(compiler, cache_dir, caplog, mode, expected_mode):
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    entry = load()
    assert stat.S_IMODE(entry.path.parent.stat().st_mode) == expected_mode
    assert stat.S_IMODE(entry.path.stat().st_mode) == expected_mode & 0o666
    assert caplog.records == []


def test_cache_published_directory_is_readable_by_others(compiler, cache_dir, tmp_path):
    umask = os.umask(0o077)
    try:
        entry = load(directory=tmp_path / "new" / "kernels")
        own = load()
    finally:
        os.umask(umask)
    for path in (entry.path.parent, entry.path.parents[1], tmp_path / "new" / "kernels", tmp_path / "new"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755, path
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.path.parent.iterdir()} == {0o644}
    assert stat.S_IMODE(own.path.parent.stat().st_mode) == stat.S_IMODE(cache_dir.stat().st_mode) == 0o700


# --- what others may have written is not loaded -------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
@pytest.mark.parametrize("named", [True, False])
def test_cache_message_open_to_others(default_place, cache_dir, caplog, monkeypatch, mode, named):
    place = cache_dir if named else default_place
    if named:
        monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(place))
    monkeypatch.setattr(trust, "_is_private_group", lambda path, status: False)
    planted(place)
    place.chmod(mode)
    entry = load_anew()
    assert (entry.source, entry.path) == ("compiled", None)
    assert entry.image != b"planted"
    who = "everyone" if mode & 2 else r"group"
    assert f"the kernel cache {place} is not used: {place}: {who}" in caplog.text
    assert f"can write to it (mode {mode:04o})" in caplog.text
    assert "chmod go-w" in caplog.text
    assert cache.info()["problem"].startswith(f"{place}: {who}")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_cache_message_of_another_user(default_place, caplog, monkeypatch):
    planted(default_place)
    monkeypatch.setattr(trust, "caller", lambda: frozenset((STRANGER,)))
    monkeypatch.setattr(trust, "_user", str)
    entry = load_anew()
    assert (entry.source, entry.path) == ("compiled", None)
    assert f"it belongs to user {os.lstat('/').st_uid}, not to user {os.geteuid()}" in caplog.text


@needs_root
@pytest.mark.parametrize("where", ["root", "above"])
def test_cache_directory_that_an_attacker_made_first(compiler, cache_dir, tmp_path, monkeypatch, caplog, where):
    """In a shared temporary folder the name may be taken already, for the cache or for a directory above it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    place = folder / "theirs" / "cache"
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(place))
    planted(place)
    taken = place if where == "root" else place.parent
    os.chown(taken, STRANGER, STRANGER)
    entry = load_anew()
    assert (entry.source, entry.path) == ("compiled", None)
    reason = f"{taken}: it belongs to user {STRANGER}, not to user root (0)"
    assert f"the kernel cache {place} is not used: {reason}" in caplog.text


def test_cache_below_a_sticky_directory_is_used(compiler, tmp_path, monkeypatch, caplog):
    """Others can add files to it, but not replace ours."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(folder / "mine"))
    load()
    assert load_anew().source == "disk"
    folder.chmod(0o777)
    assert load_anew().path is None
    assert f"is not used: {folder}: everyone can write to it (mode 0777)" in caplog.text


@pytest.mark.parametrize("level", ["v2", "v2/sm_90a"])
def test_cache_directory_inside_that_everyone_can_write_to(compiler, cache_dir, caplog, level):
    planted(cache_dir)
    (cache_dir / level).chmod(0o777)
    entry = load_anew()
    assert (entry.source, entry.path) == ("compiled", None)
    assert f"is not used: {cache_dir / level}: everyone can write to it (mode 0777)" in caplog.text
    assert cache.info()["problem"] == f"{cache_dir / level}: everyone can write to it (mode 0777)"
    assert len(caplog.records) == 1
    if level != "v2":
        assert load(target=SM80).path is not None


@pytest.mark.parametrize("what", ["tmp", "locks"])
def test_cache_work_directories_of_others_are_not_used(compiler, cache_dir, what):
    cache_dir.mkdir(mode=0o700)
    (cache_dir / "v2").mkdir(mode=0o700)
    (cache_dir / "v2" / what).mkdir()
    (cache_dir / "v2" / what).chmod(0o777)
    entry = load()
    assert (entry.path is None) == (what == "tmp")
    assert list((cache_dir / "v2" / what).iterdir()) == []


@pytest.mark.parametrize("name", [".", "meta.json", "kernel.cubin"])
def test_cache_entry_that_everyone_can_write_to(compiler, cache_dir, caplog, name):
    first = load()
    planted(cache_dir)
    (first.path.parent / name).chmod(0o777)
    entry = load_anew()
    assert (entry.source, entry.image, entry.path) == ("compiled", first.image, first.path)
    assert "everyone can write to it (mode 0777); moved to" in caplog.text
    assert load_anew().source == "disk"


@needs_root
@pytest.mark.parametrize("name", [".", "meta.json", "kernel.cubin"])
def test_cache_entry_of_another_user(compiler, cache_dir, caplog, name):
    first = load()
    planted(cache_dir)
    os.chown(first.path.parent / name, STRANGER, STRANGER)
    entry = load_anew()
    assert (entry.source, entry.image) == ("compiled", first.image)
    assert f"it belongs to user {STRANGER}, not to user root (0)" in caplog.text


def test_cache_linked_directories_inside_are_not_followed(compiler, cache_dir, tmp_path, caplog):
    planted(cache_dir)
    (cache_dir / "v2" / "sm_90a").rename(tmp_path / "elsewhere")
    (cache_dir / "v2" / "sm_90a").symlink_to(tmp_path / "elsewhere")
    assert load_anew().image != b"planted"
    assert "it is a symbolic link, not a directory" in caplog.text


def test_cache_symlinked_root_is_resolved_before_it_is_judged(compiler, tmp_path, monkeypatch, caplog):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(tmp_path / "link"))
    assert load().path.is_relative_to(real)
    assert cache.path() == real
    real.chmod(0o777)
    assert load_anew().path is None
    assert f"the kernel cache {real} is not used" in caplog.text


def test_cache_directory_that_appears_after_the_check(compiler, cache_dir, monkeypatch, caplog):
    """Somebody else creates the directory between our check and our mkdir."""
    make = os.mkdir

    def attacked(path, mode=0o777):
        make(path, mode)
        if Path(path).name == "sm_90a":
            os.chmod(path, 0o777)
            raise FileExistsError

    monkeypatch.setattr(os, "mkdir", attacked)
    assert load().path is None
    assert "sm_90a: everyone can write to it" in caplog.text


def test_cache_lock_file_is_not_followed(compiler, cache_dir, tmp_path):
    load()
    (lock,) = (cache_dir / "v2" / "locks").iterdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock.unlink()
    lock.symlink_to(victim)
    cache.clear()
    assert load_anew().path is not None
    assert victim.read_text() == "precious"


def test_cache_group_of_one_may_write(compiler, cache_dir, monkeypatch):
    """Where every user has a group of the same name, umask 002 makes directories of mode 775."""
    cache_dir.mkdir()
    cache_dir.chmod(0o775)
    status = os.lstat(cache_dir)
    members = []

    class Account:
        pw_name = gr_name = "alice"
        pw_uid, pw_gid = status.st_uid, status.st_gid
        gr_gid = status.st_gid
        gr_mem = members

    monkeypatch.setattr(trust.pwd, "getpwuid", lambda number: Account)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda number: Account)
    assert load().path is not None
    members.append("bob")
    assert load_anew().path is None
    members.clear()
    monkeypatch.setattr(os, "listxattr", lambda path, follow_symlinks: ["system.posix_acl_access"])
    assert load_anew().path is None


def test_cache_unknown_owners_above_the_cache_in_a_rootless_container(monkeypatch):
    texts = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": "1000 1000 1\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert trust._is_unmapped.__wrapped__(65534)
    assert not trust._is_unmapped.__wrapped__(1000)
    texts["/proc/self/uid_map"] = "0 0 4294967295\n"
    assert not trust._is_unmapped.__wrapped__(65534)


def test_cache_directories_are_looked_at_one_time(compiler, cache_dir, monkeypatch):
    for expression in (KERNEL, "rtk::scale<double>"):
        load(expression)
    looked = []

    def judge(status, owners, *, above):
        looked.append(status)

    monkeypatch.setattr(trust, "_owner_problem", judge)
    load_anew()
    first = len(looked)
    assert first == len((cache_dir / "v2" / "sm_90a" / "entry").parents) + 3  # the entry and its two files
    load("rtk::scale<double>")
    assert len(looked) == first + 3


def test_cache_message_given_directory_open_to_everyone(compiler, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    with pytest.raises(ArgumentError, match=r"cannot hold compiled kernels: .*everyone can write to it \(mode 0777\)"):
        load(directory=tmp_path / "out")


# --- extra caches -------------------------------------------------------------------------------------------


def test_cache_extra_open_to_others(compiler, tmp_path, monkeypatch, caplog):
    extra = tmp_path / "extra"
    planted(extra)
    extra.chmod(0o1777)
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(extra))
    entry = load_anew()
    assert entry.source == "compiled"
    assert f"the kernel cache {extra} is not used: {extra}: everyone can write to it (mode 1777)" in caplog.text
    assert cache.info()["refused"] == {str(extra): f"{extra}: everyone can write to it (mode 1777)"}


@needs_root
def test_cache_extra_of_another_user_is_used_if_the_user_names_them(compiler, shared, monkeypatch, caplog):
    extra = shared / "extra"
    entry_of_extra = load(directory=extra)
    give(extra)
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(extra))
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    with pytest.raises(NotWarmError, match=rf"\(not used: {extra}: it belongs to user {STRANGER}, not to user root"):
        load_anew()
    assert "name the user in RTKERNELS_CACHE_OWNERS" in caplog.text
    monkeypatch.setenv("RTKERNELS_CACHE_OWNERS", f"nobody,{STRANGER}")
    entry = load_anew()
    assert (entry.source, entry.image) == ("extra", entry_of_extra.image)
    assert cache.info()["refused"] == {}
    give(extra / "v2" / "sm_90a", OTHER)
    with pytest.raises(NotWarmError, match="belongs to user 54322"):
        load_anew()


def test_cache_owners_count_for_extra_caches_only(compiler, monkeypatch):
    monkeypatch.setenv("RTKERNELS_CACHE_OWNERS", str(STRANGER))
    assert STRANGER in places.extra_owners()
    assert STRANGER not in places.user_store().owners


# --- two users ----------------------------------------------------------------------------------------------

# Everything is imported before the process becomes another user, who may not be able to read the interpreter's files.
BECOME = """
import os, pwd, sys
import torch, rtkernels, rtkernels.cache
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.operator import registry
from rtkernels.runtime import warm as warming
from rtkernels.__main__ import main
registry.ops()
nvrtc.version()
user = int(sys.argv[1])
os.umask(0o077)
os.setgroups([])
os.setgid(user)
os.setuid(user)
"""
USE = """
jobs = list(warming.plan(warming.select(["column_sum"]), warming.targets(["sm_90a"])))
print([build_cache.load(*job.entry, op=job.kernel.op).source for job in jobs])
"""
BUILD = 'sys.exit(main(["warm", "--arch", "sm_90a", "--op", "column_sum", "--out", "kernels"]))'


def run(code: str, folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python without a home directory, in a folder."""
    kept = {name: text for name, text in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")}
    env = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return run_python("-c", code, *map(str, arguments), env=env, cwd=folder)


def others_can_reach(path: Path) -> bool:
    return all(os.stat(item).st_mode & stat.S_IXOTH for item in (path, *path.parents))


@pytest.mark.one_in(3)
@needs_root
@pytest.mark.parametrize("builder", [0, OTHER])
def test_published_cache_serves_another_user(shared, builder):
    """The recipe of the README: built by one user, used by another, who may neither compile nor write."""
    cupy = pytest.importorskip("cupy")
    if not others_can_reach(ROOT / "cuda_src") or not others_can_reach(Path(cupy.__file__).parent):
        pytest.skip("other users cannot read the sources or NVRTC here")
    os.chown(shared, builder, builder)
    done = run(BECOME + BUILD, shared, builder, HOME="/", CUPY_CACHE_DIR=str(shared / "cupy"))
    assert done.returncode == 0, done.stderr
    use = {"RTKERNELS_CACHE_EXTRA": "kernels", "RTKERNELS_NO_COMPILE": "1", "CUPY_CACHE_DIR": str(shared / "cupy")}
    used = run(BECOME + USE, shared, STRANGER, **use)
    if builder:
        assert used.returncode == 1
        assert f"it belongs to user {OTHER}, not to user {STRANGER} or root" in used.stderr
        used = run(BECOME + USE, shared, STRANGER, RTKERNELS_CACHE_OWNERS=str(builder), **use)
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == str(["extra"] * 3)


@pytest.mark.one_in(3)
def test_without_a_home_nothing_is_written_into_the_current_folder(tmp_path):
    pytest.importorskip("cupy")
    nameless = """
import pwd
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime import warm as warming
"""
    used = run(nameless + USE, tmp_path)
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == str(["compiled"] * 3)
    assert "no home directory" in used.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_relative_home_is_none(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("RTKERNELS_CACHE_DIR", "CUPY_CACHE_DIR"):
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    nvrtc._make_cupy_importable()
    assert os.path.isdir(os.environ["CUPY_CACHE_DIR"])
    assert cache.path() is None
    assert load().path is None
    assert list((tmp_path / "here").iterdir()) == []
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", "~/cache")
    with pytest.raises(ArgumentError, match="RTKERNELS_CACHE_DIR='~/cache' is not accepted"):
        load()
