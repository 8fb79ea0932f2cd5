"""Before a command begins, checks the file that it will write at its end."""

from __future__ import annotations

import os
from pathlib import Path

from pycoll.errors import InvalidArgumentError


def check_output(path: Path, option: str) -> None:
    """Raise InvalidArgumentError that names ``option`` if no file can be written at ``path``.

    An existing file keeps its content; a file that the check had to create is removed again.
    """
    existed = os.path.lexists(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o666))
    except OSError as error:
        raise InvalidArgumentError(
            f"{option}: {str(path)!r} is no file that can be written ({error.strerror}): name one "
            "in a folder that exists and may be written to"
        ) from None
    if not existed:
        path.unlink(missing_ok=True)
