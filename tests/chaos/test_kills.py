"""Laws 1 and 4 on real processes: workers end by SIGKILL at chosen places of a step."""

import os
from pathlib import Path
from signal import SIGKILL, SIGSEGV, SIGSTOP

import pytest
import torch

from elastix.comm.network import transfer
from elastix.errors import QuorumLost
from elastix.events import Recovered, WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests import hanging
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.trainables import train

CONFIG = {"model": "wide", "samples": 150, "batch_size": 30, "epochs": 2}


def run(tmp_path, kills, workers=3, config=None, sign=None, **options):
    """`sign` is a file that whoever is killed by the last of `kills` leaves."""
    logs = tmp_path / "logs"
    logs.mkdir()
    settings = {**CONFIG, **(config or {}), "log": str(logs)}
    doomed = with_kills(with_kills(train, kills[:-1]), kills[-1:], log=sign)
    result = run_local(doomed, workers, config=settings, directory=tmp_path / "run", **options)
    assert {kill.worker for kill in kills} == set(result.lost)
    assert_exactly_once(result.events, settings["epochs"])
    assert_replicas_identical(logs, set(result.lost), result.events)
    return result


PLACES = {
    "forward": Kill(worker=1, phase="batch", step=3),
    "first bucket": Kill(worker=1, phase="bucket", detail=0, step=3),
    "middle bucket": Kill(worker=1, phase="bucket", detail=1, step=3),
    "last bucket": Kill(worker=1, phase="bucket", detail=2, step=3),
    "commit round": Kill(worker=1, phase="round", detail=1, step=3),
    "out of the commit round": Kill(worker=1, phase="left", detail=1, step=3),
    "between steps": Kill(worker=1, phase="boundary", step=3),
    "evaluation": Kill(worker=1, phase="evaluate"),
    "first step": Kill(worker=1, phase="bucket", detail=1, step=0),
}


@pytest.mark.fast("*-3", "commit round-5", "first bucket-3 by sockets", "out of*-3 by sockets")
@pytest.mark.parametrize(
    ("workers", "shared"), [(3, True), (5, True), (3, False)], ids=["3", "5", "3 by sockets"]
)
@pytest.mark.parametrize("place", PLACES)
def test_one_worker_is_killed(tmp_path, place, workers, shared):
    result = run(tmp_path, [PLACES[place]], workers, shared=shared)
    survivors = {e.worker for e in result.events if isinstance(e, Recovered)}
    assert survivors == set(range(workers)) - {1}


