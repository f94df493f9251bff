"""Checkpoints that survive a death: what was accepted can be loaded, on any number of workers."""

import json
import shutil
import time
from pathlib import Path
from signal import SIGSTOP

import pytest
import torch
import torch.nn.functional as F

from elastix.config import CheckpointConfig, RestoreConfig
from elastix.data.audit import audit
from elastix.errors import ConfigError, NotFound, StoreError, TrainError
from elastix.events import (
    Reported,
    Resumed,
    RunEnded,
    StateDropped,
    StateNotStored,
    StateStored,
)
from elastix.observe import journal
from elastix.state import State
from elastix.store import Store
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests import hanging, trainables
from tests.laws import assert_exactly_once, committed

CONFIG = {"model": "wide", "samples": 240, "batch_size": 30, "epochs": 2}
EVERY_4 = CheckpointConfig(every_steps=4, keep_last=None)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def noting_states(ctx):
    """Train, and let every worker note the digest of what it has at each boundary."""
    log = Path(ctx.config["noted"])

    def look(phase, detail):
        if phase == "snapshot":
            state = ctx._member.capture()
            trainables.note(log / f"{ctx.worker}.jsonl", detail, trainables.digest(plain(state)))

    ctx.on_phase(look)
    trainables.train(ctx)


def plain(state: State) -> State:
    """Without random numbers, which are a worker's own."""
    return State({n: t for n, t in state.tensors.items() if not n.startswith("@rng")})


def run(tmp_path, kills, workers=3, checkpoint=EVERY_4, config=None, **options):
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    settings = {**CONFIG, "noted": str(logs), **(config or {})}
    doomed = with_kills(noting_states, kills)
    result = run_local(
        doomed, workers, config=settings, directory=tmp_path, checkpoint=checkpoint, **options
    )
    assert {kill.worker for kill in kills} == set(result.lost)
    assert_exactly_once(result.events, settings["epochs"])
    return result


def assert_stored_as_it_was(tmp_path, result):
    """Every State that was due is in the store, bit for bit what all workers held."""
    stored = {event.step: event.ref for event in of(StateStored, result.events)}
    last = committed(result.events)[-1].step
    assert sorted(stored) == sorted({*range(4, last + 1, 4), last})
    assert not of(StateNotStored, result.events)
    with Store(tmp_path / "store", read_only=True) as store:
        assert store.verify() == []
        for step, ref in stored.items():
            held = trainables.digest(plain(store.get(ref)))
            for worker, noted in trainables.notes(tmp_path / "logs").items():
                assert noted.get(step, held) == held, f"step {step}, worker {worker}"


@pytest.mark.fast("1", "3")
@pytest.mark.parametrize("workers", [1, 3, 5])
def test_every_state_that_was_due_is_stored_and_is_what_all_workers_held(tmp_path, workers):
    result = run(tmp_path, [], workers)
    assert_stored_as_it_was(tmp_path, result)
    with Store(tmp_path / "store", read_only=True) as store:
        tags = store.tags()
        final = tags["local/final"]
        assert final == tags["local/last"] == tags["local/step-0000000016"]
        assert store.get(final).meta["step"] == 16
    assert compare(tmp_path).relative < 1e-9


DEATHS = {
    "at the boundary, before its snapshot": [Kill(worker=1, phase="boundary", step=8)],
    "with the snapshot just begun": [Kill(worker=1, phase="snapshot", step=8)],
    "in the forward pass": [Kill(worker=1, phase="batch", step=8)],
    "in the first bucket": [Kill(worker=0, phase="bucket", detail=0, step=8)],
    "in the commit round": [Kill(worker=2, phase="round", detail=1, step=8)],
    "after the commit": [Kill(worker=0, phase="left", detail=1, step=8)],
    "a step later": [Kill(worker=1, phase="batch", step=9)],
    "all but one": [
        Kill(worker=0, phase="snapshot", step=8),
        Kill(worker=2, phase="batch", step=8),
    ],
    "at the end": [Kill(worker=0, phase="snapshot", step=16, after=1)],
}


@pytest.mark.fast(
    "at the boundary, before its snapshot",
    "with the snapshot just begun",
    "in the commit round",
    "all but one",
    "at the end",
)
@pytest.mark.parametrize("death", DEATHS)
def test_a_checkpoint_is_completed_while_one_holder_lives(tmp_path, death):
    result = run(tmp_path, DEATHS[death])
    assert_stored_as_it_was(tmp_path, result)
    assert compare(tmp_path).relative < 1e-9


def test_a_stopped_worker_holds_up_no_checkpoint_for_ever(tmp_path, monkeypatch):
    hanging.only(monkeypatch, 1)
    kill = Kill(worker=1, phase="snapshot", step=8, signal=SIGSTOP)
    result = run(tmp_path, [kill], hang_timeout_s=2.0)
    assert_stored_as_it_was(tmp_path, result)


