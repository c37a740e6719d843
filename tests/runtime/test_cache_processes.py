"""The kernel cache under attack by other processes: races, kills, waiting, forks, clearing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.cache_stub import cache_key
from support.interpreter import Program, run_python

import rtkernels
from rtkernels import cache
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import locks, nvrtc, sources

# What every worker process starts with: the test's sources, and a slow stub that logs each compilation.
PRELUDE = """
import os, sys, time
from pathlib import Path
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.build import sources

work = Path(sys.argv[1])
sources._root_override = work / "cuda_src"
nvrtc.version = lambda: (13, 0)

def compile_unit(unit, expressions, target, flags=(), *, op=None, sources=None, want_ptx=False):
    with open(work / "compiles", "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(float(sys.argv[2]))
    return nvrtc.Compiled(b"image " * 1000, {e: "name" for e in expressions}, "", {})

nvrtc.compile_unit = compile_unit

def load():
    return build_cache.load("k.cu", ["k"], targets.parse("sm_90a"), op="k")

def wait_for(path):
    (work / f"ready-{os.getpid()}").touch()
    while not path.exists():
        time.sleep(0.002)
"""
IMAGE = b"image " * 1000


@pytest.fixture
def work(tmp_path, cache_dir, monkeypatch):
    """A directory for sources, marks and logs that worker processes share with the test."""
    (tmp_path / "cuda_src").mkdir()
    (tmp_path / "cuda_src" / "k.cu").write_text("int k;\n")
    monkeypatch.setattr(sources, "_root_override", tmp_path / "cuda_src")
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))

    def compile_unit(unit, expressions, target, flags=(), **options):
        return nvrtc.Compiled(IMAGE, dict.fromkeys(expressions, "name"), "", {})

    monkeypatch.setattr(nvrtc, "compile_unit", compile_unit)
    return tmp_path


@pytest.fixture
def start(work):
    """Start worker processes; whatever is still running at the end is killed."""
    running = []

    def start_worker(code, compile_seconds=0.0):
        environment = {**os.environ, "PYTHONPATH": str(Path(rtkernels.__file__).parent.parent)}
        worker = Program("-c", PRELUDE + code, str(work), str(compile_seconds), env=environment)
        running.append(worker)
        return worker

    yield start_worker
    for worker in running:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()


def load():
    return build_cache.load("k.cu", ["k"], targets.parse("sm_90a"), op="k")


def _until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the worker processes did not get there"
        time.sleep(0.005)


def _results(workers):
    results = []
    for worker in workers:
        out, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
        results.append(json.loads(out))
    return results


@pytest.mark.one_in(3)
def test_cache_eight_processes_compile_once(work, start):
    code = """
import json
wait_for(work / "go")
entry = load()
print(json.dumps([entry.source, len(entry.image), build_cache.stats.compiles, str(entry.path)]))
"""
    workers = [start(code, compile_seconds=0.3) for _ in range(8)]
    _until(lambda: len(list(work.glob("ready-*"))) == 8)
    (work / "go").touch()
    results = _results(workers)
    assert len((work / "compiles").read_text().split()) == 1
    assert sorted(source for source, *_ in results) == ["compiled"] + ["disk"] * 7
    assert sum(compiles for _, _, compiles, _ in results) == 1
    assert {(size, path) for _, size, _, path in results} == {(len(IMAGE), results[0][3])}
    assert list(cache.path().glob("v2/tmp/*")) == []


@pytest.mark.one_in(3)
def test_cache_unlocked_race_keeps_one_sound_entry(work, start):
    """Without working locks every process compiles; the rename alone must keep the entry consistent."""
    code = """
import json
from rtkernels.runtime.build import locks
locks._wait_for = lambda *args: False
wait_for(work / "go")
entry = load()
print(json.dumps([len(entry.image), build_cache.stats.quarantined]))
"""
    workers = [start(code, compile_seconds=0.1) for _ in range(4)]
    _until(lambda: len(list(work.glob("ready-*"))) == 4)
    (work / "go").touch()
    assert _results(workers) == [[len(IMAGE), 0]] * 4
    assert cache.verify() == cache.Verified(1, [])
    assert list(cache.path().glob("v2/tmp/*")) == []


def test_cache_killed_holder_frees_the_lock(work, start):
    holder = start("load()", compile_seconds=60)
    _until(lambda: (work / "compiles").exists())
    lock = next(cache.path().glob("v2/locks/*.lock"))
    assert lock.read_text().split()[0] == str(holder.pid)
    holder.kill()
    holder.communicate()
    started = time.monotonic()
    entry = load()
    assert time.monotonic() - started < 60
    assert (entry.source, entry.image) == ("compiled", IMAGE)
    assert entry.path is not None
    assert lock.exists()


def test_cache_waiting_is_logged_and_bounded(work, monkeypatch, caplog):
    monkeypatch.setattr(locks, "LOG_AFTER_S", 0.05)
    monkeypatch.setattr(locks, "TIMEOUT_S", 0.2)
    key = cache_key("k.cu", ["k"], targets.parse("sm_90a"), (), (13, 0))
    lock = cache.path() / "v2" / "locks" / f"{key[:32]}.lock"
    lock.parent.mkdir(parents=True, mode=0o700)
    with open(lock, "w") as held:
        held.write("4711 somehost\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        entry = load()
    assert entry.source == "compiled"
    assert entry.path is not None
    waiting, gave_up = (record.getMessage() for record in caplog.records)
    assert waiting.startswith("k: waiting for process 4711 on somehost, which is compiling the same kernel")
    assert gave_up.startswith("k: gave up waiting for process 4711 on somehost after")


def test_cache_lock_limits_are_those_documented():
    assert (locks.TIMEOUT_S, locks.LOG_AFTER_S) == (120, 5)


@pytest.mark.one_in(3)
def test_cache_fork_while_a_thread_compiles(work, start):
    """The child must neither wait for locks of threads it does not have, nor keep the parent's lock file open."""
    code = """
import json, threading
from rtkernels.runtime.build import locks
thread = threading.Thread(target=load)
thread.start()
while not locks._lock_files:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    build_cache._state.guard.acquire(timeout=60) or os._exit(1)
    build_cache._state.guard.release()
    locks._lock_files and os._exit(2)
    time.sleep(0.5)
    os._exit(0 if load().source == "disk" else 3)
thread.join()
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert _results([start(code, compile_seconds=0.3)]) == [0]


def test_cache_fork_after_parent_is_killed_leaves_the_lock_free(work, start):
    code = """
import threading
threading.Thread(target=load, daemon=True).start()
from rtkernels.runtime.build import locks
while not locks._lock_files:
    time.sleep(0.001)
if os.fork() == 0:
    (work / f"child-{os.getpid()}").touch()
    time.sleep(200)
    os._exit(0)
time.sleep(60)
"""
    parent = start(code, compile_seconds=60)
    _until(lambda: list(work.glob("child-*")))
    child = int(next(work.glob("child-*")).name.split("-")[1])
    try:
        parent.kill()
        parent.communicate()
        started = time.monotonic()
        assert load().source == "compiled"
        assert time.monotonic() - started < 60
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.one_in(3)
def test_cache_clear_while_others_load(work, start):
    code = """
import json
wait_for(work / "go")
loads = quarantined = 0
while not (work / "stop").exists():
    build_cache.forget()
    assert load().image == b"image " * 1000
    loads += 1
    quarantined += build_cache.stats.quarantined
print(json.dumps([loads, quarantined]))
"""
    workers = [start(code) for _ in range(3)]
    _until(lambda: len(list(work.glob("ready-*"))) == 3)
    (work / "go").touch()
    removed = 0
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        removed += cache.clear().entries
    (work / "stop").touch()
    results = _results(workers)
    assert removed > 3
    assert all(loads > 0 and quarantined == 0 for loads, quarantined in results), results
    assert sum(loads for loads, _ in results) > 10


@pytest.mark.one_in(3)
def test_cache_import_loads_no_compiler(start):
    code = """
import json, sys
print(json.dumps([name for name in ("cupy", "cupy_backends", "cuda.pathfinder") if name in sys.modules]))
"""
    of_torch = json.loads(run_python("-c", code).stdout)
    assert of_torch in ([], ["cuda.pathfinder"])  # torch 2.15 loads that one
    assert _results([start(code)]) == [of_torch]
