"""The decoding loop of ``generate()``, in place of transformers' ``_sample``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from rtkernels.models import decoding
from rtkernels.models.generation import STATE, select, supported
from rtkernels.models.generation.cache import FixedCache, states_of, windows_of
from rtkernels.models.generation.follow import DEPTH, RandomState, Ring
from rtkernels.models.generation.state import State
from rtkernels.models.generation.step import Program, Rows
from rtkernels.models.served import ServedLinear
from rtkernels.nn.fp8_linear import KeepsCodes
from rtkernels.runtime.invariance import level
from rtkernels.runtime.torch_private import is_dynamo_compiling

FIRST_CAPACITY = 1024  # keys; doubled as often as needed
SOON = 128  # new tokens for which the first capacity has room
WORTH = 4  # a graph is captured for so many steps or more
_TOLERANCE = {torch.float32: 0.01, torch.float64: 1e-6}  # of the first step's logits; 16 bits: 0.1
_OF_CODES = 0.4  # where activations are rounded to 8 bits: a last bit flips codes. Wrong keys differ by more than 1


class Refused(Exception):
    """The call must run transformers' own loop."""


def sample(
    own: Callable[..., Any], model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
    generation_config: Any, synced_gpus: bool = False, streamer: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Decode here if the call is supported, else with `own`, which is transformers' loop."""
    state: State | None = None if is_dynamo_compiling() else model.__dict__.get(STATE)
    reason = None
    if state is not None:
        state.loops += 1
        reason = supported.reason_against(model, input_ids, logits_processor, generation_config, synced_gpus, kwargs)
        if reason is None and not state.lock.acquire(blocking=False):
            reason = "another generate() of this model has not ended"
        elif reason is None:
            try:
                state.update(supported.stamp(model))
                call = _Call(state, model, input_ids, logits_processor, stopping_criteria, generation_config, kwargs)
                return call.decode(streamer)
            except Refused as refused:
                reason = str(refused)
            finally:
                state.lock.release()
        state.refuse(reason)
    return own(
        model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
        generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **kwargs,
    )  # fmt: skip


class _Call:
    """One call of ``generate()``."""

    def __init__(
        self, state: State, model: Any, ids: Tensor, processors: Any, criteria: Any, config: Any, kwargs: dict[str, Any]
    ) -> None:
        self.state, self.model, self.ids, self.processors, self.config = state, model, ids, processors, config
        self.batch, self.columns = ids.shape
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.kwargs = {**kwargs, "past_key_values": self.cache}  # the cache that was passed stays empty
        self.criteria = criteria
        self.others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self.limit = max(min(lengths) - self.columns, 1) if lengths else None
        stops = [c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria]
        self.stop = [int(token) for tokens in stops for token in tokens]
        pad = config._pad_token_tensor
        self.pad = None if pad is None else int(pad)
        if any(hasattr(c, "eos_token_id") for c in self.others) or (self.stop and self.pad is None):
            raise Refused("its stop tokens are not those of the configuration")
        self.key = select.key_of(processors, bool(config.do_sample), self.stop, self.pad)
        self.options = {name: kwargs[name] for name in ("logits_to_keep",) if name in kwargs}
        last = kwargs["position_ids"][:, -1]
        self.bounded = bool(((last >= 0) & (last < self.columns)).all())  # by the number of tokens
        window = next((w for w in windows_of(self.cache) or () if w is not None), None)
        self.form = self.batch, kwargs.get("attention_mask") is not None, window is not None and self.columns >= window
        if self.form in state.refused:
            raise Refused(state.refused[self.form])
        self.random = RandomState(ids.device, bool(config.do_sample))

    def decode(self, streamer: Any) -> Tensor:
        """Return the prompt with the new tokens."""
        if not self.ids.is_cuda:
            return self._decode(streamer)
        state = self.state
        with torch.cuda.device(self.ids.device):
            if state.done is not None:  # steps behind the end of the last call, which may be in another stream
                torch.cuda.current_stream().wait_event(state.done)
            try:
                return self._decode(streamer)
            finally:
                state.done = torch.cuda.Event()
                state.done.record()

    def _decode(self, streamer: Any) -> Tensor:
        program = self._begin(self.model._prefill(self.ids, self.config, self.kwargs, is_first_iteration=True))
        del self.cache, self.kwargs  # the keys of the prompt have been copied
        with self.model._optimize_model_for_decode():
            return self._follow(program, streamer)

    # ---- the first step ---------------------------------------------------------------------------------------------

    def _begin(self, outputs: Any) -> Program:
        """Select the first token, and return the program of the next step."""
        logits = outputs.logits[:, -1]
        capacity = FIRST_CAPACITY
        while capacity < self.columns + min(self.limit or SOON, SOON):
            capacity *= 2
        try:
            program = self._program(capacity, logits.shape[-1], self.cache)
        except torch.OutOfMemoryError:
            raise Refused("there is no memory for a second cache") from None
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs["position_ids"]
        start = torch.zeros_like(self.ids[:, 0]) if mask is None else (mask == 0).sum(1)
        program.cache.load(self.cache, start, self.columns)
        program.rows.length.copy_(self.columns - start)
        program.rows.position.copy_(positions[:, -1:] + 1)
        program.prepare()
        program.selection.start(self.processors, self.ids)
        self.random.save(0)
        program.accept(logits)
        if self.form not in self.state.checked and self.limit != 1:
            with self.model._optimize_model_for_decode():
                self._check(program, outputs)
        return program

    def _program(self, capacity: int, vocabulary: int, like: Any) -> Program:
        """Return the program of a capacity for this call, with layers like those of a cache."""
        state, key = self.state, (self.batch, capacity, self.key, self.bounded, level(), *self.options.items())
        if key in state.programs:
            state.programs.move_to_end(key)
            return state.programs[key]
        device, programs = self.ids.device, state.programs.items()
        with torch.inference_mode(False):
            rows = next((p.rows for (batch, *_), p in programs if batch == self.batch), None)
            alike = (p.selection for (batch, _, form, *_), p in programs if (batch, form) == (self.batch, self.key))
            selection = next(alike, None) or select.Selection(
                self.processors, bool(self.config.do_sample), self.stop, self.pad, self.batch, vocabulary, device
            )
            cache = state.cache_of(self.batch, capacity)
            if cache is None:
                try:
                    cache = FixedCache(like, capacity)
                except torch.OutOfMemoryError:  # programs of other calls use memory, too
                    state.keep(like)
                    cache = FixedCache(like, capacity)
            tables = decoding.Tables(capacity) if self.bounded else None
            program = Program(rows or Rows(self.batch, device), cache, selection, self.options, state.report, tables)
        state.add(key, program)
        return program

    def _check(self, program: Program, outputs: Any) -> None:
        """Compare a step of ours with one of transformers, once for each form of call.

        The step is repeated afterwards: it writes the same keys to the same place, from the same states.

        Raises:
            Refused: The logits differ, or the model cannot run a step over our cache.
        """
        model = self.model
        kwargs = model._update_model_kwargs_for_generation(outputs, dict(self.kwargs), is_encoder_decoder=False)
        ids = torch.cat([self.ids, program.rows.token], 1)
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        before = [state.clone() for state in states_of(program.cache)]
        wanted = model(**inputs, return_dict=True).logits[:, -1].double()
        reason = None
        try:
            error = _difference(program.logits(model).double(), wanted)
            program.cache.set_states(before)
            has_codes = any(isinstance(module, (ServedLinear, KeepsCodes)) for module in model.modules())
            if not error <= (_OF_CODES if has_codes else _TOLERANCE.get(model.dtype, 0.1)):
                reason = f"a step over our cache gives other logits (relative error {error:.2g})"
        except Exception as raised:  # a model that reads the cache in its own way
            reason = f"a step over our cache failed: {type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
        if reason is not None:
            self.state.refused[self.form] = reason
            self.random.restore(0)
            raise Refused(reason)
        self.state.checked.add(self.form)

    # ---- the other steps --------------------------------------------------------------------------------------------

    def _follow(self, program: Program, streamer: Any) -> Tensor:
        """Issue steps and read their results until all rows have ended."""
        ring, device = self._ring(), self.ids.device
        tokens: list[Tensor] = []
        issued, ended = 1, False
        ring.put(0, program.selection.result)
        while True:
            while len(tokens) < issued and not ended:
                wait = bool(self.others) or issued == self.limit or issued - len(tokens) == DEPTH
                result = ring.get(len(tokens), wait)
                if result is None:
                    break
                if result[-1]:
                    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
                tokens.append(result[: self.batch])
                if self.others:
                    ids = torch.cat([self.ids, torch.stack(tokens, 1).to(device)], 1)
                    program.selection.active.logical_and_(~self.criteria(ids, None))
                    ended = not bool(program.selection.active.any())
                else:
                    ended = len(tokens) == self.limit or not bool(result[self.batch : -1].any())
                if streamer is not None:
                    streamer.put(tokens[-1])
            if ended:
                break
            program = self._with_room(program, self.columns + issued)
            self.random.save(issued)
            worth = device.type == "cuda" and (self.limit is None or self.limit - issued >= WORTH)
            captured = program.run(self.model, self.state.graph_pool() if worth else None)
            self._record(program, captured)
            ring.put(issued, program.selection.result)
            issued += 1
        self.random.restore(len(tokens))
        if streamer is not None:
            streamer.end()
        return torch.cat([self.ids, torch.stack(tokens, 1).to(device)], 1)

    def _ring(self) -> Ring:
        ring, width = self.state.ring, 2 * self.batch + 1
        if ring is None or ring.width != width or ring.device != self.ids.device:
            with torch.inference_mode(False):
                ring = self.state.ring = Ring(width, self.ids.device)
        return ring

    def _with_room(self, program: Program, keys: int) -> Program:
        """Return a program with room for so many keys, with the contents of this one."""
        if program.cache.capacity >= keys:
            return program
        larger = self._program(2 * program.cache.capacity, program.selection.vocabulary, program.cache)
        larger.cache.take(program.cache)
        larger.prepare()
        return larger

    def _record(self, program: Program, captured: bool) -> None:
        if captured and self.state.report is not None:
            self.state.report.captures += 1
        if program.failure:
            self.state.refuse(program.failure)
            program.failure = ""


def _difference(got: Tensor, wanted: Tensor) -> float:
    """Return the largest relative error of a row of logits without its mean; infinity if NaN are elsewhere."""
    if not bool((got.isnan() == wanted.isnan()).all()):
        return float("inf")
    got, wanted = (torch.nan_to_num(t, posinf=0.0, neginf=0.0) for t in (got, wanted))
    got, wanted = got - got.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True)
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max())


def steps_of(model: nn.Module) -> list[Program]:
    """Return the programs that a model keeps, for tests and tools."""
    state = model.__dict__.get(STATE)
    return [] if state is None else list(state.programs.values())
