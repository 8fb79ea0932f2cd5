"""Arrays and streams of the frameworks at hand on a real GPU; run by test_gpu.py.

Ranks are threads on device 0. Each first does all that the framework itself will do, and then waits
for the others: kernels that are compiled or loaded while another rank's kernel waits may wait for
that one. Has never run: no GPU was there when it was written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import ThreadWorld, fresh_world

import pycoll

SIZE = 2


@pytest.fixture
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


def once_alone(comm: pycoll.Communicator, warm_up: Callable[[], Any]) -> None:
    """One rank after the other, and nobody goes on before the last."""
    for rank in range(comm.size):
        if comm.rank == rank:
            warm_up()
        comm.barrier()


def test_cupy(world: ThreadWorld) -> None:
    cupy = pytest.importorskip("cupy", reason="no cupy: pip install cupy-cuda13x")

    def run(comm: pycoll.Communicator) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = None

            def make() -> None:
                nonlocal x
                x = cupy.arange(1000, dtype=cupy.float32).reshape(20, 50) + comm.rank
                x[:, ::2].get()
                stream.synchronize()

            once_alone(comm, make)
            made = comm.all_reduce(x)
            stream.synchronize()  # a copy to pageable memory holds the driver's lock while it waits
            assert isinstance(made, cupy.ndarray)
            expected = 2 * np.arange(1000).reshape(20, 50) + 1
            np.testing.assert_array_equal(made.get(), expected)
            columns = comm.all_reduce(x[:, ::2])  # packed
            stream.synchronize()
            np.testing.assert_array_equal(columns.get(), expected[:, ::2])
            work = comm.all_reduce(x, out=x, async_op=True)
            made = work.wait()
            stream.synchronize()
            np.testing.assert_array_equal(made.get(), expected)

    world.run(run)


def need_torch() -> Any:
    torch: Any = pytest.importorskip(
        "torch", reason="no torch: pip install -r tests/requirements.txt"
    )
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: it needs one, and a build of torch for CUDA")
    torch.cuda.init()
    return torch


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "complex64"])
def test_torch(world: ThreadWorld, dtype: str) -> None:
    torch = need_torch()

    def run(comm: pycoll.Communicator) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x, twice = None, None

            def make() -> None:
                nonlocal x, twice
                x = torch.arange(64, device="cuda").to(getattr(torch, dtype)).reshape(8, 8)
                twice = x + x
                stream.synchronize()

            once_alone(comm, make)
            assert x is not None
            assert twice is not None
            made = comm.all_reduce(x)
            assert made.is_cuda
            assert made.dtype == x.dtype
            turned = comm.all_reduce(x.t())
            gathered = comm.all_gather(x[: comm.rank + 1])
            # Compared on the host, which needs no kernel of torch's.
            stream.synchronize()
            assert torch.equal(made.cpu(), twice.cpu())
            assert torch.equal(turned.cpu(), twice.cpu().t())
            assert torch.equal(gathered.cpu(), torch.cat([x.cpu()[:1], x.cpu()[:2]]))

    world.run(run)


def test_torch_messages(world: ThreadWorld) -> None:
    """Before and behind the first collective."""
    torch = need_torch()

    def run(comm: pycoll.Communicator) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensors = []
            once_alone(comm, lambda: tensors.append(torch.full((1000,), 1.0, device="cuda")))
            (x,) = tensors
            for _ in range(2):
                if comm.rank == 0:
                    comm.send(x, 1)
                else:
                    out = torch.empty_like(x)
                    assert comm.recv(out, 0) is out
                    stream.synchronize()
                    assert torch.equal(out.cpu(), torch.ones(1000))
                comm.all_reduce(x)

    world.run(run)


def test_torch_graphs(world: ThreadWorld) -> None:
    torch = need_torch()
    capturing = threading.Lock()  # torch's generator of random numbers takes part in captures

    def run(comm: pycoll.Communicator) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensors = []
            once_alone(comm, lambda: tensors.append(torch.ones(100, device="cuda")))
            (x,) = tensors
            comm.all_reduce(x)
            stream.synchronize()
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with capturing:
                graph.capture_begin(capture_error_mode="thread_local")
                comm.all_reduce(x, out=x)
                graph.capture_end()
            comm.barrier()
            for _ in range(3):
                graph.replay()
            stream.synchronize()
            assert torch.equal(x.cpu(), torch.full((100,), 8.0))

    world.run(run)


def test_numba(world: ThreadWorld) -> None:
    pytest.importorskip("numba", reason="no numba: pip install numba-cuda")
    from numba import cuda

    if not cuda.is_available():
        pytest.skip("Numba sees no GPU: it needs one, and pip install numba-cuda")

    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.stream()
        x = cuda.to_device(np.arange(50.0) + comm.rank, stream=stream)
        stream.synchronize()
        comm.barrier()
        made = comm.all_reduce(x, stream=stream)
        stream.synchronize()
        host = made.copy_to_host(stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(host, 2 * np.arange(50.0) + 1)

    world.run(run)


def test_jax() -> None:
    """Alone in its world: threads of one process share JAX's stream."""
    jax: Any = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU: it needs one, and pip install jax[cuda13]")
    world = fresh_world(1)
    x = jax.numpy.arange(50.0)
    for op in ("sum", "avg"):
        made = world.communicators[0].all_reduce(x * 2, op)
        assert isinstance(made, jax.Array)
        np.testing.assert_array_equal(np.asarray(made + 1), 2 * np.arange(50.0) + 1)
    world.close()
