"""The coordinator of checkpoints: verdicts and messages of workers that are gone. No processes."""

import queue
from dataclasses import replace

import pytest
import torch

from elastix.config import CheckpointConfig
from elastix.errors import ElastixError, ReplicasDiffer, StoreError
from elastix.events import StateNotStored, StateStored
from elastix.sharding import Part, Shard
from elastix.state import State
from elastix.store import Store
from elastix.train.checkpoint import coordinator, state_digests
from elastix.train.checkpoint.assembly import (
    CheckpointEnded,
    CheckpointId,
    Delivered,
    Offer,
    Order,
    Withdrawn,
)
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.checkpoint.saver import Occasion, Saver

MARK = CheckpointId(20, order=2)
TENSOR = {"w": torch.arange(4.0)}


class Run:
    """A coordinator, and what it says to workers."""

    def __init__(self, directory, parted=None, **config):
        self.sent = queue.Queue()
        self.events = []
        self.store = directory / "store"
        self.synced = []
        outlets = Outlets(
            send=lambda worker, order: self.sent.put((worker, order)),
            emit=self.events.append,
            journaled=lambda: 30,
            sync=lambda: self.synced.append(len(self.stored())),
            fail=self.events.append,
            parted=parted,
        )
        self.checkpoints = Checkpoints(
            Store(self.store), "run", CheckpointConfig(**config), outlets
        )

    def offer(self, worker, members, mark=MARK, **told):
        groups = ((("w",), 16),)
        reason, meta = "final" if mark.order == 2 else "every_steps", {"step": mark.step}
        offer = Offer(mark=mark, reason=reason, members=members, groups=groups, meta=meta, **told)
        self.checkpoints.told(worker, offer)

    def deliver(self, worker, mark=MARK):
        with Store(self.store) as store:
            self.checkpoints.told(worker, Delivered(mark, store.put_share(State(TENSOR))))

    def stored(self):
        with Store(self.store, read_only=True) as store:
            return store.log()

    def heard(self, kind):
        """The next of that kind, and to whom."""
        while True:
            worker, order = self.sent.get(timeout=20)
            if isinstance(order, kind):
                return worker, order


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.checkpoints.close()


def store(run, step, told, members=(0, 1)):
    """A State, of which these say that they hold it; the others are lost before they can."""
    mark = CheckpointId(step)
    for worker in told:
        run.offer(worker, members, mark, digests={"model": "same"} if len(members) > 1 else {})
    for worker in set(members) - set(told):
        run.checkpoints.lost(worker)
    for worker, order in [run.heard(Order) for _ in told[:1]]:
        assert order.mark == mark
        run.deliver(worker, mark)
    ended = run.heard(CheckpointEnded)[1]
    assert ended.ref is not None
    return ended.ref


def test_it_is_said_of_a_state_whether_all_were_seen_to_hold_it(run):
    store(run, 20, (0, 1))
    store(run, 21, (0,))  # the other one is lost, and what it held nobody knows
    store(run, 22, (2,), members=(2,))
    stored = [event for event in run.events if isinstance(event, StateStored)]
    assert [(event.step, event.compared) for event in stored] == [
        (20, True),
        (21, False),
        (22, True),
    ]


@pytest.mark.parametrize("order", [0, 2])
def test_who_comes_late_to_a_state_that_another_controller_has_stored_does_not_replace_it(
    run, tmp_path, order
):
    """What it holds may differ, and of what the others held nothing is known here but the State."""
    mark = CheckpointId(20, order=order)
    run.offer(0, (0, 1, 2), mark, digests={"model": "same"})
    run.offer(2, (0, 1, 2), mark, digests={"model": "same"})
    run.checkpoints.lost(1)  # it is late
    run.deliver(run.heard(Order)[0], mark)
    ref = run.heard(CheckpointEnded)[1].ref
    run.checkpoints.stop()
    run.checkpoints.store.close()
    after = Run(tmp_path)
    after.checkpoints.take_up()
    after.offer(1, (0, 1, 2), mark, digests={"model": "another"})
    for other in (0, 2):
        after.checkpoints.lost(other)
    assert after.heard(CheckpointEnded)[1].ref is None
    assert after.checkpoints.store.tags()["run/last"] == ref
    again = CheckpointId(20, 1, order)  # and all are seen to hold this
    for worker in (3, 4):
        after.offer(worker, (3, 4), again, digests={"model": "same"})
    after.deliver(after.heard(Order)[0], again)
    assert after.heard(CheckpointEnded)[1].ref is not None
    after.checkpoints.close()


