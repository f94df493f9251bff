"""Reductions through shared memory, among real processes: bits, ends and what is never touched."""

import gc
import math
import multiprocessing as mp
import os
import pickle
import random
import threading
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from elastix.comm.network import shared_memory, tree_reduction
from elastix.comm.network.shared_memory import Exchange, Peer, SharedBuffer, introduce, meet
from elastix.comm.network.tree_reduction import Root, Sharing
from tests.unit.comm.slice_sums import bits, shared_out, slice_values, tree_total

pytestmark = pytest.mark.skipif(
    not shared_memory.available(), reason="no memory can be shared here"
)
CONTEXT = mp.get_context("forkserver")


def say(line, what):
    """By value: sent as they are, tensors would be shared."""
    line.send_bytes(pickle.dumps(what))


def hear(line):
    return pickle.loads(line.recv_bytes())


def member(rank, line):  # noqa: C901 - a case an order
    """Does what it is told: see Members."""
    torch.set_num_threads(1)
    say(line, introduce())
    mates = meet(hear(line))
    say(line, len(mates))
    exchanges, rooms, tensors, reductions = {}, {}, {}, []
    while True:
        match hear(line):
            case ("enter", generation):
                exchanges[generation] = Exchange(generation, rank, mates)
            case ("enter late", generation, other, after):
                late = Late(mates[other].board, after)
                boards = [late if n == other else mate.board for n, mate in enumerate(mates)]
                seen = [
                    Peer(mate.process, board) for mate, board in zip(mates, boards, strict=True)
                ]
                exchanges[generation] = Exchange(generation, rank, seen)
            case ("seen",):
                say(line, late.seen.wait(30))
            case ("go on",):
                late.go_on.set()
            case ("count from", generation, number):
                exchanges[generation]._number = number
            case ("fill", name, tensor):
                if name not in rooms:
                    rooms[name] = SharedBuffer(tensor.nbytes)
                    tensors[name] = rooms[name].tensor(tensor.dtype)
                tensors[name].copy_(tensor)
            case ("reduce", generation, name, *how):
                begin = exchanges[generation].all_reduce
                reductions.append(begin(rooms[name], tensors[name], *how))
            case ("norm", number):
                say(line, reductions[number].norm)
            case ("tree", generation, name, *what):
                group = Side(rank, len(mates), exchanges[generation])
                rooms[name], tensors[name], reduction = over_tree(group, *what)
                reductions.append(reduction)
            case ("await", number):
                ended = reductions[number].over.wait(30)
                say(line, (ended, repr(reductions[number].error), tensors))
            case ("over", number, *within_s):
                say(line, reductions[number].over.wait(sum(within_s)))
            case ("mapped",):
                if Version(torch.__version__).release < (2, 10):
                    gc.collect()  # it leaves memory whose storage Python has seen to the collector
                maps = Path("/proc/self/maps").read_text().splitlines()
                say(line, sum(shared_memory._NAME in mapped for mapped in maps))
            case ("flush",):
                torch.set_flush_denormal(True)
            case ("stop", generation):
                exchanges[generation].stop()
                say(line, tensors)


@dataclass
class Side:
    """What a tree reduction needs of a group."""

    rank: int
    size: int
    exchange: Exchange

    def through_memory(self, room, sizes, work):
        return SimpleNamespace(reduction=self.exchange.begin(room, sizes, work))


def over_tree(side, rows, sharing, reduce, like):
    room = SharedBuffer((1 + len(rows)) * like.nbytes)
    into, *there = room.tensors(like.dtype, 1 + len(rows))
    for row, own in zip(rows, there, strict=True):
        own.copy_(row)
    begun = tree_reduction.begin(side, there, Sharing(*sharing), reduce, Root(into), room)
    return room, into, begun.pending.reduction


class Late:
    """A mate's board that one looks at late: what was waited for there is seen only when told."""

    def __init__(self, board, after):
        self._board, self._waits, self._after = board, 0, after
        self.seen, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._board, name)

    def wait(self, where, value, stopped):
        self._board.wait(where, value, stopped)
        self._waits += 1
        if self._waits == self._after:
            self._board.wait(shared_memory._SUMMED, value, stopped)  # the mate itself is through
            self.seen.set()
            self.go_on.wait(60)


