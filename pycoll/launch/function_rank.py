"""One rank of ``pycoll.run``: ``python -m pycoll.launch.function_rank FOLDER``.

The folder holds the pickled call, and each rank leaves its result there for its launcher.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

from pycoll.launch.host_agent import CALL, RESULT


def main(folder: str) -> int:
    """Call the function and write what it returns or raises; returns the exit status."""
    try:
        with open(os.path.join(folder, CALL), "rb") as file:
            function, args, kwargs = pickle.load(file)
        outcome = _packed((True, function(*args, **kwargs)))
        status = 0
    except Exception as error:
        outcome, status = _packed_failure(error), 1
    path = os.path.join(folder, RESULT.format(os.environ["PYCOLL_RANK"]))
    with open(path + ".part", "wb") as file:
        file.write(outcome)
    os.replace(path + ".part", path)
    return status


def _packed(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value, protocol=5)
    return bytes(cloudpickle.dumps(value, protocol=5))


def _packed_failure(error: Exception) -> bytes:
    """Pack the traceback and, where it can be pickled, the exception itself."""
    text = "".join(traceback.format_exception(error))
    try:
        return _packed((False, text, error))
    except Exception:
        return _packed((False, text, None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
