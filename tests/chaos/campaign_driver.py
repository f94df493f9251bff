"""A driver to be killed: `python -m tests.chaos.campaign_driver STORE TRIALS EXECUTOR [ADDRESS]`.

Prints a line for every event, so that whoever kills it knows how far it is.
"""

import functools
import logging
import sys

import elastix
from elastix.observe.journal import Journal
from tests.search_parts import SPACE, Drawing, diary, hungry, learns_and_tells


def main(store, trials, kind, address=None):
    append = Journal.append

    def append_and_say(self, event, *at):
        append(self, event, *at)
        print(type(event).__name__, flush=True)

    Journal.append = append_and_say
    if kind in ("pool", "hungry"):
        import ray

        ray.init(address=address, logging_level=logging.ERROR)
        executor = None
    else:
        from elastix.search.executors.serial import Local

        executor = Local()
    train, budget, rungs = diary, elastix.Budget(trials=int(trials), parallel=2), None
    searcher = Drawing(diary=f"{store}/diary")
    if kind == "hungry":
        train = hungry
    elif kind == "population":
        train = functools.partial(learns_and_tells, f"{store}/diary")
        searcher = elastix.Population(members=int(trials), share=0.5)
        budget = elastix.Budget(epochs=5 * int(trials))
    elif kind in ("screened", "rungs"):
        train = functools.partial(learns_and_tells, f"{store}/diary")
        searcher = elastix.ScreenedEvolution(initial=4, candidates=20)
        if kind == "rungs":
            searcher = elastix.Evolution(population=4, sample=2)
            rungs = elastix.Asha(first=1, eta=2, last=5)
    elastix.Campaign(
        train,
        space=SPACE,
        searcher=searcher,
        metric="score",
        budget=budget,
        rungs=rungs,
        scaling=None if executor else elastix.ScalingConfig(cpus_per_worker=0.5),
        run=elastix.RunConfig(name="hunted", store=store),
        executor=executor,
        quiet=True,
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
