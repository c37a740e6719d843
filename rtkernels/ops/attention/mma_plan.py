"""Attention by mma.sync, for every target from sm_80 on."""

from __future__ import annotations

KERNELS = ()
