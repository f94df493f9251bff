"""Which trial goes where, by memory: laws over random schedules, and what follows from them."""

import random

import pytest

from elastix.search.executors.packer import Experience, Packer, Reserve, more, quantile

SEEDS = range(60)


class World:
    """Hosts with seats, trials that come and go, and true peaks that nobody knows beforehand."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.packer = Packer()
        self.hosts = {}
        self.seats = {}
        self.running = {}
        for host in range(self.random.randint(1, 3)):
            capacity = self.random.randint(50, 400)
            for _ in range(self.random.randint(1, 4)):
                self.enter(f"host {host}", capacity)

    def enter(self, host, capacity):
        number = len(self.seats)
        idle = self.random.randint(1, 12)
        self.seats[number] = (host, idle)
        self.packer.enter(number, host, idle=idle, capacity=capacity, expected=2)
        self.hosts.setdefault(host, capacity)

    def check(self):
        for used, capacity in self.packer.used.values():
            assert used <= capacity
        for host in self.packer.used:
            seats = [n for n, (name, _) in self.seats.items() if name == host]
            held = {n: [p for p in self.running.values() if p.seat == n] for n in seats}
            used = sum(max([self.seats[n][1], *(p.reserved for p in held[n])]) for n in seats)
            assert used == self.packer.used[host][0]

    def place(self, depth=1):
        placed = self.packer.place(depth)
        for each in placed:
            assert each.trial not in self.running
            self.running[each.trial] = each
        self.check()
        return placed

    def end(self):
        trial = self.random.choice(list(self.running))
        self.packer.end(trial)
        return self.running.pop(trial)

    def most(self):
        """What the largest host can give to one trial, from what was entered."""
        found = []
        for host in {name for name, _ in self.seats.values()}:
            idle = [held for name, held in self.seats.values() if name == host]
            capacity = self.packer.used[host][1]
            found.append(capacity - sum(idle) + min(idle))
        return max(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_host_promises_more_than_it_has_and_everybody_gets_a_seat(seed):
    world = World(seed)
    depth = world.random.choice([1, 1, 2])
    trials = 40
    for trial in range(trials):
        world.packer.wait(trial, world.random.choice([0, world.random.randint(1, 600)]))
        world.place(depth)
        if world.running and world.random.random() < 0.5:
            world.end()
            world.place(depth)
    for _ in range(trials):
        if world.running:
            world.end()
        world.place(depth)
    assert not world.packer.waiting, "a trial waits for ever"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_to_memory_unless_it_had_the_largest_host_alone(seed):
    """The loop's rule for a starved trial with the packer's placements, against true peaks."""
    world = World(seed)
    peaks = {trial: world.random.choice([5, 40, 90, 200, 500]) for trial in range(25)}
    lost, scored = set(), set()
    for trial in peaks:
        world.packer.wait(trial, world.random.choice([0, 0, 10]))
    for _ in range(2000):
        world.place()
        if not world.running:
            break
        ended = world.end()
        if peaks[ended.trial] <= ended.reserved:
            scored.add(ended.trial)
        elif ended.alone:
            lost.add(ended.trial)
        else:
            world.packer.wait(ended.trial, more(ended.reserved, peak=ended.reserved))
    assert scored | lost == set(peaks)
    most = world.most()
    assert lost == {trial for trial, peak in peaks.items() if peak > most}


@pytest.mark.parametrize("seed", range(10))
def test_the_same_calls_give_the_same_placements(seed):
    def told():
        world = World(seed)
        found = []
        for trial in range(30):
            world.packer.wait(trial, world.random.choice([0, world.random.randint(1, 500)]))
            found += world.place()
            if world.running and world.random.random() < 0.6:
                found.append(world.end())
        return found

    assert told() == told()


def two_hosts():
    packer = Packer()
    for seat, (host, capacity) in enumerate([("large", 100), ("large", 100), ("small", 60)]):
        packer.enter(seat, host, idle=1, capacity=capacity)
    return packer


def test_it_goes_where_least_is_left():
    packer = two_hosts()
    packer.wait(1, 50)
    assert [(p.seat, p.reserved) for p in packer.place()] == [(2, 50)]
    packer.wait(2, 50)
    assert [(p.seat, p.alone) for p in packer.place()] == [(0, False)]


def test_one_that_waits_for_a_host_is_not_overtaken_there():
    packer = two_hosts()
    packer.wait(1, 10)
    packer.wait(2, 70)
    packer.wait(3, 10)
    assert [(p.trial, p.seat) for p in packer.place()] == [(1, 2), (2, 0), (3, 1)]
    packer.wait(4, 99)  # the whole of the large host
    packer.wait(5, 10)
    packer.end(3)
    assert packer.place() == [], "4 keeps the large host, the small one has no seat"
    packer.end(1)
    assert [(p.trial, p.seat) for p in packer.place()] == [(5, 2)]
    packer.end(2)
    (last,) = packer.place()
    assert (last.trial, last.alone) == (4, True)


def test_one_that_fits_nowhere_gets_the_largest_host_alone():
    packer = two_hosts()
    packer.wait(1, 10_000)
    (placed,) = packer.place()
    assert (placed.reserved, placed.alone) == (99, True)


def test_equal_parts_fill_a_host_and_count_seats_that_are_still_to_come():
    packer = Packer()
    packer.enter(0, "host", idle=1, capacity=90, expected=3)
    packer.wait(0, 0)
    assert packer.place()[0].reserved == 30
    for seat in (1, 2):
        packer.enter(seat, "host", idle=1, capacity=90, expected=3)
        packer.wait(seat, 0)
    assert len(packer.place()) == 2
    assert packer.used == {"host": (90, 90)}


def test_a_seat_that_leaves_gives_back_what_it_held_and_its_host_with_the_last():
    packer = two_hosts()
    packer.wait(1, 60)
    assert packer.place()[0].seat == 2
    packer.wait(2, 99)
    packer.wait(3, 99)
    packer.place()
    packer.leave(2)
    packer.leave(0)
    assert packer.used == {"large": (1, 100)}
    packer.leave(1)
    assert packer.used == {}
    assert packer.place() == []
    assert list(packer.waiting) == [3]


def test_seats_that_hold_more_than_their_host_has_still_run_something():
    packer = Packer()
    for seat in range(2):
        packer.enter(seat, "host", idle=80, capacity=100)
    packer.wait(1, 500)
    assert packer.place()[0].alone


def test_a_reservation_is_doubled_and_above_the_peak():
    assert more(100, peak=0) == 200
    assert more(100, peak=180) == 270
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.95) == 1.0


MIB = 1 << 20


def test_expectations_follow_what_was_seen():
    found = Experience()
    for _ in range(4):
        found.learn(predicted=84 * MIB, base=300 * MIB, peak=500 * MIB)
    assert found.expect(84 * MIB) is None, "too few"
    found.learn(predicted=0, base=0, peak=9 * MIB)
    assert found.expect(84 * MIB) is None, "no prediction, nothing learned"
    found.learn(predicted=84 * MIB, base=300 * MIB, peak=500 * MIB)
    assert found.expect(84 * MIB) == pytest.approx(200 * MIB)
    assert found.expect(184 * MIB) == pytest.approx(400 * MIB), "no line yet: by the constant"


def test_a_line_is_found_and_the_quantile_is_about_it():
    found = Experience()
    for step, off in enumerate([0.9, 1.0, 1.0, 1.0, 1.1] * 20):
        predicted = (1 + step) * MIB
        found.learn(
            predicted=predicted, base=MIB, peak=MIB + round(off * (2 * predicted + 5 * MIB))
        )
    for predicted in (3 * MIB, 400 * MIB):
        line = 2 * predicted + 5 * MIB
        assert found.expect(predicted, 0.5) == pytest.approx(line, rel=0.05)
        assert found.expect(predicted, 0.95) == pytest.approx(1.1 * line, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_seen_an_expectation_is_some_bytes(seed):
    draw = random.Random(seed)
    found = Experience()
    for _ in range(draw.randint(5, 30)):
        base, peak = draw.randint(0, 9), draw.choice([1, 5, 10 ** draw.randint(1, 12)])
        found.learn(predicted=draw.choice([1, 7, 10**9]), base=base, peak=peak)
    for predicted in (1, 10**6, 10**12):
        low, high = (found.expect(predicted, share) for share in (0.5, 0.95))
        assert 0 <= low <= high


def test_what_is_reserved_for_a_trial():
    assert Reserve(None).bytes_for(5, idle=1) == 0
    assert Reserve(700).bytes_for(5, idle=1) == 700
    learned = Reserve("auto")
    assert learned.bytes_for(0, idle=10) == 0, "nothing is known yet: an equal part"
    for peak in range(100, 200):
        learned.learn(predicted=0, base=10, peak=peak)
    assert learned.bytes_for(0, idle=10) == 194
    for _ in range(200):
        learned.learn(predicted=4 << 20, base=10, peak=10 + (40 << 20))
    assert learned.bytes_for(4 << 20, idle=10) == 10 + (40 << 20)


def test_who_waits_is_not_sent_from_host_to_host():
    """As long as it waits, those behind it come to the other host, however that one stands."""
    packer = Packer()
    for seat, host in enumerate("aabb"):
        packer.enter(seat, host, idle=1, capacity=100)
    for trial, wanted in enumerate([20, 30, 60, 5]):
        packer.wait(trial, wanted)
    assert [placed.seat for placed in packer.place()] == [0, 1, 2, 3]
    packer.wait(4, 99)
    assert packer.place() == []  # a is kept: 50 bytes are in use there, 65 on b
    packer.end(2)  # now it is 6 on b
    packer.end(0)
    packer.wait(5, 10)
    assert [(placed.trial, placed.seat) for placed in packer.place()] == [(5, 2)]
    packer.end(1)
    assert [(placed.trial, placed.seat) for placed in packer.place()] == [(4, 0)]


def test_one_trial_can_have_all_but_what_other_seats_hold():
    packer = Packer()
    for seat, idle in enumerate([10, 1, 5]):
        packer.enter(seat, "host", idle=idle, capacity=100)
    packer.wait(0, 1000)
    (placed,) = packer.place()
    assert (placed.seat, placed.reserved, placed.alone) == (1, 85, True)


def test_equal_parts_count_all_seats_that_are_there():
    packer = Packer()
    for seat in range(3):
        packer.enter(seat, "host", idle=1, capacity=90, expected=1)
    packer.wait(0, 0)
    assert packer.place()[0].reserved == 30
