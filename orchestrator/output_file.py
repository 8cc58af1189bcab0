"""Files that a command writes for its user: found out before the work, told without a traceback."""

import os
from pathlib import Path

from overstory.orchestrator.errors import UserFault


def check_writable(option: str, path: Path | None) -> None:
    """Refuses at once where `path` could not be written; None asks for no file.

    Raises:
        UserFault: it is a folder, its folder is not there, or either may not be written.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "permission denied"
    else:
        return
    raise UserFault(f"{option}: {path} cannot be written ({why}); name a file in a folder of yours")


def write_output(option: str, path: Path, text: str) -> None:
    """Writes the file.

    Raises:
        UserFault: the system refuses, for one because the disk is full.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise UserFault(f"{option}: {path} cannot be written ({error.strerror})") from error
