"""``python -m pycoll.ps``: a rank that serves; ``pycoll run --servers`` starts it."""

from __future__ import annotations

import sys

from pycoll.errors import PycollError
from pycoll.ps.serving import serve


def main() -> int:
    """Serve until the workers end; returns the exit status."""
    try:
        serve()
    except PycollError as error:
        print(f"pycoll server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
