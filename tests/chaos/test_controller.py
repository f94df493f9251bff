"""The controller or the driver is killed, for real; so are all workers at once.

On a real Ray. Laws: exactly once, nothing rolled back that need not be, nobody left behind.
"""

import functools
import json
import math
import os
import resource
import signal
import textwrap
import threading
import time
from pathlib import Path

import pytest
import ray
import torch.nn.functional as F

import elastix
from elastix.events import (
    Event,
    GenerationFormed,
    Resumed,
    RunEnded,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
    StopAsked,
    WorkerLost,
    WorkerStarted,
)
from elastix.observe import journal
from elastix.testing.replay import compare
from elastix.train.on_ray import takeover
from tests import trainables
from tests.forked_scripts import Script
from tests.laws import assert_exactly_once

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"model": "mlp", "samples": 300, "batch_size": 30, "epochs": 3, "pace_s": 0.05}
EVERY_5 = elastix.CheckpointConfig(every_steps=5)


def paced(ctx):
    """Steps of a known length, so that there is time to kill something between two of them."""

    def look(phase, detail):
        if phase == "batch":
            time.sleep(ctx.config["pace_s"])

    ctx.on_phase(look)
    trainables.train(ctx)


def held(go: Path, ctx):
    """In the middle until the file is there."""
    ctx.on_phase(lambda name, _: name == "batch" and ctx.step == 3 and until(go.exists))
    trainables.train(ctx)


def starting(marks: Path, when: str, ctx):
    """Up to `prepare` while the run has no controller, or when its successor knows one of two."""
    asked = threading.Event()
    adopted = ctx._member.adopted

    def adopt(address):
        newest = adopted(address)
        if ctx.worker == 1 and when == "asked":
            until((marks / "0 calls").exists)
            time.sleep(2)  # room for a call that nobody heeds
        asked.set()
        return newest

    ctx._member.adopted = adopt
    (marks / f"{ctx.worker} is up").touch()
    assert asked.wait(180) if when == "asked" else until((marks / "dead").exists)
    (marks / f"{ctx.worker} calls").touch()
    trainables.train(ctx)


def trainer(store, train=paced, workers=2, **options):
    return elastix.ElasticTrainer(
        train,
        config=options.pop("config", CONFIG),
        scaling=elastix.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="chaos", store=str(store), **options.pop("run", {})),
        checkpoint=options.pop("checkpoint", EVERY_5),
        quiet=True,
        **options,
    )


def run_of(store):
    return takeover.run_id(str(store), "chaos")


def journal_of(store) -> Path:
    return Path(store) / "runs" / "chaos" / "journal.jsonl"


def events_of(store, kind: type[Event]) -> list:
    path = journal_of(store)
    return [e for e in journal.read(path) if isinstance(e, kind)] if path.exists() else []


def until(condition, timeout_s=180.0):
    """Wait for something that another process does, seen only from outside."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
    return found


def steps_taken(store) -> int:
    return len(events_of(store, StepCommitted))


def in_background(work):
    box = {}

    def run():
        try:
            box["result"] = work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, box


def controller_pid(store) -> int:
    controller = takeover.find_controller(run_of(store))
    return ray.get(controller.process.remote())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"


@pytest.fixture(autouse=True)
def free(request):
    """CPUs that nobody had before: Ray may have lost some to a test whose driver was killed."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster")
        FREE["CPU"] = ray.available_resources()["CPU"]


FREE: dict[str, float] = {}


def nobody_left(store):
    started = events_of(store, WorkerStarted)
    pids = [pid for event in started for pid in (event.pid, *(mate for _, mate in event.mates))]
    until(lambda: not any(map(alive, pids)))
    until(lambda: not takeover.find_workers(run_of(store)))
    until(lambda: not takeover.own_groups(run_of(store)))
    until(lambda: ray.available_resources()["CPU"] >= FREE["CPU"])


