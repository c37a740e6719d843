"""Fixtures and markers shared by all tests."""

from __future__ import annotations

import functools
import inspect
import json
import linecache
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: threads of torch would only spin
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from rtkernels.runtime import invariance
from rtkernels.runtime.build import cache as build_cache

pytest.register_assert_rewrite("support")  # checks that several test files share say what differs, too

_own_cache = pytest.StashKey[str]()
SLOW_WORDS = (
    *("emulate(", "running_on(target)", "order_of_threads", "thread_order", "compile_unit("),
    *("torch.compile(", "torch.export", "opcheck("),
)
PRODUCTS = ("tests/ops/gemm", "tests/ops/attention")
# A run of the whole suite takes one test of so many that take seconds; a product's takes several times as long.
ONE_IN, ONE_PRODUCT_IN = 32, 128
COMPILED = 4  # tests of functions under torch.compile that a run of the whole suite takes
COSTLY_AT_ONCE = 1000  # tests; more are a run of the whole suite, which takes a sample of them
SAMPLES = Path(__file__).with_name("samples.json")  # written by ``python -m tests.mutation choose``


def pytest_configure(config: pytest.Config) -> None:
    """Keep tests away from the user's cache: one cache per run, shared by its workers."""
    if (op := config.getoption("--op")) and config.args_source is not pytest.Config.ArgsSource.ARGS:
        tests = config.rootpath / "tests"
        own = sorted(tests.glob(f"ops/*/test_{op}.py"))
        config.args = [str(path) for path in (*own, tests / "contracts", tests / "bench" / "test_bench.py")]
    if os.environ.get("RTKERNELS_CACHE_DIR"):
        return  # named on purpose, to keep it between runs; or inherited by a worker of this run
    config.stash[_own_cache] = os.environ["RTKERNELS_CACHE_DIR"] = tempfile.mkdtemp(prefix="rtkernels-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of this run."""
    if directory := config.stash.get(_own_cache, None):
        del os.environ["RTKERNELS_CACHE_DIR"]
        shutil.rmtree(directory, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--op``, ``--full``, ``--part``, ``--rest`` and ``--sample``."""
    parser.addoption("--op", metavar="NAME", help="the tests of one op: its own file, and its cases of all contracts")
    parser.addoption(
        "--full",
        action="store_true",
        help="also run what is marked slow, all emulated cases on sm_80 and on sm_90, every variant for every target",
    )
    parser.addoption(
        "--part",
        type=int,
        default=0,
        metavar="N",
        help="which part of the tests that take seconds a run of the whole suite takes (0 to 127)",
    )
    parser.addoption("--whole", action="store_true", help="a run of the whole suite leaves out no emulated case")
    parser.addoption("--rest", action="store_true", help="a case of every test of which the whole suite has none")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run every Nth case of each test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, visibly, where there is no GPU; leave out emulated cases that say little new.

    Compiling kernels comes last, where workers get a few tests at a time, so that none is left with a queue of them
    when the others are done.
    """
    items.sort(key=lambda item: item.name.startswith("test_compiles_without_spills"))
    kept: tuple[str, ...] = ()
    if op := config.getoption("--op"):
        _keep_one_op(op, config, items)
        kept = ("tests/contracts/",)  # all of an op's cases
    if not config.getoption("--full"):
        slow = {item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("gpu")}
        slow = {item for item in slow if not item.nodeid.startswith(kept)}
        dropped = slow | _repeated(items)
        left: set[pytest.Item] = set()
        if not config.getoption("--whole"):
            left = _left_to_others([item for item in items if item not in dropped], config.getoption("--part"))
        dropped |= left
        if config.getoption("--rest"):
            there = {_test(item) for item in items if item not in dropped and not item.get_closest_marker("gpu")}
            dropped = set(items) - _one_of_each(left, there)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))
    if (step := config.getoption("--sample")) > 1:
        seen: Counter[str] = Counter()
        kept, left = [], []
        for item in items:
            test = _test(item)
            (left if seen[test] % step and not item.get_closest_marker("one_in") else kept).append(item)
            seen[test] += 1
        items[:] = kept
        config.hook.pytest_deselected(items=left)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; none on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _keep_one_op(name: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of one op: its own, cases named after it or what it offers, and those marked ``every_op``."""
    from support.ops import op_named

    op = op_named(name)
    names = {name, *op.public, *(torch_op.name for torch_op in op.torch_ops), *(kernel.name for kernel in op.kernels)}
    about = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(names)))})(?!\w)")
    kept, others = [], []
    for item in items:
        case = item.nodeid.partition("[")[2]
        of_the_op = item.path.name == f"test_{name}.py" or item.get_closest_marker("every_op") is not None
        (kept if of_the_op or about.search(case) else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def _repeated(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return, of each test with several cases that would run on both emulated targets, one of the two.

    Few lines of a kernel depend on the target, and every variant costs a host compilation for each. Which of the two a
    case keeps is a hash of its name, so a test with several cases sees both.
    """
    tests: dict[str, dict[str, dict[str, pytest.Item]]] = {}
    for item in items:
        place = getattr(item, "callspec", None) and item.callspec.params.get("place")
        if place in ("sm_80", "sm_90"):
            test, _, case = item.nodeid.partition("[")
            tests.setdefault(test, {}).setdefault(case.replace(place, ""), {})[place] = item
    dropped = set()
    for cases in tests.values():
        twice = {case: both for case, both in cases.items() if len(both) == 2}
        if len(twice) > 1:
            for case, both in twice.items():
                dropped.add(both["sm_90" if zlib.crc32(case.encode()) & 1 else "sm_80"])
    return dropped


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _one_of_each(items: set[pytest.Item], besides: set[str]) -> set[pytest.Item]:
    """Return a case of each test, if there is one without a GPU, but for those whose name is in `besides`."""
    first: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: (item.get_closest_marker("gpu") is not None, item.nodeid)):
        first.setdefault(_test(item), item)
    return {item for test, item in first.items() if test not in besides}


