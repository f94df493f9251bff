"""The elastix side of a benchmark: an ordinary run on a Ray of its own, watched and killed at."""

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elastix.bench.ddp_group import ended_early
from elastix.bench.endless import Endless
from elastix.bench.measures import Observation, SizeMeasured, Timing, Turn, Victim
from elastix.config import RunConfig, ScalingConfig
from elastix.errors import ConfigError, TrainError
from elastix.events import Event
from elastix.train.replica.context import Context

_NAME = "bench"
_PATIENCE_S = 600.0  # twice what a run waits for its founders
_TELL_S = 60.0
_PRINTED = {"RAY_ROTATION_MAX_BYTES": str(1 << 24), "RAY_ROTATION_BACKUP_COUNT": "1"}
"""Of what a process has printed, which may be without end, Ray keeps so many bytes, twice."""


@contextmanager
def own_ray(cpus: float) -> Iterator[None]:
    """A Ray cluster of this process alone, on this machine, with so many CPUs.

    Raises:
        ConfigError: this process has connected to another one.
    """
    import ray

    from elastix.train.on_ray.find_ray import init_ray

    if ray.is_initialized():
        raise ConfigError(
            "the script has called ray.init when it was loaded, and a benchmark starts a Ray of "
            'its own. Nothing was measured. Put that call under `if __name__ == "__main__":`.'
        )
    limits = {name: value for name, value in _PRINTED.items() if name not in os.environ}
    os.environ.update(limits)  # for the processes that Ray starts
    try:
        init_ray(
            "local",
            num_cpus=max(len(os.sched_getaffinity(0)), -int(-cpus // 1)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Ray's is 15, and what else the machine does would slow elastix alone, not DDP
            _system_config={"worker_niceness": 0},
        )
        yield
    finally:
        ray.shutdown()
        for name in limits:
            os.environ.pop(name, None)


def pickled(train: Callable[[Context], None], config: Mapping[str, Any], seed: int) -> bytes:
    """The endless train function as both systems get it, all else looked at beforehand.

    Raises:
        ConfigError: it takes other arguments or cannot be pickled, or the config or seed is wrong.
    """
    from elastix.train.on_ray.pickled_train import pickle_train
    from elastix.train.on_ray.trainer import ElasticTrainer

    ElasticTrainer(train, config=config, run=RunConfig(name=_NAME, seed=seed))
    pickle_train(train)  # which names the culprit in the function itself
    return pickle_train(Endless(train))


def strike(seen: Observation, victim: Victim) -> None:
    """Kill it. The others may have heard of it before this process goes on: first the time."""
    t = time.time()
    with suppress(ProcessLookupError):  # it was lost by itself, and that counts as well
        os.kill(victim.pid, signal.SIGKILL)
    seen.killed(victim, t)


def measure_elastix(
    train: Callable[[Context], None],
    config: Mapping[str, Any],
    size: int,
    timing: Timing,
    folder: Path,
    *,
    cpus: float,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> SizeMeasured:
    """Rate, stalls and goodput of one size; Ray must be up. Blocks.

    Args:
        train: the train function.
        config: for ctx.config.
        size: number of workers.
        timing: of the window and of the kills.
        folder: an empty one, in which the run's store lies.
        cpus: of each worker.
        seed: of weights and of the order of samples.
        progress: told of each kill, and every minute how far it is.

    Raises:
        ConfigError: the function draws no samples from ctx.loader.
        TrainError: as ElasticTrainer.fit; or it ended too early, or a worker never came.
    """
    from elastix.train.on_ray.trainer import ElasticTrainer

    seen = Observation(size, timing, random.Random(seed))
    refusal: list[ConfigError] = []
    lacks: list[str] = []
    told = time.monotonic()

    def watch(events: Sequence[Event]) -> None:
        nonlocal told
        for event in events:
            seen.add(event)
        if seen.steps and not seen.counts_samples:
            refusal.append(
                ConfigError(
                    "the train function draws no samples from ctx.loader, so they cannot be "
                    "counted. The benchmark was stopped. Draw the batches from ctx.loader."
                )
            )
            raise KeyboardInterrupt  # ends a run in good order
        turn = seen.decide(time.time())
        if seen.lacking_s > _PATIENCE_S:
            lacks.append(seen.standing())
            raise KeyboardInterrupt
        if time.monotonic() > told + _TELL_S:  # a step may take long, or a worker not start
            told = time.monotonic()
            progress(f"{size} under elastix: {seen.standing()}")
        if isinstance(turn, Victim):
            strike(seen, turn)
            progress(f"killed worker {turn.worker}, {len(seen.deaths)} of {timing.kills}")
        elif turn is Turn.OVER:
            raise KeyboardInterrupt

    trainer = ElasticTrainer(
        Endless(train),
        config=config,
        scaling=ScalingConfig(num_workers=(1, size), cpus_per_worker=cpus),
        run=RunConfig(name=_NAME, store=str(folder), seed=seed),
        metrics=False,
        quiet=True,
    ).as_trial(None, None, watch)
    try:
        trainer.fit()
    except KeyboardInterrupt:
        if refusal:
            raise refusal[0] from None
        if lacks:
            raise TrainError(
                f"the group of {size} workers under elastix was not whole for {_PATIENCE_S:.0f} s "
                f"({lacks[0]}). The benchmark was stopped. Look at the workers' logs, in "
                "/tmp/ray/session_latest/logs; or take fewer: --workers."
            ) from None
        if seen.rate is None or not seen.over:
            raise  # somebody else's
        return SizeMeasured(
            workers=size, elastix=seen.rate, deaths=seen.deaths, goodput=seen.goodput
        )
    raise TrainError(ended_early("elastix", size, seen.steps))
