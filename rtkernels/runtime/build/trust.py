"""Decide whose directories and files may contain code that this process loads.

A cubin is code, so a cache is used only if no other user can have written it. The cache, every directory in it that
leads to an entry, the entry, and every directory above the cache must belong to the caller or to root, and other users
must not be able to write to them. Above the cache, a world-writable directory is accepted if it has the sticky bit,
like ``/tmp``, because other users can neither replace nor rename what we or root own in it.

Paths are resolved and then checked from the top down. Only the caller and root can change a directory that passed, so
the result is cached for the process, and there is no race between checking and using a path.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from pathlib import Path

Owners = frozenset[int]

_good: set[tuple[str, bool, Owners]] = set()  # checked with all parents; whether they are inside a cache


class Untrusted(PermissionError):
    """A directory or file that another user may have written; ``strerror`` names it and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EPERM, f"{path}: {reason}")


def caller() -> Owners:
    """Return the users whose files are always trusted: the user of this process, and root."""
    return frozenset((os.geteuid(), 0))


def forget() -> None:
    """Forget which directories passed."""
    _good.clear()
    _primary_users.cache_clear()


def check(directory: Path, root: Path, owners: Owners) -> None:
    """Check a directory of a cache and all directories above it; missing ones are accepted.

    Args:
        directory: The cache itself or a directory in it; ``root`` is resolved.
        root: The cache. From here down, the sticky bit does not count.
        owners: User ids that are trusted.

    Raises:
        Untrusted: Another user owns one of them or may write to it.
        OSError: One of them cannot be examined.
    """
    if (str(directory), True, owners) in _good:
        return
    for path in (*reversed(directory.parents), directory):
        inside = len(path.parts) >= len(root.parts)
        known = (str(path), inside, owners)
        if known in _good:
            continue
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise Untrusted(path, f"it is {_kind(status)}, not a directory")
        shielded = not inside and bool(status.st_mode & stat.S_ISVTX)
        if reason := _owner_problem(status, owners, above=not inside):
            raise Untrusted(path, reason)
        if not shielded and (reason := _write_problem(path, status)):
            raise Untrusted(path, reason)
        _good.add(known)


def check_file(path: Path, status: os.stat_result, owners: Owners) -> None:
    """Check an open file of an entry, given the result of ``fstat``.

    Raises:
        Untrusted: Another user owns it or may write to it.
    """
    if reason := _owner_problem(status, owners, above=False) or _write_problem(path, status):
        raise Untrusted(path, reason)


def problem(root: Path, directory: Path, owners: Owners) -> str | None:
    """Return why a directory of a cache must not be used, or None; the arguments are those of ``check``."""
    try:
        check(directory, root, owners)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _owner_problem(status: os.stat_result, owners: Owners, *, above: bool) -> str | None:
    if status.st_uid in owners or (above and _is_unmapped(status.st_uid)):
        return None
    me = os.geteuid()
    return f"it belongs to user {_user(status.st_uid)}, not to user {_user(me)}{'' if me == 0 else ' or root'}"


def _write_problem(path: Path, status: os.stat_result) -> str | None:
    bits = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_IWOTH:
        return f"everyone can write to it ({bits})"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(path, status):
        return f"group {_group(status.st_gid)} can write to it ({bits})"
    return None


def _is_private_group(path: Path, status: os.stat_result) -> bool:
    """Return whether only the owner is in the group, as on systems where every user has a group of the same name.

    The member list of a group omits the users whose primary group it is, so these are looked up, too. An access control
    list hides its writers behind the group bits, so a path with one is refused.
    """
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    if owner.pw_gid != group.gr_gid or owner.pw_name != group.gr_name or set(group.gr_mem) - {owner.pw_name}:
        return False
    if _primary_users(group.gr_gid) - {owner.pw_uid}:
        return False
    try:
        return "system.posix_acl_access" not in os.listxattr(path, follow_symlinks=False)
    except OSError:  # a file system without access control lists
        return True


@functools.cache
def _primary_users(group: int) -> frozenset[int]:
    """Return the users that the system enumerates whose primary group this is."""
    return frozenset(user.pw_uid for user in pwd.getpwall() if user.pw_gid == group)


@functools.cache
def _is_unmapped(user: int) -> bool:
    """Return whether this is the placeholder for users unknown in a rootless container, such as the host's root.

    It is accepted above the cache only: the owner of such a directory could only replace directories that we own.
    """
    try:
        if user != int(Path("/proc/sys/kernel/overflowuid").read_text()):
            return False
        ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return not any(first <= user < first + count for first, _, count in ranges)


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return f"{grp.getgrgid(number).gr_name} ({number})"
    except KeyError:
        return str(number)


def _kind(status: os.stat_result) -> str:
    return "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a file"
