"""Checkpoints from shares: whoever dies when, they are completed while each part has a holder."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastix.state import TensorInfo
from elastix.store import Share
from elastix.train.checkpoint.assembly import Assembly, CheckpointId, Offer, Withdrawn

MARK = CheckpointId(7)
GROUPS = (
    (("a",), 400),
    (("b", "tied to b"), 300),
    (("c",), 200),
    (("d",), 200),
    (("e",), 0),
)
NAMES = {name for names, _ in GROUPS for name in names}


def offer(members=(0, 1, 2), reason="every_steps", **options):
    return Offer(mark=MARK, reason=reason, members=members, groups=GROUPS, meta={}, **options)


def share(names):
    return Share({name: TensorInfo("float32", (), "00" * 32) for name in names})


def gathered(*workers, members=None):
    assembly = Assembly(MARK, 0.0)
    for worker in workers:
        assembly.offer(worker, offer(members or workers))
    assert assembly.gathered(0.0, 10.0)
    return assembly


def test_every_tensor_is_asked_for_once_and_the_load_is_even():
    orders = gathered(0, 1, 2).orders()
    assert sorted(name for order in orders.values() for name in order.names) == sorted(NAMES)
    bytes_of = {name: nbytes for names, nbytes in GROUPS for name in names[:1]}
    loads = [sum(bytes_of.get(name, 0) for name in order.names) for order in orders.values()]
    assert sorted(loads) == [300, 400, 400]


def test_what_is_stored_is_of_one_kind_of_processor_while_one_of_it_lives():
    """Of that of the lowest worker, which the metadata are of."""
    assembly = Assembly(MARK, 0.0)
    for worker, kind in ((0, 7), (1, 8), (2, 7)):
        assembly.offer(worker, offer(processor=kind))
    assert assembly.gathered(0.0, 1.0)
    assert set(assembly.orders()) == {0, 2}
    assembly.lost(0)
    assembly.lost(2)
    assert set(assembly.orders()) == {1}


def test_what_belongs_together_is_written_by_one_worker():
    """What it had written is written again by the next, if it is lost."""
    assembly = Assembly(MARK, 0.0)
    for worker in (0, 1, 2):
        assembly.offer(worker, offer(by_one=True))
    assert assembly.gathered(0.0, 1.0)
    (first,) = assembly.orders().values()
    assert set(first.names) == NAMES
    assembly.deliver(share(["a", "c"]), 0)
    assembly.lost(0)
    orders = assembly.orders()
    assert set(orders) == {1}
    assert set(orders[1].names) == NAMES
    assert not assembly.shares
    assembly.deliver(share(NAMES), 1)
    assert assembly.complete


def test_of_crews_it_is_written_by_the_first_worker_all_of_whose_processes_have_it():
    assembly = Assembly(MARK, 0.0)
    for holder in (0, 2, 3):  # of worker 0 the process at place 1 has none
        place = holder % 2
        assembly.offer(holder, offer((0, 1, 2, 3), by_one=True, place=place, places=2))
    assembly.lost(1)
    assert assembly.gathered(0.0, 1.0)
    assert set(assembly.orders()) <= {2, 3}


def test_nothing_of_another_worker_is_in_what_belongs_together_if_its_processes_come_late():
    members = (0, 1, 2, 3)
    late = {
        h: replace(crew_offer(h % 2, 2, members), by_one=True, meta={"of": h // 2}) for h in members
    }
    assembly = Assembly(MARK, 0.0)
    for holder in (0, 3):  # each of another worker, whose other process is not through with it
        assembly.offer(holder, late.pop(holder))
    assert assembly.gathered(10.0, 10.0)
    assert set(assembly.orders()) == {0, 3}
    assembly.deliver(share(names_of(0, 2)), 0)
    assembly.offer(2, late.pop(2))
    assert set(assembly.orders()) == {2, 3}
    assembly.offer(1, late.pop(1))
    assembly.deliver(share(names_of(1, 2)), 3)
    assembly.deliver(share(names_of(0, 2)), 0)
    assert not assembly.orders()
    assert not assembly.complete
    assembly.deliver(share(names_of(0, 2)), 2)
    assert assembly.complete
    assert len(assembly.shares) == 2
    assert assembly.chief.meta == {"of": 1}


def test_if_who_writes_what_belongs_together_is_lost_and_nobody_has_all_of_it_others_are_heard():
    """What they wrote did not count, and the checkpoint was waited for until they were lost."""
    members = (0, 1, 2, 3)
    assembly = Assembly(MARK, 0.0)
    for holder in (0, 1, 2):  # of worker 1 the process at place 1 has none
        assembly.offer(holder, replace(crew_offer(holder % 2, 2, members), by_one=True))
    assembly.lost(3)
    assert assembly.gathered(0.0, 1.0)
    assert set(assembly.orders()) == {0, 1}
    assembly.deliver(share(names_of(1, 2)), 1)
    assembly.lost(0)
    assembly.lost(1)
    assert not assembly.hopeless(0.0, 1.0)
    assert set(assembly.orders()) == {2}
    assembly.deliver(share(names_of(0, 2)), 2)
    assert assembly.complete


def test_tied_tensors_are_written_by_one_worker():
    for order in gathered(0, 1, 2, 3, 4).orders().values():
        assert ("b" in order.names) == ("tied to b" in order.names)


def test_nothing_is_asked_for_twice_while_its_writer_lives():
    assembly = gathered(0, 1)
    assert assembly.orders()
    assert assembly.orders() == {}


def test_the_offers_of_all_members_are_waited_for_but_not_for_ever():
    assembly = Assembly(MARK, 0.0)
    assembly.offer(0, offer())
    assert not assembly.gathered(9.9, 10.0)
    assembly.lost(1)
    assert not assembly.gathered(9.9, 10.0)
    assert assembly.gathered(10.0, 10.0)
    assert set(assembly.orders()) == {0}
    other = Assembly(MARK, 0.0)
    other.offer(0, offer())
    other.lost(1)
    other.offer(2, offer())
    assert other.gathered(0.1, 10.0)


def test_what_a_lost_worker_did_not_deliver_is_asked_of_the_others():
    assembly = gathered(0, 1, 2)
    first = assembly.orders()
    delivered = first[1].names[-1:]  # not one of two that are tied
    assembly.deliver(share(delivered), 0)
    assembly.lost(1)
    again = [name for order in assembly.orders().values() for name in order.names]
    assert set(again) == set(first[1].names) - set(delivered)


def test_a_worker_that_offers_again_is_asked_again():
    """A new coordinator, or one who forgot: what it was asked for may have been lost."""
    assembly = gathered(0)
    first = assembly.orders()
    assembly.offer(0, offer((0,)))
    assert assembly.orders() == first


def test_a_lost_worker_that_offers_late_is_no_holder():
    assembly = gathered(0, 1)
    assembly.lost(1)
    assembly.offer(1, offer())
    assert set(assembly.orders()) == {0}


def test_without_a_holder_it_is_hopeless_unless_all_was_delivered():
    assembly = gathered(0)
    assembly.orders()
    assembly.lost(0)
    assert assembly.hopeless(0.0, 10.0)
    whole = gathered(0)
    whole.deliver(share(NAMES), 0)
    whole.lost(0)
    assert whole.complete
    assert not whole.hopeless(0.0, 10.0)
    assert whole.chief.reason == "every_steps"


def test_it_is_not_hopeless_while_members_live_whose_offers_are_on_their_way():
    """The first to offer dies before the others have spoken: they hold the same State."""
    assembly = Assembly(MARK, 0.0)
    assembly.offer(1, offer())
    assembly.lost(1)
    assert not assembly.hopeless(0.1, 10.0)
    assert not assembly.gathered(0.1, 10.0)
    assembly.offer(0, offer())
    assembly.offer(2, offer())
    assert assembly.gathered(0.2, 10.0)
    assert {name for order in assembly.orders().values() for name in order.names} == NAMES


def test_it_is_hopeless_when_nobody_has_come_forward_in_time():
    assembly = Assembly(MARK, 0.0)
    assembly.offer(1, offer())
    assembly.lost(1)
    assert assembly.hopeless(10.0, 10.0)
    assembly.lost(0)
    assembly.lost(2)
    assert assembly.hopeless(0.1, 10.0)


def test_nobody_waits_for_the_offer_of_a_worker_that_was_lost_before_the_first():
    assembly = Assembly(MARK, 0.0, {1})
    assembly.offer(0, offer())
    assembly.offer(2, offer())
    assert assembly.gathered(0.0, 10.0)


def test_the_members_are_known_from_one_who_has_no_snapshot_too():
    """It is the first to speak, and those who have one are waited for."""
    assembly = Assembly(MARK, 0.0)
    none = Withdrawn(MARK, why="torn", reason="final", members=(0, 1, 2), stored=False)
    assembly.withdraw(1, none)
    assert (assembly.why, assembly.reason, assembly.stored) == ("torn", "final", False)
    assert not assembly.hopeless(9.9, 10.0)
    assembly.offer(0, offer((0,)))
    assert not assembly.gathered(9.9, 10.0)
    assert (assembly.reason, assembly.stored) == ("every_steps", True)
    assembly.offer(2, offer((2,)))
    assert assembly.gathered(9.9, 10.0)
    assert set(assembly.orders()) == {0, 2}


def test_what_a_lost_worker_had_in_hand_goes_to_those_who_have_least_in_theirs():
    assembly = gathered(0, 1, 2)
    first = {worker: set(order.names) for worker, order in assembly.orders().items()}
    assert first == {0: {"a"}, 1: {"b", "tied to b", "e"}, 2: {"c", "d"}}
    assembly.lost(2)  # now 0 has 400 bytes to write, and 1 has 300
    again = {worker: set(order.names) for worker, order in assembly.orders().items()}
    assert again == {1: {"c"}, 0: {"d"}}


def test_what_vanished_is_written_again():
    assembly = gathered(0, 1)
    assembly.orders()
    assembly.deliver(share(NAMES), 0)
    assembly.vanished(["c"])
    assert not assembly.complete
    assert [n for order in assembly.orders().values() for n in order.names] == ["c"]


@given(st.data())
def test_any_schedule_of_losses_completes_while_one_holder_lives(data):
    workers = list(range(data.draw(st.integers(1, 5))))
    assembly = Assembly(MARK, 0.0)
    alive = set(workers)
    in_hand: dict[int, set[str]] = {worker: set() for worker in workers}
    written: set[str] = set()
    survivor = data.draw(st.sampled_from(workers))
    for worker in data.draw(st.permutations(workers)):
        assembly.offer(worker, offer(tuple(workers)))
    assert assembly.gathered(0.0, 10.0)
    for _ in range(200):
        if assembly.complete:
            break
        for worker, order in assembly.orders().items():
            assert worker in alive
            in_hand[worker] |= set(order.names)
        busy = sorted(worker for worker in alive if in_hand[worker])
        assert busy, "nobody has anything to do, and something is missing"
        worker = data.draw(st.sampled_from(busy))
        if worker != survivor and data.draw(st.booleans()):
            alive.discard(worker)
            assembly.lost(worker)
            continue
        names = {data.draw(st.sampled_from(sorted(in_hand[worker])))}
        in_hand[worker] -= names
        written |= names
        assembly.deliver(share(names), worker)
    assert assembly.complete
    assert written == NAMES


# ------------------------------------------------------------------------ workers that are crews


def of_place(place, places):
    """A part of one tensor, what is nowhere else, and what all places have."""
    return (
        ((f"w[{place}:{place + 1}]",), 100 + place),
        ((f"own {place}", f"tied {place}"), 50),
        (("norm",), 30),
        (("count",), 0),
    )


def crew_offer(place, places, members):
    return Offer(
        mark=MARK,
        reason="every_steps",
        members=members,
        groups=of_place(place, places),
        meta={},
        place=place,
        places=places,
    )


def crews(workers, places):
    """Process p is at place p % places of worker p // places."""
    members = tuple(range(workers * places))
    assembly = Assembly(MARK, 0.0)
    for process in members:
        assembly.offer(process, crew_offer(process % places, places, members))
    assert assembly.gathered(0.0, 10.0)
    return assembly


