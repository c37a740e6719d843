"""Prove that a replacement computes the same function as a module: the inputs that both are tested with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rtkernels.models.probe import (
    HALVES,
    NotRecognized,
    Raised,
    Recognized,
    Trial,
    check_pure,
    difference,
    normal,
    rows_of_scales,
)

_SMALL = 40
_OTHERS = (24, 56)


class Setting(NamedTuple):
    """A trial as a function of the width, and the twin it runs on."""

    trial: Callable[[int], Trial]
    widths: tuple[int, ...]  # the first one that the module accepts; its own width must work
    dtype: torch.dtype = torch.float32
    training: bool = True


def settings_for(own: int, high: float, rows: float = 2e2) -> list[Setting]:
    """Return the trials for a function of ``[..., own]``; `high` is the scale of the large inputs, `rows` of others.

    Trials that do not depend on the width use a small one if the module accepts it.
    """
    whole, small = (own,), (min(own, _SMALL), own)

    def of(
        where: str, *shape: int, widths: tuple[int, ...] = small, view: Callable[[Tensor], Tensor] = lambda x: x,
        training: bool = True,
    ) -> Setting:  # fmt: skip
        def trial(width: int) -> Trial:
            sizes = (width * -n if n < 0 else n for n in shape)
            return Trial(where, (rows_of_scales(*sizes, high=rows),), lambda x: (view(x),))

        return Setting(trial, widths, training=training)

    found = [
        of("for inputs of 2 dimensions", 7, -1, widths=whole),
        of("for inputs of 3 dimensions", 2, 3, -1, widths=whole),
        of("for inputs of 2 dimensions", 7, -1),
        of("for inputs of 3 dimensions", 2, 4, -1),
        of("for inputs of 4 dimensions", 2, 2, 3, -1),
        of("for transposed inputs", 4, 2, -1, view=lambda x: x.transpose(0, 1)),
        of("for inputs with gaps", 4, -2, view=lambda x: x[:, ::2]),
        of("for channels that lie last", 2, -1, 2, 3, view=lambda x: x.permute(0, 2, 3, 1)),
        of("in evaluation", 2, 4, -1, training=False),
        Setting(lambda w: Trial("for large numbers", (normal(4, w) * high,)), small),
        *(of(f"for width {width}", 2, 67, -1, widths=(width,)) for width in _OTHERS if width != own),
    ]
    for dtype in HALVES:

        def trial(width: int, dtype: torch.dtype = dtype) -> Trial:
            return Trial(f"in {str(dtype)[6:]}", (normal(2, 3, width, dtype=dtype) * 2,))

        found += [Setting(trial, small, dtype, training) for training in (True, False)]
    return found


def prove(
    module: nn.Module,
    own: int,
    candidates: Sequence[tuple[str, Recognized]],
    twin: Callable[[int, torch.dtype, bool], nn.Module],
    settings: Sequence[Setting],
) -> Recognized:
    """Return the one replacement that computes the same function as a module.

    Args:
        module: The module; its forward is called on twins of it.
        own: The width of the module itself.
        candidates: Replacements with their names for the report.
        twin: Returns a twin for a width, a dtype and a training mode.
        settings: The trials. The first one selects among the candidates.

    Raises:
        NotRecognized: No candidate computes the same function, or more than one does.
    """
    from rtkernels.models.replace import forward_of  # which imports this file

    theirs = type(module).forward
    screen = settings[0].trial(own)._replace(gradients=False)
    for training in (False, True):
        own_twin = twin(own, torch.float32, training)
        check_pure(partial(theirs, own_twin), own_twin, screen)
    alike = []
    for name, kind in candidates:
        ours = forward_of(kind.kind, type(module), **dict(kind.options))
        if not difference(partial(ours, own_twin), partial(theirs, own_twin), screen):
            alike.append((name, kind, ours))
    if not alike:
        raise NotRecognized("it computes none of our ops")
    if len(alike) > 1:
        raise NotRecognized(f"it computes more than one of our ops: {', '.join(name for name, *_ in alike)}")
    name, kind, ours = alike[0]
    for setting in settings:
        for width in dict.fromkeys(setting.widths):
            copied = twin(width, setting.dtype, setting.training)
            functions = partial(ours, copied), partial(theirs, copied)
            try:
                found = difference(*functions, setting.trial(width), list(copied.parameters()))
            except Raised:
                if width == own:
                    raise
                continue
            if found:
                raise NotRecognized(f"it computes none of our ops: like {name}, but with {found}")
            break
    return kind
