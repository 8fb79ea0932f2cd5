"""Files that commands write at their end, checked before they begin."""

from __future__ import annotations

import os
from pathlib import Path

from pycoll.errors import InvalidArgumentError


def check_output(path: Path, option: str) -> None:
    """InvalidArgumentError that names ``option`` if no file can be written at ``path``.

    Leaves what is there as it is: an existing file keeps its content, a new one is removed again.
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
