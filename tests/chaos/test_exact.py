"""exact=True: whatever befalls a run, its State has the bytes of the quiet run of one process."""

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch

from elastix.config import CheckpointConfig
from elastix.events import Resumed, SlicesHandedOver, StateStored, StepCommitted
from elastix.state import raw_bytes
from elastix.store import Store
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.exact_programs import train
from tests.laws import assert_exactly_once
from tests.laws import joins as entries

EPOCHS = 3
PROGRAMS = {
    "mlp": {"model": "mlp", "epochs": EPOCHS},
    "convnet": {"model": "convnet", "jitter": True, "epochs": EPOCHS},
    "transformer": {"model": "tied", "epochs": EPOCHS},
    "processes": {"model": "convnet", "jitter": True, "num_workers": 2, "epochs": EPOCHS},
}


def final(result):
    """The last State that was stored, and its digest."""
    stored = [event for event in result.events if isinstance(event, StateStored)][-1]
    with Store(result.directory / "store", read_only=True) as store:
        state = store.get(stored.ref)
        tensors = {name: raw_bytes(tensor).clone() for name, tensor in state.tensors.items()}
    return stored.digest, tensors


@functools.cache
def quiet(program):
    """What the undisturbed run of one process leaves, and its steps' samples."""
    directory = Path(tempfile.mkdtemp(prefix="elastix-quiet-"))
    result = run_local(train, 1, config=PROGRAMS[program], directory=directory, exact=True)
    return final(result), steps_of(result.events)


def samples_of(step):
    """The positions that a step had, whoever computed them."""
    spans = [span for batch in step.batches for share in batch.shares.values() for span in share]
    return sorted(position for start, stop in spans for position in range(start, stop))


def steps_of(events):
    """By number, the samples of each step that stands."""
    steps = {}
    for event in events:
        if isinstance(event, Resumed):
            steps = {number: had for number, had in steps.items() if number <= event.step}
        elif isinstance(event, StepCommitted):
            steps[event.step] = samples_of(event)
    return steps


def check(result, program):
    (digest, tensors), steps = quiet(program)
    found, ours = final(result)
    assert sorted(ours) == sorted(tensors)
    apart = [name for name in tensors if not torch.equal(ours[name], tensors[name])]
    assert not apart, f"other bytes than in the quiet run: {apart}"
    assert found == digest
    assert_exactly_once(result.events, EPOCHS)
    assert steps_of(result.events) == steps


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, program, workers):
    check(
        run_local(train, workers, config=PROGRAMS[program], directory=tmp_path, exact=True), program
    )


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("phase", ["slice", "bucket", "round", "left", "boundary"])
def test_a_loss_anywhere_in_a_step_leaves_the_same_bytes(tmp_path, phase, shared):
    doomed = with_kills(train, [Kill(worker=1, phase=phase, step=3)])
    options = {"config": PROGRAMS["mlp"], "directory": tmp_path, "shared": shared}
    result = run_local(doomed, 3, exact=True, **options)
    assert set(result.lost) == {1}
    check(result, "mlp")


def test_all_are_lost_and_the_run_goes_on_from_what_was_stored(tmp_path):
    kills = [Kill(worker=worker, phase="bucket", step=7) for worker in (0, 1)]
    result = run_local(
        with_kills(train, kills),
        2,
        config=PROGRAMS["convnet"],
        directory=tmp_path,
        replace=True,
        checkpoint=CheckpointConfig(every_steps=3),
        exact=True,
    )
    assert [event.step for event in result.events if isinstance(event, Resumed)] == [6]
    check(result, "convnet")


def test_without_it_the_order_of_sums_shows_in_the_bytes(tmp_path):
    """Nothing random is in this program but its initial weights."""
    config = {"model": "tied", "noise": False}
    found = {}
    for exact in (False, True):
        for workers in (1, 3):
            where = tmp_path / f"{exact}-{workers}"
            result = run_local(train, workers, config=config, directory=where, exact=exact)
            found[exact, workers] = final(result)[1]["embed.weight"]
    assert not torch.equal(found[False, 1], found[False, 3])
    assert torch.equal(found[True, 1], found[True, 3])


PHASES = ("slice", "slice", "bucket", "filled", "round", "left", "boundary", "evaluate", "meet")


def schedule(seed):
    """A program, a world, who is killed where, and for which newcomers is waited when."""
    draws = random.Random(seed)
    workers = draws.randint(1, 5)
    doomed = draws.sample(range(workers), draws.randint(0, workers - 1))
    joins = draws.randint(0, 2)
    kills = [
        Kill(
            worker=w, phase=draws.choice(PHASES), step=draws.randrange(12), after=draws.randrange(2)
        )
        for w in doomed
    ]
    if joins and draws.random() < 0.3:
        kills.append(Kill(worker=workers, phase=draws.choice(("take", "slice", "bucket", "enter"))))
    holds = {str(3 * (n + 1)): [workers + n] for n in range(joins)}
    return draws.choice(sorted(PROGRAMS)), workers, kills, joins, holds, draws.random() < 0.7


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 56))]
)
def test_law_1_any_schedule_of_losses_and_joins_leaves_the_bytes_of_the_quiet_run(tmp_path, seed):
    program, workers, kills, joins, holds, shared = schedule(seed)
    result = run_local(
        with_kills(train, kills),
        workers,
        config={**PROGRAMS[program], "holds": holds, "meeting": str(tmp_path)},
        directory=tmp_path / "run",
        spares=joins,
        max_workers=workers + joins,
        replace=True,
        shared=shared,
        exact=True,
    )
    print(
        f"{program}, {workers} workers, lost {sorted(result.lost)}, "
        f"joined {len(entries(result.events))}, handed over {handed_over(result.events)} slices"
    )
    check(result, program)


def handed_over(events):
    return sum(n for e in events if isinstance(e, SlicesHandedOver) for *_, n in e.moved)
