"""Trains a classifier, data-parallel, on ranks that Ray, Dask or Spark starts.

    python examples/train_on_engines.py --engine ray --ranks 4

Each rank makes its own samples. One all_reduce in each step adds the gradients of all ranks, so all
ranks keep the same weights. The option --address names a cluster that runs already (Ray: "auto";
Dask: a scheduler, "tcp://head:8786"; Spark: a master, "spark://head:7077"). Without it the engine
runs on this machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import pycoll

FEATURES, CLASSES, SAMPLES, RATE = 16, 4, 256, 0.5


def train(steps: int) -> dict[str, Any]:
    """Train on this rank's samples; returns the losses and the share of right answers."""
    comm = pycoll.world()
    truth = np.random.default_rng(0).standard_normal((FEATURES, CLASSES))
    samples = np.random.default_rng(1 + comm.rank).standard_normal((SAMPLES, FEATURES))
    labels = np.argmax(samples @ truth, axis=1)
    weights = np.zeros((FEATURES, CLASSES))
    losses = []
    for _ in range(steps):
        scores = samples @ weights
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(SAMPLES), labels]).mean()
        chances[np.arange(SAMPLES), labels] -= 1
        gradient = samples.T @ chances / SAMPLES
        weights -= RATE * comm.all_reduce(gradient, "avg")
        losses.append(float(comm.all_reduce(loss, "avg")))
    right = float(np.mean(np.argmax(samples @ weights, axis=1) == labels))
    return {
        "ranks": comm.size,
        "hosts": comm.cross_size,
        "losses": losses,
        "right": float(comm.all_reduce(right, "avg")),
        "weights": weights,
    }


def with_ray(address: str | None, ranks: int, steps: int) -> list[Any]:
    import ray

    from pycoll.integrations import ray as pycoll_ray

    if address is None:
        ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=address)
    return pycoll_ray.run(train, steps, size=ranks, options={"scheduling_strategy": "SPREAD"})


def with_dask(address: str | None, ranks: int, steps: int) -> list[Any]:
    from distributed import Client, LocalCluster

    from pycoll.integrations import dask as pycoll_dask

    if address is not None:
        with Client(address) as client:
            client.wait_for_workers(ranks)
            return pycoll_dask.run(client, train, steps)
    options = {"n_workers": ranks, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(host="127.0.0.1", **options) as cluster, Client(cluster) as client:
        return pycoll_dask.run(client, train, steps)


def with_spark(address: str | None, ranks: int, steps: int) -> list[Any]:
    from pyspark.sql import SparkSession

    from pycoll.integrations import spark as pycoll_spark

    builder = SparkSession.builder.master(address or f"local[{ranks}]")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    try:
        return pycoll_spark.run(session.sparkContext, train, steps, size=ranks)
    finally:
        session.stop()


ENGINES = {"ray": with_ray, "dask": with_dask, "spark": with_spark}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--address")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    results = ENGINES[options.engine](options.address, options.ranks, options.steps)
    first = results[0]
    alike = all(np.array_equal(one["weights"], first["weights"]) for one in results)
    print(
        f"{options.engine}: {first['ranks']} ranks on {first['hosts']} host(s), loss "
        f"{first['losses'][0]:.3f} -> {first['losses'][-1]:.3f}, {first['right']:.1%} right, "
        f"weights {'alike' if alike else 'DIFFERENT'} on all ranks"
    )


if __name__ == "__main__":
    main()