@pytest.mark.fast("1", "5")
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_run_goes_on_with_any_number_of_workers(tmp_path, workers):
    kills = [Kill(worker=w, phase="batch", step=10) for w in range(3)]
    doomed = with_kills(trainables.train, kills)
    with pytest.raises(TrainError):
        run_local(doomed, 3, config=CONFIG, directory=tmp_path, checkpoint=EVERY_4)
    result = run_local(
        trainables.train, workers, config=CONFIG, directory=tmp_path, checkpoint=EVERY_4
    )
    (resumed,) = of(Resumed, result.events)
    assert resumed.step in (4, 8)  # 8 was under way when everybody died
    events = list(journal.read(tmp_path / "journal.jsonl"))
    assert_exactly_once(events, CONFIG["epochs"])
    assert committed(result.events)[0].step == resumed.step + 1
    assert compare(tmp_path).relative < 1e-9


def test_waiting_for_each_checkpoint_loses_none_even_if_all_die(tmp_path):
    kills = [Kill(worker=w, phase="batch", step=8) for w in range(3)]
    waiting = CheckpointConfig(every_steps=4, wait=True)
    doomed = with_kills(trainables.train, kills)
    with pytest.raises(TrainError):
        run_local(doomed, 3, config=CONFIG, directory=tmp_path, checkpoint=waiting)
    result = run_local(trainables.train, 2, config=CONFIG, directory=tmp_path)
    assert [event.step for event in of(Resumed, result.events)] == [8]


def test_nobody_waits_for_ever_for_a_state_whose_step_only_the_dead_told(tmp_path):
    """Rank 0 dies as it leaves a step: the others wait for the store, which waits for that step."""
    waiting = CheckpointConfig(every_steps=4, keep_last=None, wait=True)
    kill = Kill(worker=0, phase="left", detail=1, step=7)
    result = run(tmp_path, [kill], checkpoint=waiting, timeout_s=40.0)
    assert_stored_as_it_was(tmp_path, result)


def slowly_copied(ctx):
    """The train function, with a copying thread that is always late."""
    from elastix.train.checkpoint import snapshot

    copy_into = snapshot.copy_into

    def slow(copy, source, *, wait):
        time.sleep(0 if wait else 0.02)
        copy_into(copy, source, wait=wait)

    snapshot.copy_into = slow
    model, optimizer, dataset = trainables.make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    log = Path(ctx.config["noted"]) / f"{ctx.worker}.jsonl"
    loader = ctx.loader(dataset, batch_size=30)
    for epoch in loader.epochs(ctx.config["epochs"]):
        for x, y in epoch:
            if ctx.config["where"] == "before a step":
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.02, 0.02)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            now = plain(ctx._member.capture())
            trainables.note(log, ctx.step, trainables.digest(now))
        for parameter in model.parameters():
            parameter.data.neg_()
        time.sleep(0.05)
        for parameter in model.parameters():
            parameter.data.neg_()


@pytest.mark.parametrize("where", ["between epochs", "before a step"])
def test_a_state_is_what_it_was_at_the_boundary_whatever_code_does_to_its_weights(tmp_path, where):
    """Other weights are tried at the end of an epoch, or clipped before a step: all by `.data`."""
    logs = tmp_path / "logs"
    logs.mkdir()
    result = run_local(
        slowly_copied,
        2,
        config={**CONFIG, "noted": str(logs), "where": where},
        directory=tmp_path,
        checkpoint=EVERY_4,
    )
    stored = {event.step: event.ref for event in of(StateStored, result.events)}
    lost = {event.step for event in of(StateNotStored, result.events)}
    assert sorted({*stored, *lost}) == [4, 8, 12, 16]
    assert lost == ({4} if where == "before a step" else set())  # then copies are made at once
    with Store(tmp_path / "store", read_only=True) as store:
        for step, ref in stored.items():
            held = trainables.digest(plain(store.get(ref)))
            assert {noted[step] for noted in trainables.notes(logs).values()} == {held}


def test_old_states_go_and_give_their_bytes_back(tmp_path):
    keep = CheckpointConfig(every_steps=1, keep_last=2)
    result = run(tmp_path, [], 2, keep, {"model": "wide"})
    dropped = [event.step for event in of(StateDropped, result.events)]
    assert dropped == list(range(1, 15))
    with Store(tmp_path / "store") as store:
        assert len(store.log()) == 2
        stats = store.stats()
        live = sum(entry.nbytes for entry in store.log())
        assert stats.physical_bytes < 1.2 * live + 4096
        assert store.verify() == []


