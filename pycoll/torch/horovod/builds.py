"""Horovod's questions about the build. pycoll contains none of Horovod's libraries."""

from __future__ import annotations

from pycoll import _core


def mpi_threads_supported() -> bool:
    """Return False: pycoll does not use MPI."""
    return False


def mpi_enabled() -> bool:
    """Return False: pycoll does not use MPI."""
    return False


def mpi_built() -> bool:
    """Return False: pycoll does not use MPI."""
    return False


def gloo_enabled() -> bool:
    """Return False: pycoll moves the data itself."""
    return False


def gloo_built() -> bool:
    """Return False: pycoll moves the data itself."""
    return False


def nccl_built() -> int:
    """Return 0; Horovod returns the version of NCCL here."""
    return 0


def ddl_built() -> bool:
    """Return False: pycoll does not use DDL."""
    return False


def ccl_built() -> bool:
    """Return False: pycoll does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether this build can reduce tensors on CUDA devices."""
    return "not part of this build" not in _core.device_summary()


def rocm_built() -> bool:
    """Return False: pycoll has no support for ROCm devices."""
    return False
