"""Trains a linear model with Ray Train; the gradients of its workers are averaged by pycoll.

    python examples/ray_train.py --workers 2

The program is one for Ray Train and torch. Only the name of the backend is pycoll's. Each worker
gets its share of the samples, and worker 0 saves the model after each epoch. The option --address
names a cluster that runs already ("auto"). Without it Ray runs on this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

FEATURES, SAMPLES, BATCH = 8, 512, 32


def train(config: dict[str, Any]) -> None:
    """The training loop of each worker."""
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    samples = torch.randn(SAMPLES, FEATURES)
    labels = samples.sum(1, keepdim=True) + 1
    data = torch.utils.data.TensorDataset(samples, labels)
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data, BATCH))
    model = ray.train.torch.prepare_model(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), config["rate"])
    for _ in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(samples), labels).item()
        weights = torch.cat([one.detach().flatten() for one in model.parameters()])
        every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weights)
        alike = all(torch.equal(one, weights) for one in every)
        results = {"loss": loss, "alike": alike, "size": len(every), "backend": dist.get_backend()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), f"{folder}/model.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(results, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    if options.address is None:
        # Ray Train itself takes a part of a core.
        ray.init(num_cpus=options.workers + 1, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=options.address)
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train,
            train_loop_config={"rate": 0.05, "epochs": options.epochs},
            scaling_config=ScalingConfig(num_workers=options.workers),
            torch_config=TorchConfig(backend="pycoll"),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    last = result.metrics
    print(
        f"Ray Train: {last['size']} workers over {last['backend']}, {options.epochs} epochs, "
        f"loss {last['loss']:.4f}, weights {'alike' if last['alike'] else 'DIFFERENT'}"
    )


if __name__ == "__main__":
    main()
