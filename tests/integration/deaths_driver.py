"""The driver of test_deaths_told: three runs on a Ray of its own, and actors of somebody else.

Usage: deaths_driver.py STORE. The last line of its output is JSON: who died as somebody else's.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import ray
from ConfigSpace import ConfigurationSpace, Float

import elastix
from elastix.testing.chaos import Kill, with_kills
from tests import forked_workers, trainables


class Heard:
    """Standard output; notices when Ray has told of a process's death."""

    def __init__(self):
        self.text = ""
        self.news = threading.Condition()

    def write(self, text):
        sys.__stdout__.write(text)
        with self.news:
            self.text += text
            self.news.notify_all()

    def flush(self):
        sys.__stdout__.flush()

    def wait_for(self, pid):
        with self.news:
            told = self.news.wait_for(lambda: f"Worker PID: {pid} " in self.text, timeout=60)
        assert told, f"Ray has not told of the death of {pid}"


@ray.remote(num_cpus=0)
class Stranger:
    def pid(self):
        return os.getpid()


def kill(pid):
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def train(ctx):
    if ctx.worker == 0:
        kill(ctx.config["stranger"])
    trainables.train(ctx)


def trial(ctx):
    mark = Path(ctx.config["store"], "killed")
    if not mark.exists():
        mark.touch()
        kill(ctx.config["stranger"])
        kill(os.getpid())
    ctx.report(m=ctx.config["x"])


def fit(store, name, stranger=None, kills=()):
    elastix.ElasticTrainer(
        with_kills(train, kills),
        config={"samples": 120, "epochs": 1, "batch_size": 30, "stranger": stranger},
        scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
        run=elastix.RunConfig(name=name, store=store),
    ).fit()


def group(ctx):
    small = {"samples": 120, "epochs": 6, "batch_size": 30, "step_s": 0.3}
    trainables.train(Renamed(ctx, small))


class Renamed:
    """A context with another config."""

    def __init__(self, ctx, config):
        self._ctx, self.config = ctx, config

    def __getattr__(self, name):
        return getattr(self._ctx, name)


def group_trial():
    """One of its two workers is killed after a few seconds of steps."""
    return with_kills(group, [Kill(worker=1, phase="batch", step=12)])


def main(store):
    sys.stdout = heard = Heard()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _system_config=forked_workers.SETTINGS,
    )
    strangers = [Stranger.remote() for _ in range(3)]
    pids = ray.get([stranger.pid.remote() for stranger in strangers])
    fit(store, "clean")
    fit(store, "lossy", pids[0], [Kill(worker=1, phase="batch", step=2)])
    space = ConfigurationSpace(space=[Float("x", (0.0, 1.0))])
    space.add(*ConfigurationSpace({"store": [store], "stranger": [pids[1]]}).values())
    elastix.Campaign(
        trial,
        space=space,
        searcher=elastix.Random(),
        metric="m",
        budget=elastix.Budget(trials=3),
        run=elastix.RunConfig(name="search", store=store),
        scaling=elastix.ScalingConfig(num_workers=1, cpus_per_worker=2),
        inherit=elastix.InheritConfig(mode="none"),
    ).run()
    elastix.Campaign(
        group_trial(),
        space=ConfigurationSpace(space=[Float("x", (0.0, 1.0))]),
        searcher=elastix.Random(),
        metric="accuracy",
        budget=elastix.Budget(trials=1),
        run=elastix.RunConfig(name="groups", store=store),
        scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
        inherit=elastix.InheritConfig(mode="none"),
    ).run()
    os.kill(pids[2], signal.SIGKILL)
    for pid in pids:  # and by the last one Ray has told of all that died before
        heard.wait_for(pid)
    ray.shutdown()
    sys.stdout = sys.__stdout__
    print(json.dumps(pids))


if __name__ == "__main__":
    with forked_workers.serve():
        main(sys.argv[1])
