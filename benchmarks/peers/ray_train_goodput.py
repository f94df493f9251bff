"""Ray Train under repeated kills: an elastic group that goes on until `over` is there.

What is Ray Train's own and what is not stands in ray_train. The kills come from outside. Rank 0
looks for the end every ten steps, when it reports a checkpoint, and tells the others.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.peers.ray_train import CHECKPOINT_EVERY, ray_in
from benchmarks.peers.ray_train_loop import LoopConfig, train_loop
from benchmarks.peers.workload import WORLD_SIZE

_STEPS = 3000
"""More than the time allows."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    config = LoopConfig(
        steps=_STEPS, kill_step=-1, checkpoint_every=CHECKPOINT_EVERY, folder=str(folder)
    )
    size: Any = (WORLD_SIZE - 1, WORLD_SIZE)
    with tempfile.TemporaryDirectory(prefix="ray-") as name, ray_in(Path(name)):
        TorchTrainer(
            train_loop,
            train_loop_config=asdict(config),
            scaling_config=ScalingConfig(num_workers=size),
            run_config=RunConfig(
                name="run",
                storage_path=str(folder / "storage"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        ).fit()


if __name__ == "__main__":
    main()
