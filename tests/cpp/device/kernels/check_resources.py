"""Reads what ptxas reported on the kernels: no spills, no stack, registers for a full block.

python tests/cpp/device/kernels/check_resources.py build/python/csrc/cuda/sm_90.txt...
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: kThreadsMax of csrc/device/kernels/program.h, and the registers of a multiprocessor since sm_30.
THREADS, REGISTERS = 512, 65536
KERNELS = {
    f"pycoll_{protocol}_{kind}"
    for protocol in ("ll", "ll128", "simple", "pattern")
    for kind in ("any", "sum_float32", "sum_bfloat16", "sum_float16", "list")
} | {"pycoll_copy", "pycoll_code", "pycoll_sparse"}
PROPERTIES = re.compile(
    r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads"
)
USED = re.compile(r"Compiling entry function '(\w+)' for '\w+'(?:.*\n)*?.*Used (\d+) registers")


def findings(report: str) -> list[str]:
    """What is wrong with one module."""
    found = []
    for name, *sizes in PROPERTIES.findall(report):
        if any(map(int, sizes)):
            found.append(f"{name}: {', '.join(sizes)} bytes of stack, spill stores, spill loads")
    registers = {name: int(used) for name, used in USED.findall(report)}
    found += [f"{name} is missing" for name in sorted(KERNELS - set(registers))]
    for name, used in registers.items():
        if used * THREADS > REGISTERS:
            found.append(f"{name}: {used} registers are too many for {THREADS} threads")
    return found


SAMPLE = """\
ptxas info    : Compiling entry function 'pycoll_ll_any' for 'sm_90'
ptxas info    : Function properties for pycoll_ll_any
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 384 bytes smem
"""


def main(reports: list[str]) -> int:
    missing = len(KERNELS) - 1
    assert len(findings(SAMPLE)) == missing
    assert len(findings(SAMPLE.replace("0 bytes spill loads", "8 bytes spill loads"))) > missing
    assert len(findings(SAMPLE.replace("128", "129"))) > missing
    assert reports, "no reports were given"
    failed = False
    for report in reports:
        text = Path(report).read_text()
        used = [int(one[1]) for one in USED.findall(text)]
        print(f"{report}: {len(used)} kernels, at most {max(used, default=0)} registers")
        for one in findings(text):
            failed = True
            print(f"  {one}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
