"""Result files: what they hold, where they were measured, reading and writing them."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.peers import DISTRIBUTIONS

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TOP_KEYS = ("schema", "environment", "copy_peak_gbps", "rows", "host", "complete")
ROW_KEYS = tuple(
    "row shape dtype us p20 p80 bytes copy_us floor_us efficiency".split()
    + "error_ours error_torch peers peer_errors".split()
)


class ResultError(ValueError):
    """A result file that cannot be used; the text says which and why."""


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _nvrtc() -> str | None:
    try:
        from rtkernels.runtime.build import nvrtc

        return ".".join(str(part) for part in nvrtc.version())
    except Exception:
        return None


def source_hash() -> str:
    """Hash of the package and its device code: names the measured state where there is no git."""
    digest = hashlib.sha256()
    for folder, pattern in ((ROOT / "rtkernels", "*.py"), (ROOT / "cuda_src", "*.cu*")):
        for path in sorted(folder.rglob(pattern)):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def environment() -> dict[str, Any]:
    """GPU, driver, versions, commit and date of this run."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    status = _output("git", "status", "--porcelain")
    return {
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": _version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "nvrtc": _nvrtc(),
        "triton": _version("triton"),
        "peers": {peer: _version(dist) for peer, dist in DISTRIBUTIONS.items()},
        "commit": _output("git", "rev-parse", "HEAD") or os.environ.get("BENCH_COMMIT"),
        "dirty": None if status is None else bool(status),
        "source": source_hash(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def check_source(environment: dict[str, Any] | None, path: Path) -> None:
    """Raise a ResultError if the rows of a file that is to be continued were measured of other sources than these.

    A file names one commit for all of its rows.
    """
    was, source = (environment or {}).get("source"), source_hash()
    if was not in (None, source):
        raise ResultError(f"{path}: measured of source {was}; this is {source}. Choose another --out.")


def short_name(gpu: str | None) -> str:
    """Return a GPU's name as files have it, ``h200``."""
    return (gpu or "none").replace("NVIDIA ", "").replace(" ", "_").lower()


def default_path(env: dict[str, Any]) -> Path:
    """``<gpu>-<date>.json`` in the current folder: what a run measured, to be looked at and then recorded."""
    return Path(f"{short_name(env['gpu'])}-{env['date'][:19].replace(':', '')}.json")


def save(result: dict[str, Any], path: Path) -> None:
    """Write ``result`` so that a run killed half way leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def load(path: Path) -> dict[str, Any]:
    """Read and check a result file.

    Raises:
        ResultError: Not readable, not JSON, another schema, or keys missing.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ResultError(f"{path}: not JSON ({error}).") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        found = result.get("schema") if isinstance(result, dict) else None
        raise ResultError(f"{path}: schema {found!r}, this version reads schema {SCHEMA}; measure again.")
    missing = [key for key in TOP_KEYS if key not in result]
    for row in result.get("rows", ()):
        missing += [f"rows[{row.get('row')}].{key}" for key in ROW_KEYS if key not in row and "failed" not in row]
    if missing:
        raise ResultError(f"{path}: lacks {', '.join(missing)}.")
    return result
