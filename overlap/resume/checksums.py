"""Digests of the files in a folder, in the form that the program ``sha256sum`` writes and checks."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from overlap.errors import CheckpointError

__all__ = ["SUMS", "check_file", "check_files", "digest_of", "files_in", "read_sums", "sync", "write_sums"]

SUMS = "SHA256SUMS"
"""The file with the digests of all others in its folder."""
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> list[str]:
    """The names of all files below ``folder``, sorted, without the one that has the digests."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != SUMS)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, and its name, too; of a folder, until the names in it are."""
    for one in [path] if path.is_dir() else [path, path.parent]:
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_sums(path: Path, sums: Mapping[str, str]) -> None:
    """Write digests by name. ``path`` then has these, or what it had before, also if the machine fails meanwhile."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def read_sums(path: Path) -> dict[str, str]:
    """What :func:`write_sums` wrote.

    Raises:
        CheckpointError: it is not there, or not in this form.
    """
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, which has the digests of a checkpoint's files") from error
    sums = {name: digest for digest, name in _LINE.findall(text)}
    if not sums or text != "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)):
        raise CheckpointError(f"{path} is damaged: it is not a list of digests and names as it was written")
    return sums


def check_files(folder: Path, sums: Mapping[str, str]) -> None:
    """Raises: CheckpointError: ``folder`` does not have just the files that ``sums`` names."""
    found = files_in(folder)
    if missing := sorted(set(sums) - set(found)):
        raise CheckpointError(f"{folder / missing[0]} is missing, which {folder / SUMS} names")
    if added := sorted(set(found) - set(sums)):
        raise CheckpointError(f"{folder / added[0]} does not belong to this checkpoint: {SUMS} does not name it")


def check_file(path: Path, digest: str, *, by: str = SUMS) -> None:
    """Raises: CheckpointError: the file is not the one whose ``digest`` is in the file ``by``."""
    if digest_of(path) != digest:
        raise CheckpointError(
            f"{path} is not what was saved: its SHA-256 is not the one in {by}, so it is damaged, cut short, or of "
            "another checkpoint"
        )