class Members:
    """Processes that can see each other's memory."""

    def __init__(self, count):
        self.lines, self.processes = [], []
        for rank in range(count):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=member, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self.lines.append(here)
            self.processes.append(process)
        introductions = [self.hear(rank) for rank in range(count)]
        self.tell(introductions)
        assert [self.hear(rank) for rank in range(count)] == [count] * count

    def hear(self, rank):
        assert wait([self.lines[rank]], timeout=60), "no answer"
        return hear(self.lines[rank])

    def tell(self, order, *ranks):
        for rank in ranks or range(len(self.lines)):
            say(self.lines[rank], order)

    def fill(self, name, tensors):
        for rank, tensor in enumerate(tensors):
            self.tell(("fill", name, tensor), rank)

    def results(self, number, name):
        self.tell(("await", number))
        answers = [self.hear(rank) for rank in range(len(self.lines))]
        assert [(ended, error) for ended, error, _ in answers] == [(True, "None")] * len(answers)
        return [tensors[name] for *_, tensors in answers]


@pytest.fixture
def members():
    made = []

    def make(count):
        made.append(Members(count))
        return made[-1]

    yield make
    for group in made:
        for process in group.processes:
            process.kill()
            process.join()


def draw(dtype, count, elements):
    generator = torch.Generator().manual_seed(elements)
    if dtype.is_floating_point:
        return [torch.rand(elements, generator=generator).to(dtype) for _ in range(count)]
    return [torch.randint(0, 99, (elements,), generator=generator).to(dtype) for _ in range(count)]


def test_a_group_may_reduce_for_years(members):
    group = members(2)
    group.tell(("enter", 1))
    group.tell(("count from", 1, (1 << 32) - 2))
    for number in range(4):
        group.fill("some", [torch.full((99,), number + 1.0), torch.full((99,), 10.0)])
        group.tell(("reduce", 1, "some", True), 0)
        group.tell(("over", number, 0.2), 0)
        assert not group.hear(0), "it did not wait for the other"
        group.tell(("reduce", 1, "some", True), 1)
        assert all(bool((found == number + 11.0).all()) for found in group.results(number, "some"))


@pytest.mark.fast("3")
@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_have_the_same_sum_and_maximum(members, count):
    group = members(count)
    group.tell(("enter", 1))
    number = 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        for elements in (1, count + 1, 300_007):
            for add in (True, False):
                name = f"{dtype} {elements} {add}"
                drawn = draw(dtype, count, elements)
                group.fill(name, drawn)
                group.tell(("reduce", 1, name, add))
                results = group.results(number, name)
                number += 1
                assert all(torch.equal(result, results[0]) for result in results)
                whole = torch.stack(drawn)
                if add and dtype.is_floating_point:
                    expected = whole.double().sum(0)
                    close = 2e-2 if dtype is torch.bfloat16 else 1e-5
                    assert torch.allclose(results[0].double(), expected, rtol=close)
                else:
                    expected = whole.sum(0, dtype=dtype) if add else whole.amax(0)
                    assert torch.equal(results[0], expected)


@pytest.mark.parametrize("count", [2, 3])
def test_all_are_told_the_same_norm_of_the_sum_and_it_is_that_of_what_was_asked_for(members, count):
    group = members(count)
    group.tell(("enter", 1))
    drawn = [tensor - 0.5 for tensor in draw(torch.float32, count, 700_001)]
    cases = [(700_001, None), (500_003, None), (500_003, 600_000), (500_003, 7), (0, None)]
    for number, (measured, bad) in enumerate(cases):
        given = [tensor.clone() for tensor in drawn]
        if bad is not None:
            given[0][bad] = float("nan")
        group.fill("room", given)
        group.tell(("reduce", 1, "room", True, measured))
        results = group.results(number, "room")
        group.tell(("norm", number))
        norms = [group.hear(rank) for rank in range(count)]
        if not measured:
            assert norms == [None] * count
        elif bad is not None and bad < measured:
            assert all(math.isnan(norm) for norm in norms)
        else:
            expected = float(torch.linalg.vector_norm(results[0][:measured].double()))
            assert norms == [pytest.approx(expected, rel=1e-6)] * count
            assert len(set(norms)) == 1


