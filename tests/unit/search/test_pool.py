"""What the pool makes of what its workers say. No Ray: the answers are made up."""

import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from elastix.config import ScalingConfig
from elastix.errors import ConfigError, OtherCode, SearchError
from elastix.events import Reported
from elastix.observe.journal import Journal, Tail
from elastix.observe.ray_death_messages import GroupDeaths
from elastix.observe.sealed_lines import seal
from elastix.search.executors import pool as pool_module
from elastix.search.executors.executor import Ended, EndedKind, Work, WorkReport
from elastix.search.executors.failing_gpus import FailingGpus
from elastix.search.executors.group_worker import journal_of
from elastix.search.executors.in_process import execute
from elastix.search.executors.packer import Placement
from elastix.search.executors.pool import Pool, _Given, _WorkerHandle
from elastix.search.executors.pool_worker import Hello, packed
from elastix.train.record.provenance import installation


def hello(node="n", **fields):
    fields = {"host": node, "installation": installation(), **fields}
    return Hello(node=node, pid=1, **fields)


def given(number, ref):
    work = Work(number=number, name=f"a-{number:05d}", config={}, seed=2)
    return _Given(ref, work, Placement(number, 0, 1, alone=True))


def test_reports_of_a_run_that_has_ended_are_no_news():
    """The trial is about to run again, and these would count among what it reports then."""
    pool, report = Pool(), WorkReport(number=7, seq=0, metrics={"score": 1.0})
    first, second = given(7, "first"), given(8, "second")
    said = hello()
    handle = _WorkerHandle(0, None, "greeting", hello=said, inhand=deque([first, second]))
    handle.asked, handle.asked_of = "asked", first
    ended = Ended(number=7, kind=EndedKind.RAISED, results={0: report.metrics})
    (told,) = pool._take(handle, "first", packed(ended))
    assert (told.number, told.kind, told.results) == (7, EndedKind.RAISED, ended.results)
    assert pool._take(handle, "asked", (1, [report])) == []
    assert (handle.asked, handle.seen) == (None, 0)
    handle.asked, handle.asked_of = "asked again", second
    later = WorkReport(number=8, seq=0, metrics={"score": 2.0})
    assert pool._take(handle, "asked again", (2, [later])) == [later]
    assert handle.seen == 2


def test_reports_of_a_run_that_began_and_ended_since_its_worker_was_asked_are_no_news():
    """The worker was idle when it was asked, and is idle again."""
    pool, report = with_workers(0), WorkReport(number=7, seq=0, metrics={"score": 1.0})
    pool._ask()
    handle = pool._handles[0]
    asked = handle.asked
    assert asked is not None
    pool.submit(Work(number=7, name="a-00007", config={}, seed=2))
    (given,) = handle.inhand
    ended = Ended(number=7, kind=EndedKind.RAISED, results={0: report.metrics})
    pool._take(handle, given.ref, packed(ended))
    assert pool._take(handle, asked, (1, [report])) == []


