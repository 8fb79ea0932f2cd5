"""One rank of harness.ProcessWorld: python -m worker TASK RESULT."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import pycoll


def main() -> None:
    module, name, args = pickle.loads(bytes.fromhex(sys.argv[1]))
    function = getattr(importlib.import_module(module), name)
    comm = pycoll.init()
    try:
        result = function(comm, *args)
    except Exception as error:
        result = error
    path = Path(sys.argv[2])
    path.with_suffix(".part").write_bytes(pickle.dumps(result))
    path.with_suffix(".part").rename(path)
    pycoll.finalize()


if __name__ == "__main__":
    main()
