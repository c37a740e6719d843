"""Defects planted in the package, one edit each, that these tests must find: for each item that a replay asks for."""

from __future__ import annotations

import functools
import sys

from contracts.fuzz.planted import Defect, _Finder

_planted = functools.partial(Defect, kinds="public")
_CALL = "rtkernels/runtime/call"
# ``only`` is a call, ``place`` the item, ``variation`` the change that shows it.
DEFECTS = [
    _planted("strides are not compared", "rtkernels/runtime/torch_private.py",
           "[list(t.shape) for t in there], [list(t.stride()) for t in there]",
           "[list(t.shape) for t in there], [[None] * t.dim() for t in there]",
           "rms_norm(), residual", "tensors", "x step"),
    _planted("alignment is not compared", f"{_CALL}/codegen.py",
           """others.append(f"({' | '.join(aligned)}) & 15")""", "pass", "rms_norm(), residual", "tensors", "off"),
    _planted("dispatch keys are not compared: lazy negatives", "rtkernels/runtime/torch_private.py",
           "    check = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check\n",
           "    kinds = [t.dtype for t in there]\n"
           "    check = lambda *given: [t.dtype for t in given] == kinds and "
           "[list(t.shape) for t in given] == sizes and [list(t.stride()) for t in given] == strides\n",
           "rms_norm(), residual", "lazy negatives", "x neg"),
    _planted("tensors that were one may be two", f"{_CALL}/codegen.py",
           'same += [f"{name} is {distinct[id(t)]}"', 'same += ["True"', "add_residual()", "aliasing", "no longer one"),
    _planted("overlap is not looked for", f"{_CALL}/codegen.py",
           'return f"({low - further} < {distance} <', 'return "False" or f"({low - further} < {distance} <',
           "rms_norm()", "aliasing", "out overlaps"),
    _planted("signs of zeros are not compared", f"{_CALL}/codegen.py",
           "if kind is float and value == 0:", "if False:", "rms_norm(), residual", "other arguments", "0.0 -0.0"),
    _planted("types of options are not compared", f"{_CALL}/codegen.py",
           'f"type({name}) is kind_of_{name} and {name} == given_as_{name}"', 'f"{name} == given_as_{name}"',
           "rms_norm(), residual", "other arguments", "1 True"),
    _planted("lists are tuples", f"{_CALL}/codegen.py",
           "if type({name}) is not kind_of_{name} or len", "if len", "merge_attention()", "other arguments", " as a "),
    _planted("grad mode is not asked for", f"{_CALL}/codegen.py",
           'same = ["not is_grad_enabled()"]', "same = []", "rms_norm(), residual", "gradients", "on"),
    _planted("dispatch keys are not compared: inference mode", "rtkernels/runtime/torch_private.py",
           "    check = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check\n",
           "    check = lambda *given: True\n", "rms_norm(), residual", "inference mode", "on"),
    _planted("the dtype of autocast is not compared", f"{_CALL}/codegen.py",
           'same.append(f"autocast_dtype({kind!r}) is {self.constant(torch.get_autocast_dtype(kind))}")', "pass",
           "linear_cross_entropy(), none", "autocast", "to float16"),
    _planted("the default dtype is not compared", f"{_CALL}/codegen.py",
           'same.append(f"default_dtype() is {self.constant(torch.get_default_dtype())}")', "pass",
           "smooth_factors()", "default dtype", "float64"),
    _planted("deterministic mode is not compared", f"{_CALL}/codegen.py",
           'same.append(f"deterministic() is {torch.are_deterministic_algorithms_enabled()}")', "pass",
           "smooth_factors()", "deterministic mode", "on"),
    _planted("the level of batch invariance is not compared", f"{_CALL}/codegen.py",
           'same.append(f"{LEVEL_CODE} == {level()}" if level() else f"not {IS_INVARIANT}")', "pass",
           "layer_norm()", "batch invariance", "level 1"),
    _planted("the environment is not asked", f"{_CALL}/codegen.py",
           "if self.trace.debug:", "if False:", "append_kv_cache()", "environment", "beyond"),
    _planted("another target keeps its plans", "rtkernels/runtime/launch/device.py",
           "        Plans.forget_all()\n", "        pass\n", "rms_norm(), residual", "emulation", "another target"),
    _planted("dispatch modes see no replays", f"{_CALL}/public.py",
           "elif not _dispatch_modes():", "else:", "rms_norm(), residual", "dispatch modes", "a mode"),
    _planted("launches go to one stream", "rtkernels/runtime/launch/driver.py",
           "shared, current_stream(device), slot.pointers", "shared, 0, slot.pointers",
           "rms_norm(), residual", "stream", "another"),
    _planted("streams share scratch", f"{_CALL}/memory.py",
           "            stream = current_stream(self._device)\n", "            pass\n",
           "router_z_loss()", "stream", "with out"),
    _planted("graphs share scratch", f"{_CALL}/memory.py",
           "            if is_capturing():", "            if False:", "router_z_loss()", "capture", "with out"),
    _planted("threads share scratch", f"{_CALL}/memory.py",
           "from threading import get_ident\n", "get_ident = int\n", "router_z_loss()", "threads", "with out"),
    _planted("the last replay outlives plans", f"{_CALL}/recent.py",
           '.clear()\n        self._scope["_last"] = miss\n', ".clear()\n",
           "rms_norm(), residual", "plans", "forgotten"),
]  # fmt: skip


def plant(name: str) -> None:
    """Make this process import a defect. Before rtkernels is imported."""
    sys.meta_path.insert(0, _Finder(next(defect for defect in DEFECTS if defect.name == name)))