@pytest.mark.timeout(400)
def test_a_killed_controller_comes_back_and_nothing_is_rolled_back(cluster, tmp_path):
    thread, box = in_background(trainer(tmp_path).fit)
    until(lambda: steps_taken(tmp_path) >= 7)
    first = controller_pid(tmp_path)
    os.kill(first, signal.SIGKILL)
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    result = box["result"]
    assert result.audit.exact, str(result.audit)
    assert_exactly_once(list(result.events), CONFIG["epochs"])
    assert events_of(tmp_path, Resumed) == []
    assert events_of(tmp_path, WorkerLost) == []
    causes = [event.cause for event in events_of(tmp_path, GenerationFormed)]
    assert causes == ["start", "new controller"]
    steps = [event.step for event in events_of(tmp_path, StepCommitted)]
    assert steps == list(range(1, 31))
    assert compare(result.directory).relative < 1e-9
    stored = {event.step: event.ref for event in events_of(tmp_path, StateStored)}
    with elastix.Store(tmp_path, read_only=True) as store:
        line = store.ancestors(result.ref)
    assert line == [ref for step, ref in sorted(stored.items(), reverse=True) if step < 30]
    nobody_left(tmp_path)


def assert_nothing_was_lost(store, box):
    assert "error" not in box, repr(box.get("error"))
    assert_exactly_once(list(box["result"].events), CONFIG["epochs"])
    assert events_of(store, WorkerLost) == []
    assert sorted(event.worker for event in events_of(store, WorkerStarted)) == [0, 1]
    assert [event.cause for event in events_of(store, GenerationFormed)] == ["start"]
    nobody_left(store)


SOON = elastix.FailureConfig(start_timeout_s=100)


@pytest.mark.timeout(400)
def test_a_controller_is_killed_when_it_has_asked_ray_for_workers(cluster, tmp_path):
    thread, box = in_background(trainer(tmp_path, failure=SOON).fit)
    until(lambda: takeover.find_controller(run_of(tmp_path)))
    first = controller_pid(tmp_path)
    until(lambda: len(takeover.find_workers(run_of(tmp_path))) == 2)
    os.kill(first, signal.SIGKILL)
    thread.join(200)
    assert_nothing_was_lost(tmp_path, box)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("when", [pytest.param("dead", marks=pytest.mark.slow), "asked"])
def test_a_controller_is_killed_before_workers_are_ready(cluster, tmp_path, when):
    """They call when nobody leads the run, or when the new controller does not know them yet."""
    marks = tmp_path / "marks"
    marks.mkdir()
    train = functools.partial(starting, marks, when)
    thread, box = in_background(trainer(tmp_path, train, failure=SOON).fit)
    until(lambda: all((marks / f"{worker} is up").exists() for worker in range(2)))
    first = controller_pid(tmp_path)
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first))
    (marks / "dead").touch()
    thread.join(200)
    assert_nothing_was_lost(tmp_path, box)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_journal_that_cannot_be_written_ends_the_run_and_fit_goes_on(cluster, tmp_path):
    go = tmp_path / "go"
    thread, box = in_background(trainer(tmp_path, functools.partial(held, go)).fit)
    until(lambda: steps_taken(tmp_path) >= 3)
    room = journal_of(tmp_path).stat().st_size + 50
    resource.prlimit(controller_pid(tmp_path), resource.RLIMIT_FSIZE, (room, room))
    go.touch()
    thread.join(200)
    assert isinstance(box.get("error"), elastix.StoreError), repr(box)
    assert "journal.jsonl cannot be written" in str(box["error"])
    nobody_left(tmp_path)
    result = trainer(tmp_path, trainables.train).fit()
    assert_exactly_once(list(result.events), CONFIG["epochs"])


@pytest.mark.timeout(400)
def test_a_second_fit_of_the_run_is_refused_and_disturbs_nobody(cluster, tmp_path):
    """In another terminal, where it would start a Ray of its own, and in this process."""
    go = tmp_path / "go"
    thread, box = in_background(trainer(tmp_path, functools.partial(held, go)).fit)
    until(lambda: steps_taken(tmp_path) >= 1)
    other = start_driver(None, tmp_path, detached=False)
    with pytest.raises(elastix.Conflict, match=f"process {os.getpid()} on .* since "):
        trainer(tmp_path).fit()
    said = other.stderr.read()
    other.wait()
    assert f"Conflict: run 'chaos' of this store is being trained by process {os.getpid()}" in said
    assert "started Ray" not in other.stdout.read()
    go.touch()
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    assert_exactly_once(list(box["result"].events), CONFIG["epochs"])
    assert len(events_of(tmp_path, GenerationFormed)) == 1