def test_what_another_controller_has_stored_is_known_though_the_store_cannot_be_read(
    run, tmp_path, monkeypatch
):
    """An error would end the coordinator, and who has offered a State would wait for ever."""

    def fails():
        raise StoreError("the disk does not answer.")

    store(run, 20, (0, 1))
    run.checkpoints.stop()
    run.checkpoints.store.close()
    after = Run(tmp_path)
    after.checkpoints.take_up()
    with monkeypatch.context() as patched:
        patched.setattr(after.checkpoints.store, "tags", fails)
        after.offer(1, (0, 1), CheckpointId(20), digests={"model": "another"})
        after.checkpoints.lost(0)
        assert after.heard(CheckpointEnded)[1].ref is None
    after.checkpoints.close()


@pytest.mark.parametrize(
    ("steps", "left"), [({18, 19}, 19), ({18}, 18), ({17, 19, 20}, 20), ({17}, None), ((), None)]
)
def test_who_goes_back_to_a_state_drops_what_came_after_it(tmp_path, steps, left):
    run = Run(tmp_path, keep_last=None)
    refs = {step: store(run, step, (0, 1)) for step in (18, 19, 20)}
    run.checkpoints.give_up()
    chosen, dropped = run.checkpoints.go_back_to(steps)
    assert (chosen.step if chosen else None) == left
    assert [event.step for event in dropped] == [
        step for step in refs if left is None or step > left
    ]
    last = run.checkpoints.last()
    assert (last.ref if last else None) == refs.get(left)
    run.checkpoints.close()
    with Store(run.store, read_only=True) as kept:
        assert kept.tags().get("run/last") == refs.get(left)


def test_where_all_go_back_for_it_nothing_is_stored_or_given_up_before(tmp_path):
    """Whoever waits for its last State would be through with the run."""
    parted = queue.Queue()
    run = Run(tmp_path, parted=lambda found, error: parted.put((found, error)))
    run.offer(0, (0, 1), digests={"model": "one"})
    run.offer(1, (0, 1), digests={"model": "other"})
    found, error = parted.get(timeout=20)
    assert (found.step, found.apart) == (20, (0, 1))
    assert isinstance(error, ReplicasDiffer)
    assert run.sent.empty()
    run.checkpoints.give_up()  # all have gone back
    assert run.heard(CheckpointEnded)[1].lost
    assert not [event for event in run.events if isinstance(event, StateStored | ElastixError)]
    run.offer(2, (2,))  # and come to the same step
    run.heard(Order)
    run.checkpoints.close()


def test_where_nobody_goes_back_for_it_any_more_nobody_waits(tmp_path):
    """The run is over: it ends at once, and what was to be stored is given up for that."""
    parted = queue.Queue()
    run = Run(tmp_path, parted=lambda found, error: parted.put(error))
    run.offer(0, (0, 1), digests={"model": "one"})
    run.offer(1, (0, 1), digests={"model": "other"})
    error = parted.get(timeout=20)
    assert run.checkpoints.settle(20)
    assert run.heard(CheckpointEnded)[1].error is error
    assert [event.why for event in run.events if isinstance(event, StateNotStored)] == [str(error)]
    run.checkpoints.close()


def test_a_group_that_is_founded_anew_stores_what_the_lost_one_could_not(run):
    """All workers are lost while the State is written; the new ones come to the same step."""
    run.offer(0, (0, 1))
    run.offer(1, (0, 1))
    run.heard(Order)
    for worker in (0, 1):
        run.checkpoints.lost(worker)
    run.checkpoints.give_up()
    assert run.heard(CheckpointEnded)[1].error is not None
    run.offer(2, (2,))
    while (order := run.sent.get(timeout=20))[0] != 2:
        pass
    assert order == (2, Order(MARK, ("w",)))
    run.deliver(2)
    verdict = run.heard(CheckpointEnded)[1]
    assert verdict.error is None
    assert [event.ref for event in run.events if isinstance(event, StateStored)] == [verdict.ref]


