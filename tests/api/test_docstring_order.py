"""The docstrings of pycoll, its optim, ps, compress and adapters: their parts, and their examples.

tests/torch/test_torch_docstrings.py and tests/jax/test_jax_docstrings.py do the same;
test_docstrings.py runs the examples of pycoll itself.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from docstring_parts import faults_of, public_names, ranks_of, run_examples, run_on_ranks

import pycoll
import pycoll.compress
import pycoll.integrations.dask
import pycoll.integrations.ray
import pycoll.integrations.spark
import pycoll.optim
import pycoll.ps

PACKAGES = (pycoll, pycoll.optim, pycoll.ps, pycoll.compress)
ADAPTERS = {
    pycoll.integrations.dask: ["run"],
    pycoll.integrations.ray: ["register", "init", "run"],
    pycoll.integrations.spark: ["init", "run"],
}
ENGINES = {"dask": "distributed", "ray": "ray", "spark": "pyspark"}
#: Classes whose objects programs get from functions.
MADE_ELSEWHERE = {"Communicator", "Store", "StoreWork", "Table", "LocalState", "Work"}
NAMES = {
    f"{package.__name__}.{name}": one
    for package in PACKAGES
    for name, one in public_names(package).items()
}
#: Methods of a communicator that are no functions of pycoll.
METHODS = [
    name
    for name, one in vars(pycoll.Communicator).items()
    if inspect.isfunction(one) and not name.startswith("_") and name not in pycoll.__all__
]
NAMES_OF_ADAPTERS = {
    f"{package.__name__}.{name}": one
    for package, names in ADAPTERS.items()
    for name, one in public_names(package, names).items()
}
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def store() -> Iterator[pycoll.ps.Store]:
    worker, server = pycoll.local_world(2, timeout_s=TIMEOUT_S)
    serving = threading.Thread(target=pycoll.ps.serve_store, args=(server, [1]))
    serving.start()
    with pycoll.ps.connect(worker) as found:
        yield found
    serving.join()
    worker.close()
    server.close()


def test_faults_are_found() -> None:
    def good(x: Any) -> int:
        """Do it.

        Arguments: ``x``, bytes.

        Result: a number. Errors: none. Cost: none.

        >>> good(1)
        """

    def bad(x: Any, y: Any) -> int:
        """Do it and
        more.

        Cost: none. Errors: none.

        ``x``: bytes.
        """

    assert faults_of(good) == []
    assert faults_of(bad) == [
        "the first line is no sentence by itself",
        "arguments without a word: y",
        "no result",
        "no example",
        "the order is cost, errors, arguments",
    ]


@pytest.mark.parametrize("name", NAMES | NAMES_OF_ADAPTERS)
def test_the_parts_of_docstrings_are_in_order(name: str) -> None:
    thing = (NAMES | NAMES_OF_ADAPTERS)[name]
    assert faults_of(thing, thing.__name__ in MADE_ELSEWHERE) == []


@pytest.mark.parametrize("name", METHODS)
def test_the_parts_of_methods_are_in_order(name: str) -> None:
    with pycoll.local_world(1, timeout_s=TIMEOUT_S)[0] as comm:
        assert faults_of(getattr(comm, name)) == []


@pytest.mark.parametrize("name", ["done", "ended_s", "wait"])
def test_the_methods_of_a_work(name: str) -> None:
    with pycoll.local_world(1, timeout_s=TIMEOUT_S)[0] as comm:
        method = getattr(comm.barrier(async_op=True), name)
        assert faults_of(method) == []
        run_examples(method, {"comm": comm})


@pytest.mark.parametrize("name", [name for name in NAMES if name.count(".") > 1])
def test_the_examples_do_what_they_say(name: str, request: pytest.FixtureRequest) -> None:
    thing = NAMES[name]
    scope: dict[str, Any] = {"pycoll": pycoll, "np": np, "threading": threading}
    if "torch." in thing.__doc__.partition(">>>")[2]:
        scope["torch"] = pytest.importorskip(
            "torch", reason="no torch: pip install -r tests/requirements.txt"
        )
    if ranks_of(thing) > 1:
        run_on_ranks(thing, scope, ranks_of(thing))
        return
    if " store." in thing.__doc__.partition(">>>")[2]:
        scope["store"] = request.getfixturevalue("store")
    with pycoll.local_world(1, timeout_s=TIMEOUT_S)[0] as comm:
        run_examples(thing, {**scope, "comm": comm})


@pytest.mark.parametrize("name", NAMES_OF_ADAPTERS)
def test_the_examples_of_adapters_do_what_they_say(name: str) -> None:
    thing = NAMES_OF_ADAPTERS[name]
    word = name.split(".")[2]
    engine = ENGINES[word]
    scope = {"pycoll": pycoll, "adapter": importlib.import_module(name.rpartition(".")[0])}
    module = pytest.importorskip(engine, reason=f"no {engine}: pip install {engine}")
    run_examples(thing, {**scope, engine: module})
