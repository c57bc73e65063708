"""Lengths kept on disk, under a name made from what they were read from.

One npz file an entry: the lengths, and the text whose hash is its name. So a changed dataset, column or function is
simply not found; a file that was copied over or cut off is noticed (the archive has checksums), reported by a warning
and replaced. Writing is atomic: several processes may do it at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpusampler.errors import ParameterError, ParameterTypeError, quote

_Array = np.ndarray[Any, Any]
_Path = str | os.PathLike[str]

_FORMAT = 2


def describe(
    dataset: Any, paths: Sequence[_Path], column: Any, fn: Callable[[Any], Any] | None, fingerprint: str | None
) -> str:
    """Text that is the same only for the same lengths.

    Raises:
        ParameterError: nothing identifies the dataset.
    """
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise ParameterTypeError(f"fingerprint must be a str, got {quote(fingerprint)}")
    is_datasets = type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "_fingerprint")
    source: Any
    if paths:
        source = [_stat(Path(path)) for path in paths]
    elif is_datasets:
        source = [dataset._fingerprint, len(dataset)]
    elif fingerprint is None:
        raise ParameterError(
            f"cache cannot tell one {type(dataset).__name__} from another: give fingerprint, a text that changes "
            "whenever the lengths do"
        )
    else:
        source = [type(dataset).__qualname__, len(dataset)]
    function = None
    if fn is not None and is_datasets and fingerprint is None:
        from datasets.fingerprint import Hasher

        function = Hasher.hash(fn)
    about = {"format": _FORMAT, "source": source, "column": column, "fn": function, "fingerprint": fingerprint}
    return json.dumps(about)


def file_for(folder: Any, about: str) -> Path:
    """The entry's file; makes the folder.

    Raises:
        ParameterError: `folder` cannot be one.
    """
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError) as error:
        raise ParameterError(f"cache must be a folder, got {quote(folder)}: {error}") from error
    return path / f"lengths-{hashlib.sha256(about.encode()).hexdigest()[:32]}.npz"


def load(file: Path, about: str) -> _Array | None:
    """The kept lengths; None if there are none or they cannot be trusted."""
    if not file.exists():
        return None
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as entry:
            lengths: _Array = entry["lengths"]
            found = str(entry["about"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        problem = f"is damaged ({type(error).__name__}: {error})"
    else:
        if found == about:
            return lengths
        problem = f"belongs to another dataset, {quote(found)}"
    warnings.warn(f"the cached lengths in {file} are not used, the file {problem}", UserWarning, stacklevel=3)
    return None


def save(file: Path, about: str, lengths: _Array) -> None:
    """Keep lengths, so that a reader never sees half a file."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            np.savez(stream, lengths=lengths, about=np.array(about))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _stat(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error}") from error
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]
