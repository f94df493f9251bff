"""A driver to be killed: `python -m tests.chaos.campaign_driver STORE TRIALS EXECUTOR [ADDRESS]`.

Prints a line for every event, so that whoever kills it knows how far it is.
"""

import logging
import sys

import elastix
from elastix.observe.trials_console import TrialsConsole
from tests.search_parts import SPACE, Drawing, diary, hungry


def main(store, trials, kind, address=None):
    told = TrialsConsole.show

    def show(self, event):
        told(self, event)
        print(type(event).__name__, flush=True)

    TrialsConsole.show = show
    if kind in ("pool", "hungry"):
        import ray

        ray.init(address=address, logging_level=logging.ERROR)
        executor = None
    else:
        from elastix.search.executors.serial import Local

        executor = Local()
    elastix.Campaign(
        hungry if kind == "hungry" else diary,
        space=SPACE,
        searcher=Drawing(diary=f"{store}/diary"),
        metric="score",
        budget=elastix.Budget(trials=int(trials), parallel=2),
        scaling=elastix.ScalingConfig(cpus_per_worker=0.5),
        run=elastix.RunConfig(name="hunted", store=store),
        executor=executor,
        quiet=True,
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
