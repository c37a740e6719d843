"""The host behind the device: results of steps arrive in a ring of pinned memory, and nothing else is waited for."""

from __future__ import annotations

import torch
from torch import Tensor

DEPTH = 8


class Ring:
    """Results of the last ``DEPTH`` steps."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device, self.on_device = width, device, device.type == "cuda"
        self.values = torch.zeros(DEPTH, width, dtype=torch.int64, device="cpu", pin_memory=self.on_device)
        self.events = [torch.cuda.Event() for _ in range(DEPTH)] if self.on_device else []

    def put(self, number: int, result: Tensor) -> None:
        """Let the device copy the result of a step; that of ``DEPTH`` steps before must have been read."""
        self.values[number % DEPTH].copy_(result, non_blocking=True)
        if self.on_device:
            self.events[number % DEPTH].record()

    def get(self, number: int, wait: bool) -> Tensor | None:
        """Return the result of a step, None if it has not arrived and `wait` is False."""
        if self.on_device:
            event = self.events[number % DEPTH]
            if wait:
                event.synchronize()
            elif not event.query():
                return None
        return self.values[number % DEPTH].clone()


class RandomState:
    """The state of the default generator at the beginning of each of the last steps.

    Steps that were issued behind the end of the text leave no trace in the random numbers of later calls.
    """

    def __init__(self, device: torch.device, sampled: bool) -> None:
        self.device, self.sampled = device, sampled
        self.states: dict[int, Tensor] = {}

    def save(self, number: int) -> None:
        if self.sampled:
            on_device = self.device.type == "cuda"
            self.states[number] = torch.cuda.get_rng_state(self.device) if on_device else torch.get_rng_state()
            self.states.pop(number - DEPTH - 2, None)

    def restore(self, number: int) -> None:
        """Return to the beginning of a step, if it was issued."""
        state = self.states.get(number)
        if state is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        elif state is not None:
            torch.set_rng_state(state)
