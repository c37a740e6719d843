"""Python programs of tests, each in a process of its own that is forked from one that has imported torch.

Importing torch is most of the cost of a short program, and no test is about that. The server imports torch and nothing
else, so a program starts in the state of an interpreter after ``import torch``.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

# A request is a line that names a file. What the program prints goes to that file's .out and .err, the id of its
# process to .pid, its exit code to .code. The program itself is run below the loop, in the child.
_SERVER = """
import json, os, runpy, select, sys
import torch

def note(place, number):
    with open(place + ".new", "w") as file:
        file.write(str(number))
    os.rename(place + ".new", place)

programs = {}
while True:
    ready = select.select([0, *programs], [], [])[0]
    for handle in filter(None, ready):
        pid, place = programs.pop(handle)
        os.close(handle)
        note(place + ".code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if 0 not in ready:
        continue
    line = b""
    while not line.endswith(b"\\n"):
        line += os.read(0, 1) or sys.exit()
    program = json.loads(line)
    if not (pid := os.fork()):
        break
    programs[os.pidfd_open(pid)] = pid, program["place"]
    note(program["place"] + ".pid", pid)

for handle in programs:
    os.close(handle)
for number, name in enumerate((os.devnull, program["place"] + ".out", program["place"] + ".err")):
    os.dup2(handle := os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.close(handle)
os.environ.clear()
os.environ.update(program["env"])
if tempfile := sys.modules.get("tempfile"):
    tempfile.tempdir = None  # of TMPDIR as it is now, although torch or a library asked before
os.chdir(program["cwd"])
sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
kind, text, *sys.argv[1:] = program["arguments"]
if kind == "-m":
    runpy.run_module(text, run_name="__main__", alter_sys=True)
else:
    exec(compile(text, "<string>", "exec"))
"""
_server: subprocess.Popen[str] | None = None
_folder: tempfile.TemporaryDirectory[str] | None = None
_count = 0


def environment(*folders: object, **more: str) -> dict[str, str]:
    """Return the environment of a child that imports from folders first, then from where this process was told to."""
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def _start_server() -> subprocess.Popen[str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHONPATH", "RTKERNELS_"))}
    server = subprocess.Popen([sys.executable, "-c", _SERVER], env=env, text=True, stdin=subprocess.PIPE)
    atexit.register(server.communicate)  # the end of its input ends it
    return server


def _require_server() -> None:
    if _server.poll() is not None:
        raise RuntimeError("the process that starts programs has ended")


class Program:
    """A running Python program, with the part of ``subprocess.Popen`` that tests need."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: object = None) -> None:
        """Start ``python -c code ...`` or ``python -m module ...``."""
        global _server, _folder, _count
        if _server is None or _server.poll() is not None:
            _server = _start_server()
        _folder = _folder or tempfile.TemporaryDirectory(prefix="rtkernels-programs-")
        _count += 1
        self.arguments = arguments
        self.returncode: int | None = None
        self._place = f"{_folder.name}/{_count}"
        environment = dict(os.environ if env is None else env)
        request = {"arguments": arguments, "env": environment, "cwd": str(cwd or os.getcwd()), "place": self._place}
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()

    def _read(self, suffix: str) -> str:
        return Path(self._place + suffix).read_text()

    def poll(self) -> int | None:
        """Return the exit code, None before there is one."""
        if self.returncode is None and os.path.exists(self._place + ".code"):
            self.returncode = int(self._read(".code"))
        return self.returncode

    @property
    def pid(self) -> int:
        """The id of its process."""
        while not os.path.exists(self._place + ".pid"):
            _require_server()
            time.sleep(0.002)
        return int(self._read(".pid"))

    def kill(self) -> None:
        """End the program, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end; return what was printed to stdout and to stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            _require_server()
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(list(self.arguments), timeout, self._read(".out"), self._read(".err"))
            time.sleep(0.002)
        return self._read(".out"), self._read(".err")


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: object = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code ...`` or ``python -m module ...`` to its end."""
    program = Program(*arguments, env=env, cwd=cwd)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(list(arguments), program.returncode, out, err)