@pytest.mark.timeout(400)
def test_controller_and_a_worker_are_killed_together(cluster, tmp_path):
    thread, box = in_background(trainer(tmp_path, workers=3).fit)
    until(lambda: steps_taken(tmp_path) >= 7)
    pids = {event.worker: event.pid for event in events_of(tmp_path, WorkerStarted)}
    os.kill(controller_pid(tmp_path), signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    result = box["result"]
    assert_exactly_once(list(result.events), CONFIG["epochs"])
    assert events_of(tmp_path, Resumed) == []
    assert [event.worker for event in events_of(tmp_path, WorkerLost)] == [1]
    assert compare(result.directory).relative < 1e-9
    nobody_left(tmp_path)


@pytest.mark.timeout(400)
def test_all_workers_killed_at_once_go_on_from_the_last_stored_state(cluster, tmp_path):
    thread, box = in_background(trainer(tmp_path).fit)
    until(lambda: steps_taken(tmp_path) >= 12)
    # Not each at a place of its own: the second might wait for a replacement of the first there.
    for event in events_of(tmp_path, WorkerStarted):
        os.kill(event.pid, signal.SIGKILL)
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    result = box["result"]
    assert_exactly_once(list(result.events), CONFIG["epochs"])
    (resumed,) = events_of(tmp_path, Resumed)
    assert resumed.step >= 5
    assert resumed.step % 5 == 0
    assert {event.worker for event in events_of(tmp_path, WorkerLost)} == {0, 1}
    assert compare(result.directory).relative < 1e-9
    nobody_left(tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_controller_and_all_workers_killed_at_once(cluster, tmp_path):
    thread, box = in_background(trainer(tmp_path).fit)
    until(lambda: steps_taken(tmp_path) >= 12)
    pids = [event.pid for event in events_of(tmp_path, WorkerStarted)]
    for pid in (controller_pid(tmp_path), *pids):
        os.kill(pid, signal.SIGKILL)
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    assert_exactly_once(list(box["result"].events), CONFIG["epochs"])
    assert len(events_of(tmp_path, Resumed)) == 1
    assert compare(box["result"].directory).relative < 1e-9
    nobody_left(tmp_path)


def followed(marks, stops, ctx):
    """Evaluates before its loop. Worker 3 follows the others there, and waits until they are dead.

    It does so at a boundary, or where it enters the group. They take steps until then, so that it
    can.
    """

    def look(phase, detail):
        if phase == stops and ctx.worker == 3 and (ctx.rank < 0 or phase == "enter"):
            (marks / "follows").touch()
            until((marks / "dead").exists)
        elif phase == "batch" and not (marks / "dead").exists():
            time.sleep(0.1)

    ctx.on_phase(look)
    model, optimizer, dataset = trainables.make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    ctx.evaluate(trainables.accuracy, dataset, batch_size=100)
    for epoch in ctx.loader(dataset, batch_size=30).epochs(ctx.config["epochs"]):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(("stops", "resumed"), [("boundary", 1), ("enter", 0)])
def test_controller_and_all_workers_killed_while_another_one_catches_up(
    cluster, tmp_path, stops, resumed
):
    """It is in its loop, and those that found the group anew come from the beginning.

    When it enters the group it has what that has, at the same boundary, so it goes on alone.
    """
    marks = tmp_path / "marks"
    marks.mkdir()
    train = functools.partial(followed, marks, stops)
    config = {**CONFIG, "epochs": 30}
    thread, box = in_background(trainer(tmp_path, train, workers=(2, 3), config=config).fit)
    until(lambda: steps_taken(tmp_path) >= 6)
    pids = {event.worker: event.pid for event in events_of(tmp_path, WorkerStarted)}
    os.kill(pids[2], signal.SIGKILL)
    until((marks / "follows").exists)
    doomed = controller_pid(tmp_path), pids[0], pids[1]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(alive, doomed)))
    (marks / "dead").touch()
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    assert_exactly_once(list(box["result"].events), config["epochs"])
    assert len(events_of(tmp_path, Resumed)) == resumed
    steps = [event.step for event in events_of(tmp_path, StepCommitted)]
    assert resumed or len(steps) == len(set(steps))
    nobody_left(tmp_path)


