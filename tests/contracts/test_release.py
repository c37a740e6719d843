"""What a release checks before it uploads: .ci/check_release.py on distributions that lack or have too much."""

from __future__ import annotations

import importlib.util
import re
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".ci" / "check_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree with a package of three files."""
    root = tmp_path / "tree"
    files = {
        "rtkernels/__init__.py": '__version__ = "1.2.3"\n',
        "rtkernels/__init__.pyi": "",
        "rtkernels/py.typed": "",
        "cuda_src/act/glu.cu": "// kernels\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-11-20)\n\n## 1.2.2 (2026-01-01)\n",
        "LICENSE": "",
        "README.md": "# rtkernels\n",
        "pyproject.toml": "",
        "tests/test_one.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def wheel(tree: Path, change: dict[str, bytes | None] | None = None, name: str = "py3-none-any") -> Path:
    """Write a wheel of a tree; `change` adds files, replaces them, or with None leaves them out."""
    info = "rtkernels-1.2.3.dist-info"
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in sorted(check.EXTRAS))
    metadata = f"Metadata-Version: 2.4\nName: rtkernels\nVersion: 1.2.3\n{extras}Requires-Dist: torch>=2.11\n"
    metadata += "Description-Content-Type: text/markdown\n\n# rtkernels\n"
    files = {name: path.read_bytes() for name, path in check.packaged(tree).items()}
    files |= {f"{info}/METADATA": metadata.encode(), f"{info}/licenses/LICENSE": b""}
    files = {name: data for name, data in (files | (change or {})).items() if data is not None}
    digests = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files.setdefault(f"{info}/RECORD", "\n".join([*digests, f"{info}/RECORD,,"]).encode())
    path = tree.parent / f"rtkernels-1.2.3-{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    return path


def _digest(data: bytes) -> str:
    import base64
    import hashlib

    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_a_complete_wheel(tree: Path) -> None:
    assert check.check_wheel(wheel(tree), tree) == []


INFO = "rtkernels-1.2.3.dist-info"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rtkernels/cuda_src/act/glu.cu": None}, "lacks rtkernels/cuda_src/act/glu.cu"),
        ({"rtkernels/py.typed": None}, "lacks rtkernels/py.typed"),
        ({"tests/test_one.py": b""}, "has tests/test_one.py"),
        ({"rtkernels/__init__.py": b"changed"}, "rtkernels/__init__.py differs"),
        ({f"{INFO}/licenses/LICENSE": None}, "licenses/LICENSE"),
        ({f"{INFO}/RECORD": b"rtkernels/py.typed,sha256=0,0\n"}, "no matching checksum of rtkernels/py.typed"),
        ({f"{INFO}/METADATA": b"Version: 1.2.2\n\n"}, "METADATA has version 1.2.2"),
        ({f"{INFO}/METADATA": b"Version: 1.2.3\nRequires-Dist: torch @ https://x\n\n"}, "direct reference"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_wheel(tree: Path, change: dict[str, bytes | None], message: str) -> None:
    assert any(message in line for line in check.check_wheel(wheel(tree, change), tree))


def test_the_name_of_a_wheel(tree: Path) -> None:
    (line,) = check.check_wheel(wheel(tree, name="cp312-cp312-linux_x86_64"), tree)
    assert "expected rtkernels-1.2.3-py3-none-any.whl" in line


def test_versions(tree: Path) -> None:
    assert check.check_versions(tree, None) == check.check_versions(tree, "v1.2.3") == []
    assert "expected v1.2.3" in check.check_versions(tree, "1.2.3")[0]
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("(2026-11-20)", "(unreleased)"))
    assert check.check_versions(tree, None) == []
    assert "expected the date of the release" in check.check_versions(tree, "v1.2.3")[0]
    (tree / "rtkernels" / "__init__.py").write_text('__version__ = "1.2.4.dev1"\n')
    assert len(check.check_versions(tree, None)) == 2


def test_sdists(tree: Path) -> None:
    path = tree.parent / "rtkernels-1.2.3.tar.gz"
    (tree / "PKG-INFO").write_text("")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, "rtkernels-1.2.3")
    assert check.check_sdist(path, tree) == []
    (tree / "tests" / "test_two.py").write_text("")
    assert check.check_sdist(path, tree) == ["the sdist lacks tests/test_two.py"]
    assert "expected" in check.check_sdist(path.rename(tree.parent / "rtkernels-1.2.3.zip.tar.gz"), tree)[0]


def test_this_tree_and_its_workflow() -> None:
    assert check.check_versions(ROOT, None) == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(re.findall(r"^(\w+) = \[", section, re.MULTILINE)) == check.EXTRAS
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    if not workflow.exists():
        pytest.skip("an sdist has no workflows")
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used), "actions are pinned by hash"
    build, publish = text.partition("\n  testpypi:")[::2]
    assert "check_release.py dist" in build and "id-token" not in build, "the job that runs code has no rights"
    assert publish.count("id-token: write") == 2 and "run:" not in publish
    assert "check_release.py" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
