"""A directory that is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_folder(path: str | Path) -> Path:
    """An absolute path at which nothing lies that would be lost. Raises FileExistsError where something does."""
    folder = Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "holds something already" if folder.is_dir() else "is a file"
        raise FileExistsError(f"path: {str(folder)!r} {what}; give a directory that does not exist yet, or is empty")
    return folder.absolute()


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `folder` at the end of the block: what is interrupted leaves no folder
    that an engine could take for whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield beside
        for made, mode in ((beside, 0o777), *((file, 0o666) for file in beside.iterdir())):
            made.chmod(mode & ~_umask())  # some writers make what only their user may read
        if folder.is_dir():
            folder.rmdir()
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _umask() -> int:
    """What a new directory's permissions lack; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
