"""One decoding step as a function without arguments, and its CUDA graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.models import decoding
from rtkernels.models.generation.cache import FixedCache
from rtkernels.models.generation.select import Selection
from rtkernels.ops.reduce import step_token
from rtkernels.runtime.layout import FLOAT_DTYPES


class Rows:
    """The last token of each row of the batch, its position, and the number of tokens before it that are cached."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.token, self.position = (torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2))
        self.length = torch.zeros(batch, dtype=torch.int32, device=device)


class Program:
    """A step for one batch size, capacity and way of selecting tokens.

    The first run is a plain call, which compiles kernels. On CUDA the second run captures a graph, and every run from
    then on replays it. If capturing fails, all runs are plain calls.
    """

    def __init__(
        self, rows: Rows, cache: FixedCache, selection: Selection, options: dict[str, Any], report: Any = None,
        tables: decoding.Tables | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.cache, self.selection, self.options, self.report = rows, cache, selection, options, report
        self.tables = tables
        self.graph: Any = None
        self.count = 0
        self.failure: str | None = None

    def prepare(self) -> None:
        """Compute where the next keys go; needed after other code than a step has written ``rows.length``."""
        self.cache.begin(self.rows.length)

    def logits(self, model: nn.Module) -> Tensor:
        """Run the model on the last tokens and return the logits ``[batch, vocabulary]``.

        Lengths change behind the last layer only: kernels of layers read them before the previous kernel has ended.
        """
        rows = self.rows
        with decoding.steps(self.report, self.tables):
            out = model(
                input_ids=rows.token, position_ids=rows.position, attention_mask=self.cache.masks,
                past_key_values=self.cache, use_cache=True, return_dict=True, **self.options,
            )  # fmt: skip
        return out.logits[:, -1]

    def accept(self, logits: Tensor) -> None:
        """Select the next tokens."""
        self.rows.token.copy_(self.selection(logits)[:, None])

    def step(self, model: nn.Module) -> None:
        """Run the model, select the next tokens, and advance to them."""
        logits, rows, selection = self.logits(model), self.rows, self.selection
        if selection.is_plain and logits.dtype in FLOAT_DTYPES:
            step_token.FORWARD.call(
                logits, selection.stop, self.cache.rings, rows.token.view(-1), rows.position.view(-1), rows.length,
                selection.active, selection.columns, selection.result, self.cache.places, selection.pad_token,
            )  # fmt: skip
            return
        rows.length.add_(1)
        rows.position.add_(1)
        self.prepare()
        self.accept(logits)

    def run(self, model: nn.Module, pool: Any = None) -> bool:
        """Run a step; return True if a graph was captured for it. Without a memory pool, none is captured."""
        self.count += 1
        captured = pool is not None and self.graph is None and self.count > 1 and self._capture(model, pool)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step(model)
        return captured

    def _capture(self, model: nn.Module, pool: Any) -> bool:
        if self.failure is not None:
            return False
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.step(model)
        except Exception as error:  # whatever the reason: the plain call computes the same
            self.failure = f"a step could not be captured: {str(error).splitlines()[0] if str(error) else error!r}"
            if isinstance(error, torch.OutOfMemoryError):
                warnings.warn(f"generate(): {self.failure}; it goes on without a graph, slower", stacklevel=2)
            return False
        self.graph = graph
        return True