def names_of(place, places):
    return {name for names, _ in of_place(place, places) for name in names}


def test_each_process_is_asked_for_what_it_has_and_all_of_it_is_asked_for_once():
    orders = crews(2, 3).orders()
    asked = [name for order in orders.values() for name in order.names]
    assert sorted(asked) == sorted(set().union(*(names_of(place, 3) for place in range(3))))
    for process, order in orders.items():
        assert set(order.names) <= names_of(process % 3, 3)
    assert len(orders) == 6  # nobody is idle


def test_a_place_without_a_holder_is_hopeless_however_many_others_live():
    assembly = crews(2, 2)
    orders = assembly.orders()
    assembly.lost(1)
    assert not assembly.hopeless(0.0, 10.0)
    assembly.lost(3)
    assert assembly.hopeless(0.0, 10.0)
    assert not assembly.complete
    written = crews(2, 2)
    written.deliver(share(names_of(1, 2)), 0)
    written.lost(1)
    written.lost(3)
    assert not written.hopeless(0.0, 10.0)
    written.deliver(share(names_of(0, 2)), 0)
    assert written.complete
    assert orders


def test_a_place_that_nobody_has_spoken_for_is_not_taken_for_nothing():
    """What is there nobody knows, so what the others have written is no checkpoint."""
    assembly = Assembly(MARK, 0.0)
    assembly.offer(0, crew_offer(0, 2, (0, 1)))
    assert not assembly.hopeless(9.9, 10.0)
    assembly.lost(1)
    assert assembly.gathered(0.0, 10.0)
    assembly.orders()
    assembly.deliver(share(names_of(0, 2)), 0)
    assert not assembly.complete
    assert assembly.hopeless(0.0, 10.0)