def poisoned(marks: Path, ctx):
    """A batch counts on nobody. Worker 2 comes before that, and stays below `prepare` until `go`.

    The others wait in the fourth step until it has come, and for ever after the batch.
    """
    if ctx.worker == 2:
        (marks / "comes").touch()
        until((marks / "go").exists)

    def look(phase, _):
        if phase == "batch" and ctx.worker < 2 and ctx.step in (3, 7):
            until((marks / ("comes" if ctx.step == 3 else "never")).exists)

    ctx.on_phase(look)
    model, optimizer, dataset = trainables.make(ctx.config)
    dataset.tensors[0][190] = math.nan
    model, optimizer = ctx.prepare(model, optimizer)
    for x, y in next(ctx.loader(dataset, batch_size=30, shuffle=False).epochs(1)):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.timeout(400)
def test_who_was_started_before_samples_were_left_out_does_not_found_the_group_anew(
    cluster, tmp_path
):
    """Controller and all who have the State die. It would draw the batch, and the others not."""
    marks = tmp_path / "marks"
    marks.mkdir()
    failure = elastix.FailureConfig(guard=elastix.Guard())
    options = {"failure": failure, "checkpoint": elastix.CheckpointConfig()}
    train = functools.partial(poisoned, marks)
    thread, box = in_background(trainer(tmp_path, train, workers=(1, 2), **options).fit)
    until(lambda: steps_taken(tmp_path) >= 3)
    pids = {event.worker: event.pid for event in events_of(tmp_path, WorkerStarted)}
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: steps_taken(tmp_path) >= 7)
    for pid in (controller_pid(tmp_path), pids[0]):
        os.kill(pid, signal.SIGKILL)
    until(lambda: events_of(tmp_path, Resumed))
    (marks / "go").touch()
    thread.join(200)
    assert "error" not in box, repr(box.get("error"))
    account = box["result"].audit
    assert account.exact, str(account)
    (left_out,) = account.loaders[0].left_out
    assert left_out[0] <= 190 < left_out[1] == left_out[0] + 30
    assert len(events_of(tmp_path, SamplesLeftOut)) == 1
    assert 2 not in {w for e in events_of(tmp_path, GenerationFormed) for w in e.members}
    nobody_left(tmp_path)


@pytest.mark.timeout(400)
def test_a_controller_that_is_ended_for_good_is_a_typed_error_and_leaves_nobody(cluster, tmp_path):
    thread, box = in_background(trainer(tmp_path).fit)
    until(lambda: steps_taken(tmp_path) >= 3)
    ray.kill(takeover.find_controller(run_of(tmp_path)), no_restart=True)
    thread.join(100)
    assert isinstance(box["error"], elastix.ControllerLost)
    nobody_left(tmp_path)


def heavy(table, ctx):
    """With more data in the train function than Ray sends along in a message."""
    assert len(table) == 1_000_000
    paced(ctx)


SCRIPT = """
    import functools, ray, elastix
    from tests.chaos import test_controller as chaos
    if {address!r}:
        ray.init(address={address!r}, log_to_driver=False)
    else:
        ray.init = lambda **_: print("started Ray")
    train = functools.partial(chaos.heavy, bytes(1_000_000)) if {large} else chaos.paced
    result = chaos.trainer({store!r}, train, run={{"detached": {detached}}}).fit()
    print("exact" if result.audit.exact else "NOT EXACT")
"""


