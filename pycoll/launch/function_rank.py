"""One rank of ``pycoll.run``: ``python -m pycoll.launch.function_rank FOLDER``.

The folder holds the pickled call, and each rank leaves its outcome there for its launcher: the
pickled pair of a text, empty if all is well, and bytes. The bytes are the pickled result, or else
the pickled exception; None where that cannot be pickled. The pair itself can always be unpickled.
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
    rank = os.environ["PYCOLL_RANK"]
    failure, packed = _outcome_of(folder, rank)
    path = os.path.join(folder, RESULT.format(rank))
    with open(path + ".part", "wb") as file:
        pickle.dump((failure, packed), file, protocol=5)
    os.replace(path + ".part", path)
    return 1 if failure else 0


def _outcome_of(folder: str, rank: str) -> tuple[str, bytes | None]:
    """Call the function; returns why it failed, or an empty text, and the bytes of the outcome."""
    try:
        with open(os.path.join(folder, CALL), "rb") as file:
            function, args, kwargs = pickle.load(file)
        result = function(*args, **kwargs)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return f"the function failed on rank {rank}:\n{text}", _packed_or_none(error)
    try:
        return "", _pack(result)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return f"the result of rank {rank} cannot be pickled:\n{text}", _packed_or_none(error)


def _pack(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value, protocol=5)
    return bytes(cloudpickle.dumps(value, protocol=5))


def _packed_or_none(error: Exception) -> bytes | None:
    try:
        return _pack(error)
    except Exception:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
