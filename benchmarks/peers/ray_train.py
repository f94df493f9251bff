"""Ray Train through the kill: an elastic group of up to five workers on one machine.

``ScalingConfig(num_workers=(min, max))`` lets Ray Train choose the size of the group,
``FailureConfig(max_failures=-1)`` lets it restart as often as it has to, the model goes through
``ray.train.torch.prepare_model`` (torch's DDP on gloo), and rank 0 reports a checkpoint every
ten steps, which is a barrier for all. Everything else is as Ray Train has it by default, its
controller's poll of the workers every two seconds included.

One worker kills itself in the middle of backward. Ray Train ends all workers and starts the
group again from the last checkpoint it knows.

Samples: ``DistributedSampler`` with ``set_epoch``, and after a restart every rank leaves out the
batches of the steps before the checkpoint's, which is exact as long as the group comes back in
its old size. Steps that are done again count as lost; their samples count once, because the
weights of their first time are gone.
"""

import argparse
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.peers.ray_train_loop import LoopConfig, stamp_path, train_loop
from benchmarks.peers.summary import (
    Repeat,
    account,
    common_arguments,
    read_kill,
    read_logs,
    write_result,
)
from benchmarks.peers.workload import GLOBAL_BATCH, KILL_STEP, STEPS, WORLD_SIZE

CHECKPOINT_EVERY = 10
_LOGICAL_CPUS = 8
_OBJECT_STORE_BYTES = 200 * 2**20
_REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def ray_in(folder: Path) -> Iterator[None]:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        ray.init(
            address="local",
            num_cpus=_LOGICAL_CPUS,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()


def _fit(trainer: TorchTrainer, limit_s: float) -> None:
    # Ray Train ends a run in good order on Ctrl-C, so running late is treated as one.
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(limit_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        trainer.fit()
    except (KeyboardInterrupt, SystemExit) as error:
        if late.is_set():
            raise TimeoutError(f"Ray Train took longer than {limit_s} s") from error
        raise KeyboardInterrupt from error
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def run_once(settings: argparse.Namespace) -> Repeat:
    """Runs one pass with one kill; Ray must be up.

    Args:
        settings: The parsed arguments of this module.
    """
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        config = LoopConfig(
            steps=settings.steps,
            kill_step=settings.kill_step,
            checkpoint_every=CHECKPOINT_EVERY,
            folder=name,
        )
        size: Any = (settings.min_workers, WORLD_SIZE)
        trainer = TorchTrainer(
            train_loop,
            train_loop_config=asdict(config),
            scaling_config=ScalingConfig(num_workers=size),
            run_config=RunConfig(
                name="run",
                storage_path=str(folder / "storage"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        _fit(trainer, settings.timeout)
        records = read_logs(folder.glob("steps-*.jsonl"))
        kill = read_kill(stamp_path(folder), settings.kill_step)
    return account(records, kill, settings.steps * GLOBAL_BATCH)


def main() -> None:
    """Runs the repeats and writes the result file."""
    parser = common_arguments(__doc__, STEPS, KILL_STEP)
    parser.add_argument("--min-workers", type=int, default=WORLD_SIZE - 1)
    settings = parser.parse_args()
    repeats = []
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ray_in(Path(folder)):
        for number in range(settings.repeats):
            repeats.append(run_once(settings))
            print(f"repeat {number + 1}: {repeats[-1]}", flush=True)
    described = {
        "workers": [settings.min_workers, WORLD_SIZE],
        "checkpoint_every_steps": CHECKPOINT_EVERY,
        "steps": settings.steps,
        "kill_step": settings.kill_step,
    }
    write_result(settings.out, "ray-train", ["torch", "ray"], described, repeats)


if __name__ == "__main__":
    main()
