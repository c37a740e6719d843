"""Check a wheel and an sdist before they are uploaded: ``python .ci/check_release.py dist [--tag v1.2.3]``.

Reads files only; nothing is installed. With a tag, the changelog must have a dated heading for it.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import re
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
EXTRAS = {"cuda12", "cuda13", "test", "models", "bench", "docs", "dev"}


def declared_version(root: Path) -> str:
    """Return ``__version__`` of a source tree."""
    text = (root / "rtkernels" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)[1]


def check_versions(root: Path, tag: str | None) -> list[str]:
    """Return what is wrong with the version, the newest heading of the changelog, and the tag."""
    version, wrong = declared_version(root), []
    if not VERSION.fullmatch(version):
        wrong.append(f"__version__ is {version!r}; expected X.Y.Z, or X.Y.Z with aN, bN or rcN")
    heading = re.search(r"^## (\S+)(?: \((.*)\))?$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    newest, date = heading.groups() if heading else (None, None)
    if newest != version:
        wrong.append(f"the newest heading of CHANGELOG.md is {newest}; expected {version}, which is __version__")
    if tag is not None and tag != f"v{version}":
        wrong.append(f"the tag is {tag}; expected v{version}")
    if tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", date or ""):
        wrong.append(f"the heading of CHANGELOG.md says ({date}); expected the date of the release, (YYYY-MM-DD)")
    return wrong


def packaged(root: Path) -> dict[str, Path]:
    """Return the files that a wheel carries besides its metadata, by their names there."""
    found = {f"rtkernels/cuda_src/{p.relative_to(root / 'cuda_src').as_posix()}": p for p in _files(root / "cuda_src")}
    return found | {p.relative_to(root).as_posix(): p for p in _files(root / "rtkernels")}


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"]


def check_wheel(file: Path, root: Path) -> list[str]:
    """Return what is wrong with a wheel: its name, files, checksums and metadata."""
    version = declared_version(root)
    if file.name != f"rtkernels-{version}-py3-none-any.whl":
        return [f"the wheel is {file.name}; expected rtkernels-{version}-py3-none-any.whl"]
    info, wrong = f"rtkernels-{version}.dist-info", []
    with zipfile.ZipFile(file) as archive:
        given = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    expected = packaged(root)
    ours = {name for name in given if not name.startswith(f"{info}/")}
    wrong += [f"the wheel lacks {name}" for name in sorted(expected.keys() - ours)]
    wrong += [f"the wheel has {name}, which is not of the package" for name in sorted(ours - expected.keys())]
    wrong += [
        f"{name} differs from the source tree"
        for name in ours & expected.keys()
        if given[name] != _read(expected[name])
    ]
    for needed in ("rtkernels/py.typed", "rtkernels/__init__.pyi", f"{info}/licenses/LICENSE", f"{info}/RECORD"):
        wrong += [] if needed in given else [f"the wheel lacks {needed}"]
    wrong += _check_record(given, info)
    metadata = HeaderParser().parsestr(given.get(f"{info}/METADATA", b"").decode())
    if metadata["Version"] != version:
        wrong.append(f"METADATA has version {metadata['Version']}; expected {version}")
    if set(metadata.get_all("Provides-Extra") or ()) != EXTRAS:
        wrong.append(f"METADATA has extras {metadata.get_all('Provides-Extra')}; expected {sorted(EXTRAS)}")
    wrong += [
        f"{line} is a direct reference, which PyPI refuses"
        for line in metadata.get_all("Requires-Dist") or ()
        if " @ " in line
    ]
    if metadata["Description-Content-Type"] != "text/markdown" or "# rtkernels" not in str(metadata.get_payload()):
        wrong.append("METADATA has no description in Markdown, which is README.md")
    return wrong


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _check_record(given: dict[str, bytes], info: str) -> list[str]:
    rows = {row[0]: row[1] for row in csv.reader(given.get(f"{info}/RECORD", b"").decode().splitlines()) if row}
    wrong = []
    for name, data in given.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if name != f"{info}/RECORD" and rows.get(name) != f"sha256={digest}":
            wrong.append(f"RECORD has no matching checksum of {name}")
    return wrong


def check_sdist(file: Path, root: Path) -> list[str]:
    """Return what is wrong with an sdist: its name, or files that a build or the tests need."""
    version = declared_version(root)
    if file.name != f"rtkernels-{version}.tar.gz":
        return [f"the sdist is {file.name}; expected rtkernels-{version}.tar.gz"]
    with tarfile.open(file) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    folders = ("rtkernels", "cuda_src", "tests", "docs", "examples", ".ci")
    expected = {p.relative_to(root).as_posix() for folder in folders for p in _files(root / folder)}
    expected |= {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    wrong = [f"the sdist lacks {name}" for name in sorted(expected - names)]
    return wrong + [f"the sdist has {name}" for name in sorted(names) if "__pycache__" in name or name.endswith(".pyc")]


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--tag", help="the git tag of the release, vX.Y.Z")
    given = parser.parse_args(arguments)
    wheels, sdists = list(given.folder.glob("*.whl")), list(given.folder.glob("*.tar.gz"))
    wrong = check_versions(ROOT, given.tag)
    if len(wheels) != 1 or len(sdists) != 1:
        wrong.append(f"{given.folder} has {len(wheels)} wheels and {len(sdists)} sdists; expected one of each")
    wrong += [line for file in wheels for line in check_wheel(file, ROOT)]
    wrong += [line for file in sdists for line in check_sdist(file, ROOT)]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(wrong)} errors" if wrong else f"rtkernels {declared_version(ROOT)}: wheel and sdist are complete")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