@pytest.mark.parametrize("each", [True, False], ids=["one by one", "all at once"])
@pytest.mark.parametrize("told_first", [True, False], ids=["told first", "copied first"])
def test_a_shadow_that_goes_on_stores_what_the_lost_group_could_not(run, told_first, each):
    """It comes to the step whose State died with the group, and may have been told so."""
    run.offer(0, (0, 1))
    run.offer(1, (0, 1))
    run.heard(Order)
    for worker in (0, 1) if each else ():
        run.checkpoints.lost(worker)
    run.checkpoints.give_up()
    lost = run.heard(CheckpointEnded)[1]
    assert lost.lost
    arrived = queue.Queue()
    saver = Saver(arrived.put, lambda: Store(run.store))
    saver.listen()
    if told_first:
        saver.tell(lost)
    occasion = Occasion(mark=MARK, reason="final", members=(2,))
    saver.save(State(TENSOR, {"step": MARK.step}), occasion, ())
    offer = arrived.get(timeout=20)
    if not told_first:
        saver.tell(lost)
    run.checkpoints.told(2, offer)
    saver.tell(run.heard(Order)[1])
    run.checkpoints.told(2, arrived.get(timeout=20))
    saver.tell(run.heard(CheckpointEnded)[1])
    assert saver.wait(MARK).ref is not None
    saver.close()
    kinds = [type(event) for event in run.events]
    assert kinds.count(StateNotStored) == kinds.count(StateStored) == 1


def test_a_place_whose_mates_are_lost_does_not_wait_for_them(run):
    saver = saver_at(run, 0, 0, "final")
    run.checkpoints.lost(1)
    told = [run.heard(CheckpointEnded) for _ in range(2)]
    assert [(worker, ended.lost) for worker, ended in told] == [(None, True), (0, False)]
    for _, ended in told:
        saver.tell(ended)
    assert saver.wait(MARK).error is not None
    saver.close()


def test_a_tensor_that_the_store_cannot_hold_is_told_and_nobody_waits_for_ever(run):
    """What a store says of a State is no StoreError; the thread that writes must not end by it."""
    tensors = {"@table/rows[0:4]": torch.arange(4.0)}  # as if it were a part of another
    saver = Saver(lambda message: run.checkpoints.told(0, message), lambda: Store(run.store))
    occasion = Occasion(mark=MARK, reason="final", members=(0,))
    saver.save(State(tensors, {"step": MARK.step}), occasion, ())
    saver.tell(run.heard(Order)[1])
    saver.tell(run.heard(CheckpointEnded)[1])
    assert "reads as if it were a part of another tensor" in str(saver.wait(MARK).error)
    saver.close()
    assert [type(event) for event in run.events] == [StateNotStored]


def test_metadata_that_the_store_cannot_hold_end_the_checkpoint_and_not_the_coordinator(run):
    deep = {}
    for _ in range(200):
        deep = {"in": deep}
    for mark, meta in ((CheckpointId(20), {"@deep": deep}), (MARK, {})):
        offer = Offer(
            mark=mark,
            reason="every_steps",
            members=(0,),
            groups=((("w",), 16),),
            meta={"step": mark.step, **meta},
        )
        run.checkpoints.told(0, offer)
        run.heard(Order)
        run.deliver(0, mark)
        ended = run.heard(CheckpointEnded)[1]
        assert ("nested" in str(ended.error)) == bool(meta)
        assert (ended.ref is None) == bool(meta)


def exhausted(*_, **__):
    raise MemoryError("no room")


def test_a_commit_for_which_there_is_no_memory_ends_the_checkpoint_and_not_the_coordinator(
    run, monkeypatch
):
    with monkeypatch.context() as short:
        short.setattr(run.checkpoints.store, "put_shares", exhausted)
        run.offer(0, (0,), CheckpointId(16))
        run.heard(Order)
        run.deliver(0, CheckpointId(16))
        assert "MemoryError" in str(run.heard(CheckpointEnded)[1].error)
    run.offer(0, (0,))
    run.heard(Order)
    run.deliver(0)
    assert run.heard(CheckpointEnded)[1].ref is not None


def test_an_offer_for_which_there_is_no_memory_is_withdrawn_and_the_next_one_is_made(monkeypatch):
    arrived = queue.Queue()
    saver = Saver(arrived.put, lambda: pytest.fail("nothing is stored"))
    occasion = Occasion(mark=CheckpointId(16), reason="every_steps", members=(0, 1))
    with monkeypatch.context() as short:
        short.setattr(state_digests, "manifests", exhausted)
        saver.save(State(TENSOR, {"step": 16}), occasion, ())
        withdrawn = arrived.get(timeout=20)
    assert isinstance(withdrawn, Withdrawn)
    assert "MemoryError" in withdrawn.why
    saver.save(State(TENSOR, {"step": 20}), replace(occasion, mark=MARK), ())
    assert isinstance(arrived.get(timeout=20), Offer)
    saver.close()


