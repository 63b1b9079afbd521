"""A directory that is written whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


def free_folder(path: str | Path) -> Path:
    """The absolute path of a folder that does not exist yet, or is empty; of a symbolic link, its destination.

    Raises FileExistsError if something exists there, and another OSError for a folder that cannot be made or written.
    Makes nothing.
    """
    folder = Path(path).expanduser()
    folder = folder.resolve() if folder.is_symlink() else folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise FileExistsError(f"path: {str(folder)!r} {what}; give a directory that does not exist yet, or is empty")
    place = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise type(error)(f"path: {str(folder)!r} cannot be written: {str(place)!r}: {error.strerror}") from error
    return folder


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A directory to write into. At the end of the block its files are moved into `folder`, config.json last, so that
    an interrupt leaves no folder that an engine could take for complete. An existing empty `folder`, perhaps a mount
    point, is kept. Raises OSError if something cannot be written, also for such an error of safetensors."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder if folder.is_dir() else folder.parent))
    try:
        yield beside
        files = sorted(beside.iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for made in (beside, *files):  # some writers make files that only their user may read
            made.chmod((0o777 if made.is_dir() else 0o666) & ~_umask())
        if folder.is_dir():
            for file in files:
                file.rename(folder / file.name)
            beside.rmdir()
        else:
            beside.rename(folder)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, SafetensorError) and (of_system := re.search(r"\(os error (\d+)\)", str(error))):
            number = int(of_system[1])
            raise OSError(number, os.strerror(number)) from error
        raise


def _umask() -> int:
    """The permissions that new directories lack. It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
