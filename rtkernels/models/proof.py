"""The proof that a replacement computes what a module computes: with what both are tried."""

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
    """A trial for a width, and the twin it is made with."""

    trial: Callable[[int], Trial]
    widths: tuple[int, ...]  # the first that the module does not refuse, which it may for all but its own
    dtype: torch.dtype = torch.float32
    training: bool = True


def settings_for(own: int, high: float) -> list[Setting]:
    """Return what a function of ``[..., own]`` is tried with; `high` is the scale of far numbers.

    What does not depend on the width is tried with a small one, if the module takes it.
    """
    whole, small = (own,), (min(own, _SMALL), own)

    def of(
        where: str, *shape: int, widths: tuple[int, ...] = small, view: Callable[[Tensor], Tensor] = lambda x: x,
        training: bool = True,
    ) -> Setting:  # fmt: skip
        def trial(width: int) -> Trial:
            return Trial(where, (rows_of_scales(*(width * -n if n < 0 else n for n in shape)),), lambda x: (view(x),))

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
    """Return the one replacement that computes what a module computes.

    Args:
        module: The module; its forward is called with twins of it.
        own: The width that the module itself has.
        candidates: Replacements with the names that the report gives them.
        twin: Returns a twin for a width, a dtype and a mode.
        settings: What the forwards are tried with; the first one chooses among the candidates.

    Raises:
        NotRecognized: None of them does, or more than one.
    """
    from rtkernels.models.replace import forward_of  # which imports this file

    theirs = type(module).forward
    screen = settings[0].trial(own)._replace(gradients=False)
    for training in (False, True):
        made = twin(own, torch.float32, training)
        check_pure(partial(theirs, made), made, screen)
    alike = []
    for name, kind in candidates:
        ours = forward_of(kind.kind, type(module), **dict(kind.options))
        if not difference(partial(ours, made), partial(theirs, made), screen):
            alike.append((name, kind, ours))
    if not alike:
        raise NotRecognized("it computes none of our ops")
    if len(alike) > 1:
        raise NotRecognized(f"it computes more than one of our ops: {', '.join(name for name, *_ in alike)}")
    name, kind, ours = alike[0]
    for setting in settings:
        for width in dict.fromkeys(setting.widths):
            made = twin(width, setting.dtype, setting.training)
            functions = partial(ours, made), partial(theirs, made)
            try:
                found = difference(*functions, setting.trial(width), list(made.parameters()))
            except Raised:
                if width == own:
                    raise
                continue
            if found:
                raise NotRecognized(f"it computes none of our ops: like {name}, but with {found}")
            break
    return kind
