"""Static scales from sample data: record the largest magnitudes of tensors by name, compute scales, save and load them.

    calibration = rtkernels.Calibration()
    for batch in batches:                    # a model whose quantisers call `calibration.observe(name, x)`
        model(batch)
        calibration.next_sample()
    calibration.freeze()
    calibration.save("scales.json", key=rtkernels.calibration.checkpoint_key("model.safetensors"))

Recording takes one reduction and one maximum per tensor and never waits for the device; ``freeze`` does. Each scale is
a float32 tensor that keeps its memory: a captured graph that uses it sees values that are loaded later.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.row_quant import CODE_MAX, Quant

VERSION = 1
MIN_SCALE = 1e-12
_MODES = ("max", "percentile", "ema")
_OUTLIER = 20.0  # times the median: warn about scales above this


class Calibration:
    """Largest magnitudes of tensors by name, and the scales computed from them.

    Args:
        mode: How samples are combined: ``"max"``, ``"percentile"`` of the samples' maxima (linear interpolation), or
            ``"ema"``, an exponential moving average of them.
        percentile: For "percentile": 0 to 100.
        momentum: For "ema": the weight of the previous average, at least 0 and below 1.
        dtype: Dtype of the codes: float8_e4m3fn, float8_e5m2 or int8.
        headroom: Factor of the scales, above 0; more than 1 leaves room for values larger than those recorded.

    Raises:
        ArgumentError: An argument is out of range.
    """

    def __init__(
        self, mode: str = "max", *, percentile: float = 99.9, momentum: float = 0.9,
        dtype: torch.dtype = torch.float8_e4m3fn, headroom: float = 1.0,
    ) -> None:  # fmt: skip
        if mode not in _MODES:
            raise ArgumentError(f"mode is {mode!r}; expected one of {', '.join(map(repr, _MODES))}")
        if not 0 <= percentile <= 100 or not 0 <= momentum < 1 or not headroom > 0:
            raise ArgumentError(
                f"percentile, momentum and headroom are {percentile}, {momentum} and {headroom}; expected 0 to 100, "
                f"0 to less than 1, and more than 0"
            )
        if dtype not in CODE_MAX:
            raise ArgumentError(f"dtype is {dtype}; expected one of {', '.join(map(str, CODE_MAX))}")
        self.mode, self.percentile, self.momentum, self.dtype, self.headroom = (
            mode,
            percentile,
            momentum,
            dtype,
            headroom,
        )
        self.recording = True
        self._scales: dict[str, Tensor] = {}
        self._sample: dict[str, Tensor] = {}  # maxima of the current sample
        self._samples: list[dict[str, Tensor]] = []

    def observe(self, name: str, x: Tensor) -> None:
        """Record the largest magnitude of x for `name`, unless frozen. NaN and infinity are recorded, too."""
        if not self.recording or x.numel() == 0:
            return
        amax = x.detach().abs().amax().float()
        before = self._sample.get(name)
        self._sample[name] = amax if before is None else torch.maximum(before, amax)

    def next_sample(self) -> None:
        """End a sample. Several calls of one model, such as denoising steps, may form one sample."""
        if self._sample:
            self._samples.append(self._sample)
            self._sample = {}

    def scale(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Return the scale of `name`, one float32 element with a fixed address; NaN until it is known."""
        if name not in self._scales:
            self._scales[name] = torch.full((), torch.nan, dtype=torch.float32, device=device)
        return self._scales[name]

    def quant(self, name: str, device: torch.device | str | None = None) -> Quant:
        """Return ``Quant(dtype, scale=scale(name))`` for ``quant=`` of norms and glu."""
        return Quant(self.dtype, scale=self.scale(name, device))

    def freeze(self) -> dict[str, float]:
        """Compute the scales, stop recording, and return the scales as numbers by name.

        Raises:
            ArgumentError: Nothing was recorded, or a tensor had NaN or infinity; the message names it.
        """
        self.next_sample()
        if not self._samples:
            raise ArgumentError("nothing was recorded; expected at least one call of observe")
        seen: dict[str, list[float]] = {}
        for sample in self._samples:
            values = torch.stack([amax.cpu() for amax in sample.values()]).tolist()
            for name, value in zip(sample, values, strict=True):
                seen.setdefault(name, []).append(value)
        bad = [name for name, values in seen.items() if not all(map(math.isfinite, values))]
        if bad:
            raise ArgumentError(f"{', '.join(bad)}: recorded NaN or infinity; expected finite tensors")
        limit = CODE_MAX[self.dtype]
        found = {name: max(self._over_samples(v) * self.headroom / limit, MIN_SCALE) for name, v in seen.items()}
        device = next(iter(self._samples[0].values())).device
        self._set(found, device)
        self.recording, self._samples = False, []
        median = statistics.median(found.values())
        outliers = [name for name, value in found.items() if value > _OUTLIER * median]
        if outliers:
            warnings.warn(f"scales above {_OUTLIER:g} times the median: {', '.join(outliers)}", stacklevel=2)
        return found

    def _over_samples(self, values: list[float]) -> float:
        if self.mode == "max":
            return max(values)
        if self.mode == "percentile":
            return torch.tensor(values, dtype=torch.float64, device="cpu").quantile(self.percentile / 100).item()
        average = values[0]
        for value in values[1:]:
            average = self.momentum * average + (1 - self.momentum) * value
        return average

    def _set(self, scales: dict[str, float], device: Any) -> None:
        for name, value in scales.items():
            self.scale(name, device).fill_(value)

    # ---- files ------------------------------------------------------------------------------------------------------

    def scales(self) -> dict[str, float]:
        """Return all scales as numbers by name."""
        return {name: scale.item() for name, scale in self._scales.items()}

    def save(self, path: str | os.PathLike[str], key: str = "") -> None:
        """Write all scales to a file: safetensors if the name ends in ".safetensors", else JSON.

        Args:
            path: The file.
            key: Identifies the checkpoint that the scales belong to (:func:`checkpoint_key`); ``load`` compares it.
        """
        head = {"format": "rtkernels.calibration", "version": str(VERSION), "key": key, "dtype": _spell(self.dtype)}
        path = Path(path)
        if path.suffix == ".safetensors":
            path.write_bytes(_safetensors(self.scales(), head))
        else:
            path.write_text(json.dumps({**head, "scales": self.scales()}, indent=1) + "\n", encoding="utf-8")

    def load(self, path: str | os.PathLike[str], key: str = "", device: torch.device | str | None = None) -> None:
        """Read scales written by ``save``, into the existing tensors where there are any.

        Args:
            path: The file.
            key: As given to ``save``.
            device: Device of scales that do not exist yet.

        Raises:
            ArgumentError: The file has another version, key or dtype, or is not a calibration.
        """
        path = Path(path)
        try:
            if path.suffix == ".safetensors":
                head, scales = _from_safetensors(path.read_bytes())
            else:
                head = json.loads(path.read_text(encoding="utf-8"))
                scales = head.pop("scales")
            wanted = {
                "format": "rtkernels.calibration",
                "version": str(VERSION),
                "key": key,
                "dtype": _spell(self.dtype),
            }
            wrong = [(name, head.get(name), value) for name, value in wanted.items() if head.get(name) != value]
            scales = {str(name): float(value) for name, value in scales.items()}
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ArgumentError(f"{path} cannot be read as a calibration: {error}") from error
        if wrong:
            name, got, value = wrong[0]
            raise ArgumentError(f"{path} has {name} {got!r}; expected {value!r}: calibrate again")
        self._set(scales, device)
        self.recording = False


