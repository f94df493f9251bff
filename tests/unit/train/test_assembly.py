"""Checkpoints from shares: whoever dies when, they are completed while one holder lives."""

from hypothesis import given
from hypothesis import strategies as st

from elastix.state import TensorInfo
from elastix.store import Share
from elastix.train.checkpoint.assembly import Assembly, CheckpointId, Offer

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
    assembly.deliver(share(delivered))
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
    whole.deliver(share(NAMES))
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


def test_what_vanished_is_written_again():
    assembly = gathered(0, 1)
    assembly.orders()
    assembly.deliver(share(NAMES))
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
        assembly.deliver(share(names))
    assert assembly.complete
    assert written == NAMES