def test_the_best_state_is_kept_beside_the_last(tmp_path):
    config = CheckpointConfig(keep_last=1, best="score", keep_best=1)
    result = run_local(
        scoring, 2, config={**CONFIG, "epochs": 4}, directory=tmp_path, checkpoint=config
    )
    assert [e.step for e in of(StateStored, result.events) if e.reason == "best"] == [8, 16]
    with Store(tmp_path / "store", read_only=True) as store:
        assert store.score("local/best") == 0.9
        assert store.get("local/best").meta["step"] == 16
        assert store.get("local/final").meta["step"] == 32
        assert len(store.log()) == 2


def scoring(ctx):
    """Reports 0.5, 0.9, 0.1, 0.2 after the four epochs."""
    model, optimizer, dataset = trainables.make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, batch_size=30)
    for epoch in loader.epochs(4):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        ctx.report(score=[0.5, 0.9, 0.1, 0.2][epoch.number])


def test_time_makes_a_state_due(tmp_path):
    result = run(tmp_path, [], 2, CheckpointConfig(every_s=0.05, keep_last=None))
    reasons = [event.reason for event in of(StateStored, result.events)]
    assert reasons[:-1]
    assert set(reasons[:-1]) == {"every_s"}
    assert compare(tmp_path).relative < 1e-9


def test_all_workers_lost_at_once_start_over_by_themselves(tmp_path):
    kills = [Kill(worker=w, phase="batch", step=10) for w in range(3)]
    doomed = with_kills(trainables.train, kills)
    result = run_local(
        doomed, 3, config=CONFIG, directory=tmp_path, checkpoint=EVERY_4, replace=True
    )
    assert {0, 1, 2} <= set(result.lost)
    assert_exactly_once(result.events, CONFIG["epochs"])
    assert [event.step for event in of(Resumed, result.events)] in ([4], [8])
    assert compare(tmp_path).relative < 1e-9


def test_all_workers_lost_before_the_first_state_begin_anew(tmp_path):
    kills = [Kill(worker=w, phase="batch", step=2) for w in range(2)]
    doomed = with_kills(trainables.train, kills)
    result = run_local(
        doomed, 2, config=CONFIG, directory=tmp_path, checkpoint=EVERY_4, replace=True
    )
    assert [event.step for event in of(Resumed, result.events)] == [0]
    assert_exactly_once(result.events, CONFIG["epochs"])
    assert compare(tmp_path).relative < 1e-9


# ------------------------------------------------------------------- going back on purpose


def test_a_run_goes_back_to_an_older_state_and_forgets_what_came_after(tmp_path):
    run(tmp_path, [], 2)
    result = run_local(
        trainables.train,
        3,
        config=CONFIG,
        directory=tmp_path,
        checkpoint=EVERY_4,
        restore=RestoreConfig(step=8),
    )
    assert [event.step for event in of(Resumed, result.events)] == [8]
    assert [event.step for event in committed(result.events)] == list(range(9, 17))
    assert_exactly_once(list(journal.read(tmp_path / "journal.jsonl")), CONFIG["epochs"])
    assert compare(tmp_path).relative < 1e-9
    with Store(tmp_path / "store") as store:
        line = [entry.meta["step"] for entry in store.log("local/last")]
    assert line == [16, 12, 8, 4]


def test_batches_are_left_out_for_good_and_nobody_misses_them(tmp_path):
    first = run(tmp_path, [], 2)
    bad = [committed(first.events)[step - 1] for step in (10, 13)]
    unwanted = {p for b in bad for p in positions(b)}
    again = run_local(
        trainables.train,
        3,
        config=CONFIG,
        directory=tmp_path,
        checkpoint=EVERY_4,
        restore=RestoreConfig(step=8, leave_out=(10, 13)),
    )
    used = {p for step in committed(again.events) for p in positions(step)}
    assert len(unwanted) == 60
    assert used == set(range(240, 480)) - unwanted
    account = audit(journal.read(tmp_path / "journal.jsonl"))
    assert account.exact, str(account)
    assert "60 left out on purpose" in str(account)
    assert compare(tmp_path).relative < 1e-9
    # A third run knows of it without being told.
    run_local(trainables.train, 2, config={**CONFIG, "epochs": 3}, directory=tmp_path)
    account = audit(journal.read(tmp_path / "journal.jsonl"))
    assert account.exact, str(account)
    assert (account.loaders[0].epochs, account.loaders[0].samples) == (3, 720 - 60)


def test_what_was_left_out_stays_so_if_the_run_is_killed_before_its_next_state(tmp_path):
    first = run(tmp_path, [], 2)
    unwanted = set(positions(committed(first.events)[9]))
    doomed = with_kills(trainables.train, [Kill(worker=w, phase="batch", step=9) for w in range(2)])
    with pytest.raises(TrainError):
        run_local(
            doomed,
            2,
            config=CONFIG,
            directory=tmp_path,
            restore=RestoreConfig(step=8, leave_out=(10,)),
        )
    result = run_local(trainables.train, 2, config=CONFIG, directory=tmp_path)
    assert [event.step for event in of(Resumed, result.events)] == [8]
    assert not unwanted & {p for step in committed(result.events) for p in positions(step)}
    assert audit(journal.read(tmp_path / "journal.jsonl")).exact


