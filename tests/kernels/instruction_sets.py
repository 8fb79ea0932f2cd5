"""A parameter of tests for each instruction set of the kernels; those that lack are skipped."""

from __future__ import annotations

import platform

import pytest

from pycoll import _core

_X86 = ("avx2", "avx512", "avx512_fp16")


def _parameter(name: str) -> object:
    here = name in _core.isas()
    reason = f"needs a processor, a compiler and a build (PYCOLL_VECTORS) with {name}"
    return pytest.param(name, marks=() if here else pytest.mark.skip(reason=reason))


#: Those of other architectures are not named.
_NAMES = ("reference", "portable", *(_X86 if platform.machine() in ("x86_64", "AMD64") else ()))
every_isa = pytest.mark.parametrize("isa", [_parameter(name) for name in _NAMES])
assert set(_core.isas()) <= set(_NAMES), "an instruction set that no test names"
