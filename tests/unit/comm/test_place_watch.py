"""Where a thread stands, as another sees it."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.futures
from torch.distributed.pipelining import schedules

from elastix.comm.network.place_watch import PlaceWatch
from elastix.comm.protocol.standing import BATCHES


@contextmanager
def watched(work, counts):
    """A thread that has come to `work`, and is held there."""
    watch, there, go = PlaceWatch(), threading.Event(), threading.Event()

    def hold(*_):
        there.set()
        go.wait()

    def run():
        watch.begin(lambda: counts)
        work(watch, hold)

    thread = threading.Thread(target=run)
    thread.start()
    assert there.wait(20)
    try:
        yield watch
    finally:
        go.set()
        thread.join()


def test_one_that_moves_stands_nowhere_and_then_for_as_long_as_it_does():
    counts = {"shard": 3}
    with watched(lambda _watch, hold: hold(), counts) as watch:
        assert watch.look(10.0) is None
        assert watch.look(11.5).still_s == 1.5
        assert watch.look(14.0).still_s == 4.0
        counts["shard"] = 4
        assert watch.look(15.0) is None
        assert watch.look(15.5).still_s == 0.5
        assert watch.look(15.5).now == {"shard": 4, BATCHES: 0}


def test_what_it_had_begun_when_it_came_to_a_call_is_kept():
    counts = {"shard": 3}

    def work(watch, hold):
        watch.come(2, batch=True)
        watch.go()
        counts["shard"] = 5
        watch.come(3)
        counts["shard"] = 6
        hold()

    with watched(work, counts) as watch:
        watch.look(0.0)
        standing = watch.look(1.0)
    assert (standing.position, standing.before) == (3, {"shard": 5, BATCHES: 1})
    assert standing.now == {"shard": 6, BATCHES: 1}


def in_a_call(watch, hold):
    watch.come(3)
    hold()


def in_it_again(watch, hold):
    watch.come(3)
    watch.go()
    watch.stay()
    hold()


def after_it(watch, hold):
    watch.come(3)
    watch.go()
    hold()


def in_torch(watch, hold):
    after_it(watch, lambda: None)
    future = torch.futures.Future()
    threading.Thread(target=lambda: (hold(), future.set_result(None))).start()
    torch.futures.wait_all([future])


def in_user_code_that_torch_calls(watch, hold):
    after_it(watch, lambda: None)
    model = torch.nn.Identity()
    model.register_forward_hook(hold)
    model(torch.zeros(1))


@pytest.mark.parametrize(
    ("work", "busy"),
    [
        (in_a_call, False),
        (in_it_again, False),
        (after_it, True),
        (in_user_code_that_torch_calls, True),
    ],
)
def test_it_is_busy_where_it_is_in_no_call_that_all_places_make(work, busy):
    with watched(work, {}) as watch:
        watch.look(0.0)
        assert watch.look(1.0).busy is busy


def test_it_is_not_busy_where_torch_waits():
    with watched(in_torch, {}) as watch:
        watch.look(0.0)
        while watch.look(1.0).busy:  # it has not come there yet
            pass


@pytest.mark.parametrize("scheduled", [True, False])
def test_it_is_seen_whether_it_waits_in_a_schedule(scheduled):
    """Rather than for something that torch computes there."""
    sent = threading.Lock()
    sent.acquire()

    def work(watch, hold):
        watch.come(3)
        watch.go()
        threading.Thread(target=lambda: (hold(), sent.release())).start()
        if scheduled:
            schedules._wait_batch_p2p([SimpleNamespace(wait=sent.acquire)])
        else:
            sent.acquire()

    with watched(work, {}) as watch:
        watch.look(0.0)
        while (stands := watch.look(1.0)) is None or stands.busy is scheduled:
            pass  # it has not come there yet
        assert (stands.scheduled, stands.inside) == (scheduled, False)


def test_one_between_which_and_others_something_travels_moves():
    carried = [10, 10, None, 10, 12, 12]  # it is not asked while it moves anyhow
    watch, there, go = PlaceWatch(), threading.Event(), threading.Event()

    def run():
        watch.begin(dict, lambda: carried.pop(0))
        there.set()
        go.wait()

    thread = threading.Thread(target=run)
    thread.start()
    assert there.wait(20)
    try:
        seen = [watch.look(float(second)) for second in range(7)]
    finally:
        go.set()
        thread.join()
    assert [stands and stands.still_s for stands in seen] == [
        None,
        None,
        1.0,
        None,
        None,
        None,
        1.0,
    ]


def test_the_line_of_user_code_is_told():
    with watched(after_it, {}) as watch:
        watch.look(0.0)
        where = watch.look(1.0).where
    assert where.startswith("line ")
    assert where.count(" of test_place_watch.py") == 2  # the innermost, in the first


def test_nobody_is_watched_before_somebody_asks_for_it():
    watch = PlaceWatch()
    watch.come(3)
    assert watch.look(0.0) is None
    assert watch.look(1.0) is None