def test_many_more_than_a_board_has_places_for(members):
    group = members(2)
    group.tell(("enter", 1))
    for number in range(shared_memory.MOST + 20):
        group.fill("x", [torch.full((1000,), float(number)), torch.ones(1000)])
        group.tell(("reduce", 1, "x", True))
        first, second = group.results(number, "x")
        assert torch.equal(first, torch.full((1000,), number + 1.0))
        assert torch.equal(second, first)


def test_nothing_is_written_once_it_was_stopped(members):
    """Two of three are there; the third comes when they have given up and filled anew."""
    group = members(3)
    group.tell(("enter", 1))
    group.fill("x", draw(torch.float32, 3, 500_000))
    group.tell(("reduce", 1, "x", True), 0, 1)
    anew = [torch.full((500_000,), 7.0)] * 3
    for rank in (0, 1):
        group.tell(("stop", 1), rank)
        group.hear(rank)
        group.tell(("fill", "x", anew[rank]), rank)
    group.tell(("reduce", 1, "x", True), 2)
    group.tell(("enter", 2), 0, 1)  # of which the third has not heard
    for rank in (0, 1):
        group.tell(("stop", 2), rank)
        assert torch.equal(group.hear(rank)["x"], anew[rank])
        group.tell(("over", 0), rank)
        assert group.hear(rank) is False


@pytest.mark.parametrize("after", [1, 2], ids=["before it sums", "before it copies"])
def test_what_a_peer_has_refilled_never_passes_for_a_result(members, after):
    """The peer is through with its part, leaves the generation and fills its room for the next."""
    group = members(2)
    group.tell(("enter", 1), 0)
    group.tell(("enter late", 1, 0, after), 1)
    group.fill("x", [torch.ones(100_000)] * 2)
    group.tell(("reduce", 1, "x", True))
    group.tell(("seen",), 1)
    assert group.hear(1)
    group.tell(("stop", 1), 0)
    group.hear(0)
    group.tell(("fill", "x", torch.full((100_000,), 7.0)), 0)
    group.tell(("over", 0), 0)
    group.hear(0)  # that is done
    group.tell(("go on",), 1)
    group.tell(("over", 0, 1.0), 1)
    assert not group.hear(1)


@pytest.fixture
def board():
    """Of one member, apart from this process's own."""
    introduce()
    file = os.memfd_create("board")
    os.ftruncate(file, shared_memory._PAGES)
    yield shared_memory.Board(file)
    os.close(file)


def test_who_has_left_a_generation_shows_nothing_more_of_it(board):
    """The thread that adds up goes on when the next generation has begun.

    Counters would go back, so that others would wait for ever, and its norm pass for another one.
    """
    newer = 2 << 32 | 1
    exchange = Exchange(1, 0, [Peer(os.getpid(), board)])
    check = exchange._check_still_there

    def then_left(ranks):
        check(ranks)
        exchange.stop()
        board.tell(0, 5.0)
        board.count(shared_memory._SUMMED, newer)

    exchange._check_still_there = then_left
    tensor = torch.ones(1000)
    work = shared_memory.Contribution(tensor, len(tensor), lambda *_: None, len(tensor))
    with pytest.raises(shared_memory._Stopped):
        exchange._reduce(0, [tensor.nbytes], work)
    assert board.told(0) == 5.0
    assert board._counters[shared_memory._SUMMED].value == newer


def test_whatever_goes_wrong_is_told(board):
    def add_up(part, rooms):
        raise MemoryError("no room for a sum")

    exchange = Exchange(1, 0, [Peer(os.getpid(), board)])
    room, tensor = SharedBuffer(4000), torch.ones(1000)
    work = shared_memory.Contribution(tensor, len(tensor), add_up)
    reduction = exchange.begin(room, [tensor.nbytes], work)
    assert reduction.over.wait(30)
    assert isinstance(reduction.error, MemoryError)
    exchange.stop()


def test_a_group_that_was_built_ahead_and_dropped_leaves_the_present_one_alone(members):
    group = members(2)
    group.tell(("enter", 1))
    group.tell(("enter", 2))
    for rank in (0, 1):
        group.tell(("fill", "x", torch.ones(100_000)), rank)
        group.tell(("stop", 2), rank)
        group.hear(rank)
    group.tell(("reduce", 1, "x", True))
    assert all(torch.equal(x, torch.full((100_000,), 2.0)) for x in group.results(0, "x"))


