"""Workers whose processors round differently: no fault, but for those of one kind.

The kinds are made up; the rounding is real: after each step of one kind's optimizer every parameter
is the next larger number.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastix.data.audit import audit
from elastix.events import (
    ProcessorsDiffer,
    ReplicasDiverged,
    ReplicasLevelled,
    ResumedFromShadow,
    ShadowDiffers,
    WorkerLost,
)
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from elastix.train.replica import member, step_commits
from tests.laws import assert_exactly_once, joins
from tests.trainables import await_worker, make, shadow_hold, subscribers

CONFIG = {"samples": 150, "batch_size": 30, "epochs": 2}  # 10 steps


def train(ctx):
    """Worker by worker, `kinds` says with what it computes: "a" as it is, all else with an ulp."""
    kind = ctx.config["kinds"][ctx.worker % len(ctx.config["kinds"])]
    member.computes_with = lambda _device: f"processor {kind}"
    step_commits.LEVEL_S = ctx.config.get("level_s", 60.0)
    held, folder = ctx.config.get("held", {}), Path(ctx.config.get("folder", "."))
    if held:
        ctx.on_phase(lambda name, _: name == "wait" and (folder / str(ctx.worker)).touch())
    hold = shadow_hold(ctx)
    model, optimizer, dataset = make(CONFIG)
    model, optimizer = ctx.prepare(model, optimizer)
    if kind != "a":
        optimizer.register_step_post_hook(rounded_up)
    for epoch in ctx.loader(dataset, batch_size=30).epochs(2):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for newcomer in held.get(ctx.step, ()):
                await_worker(folder / str(newcomer))
            hold()
            if ctx.step == ctx.config.get("calm_from"):
                step_commits.LEVEL_S = 60.0
                while ctx.rank == 0 and not subscribers(ctx._member):
                    time.sleep(0.005)


@torch.no_grad()
def rounded_up(optimizer, _args, _kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.copy_(torch.nextafter(parameter, torch.tensor(float("inf"))))


def of(kind, run):
    return [event for event in run.events if isinstance(event, kind)]


def run(directory, kinds, *harm, workers=3, **options):
    config = {"kinds": kinds, **options.pop("config", {})}
    return run_local(
        with_kills(train, harm), workers, config=config, directory=directory, **options
    )


@pytest.mark.parametrize(("level_s", "levelled"), [(0.0, range(1, 11)), (60.0, ())])
def test_differences_between_kinds_are_no_fault_and_are_levelled_now_and_then(
    tmp_path, level_s, levelled
):
    found = run(tmp_path, "bab", config={"level_s": level_s})
    (told,) = of(ProcessorsDiffer, found)
    assert told.kinds == {"processor b": (0, 2), "processor a": (1,)}
    assert not of(ReplicasDiverged, found) + of(WorkerLost, found)
    levels = [(event.step, event.worker) for event in of(ReplicasLevelled, found)]
    assert levels == [(step, 0) for step in levelled]  # b is what most compute with
    assert audit(found.events).exact


def test_one_kind_is_told_of_nothing(tmp_path):
    found = run(tmp_path, "bbb", config={"level_s": 0.0})
    assert not of(ProcessorsDiffer, found) + of(ReplicasLevelled, found)


@pytest.mark.parametrize(
    ("kinds", "culprits"),
    [
        pytest.param("aaab", (1,), id="of three of its kind"),
        pytest.param("baab", (1, 2), id="of two: nobody knows which"),
    ],
)
def test_within_a_kind_they_are_a_fault_and_whoever_differs_goes(tmp_path, kinds, culprits):
    flip = Flip(worker=1, tensor="head.weight", step=5, bit=3)
    found = run(tmp_path, kinds, flip, workers=4)
    (diverged,) = of(ReplicasDiverged, found)
    assert (diverged.step, diverged.apart, diverged.cure) == (5, culprits, "evicted")
    assert {(lost.worker, lost.cause) for lost in of(WorkerLost, found)} == {
        (worker, "diverged") for worker in culprits
    }
    assert audit(found.events).exact


PHASES = ("bucket", "filled", "round", "left", "boundary", "level", "batch")


@dataclass(frozen=True)
class Schedule:
    """Who computes with what, who is killed where, and for whom is waited when."""

    kinds: str
    workers: int
    kills: tuple[Kill, ...]
    options: dict

    @classmethod
    def drawn(cls, seed):
        draws = random.Random(seed)
        workers, spares = draws.randint(2, 4), draws.randint(0, 2)
        doomed = draws.sample(range(workers), draws.randint(1, workers - 1))
        kills = [
            Kill(worker=w, phase=draws.choice(PHASES), step=draws.randrange(8)) for w in doomed
        ]
        if draws.random() < 0.3:
            kills.append(Kill(worker=workers, phase=draws.choice(("take", "enter", "level"))))
        kinds = "".join(draws.choice("aab") for _ in range(7))
        options = {
            "spares": spares,
            "shadows": draws.randint(0, 1),
            "recovery": draws.choice(("forward", "forward", "rollback")),
            "shared": draws.random() < 0.7,
        }
        return cls(kinds, workers, tuple(kills), options)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 60))]
)
def test_losses_and_joins_among_kinds_raise_no_alarm_and_lose_nothing(tmp_path, seed):
    what = Schedule.drawn(seed)
    more = list(range(what.workers, what.workers + what.options["spares"]))
    config = {"level_s": random.Random(seed).choice((0.0, 0.05)), "folder": str(tmp_path)}
    config["held"] = {4: more}
    found = run(
        tmp_path / "run",
        what.kinds,
        *what.kills,
        workers=what.workers,
        config=config,
        replace=True,
        max_workers=what.workers + 1,
        **what.options,
    )
    print(
        what.kinds, sorted(found.lost), len(joins(found.events)), len(of(ReplicasLevelled, found))
    )
    assert not of(ReplicasDiverged, found)
    assert_exactly_once(found.events, 2)


def test_a_shadow_of_another_kind_is_copied_anew_and_what_goes_on_from_it_says_so(tmp_path):
    """How far it is from the group is found by digest, and told."""
    kills = [Kill(worker=worker, phase="bucket", step=8) for worker in (0, 1)]
    config = {"level_s": 0.0, "calm_from": 5, "shadow": 2, "meeting": str(tmp_path)}
    found = run(tmp_path / "run", "aab", *kills, workers=2, config=config, shadows=1, replace=True)
    apart = of(ShadowDiffers, found)
    assert apart
    # Later shadows may be of another kind than the one that went on, and tell it too.
    assert 2 in {event.worker for event in apart}
    assert all(event.parts == ("model",) and event.followed > 0 for event in apart)
    (resumed,) = of(ResumedFromShadow, found)
    assert (resumed.worker, resumed.equal) == (2, False)
    assert_exactly_once(found.events, 2)