def test_a_state_that_cannot_be_digested_once_it_is_stored_is_stored_all_the_same(run, monkeypatch):
    def manifest(*_):
        raise StoreError("reading failed: Input/output error.")

    monkeypatch.setattr(run.checkpoints.store, "manifest", manifest)
    meta = {"step": MARK.step, "exact": "cpu"}
    run.checkpoints.told(
        0, Offer(mark=MARK, reason="final", members=(0,), groups=((("w",), 16),), meta=meta)
    )
    run.heard(Order)
    run.deliver(0)
    ended = run.heard(CheckpointEnded)[1]
    assert ended.error is None
    (event,) = run.events
    assert (event.ref, event.digest) == (ended.ref, "")


def test_what_a_dead_worker_offered_is_not_waited_for(run):
    """Its message may come after the news of its death."""
    run.checkpoints.lost(0)
    run.offer(0, (0,))
    run.offer(1, (1,))
    assert run.heard(Order) == (1, Order(MARK, ("w",)))
    run.deliver(1)
    assert run.heard(CheckpointEnded)[1].ref is not None


def test_it_is_told_if_no_worker_has_a_snapshot_that_can_be_used(run):
    for worker in (0, 1):
        torn = Withdrawn(MARK, why="'w' has changed", reason="every_steps", members=(0, 1))
        run.checkpoints.told(worker, torn)
    assert "'w' has changed" in str(run.heard(CheckpointEnded)[1].error)
    (told,) = run.events
    assert isinstance(told, StateNotStored)
    assert (told.step, told.reason) == (MARK.step, "every_steps")


def test_one_worker_with_a_snapshot_is_enough(run):
    torn = Withdrawn(MARK, why="'w' has changed", reason="final", members=(0, 1))
    run.checkpoints.told(0, torn)
    run.offer(1, (0, 1))
    assert run.heard(Order) == (1, Order(MARK, ("w",)))
    run.deliver(1)
    assert run.heard(CheckpointEnded)[1].ref is not None


def test_what_a_run_goes_on_from_does_not_move_back(run):
    """A shadow is behind: its State of step 18 comes when the group has stored that of step 20."""
    before = CheckpointId(18)
    run.offer(0, (0,))
    run.heard(Order)
    run.deliver(0)
    last = run.heard(CheckpointEnded)[1]
    assert last.ref is not None
    run.offer(1, (1,), before)
    assert run.heard(CheckpointEnded) == (None, CheckpointEnded(before))
    with Store(run.store, read_only=True) as store:
        assert store.tags()["run/last"] == last.ref


def test_a_state_appears_after_the_journal_that_accounts_for_it_is_durable(run):
    run.offer(0, (0,))
    run.heard(Order)
    run.deliver(0)
    assert run.heard(CheckpointEnded)[1].ref is not None
    assert run.synced == [0]
    assert len(run.stored()) == 1


def saver_at(run, process, place, reason="final"):
    """What one process of a crew of two does about its half of `w`."""
    half = Shard(Part((2 * place,), (2 * place + 2,)), (4,))
    both = {"w": TENSOR["w"][2 * place : 2 * place + 2], "norm": torch.ones(3)}
    saver = Saver(lambda message: run.checkpoints.told(process, message), lambda: Store(run.store))
    occasion = Occasion(mark=MARK, reason=reason, members=(0, 1), place=place, places=2)
    saver.save(State(both, {"step": MARK.step}, parts={"w": half}), occasion, ())
    return saver


@pytest.mark.parametrize(
    ("reason", "names"),
    [("every_steps", {"w[0:2]", "w[2:4]", "norm"}), ("final", {"w", "norm"})],
)
def test_a_crew_stores_a_state_of_which_each_process_has_a_part(run, reason, names):
    """What a run leaves is whole: to the digests of one process."""
    savers = [saver_at(run, place, place, reason) for place in (0, 1)]
    while not isinstance((told := run.sent.get(timeout=20))[1], CheckpointEnded):
        savers[told[0]].tell(told[1])
    for saver in savers:
        saver.tell(told[1])
        saver.close()
    assert told[1].error is None
    with Store(run.store, read_only=True) as store:
        found = store.get("run/last")
        assert set(store.manifest("run/last").tensors) == names
        assert len(store.log()) == 1
        assert torch.equal(found.tensors["w"], TENSOR["w"])
        assert found.meta["step"] == MARK.step
    (stored,) = (event for event in run.events if isinstance(event, StateStored))
    assert stored.state_bytes == 16 + 12


