"""Opens only files that no other user can have written, and reads without blocking."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RefusedFileError(OSError):
    """A file or folder that others could have written, or a file that is not regular or too large."""


def make_private_folder(folder: Path) -> None:
    """Make a folder, and missing ones above it, accessible only to this user.

    Raises:
        OSError: that is not possible.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def check_private_folder(folder: Path) -> None:
    """Check that only this user and root can put files into a folder, or replace the folder. A missing one is private.

    Raises:
        RefusedFileError: names the folder, who can write to it, and what to do.
    """
    folder = Path(os.path.realpath(folder))
    for each in (folder, *folder.parents):
        try:
            info = each.stat()
        except FileNotFoundError:
            continue
        is_sticky = each != folder and bool(info.st_mode & stat.S_ISVTX)  # others can create files there, but not replace ours
        if info.st_uid not in (os.geteuid(), 0):
            raise RefusedFileError(f"{each} belongs to user {_user(info.st_uid)}; only folders of {_user(os.geteuid())} or root are used")
        if info.st_mode & MAY_WRITE and not is_sticky and not _is_own_group(info):
            mode = stat.S_IMODE(info.st_mode)
            raise RefusedFileError(f"others can write to {each} (mode {mode:o}); run `chmod go-w {each}`, or choose another folder")


def read_file(path: Path, most_bytes: int, *, is_private: bool = False) -> bytes:
    """The content of a file, following links. Never blocks on a pipe or a device.

    Args:
        is_private: refuse links and files that others can write.

    Raises:
        RefusedFileError: it is not a file, it is larger than `most_bytes`, or others can write it.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_private else 0))
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise RefusedFileError(f"{path} is not a file, but a {_kind(info.st_mode)}; remove it")
        if is_private and (info.st_uid not in (os.geteuid(), 0) or (info.st_mode & MAY_WRITE and not _is_own_group(info))):
            raise RefusedFileError(f"{path} may have been written by others (mode {stat.S_IMODE(info.st_mode):o}); remove it")
        if info.st_size > most_bytes:
            raise RefusedFileError(f"{path} has {info.st_size:,} bytes, and {most_bytes:,} are the most; remove it")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes + 1)
    finally:
        os.close(descriptor)  # `open` does not close the descriptor of a folder


def _is_own_group(info: os.stat_result) -> bool:
    """Whether the file's group consists of only this user: it has the user's name and no other members."""
    if info.st_mode & stat.S_IWOTH or info.st_uid != os.geteuid():
        return False
    try:
        group, user = grp.getgrgid(info.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:  # an id without a name
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _kind(mode: int) -> str:
    kinds = {stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket", stat.S_ISDIR: "folder", stat.S_ISCHR: "device", stat.S_ISBLK: "device"}
    return next(name for is_kind, name in kinds.items() if is_kind(mode))
