"""Switching operators to our kernels and back: names, nesting, threads, gradients, fallback, compile, the report."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
import types

import pytest
import torch
from support.overrides import taken

import rtkernels
from rtkernels.aten import table, wrapped
from rtkernels.aten.measured import DEFAULT
from rtkernels.aten.table import NotHandled, Overload
from rtkernels.errors import ArgumentError, NotWarmError


def _sin(self):
    if self.dtype == torch.float64:
        return NotHandled("float64")
    return torch.sin(self).add_(0)  # not taken: handlers' own calls go to torch


def _mul(self, other):
    return NotHandled("never")


def _not_warm(self):
    raise NotWarmError("not loaded")


def _bad(self):
    raise ArgumentError("self is bad")


def _too_large(self):
    raise OverflowError("more blocks than a grid has")


def _isfinite(self):
    return torch.ones_like(self, dtype=torch.bool)


TOY = {
    row.name: row
    for row in (
        Overload("sin", "ew", _sin, default=True),
        Overload("sin_", "ew", lambda self: NotHandled("in place")),
        Overload("mul.Tensor", "ew", _mul),
        Overload("cos", "ew", _not_warm),
        Overload("exp", "ew", _bad),
        Overload("log", "ew", _too_large),
        Overload("isfinite", "ew", _isfinite, composite="no gradient"),
        Overload("kron", "copy", lambda self, other: NotHandled("")),
        Overload("sum.dim_IntList", "red", lambda *args, **named: NotHandled("toy")),
    )
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch):
    """A small table whose handlers launch nothing, and counters at zero."""
    monkeypatch.setattr(table, "table", lambda: TOY)
    monkeypatch.setattr(table, "default_rows", lambda: TOY)
    rtkernels.aten.reset()
    with rtkernels.emulate():
        yield
    rtkernels.disable()
    rtkernels.aten.reset()


def rows() -> dict[str, tuple[int, dict[str, int]]]:
    return {row["overload"]: (row["ours"], row["why"]) for row in rtkernels.report(as_rows=True)}


def test_use_counts_and_gives_back(toy) -> None:
    x = torch.randn(5)
    with rtkernels.use():
        assert rtkernels.aten.enabled() == ["sin"]
        torch.testing.assert_close(torch.sin(x), x.sin())
        torch.sin(x.double())
    torch.sin(x)
    assert rows() == {"sin": (2, {"float64": 1})}
    assert rtkernels.aten.enabled() == []


def test_gradients_stay(toy) -> None:
    x = torch.randn(5, requires_grad=True)
    with rtkernels.use(["sin", "isfinite"]):
        (grad,) = torch.autograd.grad(torch.sin(x).sum(), x)
        assert torch.isfinite(x).all()
    torch.testing.assert_close(grad, x.detach().cos())
    assert rows()["isfinite"] == (1, {})


def test_composites_are_refused(toy) -> None:
    with pytest.raises(ArgumentError, match="kron is a composite, which would lose its gradient"):
        rtkernels.enable("kron")
    assert rtkernels.aten.enabled() == []


def test_names(toy) -> None:
    def chosen(include=None, exclude=None):
        with rtkernels.use(include, exclude):
            return rtkernels.aten.enabled()

    assert chosen("sin") == ["sin", "sin_"]
    assert chosen("sin_") == ["sin_"]
    assert chosen(["aten::sum.dim_IntList", "mul"]) == ["mul.Tensor", "sum.dim_IntList"]
    assert chosen("red") == chosen("sum") == ["sum.dim_IntList"]
    assert chosen(["ew"], ["cos", "exp", "log", "isfinite", "mul.Tensor"]) == ["sin", "sin_"]
    with pytest.raises(ArgumentError, match=r"include has 'sinn', which is no overload.*did you mean 'sin'"):
        rtkernels.enable("sinn")
    with pytest.raises(ArgumentError, match="exclude has 'nothing'"):
        rtkernels.enable(exclude=["nothing"])
    with pytest.raises(ArgumentError, match="include has a int"):
        rtkernels.enable([3])
    with pytest.raises(ArgumentError, match="record is 3"):
        rtkernels.enable(record=3)


def test_names_of_the_environment_and_of_files(toy, monkeypatch, tmp_path) -> None:
    def chosen(include=None, exclude=None):
        with rtkernels.use(include, exclude):
            return rtkernels.aten.enabled()

    path = tmp_path / "ops.txt"
    path.write_text("# what this model needs\nsin, mul.Tensor  # two\n\n-sin_\naten::sum.dim_IntList\n")
    from_file = ["mul.Tensor", "sin", "sum.dim_IntList"]
    assert chosen(path) == chosen(f"@{path}") == chosen([f"@{path}"]) == from_file
    assert chosen(["cos", path], ["mul"]) == ["cos", "sin", "sum.dim_IntList"]
    assert chosen(["ew", "-cos", "-exp"], ["log", "isfinite"]) == ["mul.Tensor", "sin", "sin_"]
    assert chosen("-mul") == ["sin"]  # of the default set

    listed = tmp_path / "ops.yaml"
    listed.write_text("---\ninclude:\n  - sin\n  - 'mul'\nexclude: [sin_, cos]\n")
    assert chosen(listed) == ["mul.Tensor", "sin"]
    assert chosen("ew", [tmp_path / "ops.yaml", "isfinite"]) == ["exp", "log"]

    monkeypatch.setenv("RTKERNELS_ENABLE", f"cos,@{path}, -mul")
    assert chosen() == ["cos", "sin", "sum.dim_IntList"]
    assert chosen(exclude="cos") == ["sin", "sum.dim_IntList"]
    assert chosen("exp") == ["exp"]  # what a call names counts alone
    monkeypatch.setenv("RTKERNELS_ENABLE", "-mul")
    assert chosen() == ["sin"]


def test_bad_names_say_where_they_are(toy, monkeypatch, tmp_path) -> None:
    path = tmp_path / "ops.txt"
    path.write_text("cos\nsinn\n")
    with pytest.raises(ArgumentError, match=r"ops.txt, line 2, has 'sinn', which is no overload.*did you mean 'sin'"):
        rtkernels.enable(path)
    monkeypatch.setenv("RTKERNELS_ENABLE", "kos")
    with pytest.raises(ArgumentError, match=r"RTKERNELS_ENABLE has 'kos'.*did you mean 'cos'"):
        rtkernels.enable()
    monkeypatch.delenv("RTKERNELS_ENABLE")
    for text, message in (
        ("", "which lists no name"),
        ("vendor:\n- sin", "line 1, has 'vendor:'; expected a name, or one of the headings"),
        ("exclude:\n-sin", "line 2, has '-sin'; expected a name without '-'"),
        ("@other.txt", "a file cannot name other files"),
    ):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            rtkernels.enable(path)
    with pytest.raises(ArgumentError, match=r"include has the file .*, which cannot be read"):
        rtkernels.enable(f"@{tmp_path}/absent.txt")
    with pytest.raises(ArgumentError, match="include is a int; expected names"):
        rtkernels.enable(3)
    assert rtkernels.aten.enabled() == []


def test_nesting_and_threads(toy) -> None:
    rtkernels.enable("sin")
    with rtkernels.use("mul"):
        assert rtkernels.aten.enabled() == ["mul.Tensor"]
        with rtkernels.use("all", ["kron"]):
            assert len(rtkernels.aten.enabled()) == len(TOY) - 1
        assert rtkernels.aten.enabled() == ["mul.Tensor"]
        seen: list[list[str]] = []
        thread = threading.Thread(target=lambda: seen.append(rtkernels.aten.enabled()))
        thread.start()
        thread.join()
        assert seen == [["mul.Tensor"]]  # the whole process
    assert rtkernels.aten.enabled() == ["sin", "sin_"]
    first, second = rtkernels.use("mul"), rtkernels.use("red")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as another thread would: its choice ends, the other stays
    assert rtkernels.aten.enabled() == ["sum.dim_IntList"]
    second.__exit__(None, None, None)
    assert rtkernels.aten.enabled() == ["sin", "sin_"]
    rtkernels.enable("mul")
    assert rtkernels.aten.enabled() == ["mul.Tensor"]
    rtkernels.disable()
    assert rtkernels.aten.enabled() == []


def test_what_is_not_handled_goes_to_torch(toy) -> None:
    x, y = torch.randn(3, 4), torch.arange(4, dtype=torch.int32)
    half = torch.tensor(2.5, dtype=torch.bfloat16)
    with rtkernels.use(["cos", "exp", "log", "mul", "sum"]):
        torch.testing.assert_close(y.log(), y.double().log().float(), equal_nan=True)
        got = [
            x.cos(), x.exp(), x * y, y * 2.5, 2 * y, half * 0.1, half * 3, torch.tensor(3) * 2.5, torch.mul(2, 3),
            x.sum(1), y.clone().mul_(3), torch.tensor(4, dtype=torch.int8).mul_(2), x * True, x * 2j,
        ]  # fmt: skip
    want = [
        x.cos(), x.exp(), x * y, y * 2.5, 2 * y, half * 0.1, half * 3, torch.tensor(3) * 2.5, torch.mul(2, 3),
        x.sum(1), y.clone().mul_(3), torch.tensor(4, dtype=torch.int8).mul_(2), x * True, x * 2j,
    ]  # fmt: skip
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert rows()["cos"] == (0, {"kernel not loaded while a graph is captured or compiling is off": 1})
    assert rows()["exp"] == (0, {"invalid arguments": 1})
    assert rows()["log"] == (0, {"too large": 2})


def test_small_tensors_go_to_torch() -> None:
    from rtkernels.aten.replay import _elements

    assert _elements((2, torch.ones(3))) == 3
    assert _elements(([torch.ones(3), torch.ones(2, 2)],)) == 7
    assert _elements((5,)) > 2**60
    assert set(table.MIN_ELEMENTS) == {*table.FAMILIES, *DEFAULT}


@pytest.mark.parametrize(
    "backend", ["aot_eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "inductor"))]
)
def test_compiled(toy, backend: str) -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: torch.sin(x) + 1, backend=backend)
    x = torch.randn(5, requires_grad=True)
    with rtkernels.use():
        y = function(x)
        y.sum().backward()
    torch.testing.assert_close(y, x.sin() + 1)
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert backend == "inductor" or rows()["sin"][0] >= 1  # inductor writes its own sine


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_compiled_on_the_gpu(backend: str) -> None:
    """Inductor calls aten for what it does not write itself: sorting more than 512 elements, here."""

    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.softmax(-1)[index], x]).sum(0) + x.sort(0).values[0]

    x = torch.randn(1024, 2048, device="cuda", requires_grad=True)
    index = torch.randint(0, 1024, (1024,), device="cuda")
    want = function(x, index)
    (expected,) = torch.autograd.grad(want.square().sum(), x)
    torch._dynamo.reset()
    rtkernels.aten.reset()
    with taken("cuda", "all"):
        got = torch.compile(function, backend=backend)(x, index)
        (grad,) = torch.autograd.grad(got.square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)
    ours = {name for name, (count, _) in rows().items() if count}
    assert ours >= ({"sort.stable"} if backend == "inductor" else {"_softmax", "index.Tensor", "sum.dim_IntList"})


def test_inference_mode_and_vmap(toy) -> None:
    x = torch.randn(3, 4)
    with rtkernels.use():
        with torch.inference_mode():
            assert torch.sin(x).is_inference()
        torch.testing.assert_close(torch.func.vmap(torch.sin)(x), x.sin())
        torch.testing.assert_close(torch.func.grad(lambda v: torch.sin(v).sum())(x), x.cos())


def test_records(toy, tmp_path, capsys) -> None:
    calls: list[tuple[str, str | None]] = []
    path = tmp_path / "calls"
    x = torch.ones(2)
    with rtkernels.use(record=lambda name, why: calls.append((name, why))):
        torch.sin(x), torch.sin(x.double())
    with rtkernels.use(record=path):
        torch.sin(x), torch.sin(x.double())
    assert calls == [("sin", None), ("sin", "float64")]
    assert path.read_text() == "sin\trtkernels\nsin\ttorch: float64\n"
    rtkernels.report()
    assert capsys.readouterr().out.splitlines() == [
        "overload  family  ours  torch  why torch", "sin       ew         2      2  float64 (2)",
    ]  # fmt: skip
    rtkernels.aten.reset()
    rtkernels.report()
    assert "no call" in capsys.readouterr().out


def test_enabling_is_quick_and_compiles_nothing() -> None:
    table.table()
    with rtkernels.emulate():
        start = time.process_time()
        rtkernels.enable("all")
        took = time.process_time() - start
    rtkernels.disable()
    assert took < 0.5  # 50 ms for the CUDA key alone on a machine of its own


def test_handlers_take_what_schemas_take() -> None:
    """The dispatcher passes only arguments that differ from their defaults."""
    for name, row in table.table().items():
        arguments = table.schema_of(name).arguments
        required = [a for a in arguments if not a.has_default_value()]
        given = [None for a in required if not a.kwarg_only], {a.name: None for a in required if a.kwarg_only}
        inspect.signature(row.handler).bind(*given[0], **given[1])
        last = [None for a in arguments if not a.kwarg_only], {a.name: None for a in arguments if a.kwarg_only}
        inspect.signature(row.handler).bind(*last[0], **last[1])


def test_every_row_has_a_schema_and_is_no_composite() -> None:
    from rtkernels.aten.enable import _refuse_composite

    for row in table.table().values():
        _refuse_composite(row)
    assert "add.Tensor" in rtkernels.aten.overloads()


def _call_while_switching(function, want: torch.Tensor, switches: int, include: tuple) -> set[str]:
    """Call a function in eight threads while this one switches overrides; return what went wrong."""
    errors: set[str] = set()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                if not torch.equal(function(), want):
                    errors.add("wrong result")
            except BaseException as error:
                errors.add(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for i in range(switches):
        with rtkernels.use(include[i % len(include)]):
            time.sleep(0.001)
        time.sleep(0.0005)
    stop.set()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.one_in(1000)
def test_switching_while_threads_call(toy) -> None:
    """The dispatcher frees unregistered functions, which other threads may be executing."""
    x = torch.randn(64)
    include = ("sin", "mul", ("sin", "mul", "red"))
    assert not _call_while_switching(lambda: torch.sin(x) * x, torch.sin(x) * x, 200, include)
    assert not rtkernels.aten.enabled()


def test_overrides_that_are_off(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread runs, they stay registered and pass every call to torch; then they are removed."""
    enable = importlib.import_module("rtkernels.aten.enable")  # the package has a function of that name
    before = sys._current_frames().keys() - {threading.get_ident()}  # a distributed run has threads of its own

    def frames() -> dict:
        return {ident: frame for ident, frame in sys._current_frames().items() if ident not in before}

    monkeypatch.setattr(enable, "sys", types.SimpleNamespace(_current_frames=frames))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    x = torch.randn(5)
    with rtkernels.use("sin"):
        torch.sin(x)
    assert ("sin", "CPU") in enable._registered
    torch.testing.assert_close(torch.sin(x), x.double().sin().float())
    assert rows() == {"sin": (1, {})}
    stop.set()
    thread.join()
    with rtkernels.use("mul"):
        assert ("sin", "CPU") not in enable._registered
    assert not enable._registered


