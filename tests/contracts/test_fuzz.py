"""The fuzzer (``tests/contracts/fuzz``): a seeded part of it here, all of it on a GPU; and defects that it must find.

On the CPU, where references run, it looks for memory that is shared and not refused: that is decided before any launch.
In the emulator it looks for accesses outside of tensors and for results that depend on layouts.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.compare import poisoned
from support.interpreter import environment, run_python
from support.places import at, emulated

from contracts.fuzz import calls, campaign, planted
from contracts.fuzz.check import Fuzzer, rng_of
from contracts.fuzz.variations import Variation, resized, sizes_of, variations
from rtkernels.errors import RtkError

SEED = 1
FAMILIES = (
    "act", "attention", "conv", "gemm", "index", "layout", "loss", "moe", "multi", "norm", "pointwise", "quant",
    "reduce", "rope", "router", "shared",
)  # fmt: skip


def _family(family: str) -> list[calls.Call]:
    return [call for call in campaign.own_calls(family) if call.family == family]


def _check(place: str, cases: list[tuple[calls.Call, Variation]], repeat: int = 1) -> Fuzzer:
    fuzzer = Fuzzer(place, repeat)
    with poisoned():
        found = [failure for call, variation in cases if (failure := fuzzer.check(call, variation)) is not None]
    assert not found, "\n".join(" | ".join(failure) for failure in found[:20])
    return fuzzer


def test_every_family_is_fuzzed() -> None:
    assert {call.family for call in campaign.own_calls()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_memory_is_refused(family: str) -> None:
    """What is written shares memory with something else: refused, or exactly what an operator says it may be."""
    cases = []
    for call in _family(family):
        rng = rng_of(SEED, call)
        shared = [v for v in variations(call, rng) if v.alias is not None]
        cases += [(call, v) for v in rng.sample(shared, min(len(shared), 8))]
    fuzzer = _check("cpu", cases)
    assert not cases or fuzzer.refused


# Integers in these calls refer to what is empty then, or the operators are never called without these elements.
NEVER_EMPTY = {
    ("divergence_bwd", 2), ("indexer_logits_fwd", 2), ("indexer_topk_fwd", 2), ("norm_modulated", 1),
    ("quantize_fp8_smooth", 2), ("linear_divergence_bwd_kept", 24),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_any_size_can_be_0(family: str) -> None:
    """There is a result, or an error that names an argument: nothing of Python's or torch's own."""
    found = []
    for call in _family(family):
        widths = {t.shape[-1] for t in call.tensors if t.dtype.is_floating_point and t.dim()}
        name = call.name.partition("#")[0]
        for size in sorted((widths | {old for old, _ in sizes_of(call)}) - {0}):
            if (name, size) in NEVER_EMPTY:
                continue
            try:
                with torch.no_grad():
                    call.run([resized(t, size, 0) for t in call.tensors])
            except RtkError:
                continue
            except Exception as error:
                found.append(f"{call.name}, {size}: {type(error).__name__} {error}")
    assert not found, "\n".join(found)


@emulated
@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
@at("sm_80", "sm_90")
def test_layouts_in_the_emulator(family: str, place: str, request: pytest.FixtureRequest) -> None:
    """With ``--full``, more of it."""
    full, rng = request.config.getoption("--full"), random.Random(f"{SEED} {family} {place}")
    found = _family(family)
    chosen = rng.sample(found, min(len(found), 12 if full else 2))
    cases = [case for call in chosen for case in campaign.cases([call], SEED)[: 24 if full else 12]]
    _check(place, cases, repeat=2)


@emulated
@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", range(4))
@at("sm_80")
def test_aten_overloads_in_the_emulator(number: int, place: str) -> None:
    pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")
    found = []
    for i, failure in enumerate(campaign.run(place, SEED, 600.0, part=number, parts=64, kinds="aten")):
        found += [] if failure is None else [" | ".join(failure)]
        if i == 40:
            break
    assert not found, "\n".join(found)


# ---- what it takes a call for ---------------------------------------------------------------------------------------


def test_what_is_written_is_known() -> None:
    """Writes are detected even if memory already held the results; otherwise they would be misjudged."""
    written = {call.name: {call.names[i] for i in call.written} for call in campaign.own_calls() if call.function}
    assert all(names for name, names in written.items() if name.partition("(")[0].endswith("_"))
    assert written["append_kv_cache()"] == {"k_cache", "v_cache"}
    assert written["quantize_fp8_shard_()"] == {"q", "scale"}
    assert written["multi_copy_()"] == {"outputs[0]"}


def test_places_of_rows_are_not_repeated() -> None:
    """Two rows with the same destination are a race, and its outcome depends on the GPU."""
    found = [call for call in _family("moe") if "rows" in call.names and call.name.startswith("moe_permute_fwd")]
    assert found
    for call in found:
        tokens = call.tensors[call.names.index("rows")].shape[0]
        assert all(v.sizes is None or v.sizes[0] != tokens for v in variations(call, rng_of(SEED, call)))


def test_what_torch_leaves_undefined() -> None:
    """A result with the strides of an overlapping input, written to by torch itself."""
    pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")
    from contracts.fuzz import aten

    x = torch.arange(64, dtype=torch.uint8).as_strided((5, 16), (3, 1))
    call = calls.Call(
        "select_scatter", "copy", ["x"], [x], lambda t: torch.select_scatter(t[0], t[0].new_full((16,), 99), 0, 1)
    )
    fuzzer = aten.AtenFuzzer("sm_80", contextlib.nullcontext)
    assert fuzzer.check(call, Variation(((0, "windows3"),))) is None
    wrong = calls.Call("sum", "reduce", ["x"], [x], lambda t: t[0].sum(0) if t[0].is_contiguous() else t[0][0].long())
    fuzzer._run = lambda call, tensors, ours: [(call.run if ours else lambda t: t[0].sum(0))(tensors)]
    assert "other values" in fuzzer.check(wrong, Variation(((0, "windows3"),))).what


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_operators_of_other_dtypes_are_passed_over(device: str) -> None:
    """Torch has an OpInfo of silu for complex numbers alone."""
    pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")
    from conformance import harness

    from contracts.fuzz import aten

    others = [op for op in harness.operators() if not set(aten._DTYPES) & op.supported_dtypes(device)]
    assert [call for op in others for call in aten.calls(op, random.Random(SEED), device, 2)] == []


# ---- what it found --------------------------------------------------------------------------------------------------

FOUND = (
    ("sm_90", "qk_norm_rope_bwd#5", "", {"cos": "off", "sin": "step0"}),  # one table is copied, the other is as it was
    ("cpu", "multi_clip_()", "", {"tensors[0]": "neg"}),
    ("cpu", "multi_scale_()", "", {"tensors[0]": "neg"}),
    ("cpu", "multi_copy_()", "", {"outputs[0]": "neg"}),
    ("cpu", "multi_clip_norm_()", "", {"tensors[0]": "neg"}),
    ("cpu", "quantize_fp8_shard_()", "scale=shard+0", {}),
    ("cpu", "quantize_fp8_shard_()", "q=shard+0", {}),
    ("cpu", "quantize_fp8_shard_()", "q=scale-16", {}),
)


@emulated
@pytest.mark.parametrize(("place", "name", "alias", "chosen"), FOUND, ids=lambda value: str(value))
def test_what_it_found_stays_away(place: str, name: str, alias: str, chosen: dict[str, str]) -> None:
    call = next(call for call in campaign.own_calls(name) if call.name == name)
    if alias:
        variation = next(v for v in variations(call, rng_of(SEED, call)) if v.named(call) == alias)
    else:
        variation = Variation(tuple((call.names.index(key), how) for key, how in chosen.items()))
    _check(place, [(call, variation)])


# ---- defects that it must find --------------------------------------------------------------------------------------


@emulated
@pytest.mark.one_in(1000)
@pytest.mark.parametrize("defect", planted.DEFECTS, ids=lambda d: d.name.replace(" ", "_"))
def test_planted_defects_are_found(defect: planted.Defect) -> None:
    """Found in a process of its own, and not found without the defect."""
    if defect.kinds == "aten":
        pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")
    tests = Path(__file__).parents[1]
    for name, found in ((defect.name, True), (f"without {defect.name}", False)):
        done = run_python("-m", "contracts.fuzz.planted", name, env=environment(tests.parent, tests), timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        last = done.stdout.strip().splitlines()[-1]
        assert last.endswith(": nothing") is not found, last


def test_every_planting_applies() -> None:
    for defect in planted.DEFECTS:
        planted.edited(defect)
    assert len({defect.name for defect in planted.DEFECTS}) == len(planted.DEFECTS) >= 15


# ---- machines that lack something -----------------------------------------------------------------------------------


@pytest.mark.one_in(3)
def test_calls_of_ours_need_no_opinfos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``expecttest`` is missing only aten overloads are left out; what a person put on the path stays on it."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = """
import sys
assert "/elsewhere" in sys.path
sys.modules["expecttest"] = None
from contracts.fuzz import campaign, planted
print(callable(campaign.run), len(planted.DEFECTS) > 0)
"""
    done = run_python("-c", code, env=environment(tests.parent, tests))
    assert done.stdout == "True True\n", done.stderr


# ---- all of it ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_everything_on_the_gpu() -> None:
    """90 seconds of it; choose another seed with ``python -m tests.contracts.fuzz --seed N``."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.contracts.fuzz", "--device=cuda", "--seconds=90", "--jobs=8", "--rows=12"]
    done = subprocess.run(
        [*command, f"--seed={SEED}"], cwd=root, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    if done.returncode:  # without the traceback of this test: what was found has its own words
        pytest.fail((done.stdout[-5000:] or done.stderr[-2000:]).strip(), pytrace=False)