def test_the_pool_goes_on_where_the_journal_of_a_group_is_of_a_later_version(tmp_path):
    """Of that it asks which deaths were told, and for nothing else."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(seal(b'{"event":"Dreamt","t":3.0}', 0)[0])
    pool = with_workers(0)
    pool._handles[0].group = Tail(path), GroupDeaths(pool._deaths)
    assert pool._ask() == []
    assert pool._handles[0].asked is not None


def test_a_trial_that_waits_for_memory_is_held_back():
    pool = Pool(scaling=ScalingConfig(memory_per_worker=600))
    said = hello(idle_bytes=1, capacity_bytes=1000)
    for number in range(2):
        pool._handles[number] = _WorkerHandle(number, Deaf(), "greeting", hello=said)
        pool._packer.enter(number, "n", idle=1, capacity=1000)
    for number in (7, 8):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    assert list(pool.held_back) == [8]


def test_a_trial_that_is_queued_behind_another_has_not_started():
    """Its worker may die before, and others have it then: it is never said to run meanwhile."""
    pool = Pool()
    pool._usual_s = 0.01  # short work is queued
    said = hello(idle_bytes=1, capacity_bytes=1000)
    pool._handles[0] = _WorkerHandle(0, Deaf(), "greeting", hello=said)
    pool._packer.enter(0, "n", idle=1, capacity=1000)
    for number in (7, 8):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    assert [one.work.number for one in pool._handles[0].inhand] == [7, 8]
    assert list(pool.held_back) == [8]


def with_workers(*numbers):
    pool = Pool()
    pool._usual_s = 0.001  # what is very short is queued
    said = hello(idle_bytes=1, capacity_bytes=1000)
    for number in numbers:
        pool._handles[number] = _WorkerHandle(number, Deaf(), "greeting", hello=said)
        pool._packer.enter(number, "n", idle=1, capacity=1000)
    pool._next = 1 + max(numbers)
    return pool


def test_what_is_queued_behind_a_long_run_goes_to_an_idle_worker():
    pool = with_workers(0, 1)
    for number in range(4):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    long, short = pool._handles[0], pool._handles[1]
    assert [given.work.number for given in long.inhand] == [0, 2]
    pool._take_back()
    assert long.giving_back is None  # the other worker has work, too
    for given in [*short.inhand]:
        pool._over(short, packed(Ended(number=given.work.number, kind=EndedKind.FINISHED)))
    pool._usual_s = 1.0  # nothing would be queued any more; what is stays
    long.begun_s -= 1.0
    pool._take_back()
    queued = long.inhand[1]
    assert long.giving_back == ([queued.turn],)
    (back,) = pool._take(long, long.giving_back, [queued.turn])
    assert (back.number, back.kind) == (2, EndedKind.RETURNED)
    assert [given.work.number for given in long.inhand] == [0]
    pool.submit(queued.work)
    assert [given.work.number for given in short.inhand] == [2]


def test_what_has_begun_meanwhile_is_not_taken_back():
    pool = with_workers(0)
    for number in range(2):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    handle = pool._handles[0]
    handle.giving_back = "asked"
    assert pool._take(handle, "asked", []) == []
    assert [given.work.number for given in handle.inhand] == [0, 1]
    assert handle.giving_back is None


@pytest.mark.parametrize("first", ["its end", "that it was given back"])
def test_what_was_given_back_ends_once_whatever_is_heard_of_first(first):
    """The long run may end at that moment, and all three answers come at once."""
    pool = with_workers(0)
    for number in range(3):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    handle = pool._handles[0]
    long, *behind = handle.inhand
    handle.giving_back = "asked"
    over = pool._take(handle, long.ref, packed(Ended(number=0, kind=EndedKind.FINISHED)))
    assert [one.kind for one in over] == [EndedKind.FINISHED]
    answers = [(given.ref, b"") for given in behind]
    asked = ("asked", [given.turn for given in behind])
    ends = []
    for ref, answer in [*answers, asked] if first == "its end" else [asked, *answers]:
        ends += pool._take(handle, ref, answer)
    assert [(one.number, one.kind) for one in ends] == [
        *((1, EndedKind.RETURNED), (2, EndedKind.RETURNED))
    ]
    assert not handle.inhand
    assert pool.room == 8


def asked(monkeypatch, since_s, looked_s):
    """A pool of two workers, asked so long ago; so long ago it was looked what they have said."""
    pool, killed = with_workers(0, 1), []
    for number in range(2):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    pool._ask()
    for handle, silent in zip(pool._handles.values(), (since_s, 1.0), strict=True):
        assert handle.asked is not None
        handle.asked_s -= silent
        handle.begun_s = handle.asked_s
    pool._looked_s -= looked_s
    monkeypatch.setattr("elastix.search.executors.pool._end_silent", killed.append)
    monkeypatch.setattr("elastix.search.executors.pool._end", lambda handle: None)
    monkeypatch.setattr(pool, "_spawn", lambda: None)
    return pool, killed


def test_a_worker_that_answers_nothing_is_killed_and_its_trial_is_lost(monkeypatch):
    pool, killed = asked(monkeypatch, since_s=301.0, looked_s=1.0)
    (lost,) = pool._ask()
    assert [handle.number for handle in killed] == [0]
    assert (lost.number, lost.kind) == (0, EndedKind.LOST)
    assert (lost.worker, lost.summary) == ("", "worker 0 answered nothing for 300 s")
    assert list(pool._handles) == [1]


def test_a_worker_that_is_stopped_while_idle_costs_no_trial(monkeypatch):
    """It did not begin: else a trial that meets one after the other would be given up."""
    pool, killed = with_workers(0), []
    monkeypatch.setattr("elastix.search.executors.pool._end_silent", killed.append)
    monkeypatch.setattr("elastix.search.executors.pool._end", lambda handle: None)
    monkeypatch.setattr(pool, "_spawn", lambda: None)
    pool._ask()
    idle = pool._handles[0]
    assert idle.asked is not None
    pool.submit(Work(number=7, name="a-00007", config={}, seed=2))
    idle.asked_s -= 301.0
    (back,) = pool._ask()
    assert (back.number, back.kind, killed) == (7, EndedKind.RETURNED, [idle])
    assert not pool._handles


@pytest.mark.parametrize(("since_s", "looked_s"), [(299.0, 1.0), (1000.0, 900.0)])
def test_a_worker_may_be_busy_and_nobody_has_answered_who_was_not_listened_to(
    monkeypatch, since_s, looked_s
):
    pool, killed = asked(monkeypatch, since_s, looked_s)
    assert pool._ask() == []
    assert pool._ask() == []
    assert (killed, list(pool._handles)) == ([], [0, 1])


def test_a_worker_that_answers_nothing_is_killed_also_where_it_is_always_looked_late(monkeypatch):
    """A searcher that takes its time keeps the loop from looking."""
    pool, killed = asked(monkeypatch, since_s=0.0, looked_s=0.0)
    for _ in range(5):
        pool._looked_s -= 160.0
        pool._handles[0].asked_s -= 160.0
        if pool._ask():
            break
    assert [handle.number for handle in killed] == [0]


class Deaf:
    """An actor that says nothing."""

    def __getattr__(self, name):
        return self

    def remote(self, *args):
        return args


def test_ctrl_c_while_workers_take_their_leave_leaves_no_worker_and_no_ray(monkeypatch):
    """In a notebook the process goes on, and would keep what they occupy."""
    pool, ended = with_workers(0, 1), []
    pool._owns_ray = True

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("elastix.search.executors.pool.ray.wait", interrupted)
    monkeypatch.setattr(
        "elastix.search.executors.pool._end", lambda handle: ended.append(handle.number)
    )
    monkeypatch.setattr("elastix.search.executors.pool.let_go_of_ray", lambda: ended.append("ray"))
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert ended == [0, 1, "ray"]
    pool.close()
    assert ended == [0, 1, "ray"]


def nodes(*names):
    """As Ray lists them, each with a CPU."""
    return [{"Alive": True, "NodeID": name, "Resources": {"CPU": 1.0}} for name in names]


HERE = installation()
OTHER = replace(HERE, version="9", digest="other")


@pytest.fixture
def asked_of_ray(monkeypatch):
    """With which options Ray was asked for workers, which say nothing; two nodes are there."""
    found = []

    class Class:
        def options(self, **options):
            found.append(options)
            return self

        def remote(self, *args):
            return Deaf()

    monkeypatch.setattr("elastix.search.executors.pool.as_actor", lambda *_, **__: Class())
    monkeypatch.setattr("elastix.search.executors.pool._end", lambda handle: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes("n", "other"))
    return found


def turn_away(pool, number, node="other"):
    handle = pool._handles[number] = _WorkerHandle(number, Deaf(), f"greeting {number}")
    said = Hello(node=node, pid=1, host=node, installation=OTHER)
    return pool._take(handle, handle.greeting, said)


def test_a_worker_with_other_code_is_given_nothing_and_nobody_is_started_there(
    asked_of_ray, caplog
):
    pool = with_workers(0)
    for number in (1, 2):
        assert turn_away(pool, number) == []
    assert list(pool._handles) == [0]
    assert pool.room == 8  # of the one that is left
    assert caplog.text.count("node other (of worker 1) has elastix 9") == 1
    pool._recruit()
    assert asked_of_ray == []  # the other node has room for no second one
    pool._parallel, pool._recruited_s = 2, 0.0
    pool._recruit()
    (options,) = asked_of_ray
    assert options["label_selector"] == {"ray.io/node-id": "!in(other)"}
    pool._check_start()  # it goes on


def test_if_all_nodes_have_other_code_the_pool_says_so_at_once(asked_of_ray):
    pool = Pool()
    pool._opened_s = time.monotonic()
    turn_away(pool, 0)
    pool._check_start()  # a worker may come on the other node
    turn_away(pool, 1, node="n")
    with pytest.raises(OtherCode, match=r"node n \(of worker 1\) has elastix 9"):
        pool._check_start()


def test_where_each_node_that_comes_has_other_code_no_more_are_asked_for(asked_of_ray):
    pool = with_workers(0)
    pool._parallel = 3
    for tried in range(8):
        assert pool._wanted() == 3, tried
        turn_away(pool, 1, node=f"new {tried}")
    assert pool._wanted() == 2  # there is room for that


def test_who_waits_for_room_is_not_replaced_and_who_may_be_stopped_is(asked_of_ray):
    """Nobody knows which of the two it is, but where there is room nobody has to wait."""
    pool = with_workers(0)
    pool._parallel = 3
    pool._handles[1] = _WorkerHandle(1, Deaf(), "greeting")
    pool._check_start()
    assert list(pool._handles) == [0, 1]
    pool._handles[1].awaited_s -= 301.0
    pool._refused.add("other")
    pool._check_start()
    assert list(pool._handles) == [0, 1]  # the only node has no further room
    pool._refused.nodes.clear()
    pool._handles[1].awaited_s -= 301.0
    pool._check_start()
    assert list(pool._handles) == [0]
    pool._recruited_s = 0.0
    pool._recruit()
    assert len(asked_of_ray) == 2


def test_a_worker_whose_gpu_has_failed_is_replaced_and_what_it_had_in_hand_runs_elsewhere(
    asked_of_ray,
):
    pool = with_workers(0, 1)
    for number in range(3):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    failed = pool._handles[0]
    first, queued = failed.inhand
    ended = Ended(number=0, kind=EndedKind.RAISED, spent=True)
    over, back = pool._take(failed, first.ref, packed(ended))
    assert (over.number, over.kind) == (0, EndedKind.RAISED)
    assert (back.number, back.kind) == (queued.work.number, EndedKind.RETURNED)
    assert list(pool._handles) == [1, pool._next - 1]
    assert len(asked_of_ray) == 1
    pool.submit(queued.work)
    assert [given.work.number for given in pool._handles[1].inhand] == [1, 2]


@pytest.mark.parametrize(("kind", "learned"), [("finished", [100.0]), ("raised", []), ("lost", [])])
def test_where_a_gpu_failed_nothing_is_learned_of_what_trials_need(kind, learned):
    """It may have failed at once. Others would get too little memory, and starve."""
    pool = with_workers(0)
    pool.submit(Work(number=7, name="a-00007", config={}, seed=2))
    ended = Ended(number=7, kind=EndedKind(kind), peak_bytes=100, base_bytes=1)
    pool._over(pool._handles[0], packed(ended))
    assert list(pool._reserve._peaks) == learned


def test_more_memory_for_each_trial_than_any_host_has_is_refused(monkeypatch):
    """Else one trial after the other would run alone, and nobody would know why."""
    monkeypatch.setattr(ray, "nodes", lambda: nodes("a", "b"))
    monkeypatch.setattr("elastix.search.executors.pool.fit_on_nodes", lambda *_: 3)

    def welcomed(wanted):
        pool = Pool(scaling=ScalingConfig(memory_per_worker=wanted))
        for number in range(3):
            pool._handles[number] = _WorkerHandle(number, Deaf(), "greeting")
        for number, (node, room) in enumerate([("a", 500), ("b", 1000)]):
            said = hello(node, capacity_bytes=room)
            pool._welcome(pool._handles[number], said)
        return pool

    assert welcomed(1000).room == 2
    with pytest.raises(ConfigError, match=r"memory_per_worker=1001 .* 1000 bytes"):
        welcomed(1001)


def test_work_whose_answer_was_lost_is_run_again():
    """A long answer stays on the node that gave it until it is fetched."""
    pool = Pool()
    said = hello()
    handle = _WorkerHandle(0, None, "greeting", hello=said, inhand=deque([given(7, "first")]))
    (told,) = pool._take(handle, "first", ray.exceptions.WorkerCrashedError())
    assert (told.number, told.kind) == (7, EndedKind.LOST)
    assert not handle.inhand


def test_a_clock_that_is_set_back_does_not_make_work_short(monkeypatch):
    """Work that is short is queued eight deep."""
    pool, now = Pool(), [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])

    def train(ctx):
        now[0] -= 3600.0

    first = given(7, "first")
    said = hello()
    handle = _WorkerHandle(0, None, "greeting", hello=said, inhand=deque([first]))
    ended = execute(train, first.work, worker="w", tell=print)
    pool._take(handle, "first", packed(ended))
    assert 0.0 <= ended.finished_s - ended.started_s < 60.0
    assert pool._depth == 1


# ------------------------------------------------------------- who cannot be met, or used


def task_error(cause):
    return ray.exceptions.RayTaskError("hello", "in hello", cause)


@pytest.mark.parametrize("has", [None, OTHER])
def test_a_worker_that_cannot_say_who_it_is_is_asked_in_another_way(
    asked_of_ray, monkeypatch, caplog, has
):
    """An older one did not know what it was asked, and a campaign was given up after three."""
    monkeypatch.setattr(ray, "get", lambda asked, timeout: ("other", has))
    pool = with_workers(0)
    why = task_error(TypeError("hello() takes 2 arguments"))
    for number in range(1, 5):
        pool._handles[number] = _WorkerHandle(number, Deaf(), "greeting")
        assert pool._take(pool._handles[number], "greeting", why) == []
    assert list(pool._handles) == [0]
    assert (pool._refused.nodes, pool._deaths_at_start) == ({"other"}, 0)
    (warning,) = caplog.messages
    says = {
        None: "node other (of worker 1) has another elastix, which does not say what it is",
        OTHER: "node other (of worker 1) has elastix 9 in ",
    }
    assert warning.startswith(says[has])
    monkeypatch.setattr(ray, "nodes", lambda: nodes("other"))
    with pytest.raises(OtherCode, match="of worker 4"):
        Pool._check_start(emptied(pool))


def test_one_that_has_this_elastix_and_fails_as_it_begins_is_tried_again_on_its_node(
    asked_of_ray, monkeypatch
):
    """It may have been for once, as where there were too many threads or open files."""
    monkeypatch.setattr(ray, "get", lambda asked, timeout: ("other", HERE))
    pool = with_workers(0)
    pool._handles[1] = _WorkerHandle(1, Deaf(), "greeting")
    pool._next = 2
    why = task_error(RuntimeError("can't start new thread"))
    assert pool._take(pool._handles[1], "greeting", why) == []
    assert 1 not in pool._handles
    assert (pool._refused.nodes, pool._deaths_at_start) == (set(), 1)
    assert len(asked_of_ray) == 1


def emptied(pool):
    pool._handles.clear()
    return pool


def test_a_worker_asks_any_other_elastix_who_it_is(monkeypatch):
    """By code of its own: what that one lacks it cannot find by its name."""
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n")
    )
    sent = ray.cloudpickle.dumps(pool_module._introduction())
    monkeypatch.delattr(pool_module, "_introduction")
    assert ray.cloudpickle.loads(sent)(None) == ("n", HERE)
    monkeypatch.delattr("elastix.train.record.provenance.installation")
    assert ray.cloudpickle.loads(sent)(None) == ("n", None)


def gpu_nodes(count):
    return [{"Alive": True, "NodeID": "n", "Resources": {"CPU": 8.0, "GPU": float(count)}}]


@pytest.fixture
def on_gpus(asked_of_ray, monkeypatch):
    """A pool with a worker on each of two GPUs."""
    monkeypatch.setattr(ray, "nodes", lambda: gpu_nodes(2))
    pool = Pool(scaling=ScalingConfig(gpus_per_worker=1))
    pool._recruited_s = time.monotonic()
    for number in range(2):
        come(pool, number, number)
    pool._next = 2
    return pool


def come(pool, number, gpu, **fields):
    handle = pool._handles[number] = _WorkerHandle(number, Deaf(), f"greeting {number}")
    said = hello("n", host=f"n GPU {gpu}", idle_bytes=1, capacity_bytes=1000, **fields)
    assert pool._take(handle, handle.greeting, said) == []


def ends(pool, gpu, **fields):
    """The trial that runs there does."""
    (handle,) = [h for h in pool._handles.values() if h.hello and h.hello.host == f"n GPU {gpu}"]
    ended = Ended(number=handle.first.work.number, **fields)
    return handle.number, [
        (one.number, one.kind) for one in pool._take(handle, handle.first.ref, packed(ended))
    ]


FAILED = {"kind": EndedKind.LOST, "spent": True, "summary": "its GPU failed: ECC"}


def test_where_a_gpu_does_nothing_for_a_new_process_others_go_on_and_it_is_given_to_nobody(
    on_gpus, asked_of_ray, caplog, monkeypatch
):
    """Its process stays, or Ray would give that GPU to the next one."""
    pool, ended = on_gpus, []
    pool._handles.pop(1)
    pool._packer.leave(1)
    come(pool, 2, 1, failed="AcceleratorError: ECC")
    assert list(pool._handles) == [0]
    assert "n GPU 1 is given no trial any more: AcceleratorError: ECC" in caplog.text
    pool._recruited_s = 0.0
    pool._recruit()
    pool._check_start()
    assert not asked_of_ray  # there is no further GPU
    pool._handles.pop(0)
    come(pool, 3, 0, failed="AcceleratorError: ECC")
    with pytest.raises(SearchError, match="all GPUs fail that trials could have"):
        pool._check_start()
    monkeypatch.setattr(pool_module, "_end", lambda handle: ended.append(handle.number))
    pool.close()
    assert ended == [2, 3]


def test_a_gpu_that_is_full_as_a_worker_begins_is_not_broken_and_is_tried_again(
    on_gpus, asked_of_ray
):
    """The trial of a worker that shares it may fill it. It was given to nobody any more."""
    pool = on_gpus
    pool._handles.pop(1)
    pool._packer.leave(1)
    come(pool, 2, 1, failed="AcceleratorError: CUDA error: out of memory")
    assert not pool._parked
    assert len(asked_of_ray) == 1  # for another process
    assert pool._wanted() == 2


def test_a_gpu_that_fails_in_two_trials_in_a_row_is_given_up_and_costs_the_second_nothing(
    on_gpus, asked_of_ray
):
    pool = on_gpus
    for number in range(2):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    assert ends(pool, 1, **FAILED) == (1, [(1, EndedKind.LOST)])
    assert len(asked_of_ray) == 1  # for another process
    come(pool, 2, 1)
    pool.submit(Work(number=5, name="a-00005", config={}, seed=2))
    assert ends(pool, 1, **FAILED) == (2, [(5, EndedKind.RETURNED)])
    assert len(asked_of_ray) == 1
    assert list(pool._parked) == [2]
    assert pool._wanted() == 1


@pytest.mark.parametrize(
    "said",
    [
        "AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    ],
)
def test_what_may_be_a_mistake_of_a_kernel_says_nothing_of_its_gpu(on_gpus, said):
    """Two configurations that make it had ended the campaign on one GPU, and each run() again."""
    pool = on_gpus
    for number in range(2):
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    failed = {**FAILED, "summary": "its GPU failed: ValueError: step 7", "traceback": said}
    assert ends(pool, 1, **failed) == (1, [(1, EndedKind.LOST)])
    come(pool, 2, 1)
    pool.submit(Work(number=5, name="a-00005", config={}, seed=2))
    assert ends(pool, 1, **failed) == (2, [(5, EndedKind.LOST)])
    assert not pool._parked


def test_one_trial_or_one_moment_says_nothing_of_a_gpu():
    gpus = FailingGpus()
    for worker in range(2):  # they share it, and all its processes fail at once
        gpus.begin("n GPU 0", worker)
    assert not gpus.failed("n GPU 0", 0, trial=7)
    assert not gpus.failed("n GPU 0", 1, trial=8)
    gpus.begin("n GPU 0", 2)
    assert not gpus.failed("n GPU 0", 2, trial=8)  # wherever that runs
    gpus.begin("n GPU 0", 3)
    gpus.worked("n GPU 0")
    assert not gpus.failed("n GPU 0", 3, trial=9)
    gpus.begin("n GPU 0", 4)
    assert gpus.failed("n GPU 0", 4, trial=10)


def test_workers_that_die_as_they_begin_do_not_end_the_campaign_of_others(asked_of_ray, caplog):
    """A process that meets a broken GPU may not live to say so."""
    pool = with_workers(0)
    pool._recruited_s = time.monotonic()
    error = ray.exceptions.ActorDiedError()
    for number in range(1, 6):
        handle = pool._handles[number] = _WorkerHandle(number, Deaf(), "greeting")
        pool._next = number + 1
        assert pool._take(handle, "greeting", error) == []
        for one in [*pool._handles]:
            if one > number:
                del pool._handles[one]
    assert len(asked_of_ray) == 2  # and then no more for a while
    assert caplog.text.count("3 workers in a row died while they started") == 1
    emptied(pool)
    handle = pool._handles[9] = _WorkerHandle(9, Deaf(), "greeting")
    with pytest.raises(SearchError, match="6 workers in a row died while they started"):
        pool._take(handle, "greeting", error)


def test_what_has_ended_is_told_before_the_pool_gives_up(asked_of_ray, monkeypatch):
    """A trial that had finished at that moment was run again."""
    pool = with_workers(0, 1)
    pool.submit(Work(number=7, name="a-00007", config={}, seed=2))
    done = pool._handles[0].first.ref
    pool._handles[1].greeting = "greeting"
    pool._handles[1].hello = None
    died = ray.exceptions.ActorDiedError()
    answers = {done: packed(Ended(number=7, kind=EndedKind.FINISHED)), "greeting": died}
    pool._deaths_at_start, pool._opened_s = 2, time.monotonic()
    monkeypatch.setattr(pool, "_recruit", lambda: None)
    monkeypatch.setattr(pool, "_ask", list)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", lambda refs: [answers[ref] for ref in refs])
    real = pool._take

    def take(handle, ref, answer):
        told = real(handle, ref, answer)
        if ref == done:
            del pool._handles[handle.number]  # so that nobody else is there
        return told

    monkeypatch.setattr(pool, "_take", take)
    assert [one.number for one in pool.poll(0.1)] == [7]
    with pytest.raises(SearchError, match="3 workers in a row"):
        pool.poll(0.1)


def test_what_was_halted_as_the_pool_was_closed_is_nothing_to_the_next_campaign(asked_of_ray):
    """Its trials have the same numbers."""
    pool = with_workers(0)
    pool._packer.wait(7, 1)
    pool._waiting[7] = Work(number=7, name="a-00007", config={}, seed=2)
    pool.halt(7)
    emptied(pool).close()
    assert not pool._turned_back


# ------------------------------------------------------------- trials that are groups


@pytest.fixture
def of_groups(asked_of_ray, tmp_path):
    pool = Pool(scaling=ScalingConfig(num_workers=(1, 2)), store=str(tmp_path))
    for number in range(2):
        pool._handles[number] = _WorkerHandle(number, Deaf(), "greeting", hello=hello())
        pool._packer.enter(number, f"groups {number}", idle=1, capacity=1000)
        pool.submit(Work(number=number, name=f"a-{number:05d}", config={}, seed=2))
    return pool


def test_a_group_that_meets_a_node_with_other_code_runs_elsewhere(of_groups, monkeypatch):
    """The campaign ended with that."""
    pool, handle = of_groups, of_groups._handles[0]
    why = OtherCode("node other has elastix 9", node="other")
    ended = Ended(number=0, kind=EndedKind.RAISED, error=why)
    (back,) = pool._take(handle, handle.first.ref, packed(ended))
    assert (back.number, back.kind, back.error) == (0, EndedKind.RETURNED, None)
    pool._check_start()
    pool.submit(Work(number=0, name="a-00000", config={}, seed=2))
    _, _, avoided = handle.first.ref  # what Ray is asked for
    assert avoided == ("other",)
    monkeypatch.setattr(ray, "nodes", lambda: nodes("other"))
    with pytest.raises(OtherCode, match="node other has elastix 9"):
        pool._check_start()


def test_who_looks_after_groups_on_a_node_with_other_code_does_so_no_more(of_groups):
    """It was changed meanwhile. Whatever that worker was given came back, without end."""
    pool, handle = of_groups, of_groups._handles[0]
    why = OtherCode("node n has elastix 9", node="n")  # where the worker is
    ended = Ended(number=0, kind=EndedKind.RAISED, error=why)
    (back,) = pool._take(handle, handle.first.ref, packed(ended))
    assert (back.number, back.kind) == (0, EndedKind.RETURNED)
    assert list(pool._handles) == [1]
    pool.submit(Work(number=0, name="a-00000", config={}, seed=2))
    assert pool.held_back == {0}  # until there is another


@pytest.mark.parametrize("at_work", [False, True])
def test_a_group_without_room_is_not_lost_and_waits_as_long_as_another_one_trains(
    of_groups, at_work
):
    """It was counted as lost; four times, and its configuration had failed."""
    pool, handle = of_groups, of_groups._handles[0]
    if at_work:
        path = journal_of(pool._handles[1].first.work, pool._store)
        with Journal(path) as journal:
            journal.append(Reported(seq=0, step=1, metrics={}))
    ended = Ended(number=0, kind=EndedKind.RETURNED, summary="the cluster had no room.")
    if not at_work:
        with pytest.raises(SearchError, match=r"the cluster had no room\. No trial is lost"):
            pool._take(handle, handle.first.ref, packed(ended))
        return
    (back,) = pool._take(handle, handle.first.ref, packed(ended))
    assert (back.number, back.kind) == (0, EndedKind.RETURNED)


def one_event(pool, work):
    """In the journal of a group that has begun."""
    with Journal(journal_of(work, pool._store)) as journal:
        journal.append(Reported(seq=0, step=1, metrics={}))


def test_a_group_without_room_also_waits_if_another_one_has_just_ended(of_groups):
    """Nothing was to be seen of the next one yet, and a campaign ended that had room."""
    pool, handle, other = of_groups, of_groups._handles[0], of_groups._handles[1]
    one_event(pool, other.first.work)
    pool._take(other, other.first.ref, packed(Ended(number=1, kind=EndedKind.FINISHED)))
    no_room = packed(Ended(number=0, kind=EndedKind.RETURNED, summary="the cluster had no room."))
    (back,) = pool._take(handle, handle.first.ref, no_room)
    assert (back.number, back.kind) == (0, EndedKind.RETURNED)
    pool.submit(Work(number=0, name="a-00000", config={}, seed=2))
    (handle,) = [one for one in pool._handles.values() if one.inhand]
    with pytest.raises(SearchError, match="the cluster had no room"):  # nobody trained meanwhile
        pool._take(handle, handle.first.ref, no_room)


def test_a_campaign_of_groups_is_not_given_up_while_one_trains_or_since_nodes_are_gone(
    of_groups, monkeypatch
):
    """It ended at once, for a node that had been refused hours before."""
    pool, other = of_groups, of_groups._handles[1]
    pool._avoid("other", OtherCode("node other has elastix 9", node="other"))
    one_event(pool, other.first.work)
    monkeypatch.setattr(ray, "nodes", lambda: nodes("other"))
    pool._check_start()
    pool._take(other, other.first.ref, packed(Ended(number=1, kind=EndedKind.LOST)))
    monkeypatch.setattr(ray, "nodes", list)
    pool._check_start()  # others may come in their place
    monkeypatch.setattr(ray, "nodes", lambda: nodes("other"))
    with pytest.raises(OtherCode, match="node other has elastix 9"):
        pool._check_start()