def checkpoint_key(path: str | os.PathLike[str]) -> str:
    """Return 16 hexadecimal digits that identify a checkpoint file, from its size and its first 64 KiB."""
    path = Path(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 16))
    digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()[:16]


def clipped(calibration: Calibration, tensors: Iterable[tuple[str, Tensor]], excess: float = 0.1) -> dict[str, int]:
    """Return for each name how many elements exceed the largest code by more than the fraction `excess` of it."""
    limit = CODE_MAX[calibration.dtype] * (1 + excess)
    counts: dict[str, int] = {}
    for name, x in tensors:
        beyond = int((x.detach().abs().float() > limit * calibration.scale(name)).sum())
        counts[name] = counts.get(name, 0) + beyond
    return counts


def balance_channels(weight: Tensor, act_amax: Tensor, exponent: float = 0.5) -> tuple[Tensor, Tensor]:
    """Move the range of activations into the weight: columns of both are multiplied by factors that cancel.

    Args:
        weight: ``[n, k]``.
        act_amax: float32 ``[k]``, the largest magnitudes of the input's columns (:func:`rtkernels.column_absmax`).
        exponent: How much of the range is moved: 0 for nothing, 1 for all of it.

    Returns:
        ``(weight * s, 1 / s)`` with ``s = clamp((act_amax / mean) ** exponent, 0.25, 4)``. Pass the second one as
        ``channel_scale=`` to the norm or glu that computes the input.

    Raises:
        ArgumentError: The shapes do not match.
    """
    if weight.dim() != 2 or act_amax.shape != weight.shape[1:]:
        raise ArgumentError(
            f"weight and act_amax have shapes {tuple(weight.shape)} and {tuple(act_amax.shape)}; expected [n, k] and "
            f"[k]"
        )
    amax = act_amax.float()
    s = (amax / amax.mean().clamp(min=MIN_SCALE)).pow(exponent).clamp(0.25, 4.0)
    return (weight.float() * s).to(weight.dtype), s.reciprocal()


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _safetensors(scales: dict[str, float], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    for i, name in enumerate(scales):
        header[name] = {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(scales)}f", *scales.values())


def _from_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, float]]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    body = data[8 + size :]
    return metadata, {name: struct.unpack_from("<f", body, t["data_offsets"][0])[0] for name, t in header.items()}