def start_driver(cluster, store, detached, large=False):
    address = cluster.get_runtime_context().gcs_address if cluster is not None else ""
    code = textwrap.dedent(SCRIPT).format(
        address=address, store=str(store), detached=detached, large=large
    )
    return Script(["-c", code], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.timeout(400)
def test_a_killed_driver_takes_its_run_along_and_fit_goes_on(cluster, tmp_path):
    driver = start_driver(cluster, tmp_path, detached=False)
    until(lambda: steps_taken(tmp_path) >= 12)
    driver.kill()
    driver.wait()
    nobody_left(tmp_path)
    before = [event.step for event in events_of(tmp_path, StepCommitted)]
    assert len(before) < 30
    result = trainer(tmp_path, workers=3).fit()
    assert_exactly_once(list(result.events), CONFIG["epochs"])
    (resumed,) = events_of(tmp_path, Resumed)
    assert resumed.step >= 5
    assert compare(result.directory).relative < 1e-9


@pytest.mark.timeout(400)
def test_a_detached_run_goes_on_without_its_driver_and_fit_attaches(cluster, tmp_path, caplog):
    driver = start_driver(cluster, tmp_path, detached=True)
    until(lambda: steps_taken(tmp_path) >= 7)
    driver.kill()
    driver.wait()
    at_death = steps_taken(tmp_path)
    until(lambda: steps_taken(tmp_path) >= at_death + 3)  # on its own
    thread, box = in_background(trainer(tmp_path, run={"detached": True, "seed": 1}).fit)
    result = trainer(tmp_path, run={"detached": True}).fit()
    thread.join(200)
    assert box["result"].ref == result.ref, repr(box)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in warned if "goes on as it was started" in line]) == 1, warned
    assert_exactly_once(list(result.events), CONFIG["epochs"])
    assert events_of(tmp_path, Resumed) == []
    assert [event.cause for event in events_of(tmp_path, GenerationFormed)] == ["start"]
    assert [event.outcome for event in events_of(tmp_path, RunEnded)] == ["finished"]
    nobody_left(tmp_path)
    until(lambda: takeover.find_controller(run_of(tmp_path)) is None)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_large_train_function_outlives_its_driver_as_any_other(cluster, tmp_path):
    """The controller is killed after the driver: what it was started with must still be there."""
    driver = start_driver(cluster, tmp_path, detached=True, large=True)
    until(lambda: steps_taken(tmp_path) >= 4)
    first = controller_pid(tmp_path)
    driver.kill()
    driver.wait()
    os.kill(first, signal.SIGKILL)
    large = functools.partial(heavy, bytes(1_000_000))
    result = trainer(tmp_path, large, run={"detached": True}).fit()
    assert_exactly_once(list(result.events), CONFIG["epochs"])
    assert events_of(tmp_path, Resumed) == []
    assert [event.outcome for event in events_of(tmp_path, RunEnded)] == ["finished"]
    assert compare(result.directory).relative < 1e-9
    nobody_left(tmp_path)


def broken(_ctx):
    raise ValueError("a mistake")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_detached_run_that_has_failed_is_begun_again_and_not_attached_to(cluster, tmp_path):
    """Its controller is still there, to tell its driver."""
    with pytest.raises(elastix.WorkerFailed, match="a mistake"):
        trainer(tmp_path, broken, run={"detached": True}).fit()
    result = trainer(tmp_path, trainables.train, run={"detached": True}).fit()
    assert_exactly_once(list(result.events), CONFIG["epochs"])


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_detached_run_can_be_stopped(cluster, tmp_path):
    detached = trainer(tmp_path, run={"detached": True})
    thread, box = in_background(detached.fit)
    until(lambda: steps_taken(tmp_path) >= 7)
    detached.stop()
    thread.join(100)
    assert isinstance(box["error"], elastix.Interrupted), repr(box)
    assert events_of(tmp_path, StateStored)[-1].step >= 7
    assert [event.outcome for event in events_of(tmp_path, RunEnded)] == ["interrupted"]
    nobody_left(tmp_path)