def test_first_numbers_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator inside of which numbers become tensors is defined once, whoever needs it first."""
    defined: list[int] = []

    class SlowLibrary:
        def __init__(self, *args) -> None:
            time.sleep(0.02)

        def define(self, schema: str) -> None:
            defined.append(threading.get_ident())

        def impl(self, *args) -> None:
            pass

    wrapped.with_numbers_as_tensors(torch.abs, (torch.ones(2),), {})  # torch has it from here on
    wrapped._defined_number_operator.cache_clear()
    monkeypatch.setattr(torch.library, "Library", SlowLibrary)
    threads = [threading.Thread(target=wrapped._number_operator) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(defined) == 1


def test_switching_off_inside_of_a_call(toy) -> None:
    x = torch.randn(5)
    rtkernels.enable("sin", record=lambda name, why: rtkernels.disable())
    torch.testing.assert_close(torch.sin(x), x.double().sin().float())
    assert not rtkernels.aten.enabled()


@pytest.mark.gpu
def test_switching_while_threads_call_on_the_gpu() -> None:
    x = torch.randn(64, 64, device="cuda")
    with taken("cuda", "all"):
        want = x.abs().sum(1)

    def close() -> torch.Tensor:
        torch.testing.assert_close(x.abs().sum(1), want)
        return want

    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    try:
        assert not _call_while_switching(close, want, 100, ("all", ("abs", "sum"), "red"))
    finally:
        table.MIN_ELEMENTS.update(limits)


def test_overloads_that_are_composites_keep_their_gradients() -> None:
    """Where an overload is a composite of others, autograd uses a formula for it as soon as it has a kernel there."""
    import torch.nn.functional as F

    with rtkernels.emulate("sm_80"), rtkernels.use("all"):
        x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        got = torch.autograd.grad(F.rms_norm(x, (16,), weight, 1e-5).sum(), (x, weight))
    want = torch.autograd.grad(F.rms_norm(x, (16,), weight, 1e-5).sum(), (x, weight))
    torch.testing.assert_close(got, want)