def told_by_the_first(ctx):
    """As other libraries have it, and as the rules forbid."""
    model = torch.nn.Linear(4, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.utils.data.TensorDataset(torch.ones(96, 4))
    for epoch in ctx.loader(rows, batch_size=12).epochs(2):
        for (x,) in epoch:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            for number in range(3) if ctx.rank == 0 else ():
                ctx.report(number=number)


@pytest.mark.parametrize("phase", ["bucket", "left", "report", "boundary"])
def test_what_one_worker_has_reported_alone_costs_no_step(tmp_path, phase):
    doomed = with_kills(told_by_the_first, [Kill(worker=0, phase=phase, step=8)])
    result = run_local(doomed, 3, directory=tmp_path, replace=True)
    assert set(result.lost) == {0}
    assert_exactly_once(result.events, 2)
    numbers = [event.step for event in committed(result.events)]
    assert numbers == [*range(1, numbers[-1] + 1)]


@pytest.mark.fast("middle bucket", "commit round")
@pytest.mark.parametrize("place", ["forward", "middle bucket", "commit round", "between steps"])
def test_one_worker_is_killed_while_processes_read_for_all(tmp_path, place):
    run(tmp_path, [PLACES[place]], config={"num_workers": 2})


@pytest.mark.parametrize(
    "kills",
    [
        [Kill(worker=1, phase="bucket", detail=1, step=3), Kill(worker=4, phase="batch", step=3)],
        [Kill(worker=0, phase="round", detail=1, step=3), Kill(worker=3, phase="left", step=3)],
        [Kill(worker=0, phase="bucket", step=2), Kill(worker=1, phase="bucket", step=2)],
    ],
    ids=["bucket and forward", "rank 0 in and after the commit round", "the two lowest ranks"],
)
def test_two_workers_are_killed_in_one_step(tmp_path, kills):
    run(tmp_path, kills, workers=5)


@pytest.mark.fast("3-*", "5-bucket")
@pytest.mark.parametrize("phase", ["enter", "meet", "bucket", "round", "left"])
@pytest.mark.parametrize("workers", [3, 5])
def test_a_second_worker_is_killed_during_recovery(tmp_path, workers, phase):
    # Phases of generation 2 are the second pass of each place, except those of the group itself.
    first = Kill(worker=1, phase="bucket", detail=1, step=3)
    again = 1 if phase == "bucket" else 0
    second = Kill(
        worker=2,
        phase=phase,
        step=3 if phase != "left" else None,
        detail=2 if phase in ("enter", "meet") else {"bucket": 1, "round": 1}.get(phase),
        after=again if phase != "left" else 3,
    )
    run(tmp_path, [first, second], workers)


def dies_before_it_is_up(ctx):
    if ctx.worker == 1:
        os.kill(os.getpid(), SIGKILL)
    train(ctx)


def test_the_others_found_the_group_without_one_that_is_killed_before_it(tmp_path):
    config = {**CONFIG, "samples": 60, "epochs": 1}
    result = run_local(dies_before_it_is_up, 3, config=config, directory=tmp_path, min_workers=2)
    assert set(result.lost) == {1}
    assert [event.world_size for event in committed(result.events)] == [2, 2]
    assert_exactly_once(result.events, 1)


def test_too_few_that_are_left_before_there_is_a_group_end_the_run(tmp_path):
    with pytest.raises(QuorumLost, match=r"worker 1 \(died\) was gone before the group"):
        run_local(dies_before_it_is_up, 2, config=CONFIG, directory=tmp_path, min_workers=2)


def test_four_of_five_are_killed_one_after_the_other(tmp_path):
    kills = [Kill(worker=w, phase="bucket", detail=1, step=1 + w) for w in range(4)]
    result = run(tmp_path, kills, workers=5)
    assert committed(result.events)[-1].world_size == 1


def test_a_segmentation_fault_is_a_loss_like_any_other(tmp_path):
    run(tmp_path, [Kill(worker=1, phase="bucket", detail=1, step=3, signal=SIGSEGV)])


def test_a_stopped_worker_is_noticed_by_its_silence(tmp_path, monkeypatch):
    hanging.only(monkeypatch, 1)
    kill = Kill(worker=1, phase="bucket", detail=1, step=3, signal=SIGSTOP)
    result = run(tmp_path, [kill], hang_timeout_s=3.0)
    assert [e.cause for e in result.events if isinstance(e, WorkerLost)] == ["silent"]


def test_batch_norm_buffers_and_accumulation_survive_kills(tmp_path):
    kills = [
        Kill(worker=1, phase="batch", step=2, after=1),  # in the middle of an accumulation window
        Kill(worker=2, phase="bucket", step=4),
    ]
    config = {"model": "convnet", "accumulate": 2, "samples": 180}
    run(tmp_path, kills, workers=4, config=config)


def joining(tmp_path, hold_step):
    """A run that is still going on when worker 3, a replacement, is up."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    return {
        "samples": 600,
        "epochs": 3,
        "model": "convnet",
        "meeting": str(meeting),
        "hold_step": hold_step,
        "hold_for": 3,
    }


def test_a_replacement_joins_at_a_boundary(tmp_path):
    kill = Kill(worker=1, phase="bucket", step=3)
    config = {**joining(tmp_path, 5), "ushers": {"3": 5}}
    result = run(tmp_path, [kill], config=config, replace=True)
    (join,) = joins(result.events)
    assert join.worker == 3
    assert join.step >= 5
    assert committed(result.events)[-1].world_size == 3


def test_a_group_below_its_minimum_finishes_the_step_and_waits(tmp_path):
    kills = [Kill(worker=1, phase="bucket", step=3), Kill(worker=0, phase="round", step=4)]
    result = run(tmp_path, kills, replace=True, min_workers=3)
    sizes = [event.world_size for event in committed(result.events)]
    assert sizes[3] == 2  # step 4 was in hand, and was finished by those left
    assert set(sizes[4:]) == {3}  # nobody went on until a replacement was in
    assert {event.worker for event in joins(result.events)} == {3, 4}


@pytest.mark.fast(
    "running-joiner copies", "running-bystander meets", "paused-joiner meets", "paused-donor copies"
)
@pytest.mark.parametrize(
    "kill",
    [
        Kill(worker=3, phase="enter"),
        Kill(worker=3, phase="meet"),
        Kill(worker=3, phase="take"),
        Kill(worker=0, phase="give", after=1),
        Kill(worker=2, phase="enter", detail=3),
        Kill(worker=2, phase="meet", detail=3),
    ],
    ids=["joiner", "joiner meets", "joiner copies", "donor copies", "bystander", "bystander meets"],
)
@pytest.mark.parametrize("min_workers", [1, 3], ids=["running", "paused"])
def test_somebody_is_killed_during_a_join(tmp_path, kill, min_workers):
    first = Kill(worker=1, phase="bucket", step=3)
    config = joining(tmp_path, 5 if min_workers == 1 else -1)
    config["ushers"] = {"3": 5} if min_workers == 1 else {}
    options = {"replace": True, "min_workers": min_workers}
    options["sign"] = Path(config["meeting"]) / "3-in"  # it is not ushered any further
    result = run(tmp_path, [first, kill], config=config, **options)
    assert min_workers == 1 or committed(result.events)[-1].world_size == 3


def train_short_of_memory(ctx):
    """The train function; worker 3 asks for more memory than there is for the State."""
    if ctx._member.me == 3:
        transfer.rooms = lambda _body: torch.empty(1 << 60, dtype=torch.uint8)
    train(ctx)


@pytest.mark.fast("in the group")
@pytest.mark.parametrize("min_workers", [1, 3], ids=["beside the group", "in the group"])
def test_a_joiner_without_memory_for_the_state_costs_itself_alone(tmp_path, min_workers):
    logs = tmp_path / "logs"
    logs.mkdir()
    config = {**CONFIG, **joining(tmp_path, 5 if min_workers == 1 else -1), "log": str(logs)}
    doomed = with_kills(train_short_of_memory, [Kill(worker=1, phase="bucket", step=3)])
    result = run_local(
        doomed,
        3,
        config=config,
        directory=tmp_path / "run",
        replace=True,
        min_workers=min_workers,
    )
    lost = [(event.worker, event.cause) for event in result.events if isinstance(event, WorkerLost)]
    assert lost == [(1, "died"), (3, "ran out of memory")]
    assert min_workers == 1 or [event.worker for event in joins(result.events)] == [4]
    assert_exactly_once(result.events, config["epochs"])
    assert_replicas_identical(logs, set(result.lost), result.events)


def test_nobody_waits_for_the_timeout_of_an_operation(tmp_path):
    """Law 4: all survivors are out of the step long before gloo would give up."""
    result = run(tmp_path, [Kill(worker=2, phase="bucket", detail=1, step=3)], workers=5)
    stalls = [event.stall_s for event in result.events if isinstance(event, Recovered)]
    assert len(stalls) == 4
    assert max(stalls) < 20  # the operation's timeout is 1800 s, that of connecting 30 s
