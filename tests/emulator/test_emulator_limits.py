"""What the emulator cannot count, keep or address is an error, on both sides of each limit."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from support.emulator_harness import FOLDER, Record, needs_compiler, run
from support.interpreter import run_python
from support.sanitized import _many_arguments

import rtkernels
from rtkernels import emulator
from rtkernels.emulator import EmulatorError, Pointer
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.runtime.launch import tensor_map
from rtkernels.runtime.launch.kernel import MAX_ARGUMENT_BYTES, Kernel

pytestmark = needs_compiler


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_all_arguments_arrive() -> None:
    _many_arguments()


def _kernel(args: str) -> Kernel:
    return Kernel("probe/convert.cu", "probe_narrow", template="T", args=args, variants=[], max_registers=40)


def test_a_kernel_has_as_many_arguments_as_a_launch_takes() -> None:
    most = MAX_ARGUMENT_BYTES // 8
    assert len(_kernel(" ".join(f"a{i}:i64" for i in range(most))).args) == most
    assert len(_kernel("x:tmap " + " ".join(f"a{i}:i64" for i in range(most - 16))).args) == most - 15
    with pytest.raises(ArgumentError, match=r"probe_narrow takes 513 arguments of 4104 bytes; .* room for 4096"):
        _kernel(" ".join(f"a{i}:i64" for i in range(most + 1)))
    with pytest.raises(ArgumentError, match="takes 33 arguments of 4224 bytes"):
        _kernel(" ".join(f"a{i}:tmap" for i in range(33)))
    with pytest.raises(ArgumentError, match="argument rows is none of tmap, ptr, i64, f64"):
        _kernel("x:ptr rows:i32")
    with pytest.raises(ArgumentError, match=r"tensor maps .* come before all other arguments"):
        _kernel("x:ptr y:tmap")


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64 + 1])
def test_integers_of_more_than_64_bits(value: int) -> None:
    with pytest.raises(ArgumentError, match=f"argument n is {value}"):
        run("sanitized.cu", "in_order", block=64, x=torch.ones(64), y=torch.empty(64), n=value)


@pytest.mark.parametrize(
    "shape", [{"grid": 2**32 + 1}, {"block": (2**32 + 32, 1)}, {"grid": (1, 1, 1, 2)}, {"grid": -1}], ids=str
)
def test_grids_and_blocks_of_more_than_32_bits(shape: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="grid"):
        run("sanitized.cu", "in_order", **{"block": 64, **shape}, x=torch.ones(64), y=torch.empty(64), n=1)


def test_more_blocks_than_can_be_numbered() -> None:
    with pytest.raises(EmulatorError, match="numbers blocks with 32 bits"):
        run("sanitized.cu", "in_order", grid=(65536, 65535, 2), block=64, x=torch.ones(64), y=torch.empty(64), n=1)


def test_seeds() -> None:
    rtkernels.emulate(order=2**63 - 1)
    for seed in (2**63, 2**64 - 2, -1):
        with pytest.raises(ArgumentError, match="order"):
            rtkernels.emulate(order=seed)


# ---- wgmma -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [0, 65_535, 65_536])
def test_groups_of_products_are_counted_beyond_16_bits(commits: int) -> None:
    y = torch.zeros(128)
    run("limits.cu", "product_after_commits", block=128, y=y, commits=commits)
    assert (y == 16).all()


def test_blocks_of_a_cluster_keep_their_own_products() -> None:
    y = torch.zeros(256)
    run("limits.cu", "products_of_a_cluster", grid=2, block=128, cluster=2, y=y)
    assert (y[:128] == 16).all() and (y[128:] == 64).all()


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("operand_elsewhere", "an operand of wgmma that is not in shared memory"),
        ("bulk_target_elsewhere", "target of a bulk copy that is not in shared memory"),
        ("undefined_elsewhere", "not shared memory"),
    ],
)
def test_what_is_not_in_shared_memory(name: str, text: str) -> None:
    x = {} if name == "undefined_elsewhere" else {"x": torch.zeros(8192)}
    with pytest.raises(EmulatorError, match=text) as caught:
        run("limits.cu", name, block=128 if name == "operand_elsewhere" else 1, **x, y=torch.zeros(128))
    assert caught.value.kind == "out_of_bounds"


def test_cp_async_reads_no_more_than_it_writes() -> None:
    run("limits.cu", "copy_of_bytes", block=1, x=torch.zeros(64), bytes=16)
    for bytes_read in (17, -4):
        with pytest.raises(EmulatorError, match=r"cp\.async reads more than it writes"):
            run("limits.cu", "copy_of_bytes", block=1, x=torch.zeros(64), bytes=bytes_read)


@pytest.mark.parametrize(("arrivals", "bytes_expected"), [(0, 0), (2**20, 0), (1, 2**20)])
def test_what_an_mbarrier_can_count(arrivals: int, bytes_expected: int) -> None:
    run("limits.cu", "barrier_of", block=1, arrivals=2**20 - 1, bytes=2**20 - 1)
    with pytest.raises(EmulatorError, match=r"an mbarrier (counts|waits for)"):
        run("limits.cu", "barrier_of", block=1, arrivals=arrivals, bytes=bytes_expected)


# ---- tensor maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", [0, 1])
def test_coordinates_are_as_many_as_the_map_has_dimensions(stores: int) -> None:
    x = torch.zeros(8, 32)
    args = (("x", "tmap"), ("coordinates", "i64"), ("stores", "i64"))
    launch = emulator.bind(Record(str(FOLDER / "limits.cu"), "box_of_rank", args), (), 90, 1, 1)
    tensor_map_bytes = tensor_map.tiled_map(Pointer.of(x), "fp32", (32, 8), (128,), (32, 8))
    launch(tensor_map_bytes, 2, stores)
    assert (x == 3 * stores).all()
    with pytest.raises(EmulatorError, match="a tensor map of 2 dimensions, and 3 coordinates") as caught:
        launch(tensor_map_bytes, 3, stores)
    assert caught.value.kind == "trap"


@pytest.mark.parametrize(
    ("map_of", "text"),
    [
        ({"sizes": (8,) * 6, "strides": (32,) * 5, "box": (8,) * 6}, "6 sizes"),
        ({"strides": ()}, "2 sizes, 0 strides"),
        ({"box": (32, 257)}, "a box of 257"),
        ({"box": (64, 8)}, "256 bytes in the first dimension"),
        ({"box": (3, 8)}, "12 bytes in the first dimension"),
        ({"strides": (136,)}, "a stride of 136 bytes"),
        ({"sizes": (32, 0)}, "a size of 0"),
        ({"offset": 4}, "not a multiple of 16"),
    ],
)
def test_maps_that_a_driver_refuses(map_of: dict[str, Any], text: str) -> None:
    given = {"sizes": (32, 8), "strides": (128,), "box": (32, 8), "offset": 0, **map_of}
    with pytest.raises(RtkError, match=text):
        tensor_map.tiled_map(
            Pointer.of(torch.zeros(8, 32)) + given["offset"], "fp32", given["sizes"], given["strides"], given["box"]
        )


# ---- stacks ----------------------------------------------------------------------------------------------------------

_BESIDE = """
import sys
sys.path[:0] = ["tests"]
import torch
from support.emulator_harness import run
y = torch.zeros(1024, dtype=torch.int64)
run("limits.cu", "beside_the_stack", block=1024, y=y, bytes=int(sys.argv[1]))
print("came back", int(y.sum()))
"""


@pytest.mark.parametrize("bytes_away", [16 << 10, 60 << 10, -(256 << 10), -(300 << 10)])
def test_memory_beside_a_stack_is_not_there(bytes_away: int) -> None:
    """The last thread of a block: above its stack there is no other one."""
    done = run_python("-c", _BESIDE, str(bytes_away))
    assert done.returncode == -signal.SIGSEGV and not done.stdout, done.stdout + done.stderr


def test_memory_of_a_stack_is_there() -> None:
    assert run_python("-c", _BESIDE, "-10000").stdout == "came back 1024\n"