def _left_to_others(items: list[pytest.Item], part: int) -> set[pytest.Item]:
    """Return, of a run of the whole suite, most of the tests that take seconds.

    Part 0 keeps those that kill most mutants of the kernels (tests/mutation). Other parts, and part 0 of tests that are
    newer than these samples, take some by a hash of their names. The host compilation of a variant takes a fifth of a
    second, of a matrix product one, and most cases differ in types and shapes alone. torch.compile takes a second; of
    the tests that compile a function of an op, a few run. A run of a family or two keeps all cases.
    """
    costly = [item for item in items if _takes_seconds(item)]
    if len(costly) <= COSTLY_AT_ONCE:
        return set()
    return {item for item in costly if not _in_part(item, part)} | _compiled_by_others(items, part)


def _compiled_by_others(items: list[pytest.Item], part: int) -> set[pytest.Item]:
    """Return the tests that compile an op (``assert_compiles``), but for a few with all of their cases."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "assert_compiles(" in _text_of(item.function):
            tests.setdefault(_test(item), []).append(item)
    names = sorted(tests)
    kept = {names[(part + i * len(names) // COMPILED) % len(names)] for i in range(COMPILED) if names}
    return {item for name, cases in tests.items() if name not in kept for item in cases}


def in_every_run(item: pytest.Item) -> bool:
    """Return whether part 0 of the whole suite has a test, whatever the samples are."""
    return not _takes_seconds(item) or (item.get_closest_marker("one_in") is not None and _in_part(item, 0))


@functools.cache
def _samples() -> tuple[frozenset[str], frozenset[str]]:
    """Return the node ids of samples, and the functions that they were chosen from."""
    if not SAMPLES.exists():
        return frozenset(), frozenset()
    known = json.loads(SAMPLES.read_text())
    chosen, judged = (
        frozenset(f"{file}::{rest}" for file, names in known[key].items() for rest in names)
        for key in ("chosen", "judged")
    )
    return chosen, judged


def _in_part(item: pytest.Item, part: int) -> bool:
    if part == 0:
        chosen, judged = _samples()
        if item.nodeid in chosen:
            return True
        if item.nodeid.partition("[")[0] in judged and not item.get_closest_marker("one_in"):
            return False
    step = ONE_PRODUCT_IN if item.nodeid.startswith(PRODUCTS) else ONE_IN
    if marker := item.get_closest_marker("one_in"):
        (step,) = marker.args
    return zlib.crc32(item.nodeid.encode()) % step == part % step


def _takes_seconds(item: pytest.Item) -> bool:
    """Return whether a test emulates, compiles or is marked; others of the emulator itself are small and always run."""
    if item.get_closest_marker("gpu") or not isinstance(item, pytest.Function):
        return False
    if item.get_closest_marker("one_in"):
        return True
    place = getattr(item, "callspec", None) and item.callspec.params.get("place")
    if place is not None and str(place).startswith("sm_"):
        return True
    folder = item.nodeid.rpartition("/")[0]
    if folder in PRODUCTS:
        return place is None and "errors" not in item.nodeid
    return not folder.startswith("tests/emulator") and _names_what_is_slow(item.function)


@functools.cache
def _names_what_is_slow(test: Callable[..., None]) -> bool:
    return any(word in _text_of(test) for word in SLOW_WORDS)


@functools.cache
def _text_of(test: Callable[..., None]) -> str:
    """Return the lines of a test with its decorators; ``inspect.getsource`` takes seconds for all of them."""
    code = inspect.unwrap(test).__code__
    return "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : _last_line(code)])


def _last_line(code: CodeType) -> int:
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, CodeType)]
    return max([line for _, _, line in code.co_lines() if line is not None] + inner)


def pytest_report_header() -> list[str]:
    """Say at the top of a run what it ran on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none, gpu tests are skipped"
    return [f"torch {torch.__version__}, GPU: {gpu}, kernel cache: {os.environ['RTKERNELS_CACHE_DIR']}"]


@pytest.fixture(autouse=True)
def _batch_invariance_ends() -> Iterator[None]:
    """A level that a test sets for the process ends with it, and the test fails."""
    yield
    if invariance.state.default:
        invariance.set_default(0)
        pytest.fail("the test left a level of batch invariance behind; set_batch_invariant(0) ends it")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache for one test; the process remembers nothing from before, nor afterwards."""
    directory = tmp_path / "cache"
    for name in list(os.environ):
        if name.startswith("RTKERNELS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(directory))
    build_cache.forget()
    yield directory
    build_cache.forget()
