"""Folders that users name: paths of mounted file systems, and no addresses."""

import os
import pathlib
import re

from clipgrad._arrays import shown

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one letter is a drive; a Path has one stroke


def mounted_folder(name: str, path: str | os.PathLike) -> pathlib.Path:
    """The path of a folder, which is read and written by `os` and `pathlib`; "~" is the home.

    Raises `TypeError` for what is no path, and `ValueError` for the address of a bucket or another
    store, such as "gs://bucket/run". ``name`` is the argument's.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{name}: got {shown(path)}, expected the path of a folder")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _at_home(name, pathlib.Path(text))
    instead = (
        "give the path at which the bucket is mounted, as by gcsfuse for gs://, or a local folder, "
        "and copy its content to or from the bucket"
    )
    if scheme[1].lower() == "file":
        instead = f"write the path alone, {'/' + text[scheme.end() :].lstrip('/')!r}"
    raise ValueError(
        f"{name}: got {text!r}, an address, expected the path of a folder in a file system of this "
        f"machine; {instead}"
    )


def _at_home(name: str, path: pathlib.Path) -> pathlib.Path:
    """The path with the home of a user instead of "~", as a shell has it."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{name}: got {str(path)!r}, but nothing says where the home is"
        ) from error