def test_who_has_not_heard_of_the_next_generation_never_ends(members):
    group = members(2)
    group.tell(("enter", 1))
    drawn = draw(torch.float32, 2, 100_000)
    group.fill("x", drawn)
    group.tell(("reduce", 1, "x", True), 0)
    group.tell(("enter", 2), 1)
    group.tell(("reduce", 2, "x", True), 1)
    group.tell(("over", 0), 0)
    assert group.hear(0) is False
    group.tell(("enter", 2), 0)
    group.fill("x", [drawn[0]])
    group.tell(("reduce", 2, "x", True), 0)
    group.tell(("await", 1), 0)
    group.tell(("await", 0), 1)
    (*_, first), (*_, second) = group.hear(0), group.hear(1)
    assert torch.equal(first["x"], drawn[0] + drawn[1])
    assert torch.equal(first["x"], second["x"])


def test_rooms_of_other_sizes_are_an_error(members):
    group = members(2)
    group.tell(("enter", 1))
    group.fill("x", [torch.ones(1000), torch.ones(2000)])
    group.tell(("reduce", 1, "x", True))
    group.tell(("await", 0))
    for rank in (0, 1):
        ended, error, _ = group.hear(rank)
        assert ended
        assert "bytes to reduce" in error


def test_a_room_is_used_again_only_when_no_tensor_refers_to_it():
    room = SharedBuffer(4000)
    assert room.free
    tensor = room.tensor(torch.float32)
    part = tensor[10:20]
    part.fill_(3.0)
    del tensor
    assert not room.free
    del part
    assert room.free
    assert room.tensor(torch.float32)[10] == 3.0


def test_rooms_that_a_mate_has_no_more_are_not_kept(members):
    group = members(2)
    group.tell(("enter", 1))
    row, held = torch.ones(1000), (frozenset([0]), frozenset([1]))
    for number in range(16):
        group.tell(("tree", 1, "x", [row], (held, 2), "sum", row))  # in a new room each time
        group.results(number, "x")
    group.tell(("mapped",))
    for rank in (0, 1):  # two boards, and rooms of this reduction, or of the one before
        assert group.hear(rank) <= 8


def test_denormal_numbers_are_flushed_if_they_are_where_the_reduction_was_begun(members):
    group = members(2)
    group.tell(("enter", 1))
    row, held = torch.full((100,), 1e-39), (frozenset([0]), frozenset([1]))
    for number, wanted in enumerate((2e-39, 0.0)):
        group.tell(("tree", 1, "x", [row], (held, 2), "sum", row))
        for result in group.results(number, "x"):
            assert torch.equal(bits(result), bits(torch.full((100,), wanted)))
        group.tell(("flush",))


def test_who_cannot_be_seen_is_no_mate(members, monkeypatch):
    mine = introduce()
    assert len(meet([mine, mine])) == 2
    assert meet([mine, ""]) == []
    assert meet([mine, mine.replace(mine[2:10], "x" * 8)]) == []  # of another host
    group = members(1)
    other = mine.replace(f" {os.getpid()},", f" {group.processes[0].pid},")
    group.processes[0].kill()
    group.processes[0].join()
    assert meet([mine, other]) == []
    monkeypatch.setenv("ELASTIX_SHARED_MEMORY", "0")
    assert introduce() == ""


@pytest.mark.fast("3")
@pytest.mark.parametrize("count", [2, 3, 5])
def test_over_a_tree_the_sum_is_the_same_to_the_last_bit_for_any_sharing(members, count):
    group = members(count)
    group.tell(("enter", 1))
    draws, number = random.Random(count), 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for length in (1, count + 1, 140_007):
            leaves = slice_values(8, length, dtype)
            for reduce in ("sum", "max"):
                wanted = tree_total(leaves, reduce)
                for _ in range(2):
                    held, rows = shared_out(leaves, count, draws, reduce)
                    name = f"{number}"
                    for rank in range(count):
                        what = rows[rank], (held, 8), reduce, wanted
                        group.tell(("tree", 1, name, *what), rank)
                    for result in group.results(number, name):
                        assert torch.equal(bits(result), bits(wanted))
                    number += 1
