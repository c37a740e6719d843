"""The environment variables: defaults, parsing, messages, logging."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rtkernels.errors import ArgumentError
from rtkernels.runtime import env

DOCUMENTED = {
    "CACHE_DIR", "CACHE_EXTRA", "CACHE_OWNERS", "CACHE", "CACHE_MAX_MB", "NO_COMPILE", "ARCH", "CUDA_INCLUDE",
    "FALLBACK", "ENABLE", "LINEINFO", "DEBUG", "LOG", "BATCH_INVARIANT", "EMULATE",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_env_table_is_exactly_the_documented_one():
    assert {variable.name.removeprefix("RTKERNELS_") for variable in env.VARIABLES} == DOCUMENTED
    assert all(variable.help for variable in env.VARIABLES)


def test_env_defaults():
    expected = {
        "CACHE_DIR": None, "CACHE_EXTRA": (), "CACHE_OWNERS": (), "CACHE": "rw", "CACHE_MAX_MB": 512,
        "NO_COMPILE": False, "ARCH": None, "CUDA_INCLUDE": None, "FALLBACK": "off", "ENABLE": (),
        "LINEINFO": False, "DEBUG": False, "LOG": "warning", "EMULATE": False, "BATCH_INVARIANT": 0,
    }  # fmt: skip
    assert {name: env.get(name) for name in DOCUMENTED} == expected


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("CACHE_DIR", "/some/where", Path("/some/where")),
        ("CACHE_EXTRA", "/a::/b", (Path("/a"), Path("/b"))),
        ("CACHE_OWNERS", "root, 1234", (0, 1234)),
        ("CACHE", "RO", "ro"),
        ("CACHE_MAX_MB", "0", 0),
        ("NO_COMPILE", "yes", True),
        ("NO_COMPILE", "0", False),
        ("ARCH", "9.0", "sm_90a"),
        ("FALLBACK", "torch", "torch"),
        ("ENABLE", "row, -sum,,@ops.txt", ("row", "-sum", "@ops.txt")),
        ("LINEINFO", "on", True),
        ("LOG", "debug", "debug"),
        ("EMULATE", "1", True),
        ("EMULATE", "sm_90", "sm_90"),
        ("CACHE", "  ", "rw"),
    ],
)
def test_env_accepts(monkeypatch, name, text, value):
    monkeypatch.setenv(f"RTKERNELS_{name}", text)
    assert env.get(name) == value


def test_env_expands_home_and_makes_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", "~/c")
    assert env.get("CACHE_DIR") == tmp_path / "c"
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", "relative/c")
    assert env.get("CACHE_DIR") == tmp_path / "relative" / "c"


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("CACHE", "maybe", "rw, ro, off"),
        ("CACHE_OWNERS", "no_such_user_here", "names or numbers of users"),
        ("CACHE_MAX_MB", "lots", "a whole number of megabytes"),
        ("CACHE_MAX_MB", "-1", "a whole number of megabytes"),
        ("NO_COMPILE", "2", "1, true, yes, on, 0, false, no, off"),
        ("ARCH", "hopper", "a target such as sm_80"),
        ("FALLBACK", "numpy", "off, torch"),
        ("LOG", "loud", "warning, info, debug"),
        ("EMULATE", "gpu", "0, 1, or a target"),
        ("CACHE_DIR", "~no_such_user_here/x", "a directory that exists"),
    ],
)
def test_env_bad_value_names_variable_and_accepted_values(monkeypatch, name, text, accepted):
    monkeypatch.setenv(f"RTKERNELS_{name}", text)
    with pytest.raises(ArgumentError) as caught:
        env.get(name)
    assert f"RTKERNELS_{name}={text!r}" in str(caught.value)
    assert accepted in str(caught.value)


def test_env_log_level_follows_the_variable(monkeypatch):
    assert env.logger().level == logging.WARNING
    monkeypatch.setenv("RTKERNELS_LOG", "debug")
    assert env.logger().level == logging.DEBUG
    monkeypatch.delenv("RTKERNELS_LOG")
    assert env.logger().level == logging.WARNING