def test_a_part_that_nobody_has_any_more_is_not_waited_for(run):
    savers = [saver_at(run, process, place) for process, place in ((0, 0), (1, 1))]
    run.heard(Order)
    run.checkpoints.lost(1)
    release = run.heard(CheckpointEnded)[1]
    assert "every worker that held it is lost" in str(release.error)
    for saver in savers:
        saver.tell(release)
        saver.close()
    assert run.stored() == []


def test_the_best_is_another_one_when_a_state_is_taken_back(run, monkeypatch):
    """It was stored without a worker that was late, and holds something else."""
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.0)
    for mark, score in ((CheckpointId(10, 1), 0.5), (MARK, 0.9)):
        run.offer(0, (0, 1), mark, score=score, digests={"model": "a"})
        run.heard(Order)
        run.deliver(0, mark)
        assert run.heard(CheckpointEnded)[1].ref is not None
        assert run.checkpoints.settle(20)  # tags come after the verdict
    with Store(run.store) as store:
        assert store.tags()["run/best"] == store.tags()["run/last"]
    run.offer(1, (0, 1), MARK, digests={"model": "b"})
    assert run.heard(CheckpointEnded)[1].error is not None
    assert run.checkpoints.settle(20)
    with Store(run.store) as store:
        kept = store.tags()["run/step-0000000010"]
        assert store.tags() == {"run/step-0000000010": kept, "run/last": kept, "run/best": kept}


def alone(run, step):
    """A State of a group of one worker; its ref."""
    return store(run, step, (0,), members=(0,))


def parents(run, ref):
    with Store(run.store, read_only=True) as opened:
        return opened.manifest(ref).parents


def test_the_line_of_states_goes_on_where_the_run_does(tmp_path):
    """One in the place of the last one derives from what that did; after a controller's death, too.

    Both had no parents, so that nobody knew any more what the run had begun from.
    """
    run = Run(tmp_path, keep_last=None)
    first = alone(run, 10)
    second = alone(run, 20)
    assert parents(run, second) == (first,)
    run.checkpoints.close()
    again = Run(tmp_path, keep_last=None)
    again.checkpoints.go_on_from()
    instead = alone(again, 20)
    assert parents(again, instead) == (first,)
    again.checkpoints.close()
    successor = Run(tmp_path, keep_last=None)
    successor.checkpoints.take_up()
    assert parents(successor, alone(successor, 30)) == (instead,)
    successor.checkpoints.close()


def test_a_state_that_the_user_has_named_is_kept_under_that_name(tmp_path):
    """Also under a name that begins as the run's own do: it was removed with the State."""
    run = Run(tmp_path, keep_last=1)
    first = alone(run, 10)
    with Store(run.store) as opened:
        opened.tag("run/good", first)
        opened.tag("run/step-good", first)
    second = alone(run, 20)
    assert run.checkpoints.settle(20)  # States are dropped after the verdict
    run.checkpoints.close()
    with Store(run.store, read_only=True) as opened:
        own = {"run/step-0000000020": second, "run/last": second}
        assert opened.tags() == {"run/good": first, "run/step-good": first, **own}
        assert torch.equal(opened.get("run/good").tensors["w"], TENSOR["w"])
    again = Run(tmp_path)
    assert again.checkpoints.last().ref == second
    again.checkpoints.close()


def test_a_state_that_was_dropped_is_not_gone_on_from_for_a_tag_of_the_users_own(tmp_path):
    """All had gone back to the beginning as it might be wrong, and the controller was killed."""
    run = Run(tmp_path)
    first = alone(run, 10)
    with Store(run.store) as opened:
        opened.tag("run/step-10", first)
    run.checkpoints.give_up()
    assert run.checkpoints.go_back_to(())[0] is None
    run.checkpoints.close()
    successor = Run(tmp_path)
    successor.checkpoints.take_up()
    assert successor.checkpoints.last() is None
    successor.checkpoints.close()
    with Store(run.store, read_only=True) as opened:
        assert opened.tags() == {"run/step-10": first}
