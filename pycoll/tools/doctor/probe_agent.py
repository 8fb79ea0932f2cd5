"""The doctor of one host: ``python -m pycoll.tools.doctor.probe_agent``, started over ssh.

Its stdin and stdout belong to the command that was typed, as those of a job's agent do
(``pycoll/launch/host_notes.py``). After the first order it sends a note in each round of the
survey, and the next order has the notes of all hosts. It ends when its stdin ends.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence

from pycoll.errors import TransportError
from pycoll.launch.host_notes import read_order, write_note
from pycoll.tools.doctor.survey import take_part


def main() -> int:
    """Take part in a survey; returns the exit status."""
    try:
        order = read_order(0)
    except (EOFError, ValueError) as error:
        print(f"pycoll.tools.doctor.probe_agent: {error}", file=sys.stderr)
        return 2
    os.environ.update(order["environment"])

    def gather(blob: bytes) -> Sequence[bytes]:
        write_note(order["mark"], {"blob": base64.b64encode(blob).decode()})
        try:
            return [base64.b64decode(one) for one in read_order(0)["blobs"]]
        except (EOFError, ValueError) as error:
            raise TransportError(f"the doctor's command is gone: {error}") from None

    try:
        take_part(gather, order["host"], order["slots"])
    except TransportError as error:
        print(f"pycoll.tools.doctor.probe_agent: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
