"""A run and a campaign made up for the report: realistic in shape, the same each time."""

import math
import random
from collections.abc import Iterator

from elastix.events import (
    BatchShares,
    EpochsPlanned,
    Event,
    GenerationFormed,
    LoaderOpened,
    Recovered,
    Reported,
    RunEnded,
    RunStarted,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLost,
    WorkersMeasured,
    WorkerStarted,
)
from elastix.report.trials import CampaignRecord, TrialRecord

BEGAN = 1_780_000_000.0


def run_events(
    steps: int = 1200,
    workers: int = 8,
    kill_every: int = 170,
    step_s: float = 0.12,
    name: str = "digits",
    ended: bool = True,
) -> Iterator[Event]:
    """A group that loses a worker every so many steps and gets another one a little later."""
    chance = random.Random(3)
    t = BEGAN
    members = list(range(workers))
    length, batch = 6000, 240
    yield RunStarted(
        t=t,
        name=name,
        seed=7,
        config={"lr": 3e-3, "widths": [32, 64], "optimizer": {"name": "adamw", "decay": 0.01}},
        scaling={"num_workers": [4, workers], "cpus_per_worker": 1.0},
        versions={"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"},
        checkpoint={"best": "accuracy", "mode": "max", "every_steps": 200},
        origin={"command": "python train.py", "host": "gpu-3", "git": "1a2b3c4d5e6f with changes"},
    )
    for worker in members:
        t += 0.4
        yield WorkerStarted(t=t, worker=worker, pid=100 + worker, node="n0", device="cpu")
    generation, following = 1, workers
    yield GenerationFormed(t=t, generation=1, members=tuple(members), cause="start")
    yield LoaderOpened(t=t, loader=0, length=length, batch_size=batch, shuffle=True, seed=7)
    yield EpochsPlanned(t=t, loader=0, epochs=math.ceil(steps * batch / length))
    joins: list[int] = []
    for step in range(1, steps + 1):
        t += step_s * chance.uniform(0.9, 1.15) * workers / max(len(members), 1)
        if joins and step >= joins[0]:
            joins.pop(0)
            members.append(following)
            generation += 1
            yield GenerationFormed(t=t, generation=generation, members=tuple(members), cause="join")
            yield WorkerJoined(
                t=t + 0.05,
                worker=following,
                generation=generation,
                step=step - 1,
                copy_s=0.08,
                copy_bytes=4_300_000,
            )
            following += 1
        if step % kill_every == 0:
            lost = chance.choice(members)
            rank = members.index(lost)
            members.remove(lost)
            generation += 1
            stall = chance.uniform(0.04, 0.4)
            yield GenerationFormed(t=t, generation=generation, members=tuple(members), cause="loss")
            yield WorkerLost(t=t, worker=lost, rank=rank, generation=generation - 1, cause="died")
            t += stall
            for worker in members:
                yield Recovered(
                    t=t,
                    worker=worker,
                    generation=generation,
                    step=step,
                    outcome=chance.choice(["accepted", "reduced again"]),
                    rebuild_s=stall * 0.6,
                    stall_s=stall * (1 if worker == members[0] else 0.9),
                )
            joins.append(step + 35)
        first = (step - 1) * batch
        each = batch // len(members)
        ends = [first + each * i for i in range(len(members))] + [first + batch]
        shares = {w: ((ends[i], ends[i + 1]),) for i, w in enumerate(members)}
        yield StepCommitted(
            t=t,
            step=step,
            generation=generation,
            world_size=len(members),
            batches=(BatchShares(loader=0, epoch=first // length, shares=shares),),
        )
        if step % 40 == 0:
            yield WorkersMeasured(
                t=t,
                step=step,
                workers={
                    worker: {
                        "cpu": chance.uniform(0.7, 1.1),
                        "memory": 4e8 + 1e5 * step + 1e7 * worker,
                        "data_s": 0.05,
                        "compute_s": 0.75 + 0.01 * (worker % 5),
                        "reduce_s": 0.08,
                        "wait_s": 0.12 - 0.01 * (worker % 5),
                    }
                    for worker in members
                },
            )
        if step % 25 == 0:
            x = step / 400
            noise = chance.gauss(0, 0.006)
            yield Reported(
                t=t,
                seq=step // 25,
                step=step,
                metrics={
                    "accuracy": 0.96 - 0.85 * math.exp(-2 * x) + noise,
                    "loss": 0.1 + 2.2 * math.exp(-1.6 * x) + noise,
                },
            )
        if step % 200 == 0:
            yield StateStored(
                t=t,
                ref=f"{step:064x}",
                step=step,
                reason="every_steps",
                stored_bytes=4_300_000,
                store_s=0.06,
                stall_s=0.002,
            )
    if ended:
        yield RunEnded(t=t + 0.1, outcome="finished", step=steps)


def campaign(trials: int = 120, objectives: int = 1, live: bool = False) -> CampaignRecord:
    """Evolution with inheritance over a space of six parameters, two of them conditional."""
    chance = random.Random(5)
    made: list[TrialRecord] = []
    scored: list[TrialRecord] = []
    t = BEGAN
    for number in range(trials):
        t += chance.uniform(2, 9)
        parent = None
        if len(scored) > 15:
            parent = max(chance.sample(scored, 6), key=lambda trial: trial.values[0])
        config = dict(parent.config) if parent else _sample(chance)
        if parent:
            key = chance.choice(["lr", "width", "activation", "depth", "dropout"])
            config[key] = _sample(chance)[key]
            if not config["dropout"]:
                config.pop("rate", None)
            else:
                config.setdefault("rate", round(chance.uniform(0.05, 0.5), 3))
        share = chance.choice([0.0, 0.42, 0.71, 0.88, 0.93]) if parent else None
        lineage = 1.0 + (parent.lineage_epochs * (share or 0) if parent else 0.0)
        failed = chance.random() < 0.04
        score = _score(config, lineage) + chance.gauss(0, 0.015)
        running = live and number >= trials - 4
        curve = [score * (1 - 0.6 * math.exp(-0.9 * k)) for k in range(1, 9)]
        curve[-1] = score
        size = float(config["width"] * config["depth"] * 1000)
        made.append(
            TrialRecord(
                number=number,
                config=config,
                state="running" if running else "failed" if failed else "finished",
                values=() if running or failed else (score, size)[:objectives],
                curve=() if running or failed else tuple(curve),
                ref=None if running or failed else f"{number * 7919:064x}",
                parent=parent.number if parent else None,
                provider=parent.number if parent and share else None,
                inherited=share,
                epochs=0.0 if running else 1.0,
                lineage_epochs=lineage,
                asked_s=t - 0.1,
                started_s=t,
                finished_s=None if running else t + chance.uniform(4, 20),
                losses=int(chance.random() < 0.05),
                traceback=_TRACEBACK if failed else None,
            )
        )
        scored += [made[-1]] if made[-1].scored else []
    return CampaignRecord(
        name="nas-1",
        objectives=(("accuracy", "max"), ("parameters", "min"))[:objectives],
        trials=tuple(made),
        facts={"searcher": "Evolution", "inherit": "lcs", "executor": "pool"},
        budget=200,
        began=BEGAN,
        last=t,
        outcome="" if live else "finished",
    )


_TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in train
    loss.backward()
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""


def _sample(chance: random.Random) -> dict[str, object]:
    config: dict[str, object] = {
        "lr": 10 ** chance.uniform(-5, -1),
        "width": chance.choice([8, 16, 32, 64, 128]),
        "depth": chance.randint(1, 6),
        "activation": chance.choice(["relu", "gelu", "tanh", "silu"]),
        "dropout": chance.random() < 0.5,
    }
    if config["dropout"]:
        config["rate"] = round(chance.uniform(0.05, 0.5), 3)
    return config


def _score(config: dict[str, object], lineage: float) -> float:
    lr = -abs(math.log10(float(str(config["lr"]))) + 2.7) * 0.09
    width = 0.03 * math.log2(float(str(config["width"])))
    activation = {"relu": 0.02, "gelu": 0.03, "tanh": -0.05, "silu": 0.025}
    depth = -0.012 * (int(str(config["depth"])) - 4) ** 2
    learnt = 0.22 * (1 - math.exp(-lineage / 2.5))
    return 0.55 + lr + width + activation[str(config["activation"])] + depth + learnt