def test_any_schedule_completes_exactly_as_long_as_each_place_has_a_holder():
    ended = [any_schedule(random.Random(seed)) for seed in range(500)]
    assert 100 < sum(ended) < 400  # of both kinds there are many


def any_schedule(chance):
    """Against a naive model: what is written, and what the living hold, is all there is."""
    workers, places = chance.randint(1, 3), chance.randint(1, 4)
    members = tuple(range(workers * places))
    needed = set().union(*(names_of(place, places) for place in range(places)))
    assembly = Assembly(MARK, 0.0)
    alive, offered, in_hand, written = set(members), set(), {p: set() for p in members}, set()
    to_come = chance.sample(members, len(members))
    offered.add(to_come[-1])  # there is no assembly before somebody has
    assembly.offer(to_come[-1], crew_offer(to_come.pop() % places, places, members))
    for _ in range(400):
        reachable = written.union(*(names_of(p % places, places) for p in alive))
        assert assembly.hopeless(0.0, 10.0) == (not to_come and not needed <= reachable)
        assert assembly.complete == (not to_come and needed <= written)
        if (not to_come and not needed <= reachable) or assembly.complete:
            return assembly.complete
        if assembly.gathered(0.0, 10.0):
            for process, order in assembly.orders().items():
                assert process in offered & alive
                assert set(order.names) <= names_of(process % places, places)
                assert not set(order.names) & set().union(*in_hand.values())
                in_hand[process] |= set(order.names)
        what = chance.choices(["offer", "write", "again", "kill"], [4, 8, 1, 1])[0]
        busy = sorted(p for p in alive if in_hand[p])
        if what == "offer" or not busy:
            assert to_come or busy, "nobody has anything to do, and something is missing"
            if to_come:
                process = to_come.pop()
                if process in alive:
                    offered.add(process)
                assembly.offer(process, crew_offer(process % places, places, members))
        elif what == "write":
            process = chance.choice(busy)
            name = chance.choice(sorted(in_hand[process]))
            in_hand[process].discard(name)
            written.add(name)
            assembly.deliver(share({name}), process)
        elif what == "again":
            process = chance.choice(busy)
            in_hand[process].clear()
            assembly.offer(process, crew_offer(process % places, places, members))
        else:
            process = chance.choice(sorted(alive))
            alive.discard(process)
            to_come = [p for p in to_come if p != process]
            in_hand[process].clear()
            assembly.lost(process)
    raise AssertionError("it does not end")


def test_what_nobody_holds_any_more_is_asked_of_nobody():
    assembly = Assembly(MARK, 0.0)
    for place, group in enumerate(GROUPS[:2]):
        part = replace(offer((0, 1)), groups=(group,), place=place, places=2)
        assembly.offer(place, part)
    assert assembly.gathered(0.0, 10.0)
    assembly.lost(1)
    assert {worker: order.names for worker, order in assembly.orders().items()} == {0: ("a",)}
    assert assembly.hopeless(0.0, 10.0)