def stopping(store, train=held, **run):
    """A detached run that is asked to stop in the middle of its fourth step; go on: `go`."""
    go = store / "go"
    detached = trainer(store, functools.partial(train, go), run={"detached": True, **run})
    thread, box = in_background(detached.fit)
    until(lambda: steps_taken(store) >= 3)
    return detached, thread, box, go


def assert_stopped(store, thread, box):
    thread.join(100)
    assert isinstance(box.get("error"), elastix.Interrupted), repr(box)
    assert [event.outcome for event in events_of(store, RunEnded)] == ["interrupted"]
    nobody_left(store)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_being_stopped_is_so_after_the_death_of_its_controller(cluster, tmp_path):
    detached, thread, box, go = stopping(tmp_path)
    detached.stop()
    until(lambda: events_of(tmp_path, StopAsked))
    os.kill(controller_pid(tmp_path), signal.SIGKILL)
    go.touch()
    assert_stopped(tmp_path, thread, box)
    stored = events_of(tmp_path, StateStored)
    assert stored[0].reason == "notice"
    result = detached.fit()
    assert [event.step for event in events_of(tmp_path, Resumed)] == [stored[-1].step]
    assert_exactly_once(list(result.events), CONFIG["epochs"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_controller_is_being_started_anew_can_be_stopped(cluster, tmp_path):
    detached, thread, box, go = stopping(tmp_path)
    os.kill(controller_pid(tmp_path), signal.SIGKILL)
    detached.stop()
    go.touch()
    assert_stopped(tmp_path, thread, box)
    assert events_of(tmp_path, StateStored)[0].reason == "notice"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_being_stopped_and_loses_all_workers_ends_and_goes_on(cluster, tmp_path):
    detached, thread, box, go = stopping(tmp_path)
    detached.stop()
    for event in events_of(tmp_path, WorkerStarted):
        os.kill(event.pid, signal.SIGKILL)
    assert_stopped(tmp_path, thread, box)
    assert events_of(tmp_path, StateStored) == []
    go.touch()
    assert_exactly_once(list(detached.fit().events), CONFIG["epochs"])


def lingering(go: Path, ctx):
    """After the last step until the file is there."""
    trainables.train(ctx)
    until(go.exists)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_stopped_when_its_last_step_is_done_has_finished(cluster, tmp_path):
    config = {**CONFIG, "samples": 270, "epochs": 1}
    train = functools.partial(lingering, tmp_path / "go")
    detached = trainer(tmp_path, train, config=config, run={"detached": True})
    thread, box = in_background(detached.fit)
    until(lambda: steps_taken(tmp_path) >= 9)
    detached.stop()
    until(lambda: events_of(tmp_path, StopAsked))
    (tmp_path / "go").touch()
    thread.join(100)
    assert "error" not in box, repr(box)
    assert_exactly_once(list(box["result"].events), 1)
    assert [event.outcome for event in events_of(tmp_path, RunEnded)] == ["finished"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_calls_fit_while_a_run_is_being_stopped_goes_on_with_it(cluster, tmp_path):
    """As a warning tells whom to do who wants another config."""
    detached, thread, box, go = stopping(tmp_path)
    detached.stop()
    again, found = in_background(detached.fit)
    go.touch()
    again.join(200)
    thread.join(100)
    assert isinstance(box.get("error"), elastix.Interrupted), repr(box)
    assert "error" not in found, repr(found)
    assert_exactly_once(list(found["result"].events), CONFIG["epochs"])
    outcomes = [event.outcome for event in events_of(tmp_path, RunEnded)]
    assert outcomes == ["interrupted", "finished"]


def test_the_journal_numbers_what_several_workers_may_send(tmp_path):
    """What a restarted controller relies on to write no event twice."""
    path = tmp_path / "journal.jsonl"
    with journal.Journal(path) as opened:
        opened.append(Resumed(step=0, ref=""))
        opened.append(Resumed(step=1, ref=""), sequence=4)
    assert [sequence for _, sequence in journal.read_numbered(path)] == [None, 4]
    assert [event.step for event in journal.read(path)] == [0, 1]
    assert json.loads(path.read_text().splitlines()[1])["serial"] == 4