def positions(step):
    spans = [span for b in step.batches for share in b.shares.values() for span in share]
    return [p for start, stop in spans for p in range(start, stop)]


@pytest.mark.parametrize(
    ("restore", "error", "says"),
    [
        (RestoreConfig(step=7), NotFound, r"kept are \[4, 8, 12, 16\]"),
        (RestoreConfig(step=8, leave_out=(8,)), ConfigError, "older"),
        (RestoreConfig(step=8, leave_out=(99,)), ConfigError, "its last is 16"),
    ],
)
def test_going_back_where_it_cannot_is_refused_and_changes_nothing(tmp_path, restore, error, says):
    run(tmp_path, [], 2)
    before = (tmp_path / "journal.jsonl").read_bytes()
    with Store(tmp_path / "store", read_only=True) as store:
        tags = store.tags()
    with pytest.raises(error, match=says):
        run_local(trainables.train, 2, config=CONFIG, directory=tmp_path, restore=restore)
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    with Store(tmp_path / "store", read_only=True) as store:
        assert store.tags() == tags


# ------------------------------------------------------------------------------ what can fail


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path):
    """The shares cannot be written: the run goes on, and says what is missing."""
    result = run_local(
        without_room, 2, config={**CONFIG, "until": 9}, directory=tmp_path, checkpoint=EVERY_4
    )
    assert_exactly_once(result.events, CONFIG["epochs"])
    lost = of(StateNotStored, result.events)
    assert {event.step for event in lost} == {4, 8}
    assert "No space left" in lost[0].why
    assert [event.step for event in of(StateStored, result.events)] == [12, 16, 16]
    assert compare(tmp_path).relative < 1e-9


def without_room(ctx):
    """Until a step, this process cannot write a byte to a pack."""
    from elastix.store import local_packs

    write = local_packs._write_all

    def full(*args):
        if ctx.step < ctx.config["until"]:
            raise OSError(28, "No space left on device")
        write(*args)

    local_packs._write_all = full
    trainables.train(ctx)


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_no_run_ends_well_whose_store_has_gone_meanwhile(tmp_path, how):
    config = {**CONFIG, "store": str(tmp_path / "store"), "how": how, "at": 6}
    with pytest.raises(StoreError, match="was removed or moved away"):
        run_local(
            loses_its_store,
            2,
            config=config,
            directory=tmp_path,
            checkpoint=CheckpointConfig(every_steps=4, wait=True),
        )
    events = list(journal.read(tmp_path / "journal.jsonl"))
    assert [event.step for event in of(StateStored, events)] == [4]
    assert of(RunEnded, events)[-1].outcome == "failed"


def loses_its_store(ctx):
    def look(phase, detail):
        if phase == "left" and ctx.rank == 0 and ctx.step == ctx.config["at"]:
            store = Path(ctx.config["store"])
            if ctx.config["how"] == "moved":
                store.rename(store.with_name("elsewhere"))
            else:
                shutil.rmtree(store)

    ctx.on_phase(look)
    trainables.train(ctx)


def test_journal_lines_say_what_happened(tmp_path):
    run(tmp_path, [], 2)
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    stored = [line for line in lines if line["event"] == "StateStored"]
    assert {"ref", "step", "reason", "stored_bytes", "store_s", "stall_s"} <= set(stored[0])
    assert torch.tensor([line["stored_bytes"] for line in stored[:3]]).gt(0).all()


def counts_in_passing(ctx):
    """In a buffer that is in no State, and in one that is in all."""
    model = torch.nn.Linear(4, 1)
    model.register_buffer("passing", torch.zeros(()), persistent=False)
    model.register_buffer("lasting", torch.zeros(()))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
    for epoch in ctx.loader(torch.utils.data.TensorDataset(rows), batch_size=8).epochs(2):
        for (x,) in epoch:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            model.passing += 1
            model.lasting += 1
            ctx.report(passing=model.passing, lasting=model.lasting, worker=ctx.worker)


def test_buffers_that_no_state_dict_has_begin_anew_where_a_stored_state_goes_on(tmp_path):
    doomed = with_kills(counts_in_passing, [Kill(worker=0, phase="bucket", step=4)])
    checkpoint = CheckpointConfig(every_steps=1)
    result = run_local(doomed, 1, directory=tmp_path, checkpoint=checkpoint, replace=True)
    (resumed,) = of(Resumed, result.events)
    last = of(Reported, result.events)[-1].metrics
    assert last["worker"] > 0
    assert last["lasting"] == 6
    assert last["passing"] == 6 - resumed.step
