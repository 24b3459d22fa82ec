"""Checkpoints that survive a kill at any moment: at least one whole file is there once the first was written."""

import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

NAMES = ("checkpoint.pt", "checkpoint.previous.pt")  # newest first


def replace_file(file: Path, write: Any) -> None:
    """Calls ``write`` on a temporary file beside ``file`` and moves that into place once it is on the disk."""
    part = file.with_name(f"{file.name}.part")
    try:
        with open(part, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)  # half of a file would fill a full disk


def save(state: dict[str, Any], directory: Path) -> None:
    """Writes ``checkpoint.pt``; the one before stays as ``checkpoint.previous.pt``, if it is whole."""
    newest, previous = (directory / name for name in NAMES)
    if _is_whole(newest):
        os.replace(newest, previous)

    def write(stream: Any) -> None:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # PyTorch's archive cannot be closed where the disk is full
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    replace_file(newest, write)


def _is_whole(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """Reads a checkpoint: a file, or the newest whole one of a run directory (``None`` if it has none).

    Raises:
        ValueError: nothing that is there can be read.
    """
    candidates = [file for file in ([path / name for name in NAMES] if path.is_dir() else [path]) if file.exists()]
    errors = []
    for file in candidates:
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # whatever a broken archive makes of it
            errors.append(f"{file}: {type(error).__name__}: {str(error).split('. ')[0][:200]}")
            logger.warning("cannot be read and is passed over: %s", errors[-1])
    if errors or not path.is_dir():
        raise ValueError(f"no checkpoint can be read ({'; '.join(errors) or f'{path} does not exist'})")
    return None
