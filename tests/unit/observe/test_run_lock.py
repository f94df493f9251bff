"""One run, one writer: who holds the lock is named, and a file system's ways are respected."""

import errno
import fcntl
import gc
import os
import socket
import time
from pathlib import Path

import pytest
import ray

import elastix
from elastix.errors import Conflict, Full, StoreError
from elastix.events import Resumed
from elastix.observe.journal import Journal, lock_of, read
from elastix.observe.run_lock import Lock, holder

WHAT = "run 'digits' is trained"
NAMED = rf"process {os.getpid()} on {socket.gethostname()} since 20\d\d-"


def nfs(real):
    """Linux makes byte-range locks of flock over NFS, which want a handle of the right mode."""

    def flock(file, kind):
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        refused = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}
        if mode == refused.get(kind & ~fcntl.LOCK_NB):
            raise OSError(errno.EBADF, "Bad file descriptor")
        try:
            real(file, kind)
        except BlockingIOError as error:
            raise OSError(errno.EACCES, "Permission denied") from error  # fcntl(2) allows either

    return flock


@pytest.fixture(params=["local", "nfs"])
def file_system(request, monkeypatch):
    if request.param == "nfs":
        monkeypatch.setattr(fcntl, "flock", nfs(fcntl.flock))


@pytest.mark.parametrize("asked", [holder, lambda path: Lock(path, WHAT)])
def test_nobody_waits_at_a_pipe_in_the_place_of_a_lock(tmp_path, asked):
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(StoreError, match=r"run\.lock cannot be locked: .*is no file"):
        asked(tmp_path / "run.lock")


def test_a_lock_has_one_holder_who_is_named_to_the_others(tmp_path, file_system):
    path = tmp_path / "deep" / "run.lock"
    assert holder(path) is None
    began = time.time()
    with Lock(path, WHAT, stays=True):
        with pytest.raises(Conflict, match=f"{WHAT} by {NAMED}.*Nothing was started"):
            Lock(path, WHAT)
        found = holder(path)
    assert (found.host, found.pid, found.stays) == (socket.gethostname(), os.getpid(), True)
    assert began <= found.since <= time.time()
    assert holder(path) is None
    with Lock(path, WHAT):
        assert not holder(path).stays


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path):
    path = tmp_path / "run.lock"
    first = Lock(path, WHAT)
    waited = []

    def let_go(seconds):
        waited.append(seconds)
        first.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", let_go)
        Lock(path, WHAT, patience_s=60.0).close()
    assert len(waited) == 1


def test_who_waited_for_a_lock_whose_file_is_gone_takes_the_new_one(tmp_path, monkeypatch):
    """A lock on a file that is no longer there keeps nobody out."""
    path = tmp_path / "deep" / "run.lock"
    first = Lock(path, WHAT)

    def remove(_seconds):
        path.parent.rename(tmp_path / "away")
        first.close()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", remove)
        second = Lock(path, WHAT, patience_s=60.0)
    with pytest.raises(Conflict, match=NAMED):
        Lock(path, WHAT)
    assert holder(path).pid == os.getpid()
    second.close()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(_file, _kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"No locks available.*use a file system that has them"):
        Lock(tmp_path / "run.lock", WHAT)


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run.lock").symlink_to(precious)
    with pytest.raises(StoreError):
        Lock(tmp_path / "run.lock", WHAT)
    assert precious.read_text() == "mine"


def test_a_journal_has_one_writer(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as first:
        with pytest.raises(Conflict, match=NAMED):
            Journal(path)
        first.append(Resumed(step=1, ref=""))
    with Journal(path) as second:
        second.append(Resumed(step=2, ref=""))
    assert [event.step for event in read(path)] == [1, 2]


# ------------------------------------------------------------------------------- fit is refused


@pytest.fixture
def no_ray(monkeypatch):
    def init(*_, **__):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)


def trainer(store):
    run = elastix.RunConfig(name="digits", store=str(store))
    return elastix.ElasticTrainer(print, run=run, quiet=True)


def test_fit_is_refused_before_ray_is_started_while_another_process_trains_the_run(
    tmp_path, no_ray
):
    directory = tmp_path / "runs" / "digits"
    with (
        Lock(directory / "driver.lock", WHAT),
        pytest.raises(Conflict, match=f"run 'digits' of this store is being trained by {NAMED}"),
    ):
        trainer(tmp_path).fit()
    assert [path.name for path in directory.iterdir()] == ["driver.lock"]


def test_fit_is_refused_while_a_detached_run_goes_on_without_its_driver(tmp_path, no_ray):
    path = tmp_path / "runs" / "digits" / "journal.jsonl"
    with (
        Lock(lock_of(path), WHAT, stays=True),
        pytest.raises(Conflict, match=f"detached, by {NAMED}.*detached=True"),
    ):
        trainer(tmp_path).fit()
    assert not path.exists()
    assert holder(path.parent / "driver.lock") is None  # nor is it in the way of others now


def test_a_lock_that_nobody_refers_to_is_free_also_if_it_was_part_of_a_cycle(tmp_path):
    path = tmp_path / "run.lock"
    cycle = [Lock(path, "it is held")]
    cycle.append(cycle)
    del cycle
    gc.collect()
    Lock(path, "it is held").close()


@pytest.mark.parametrize("place", ["/proc/none/x.lock", "runs/x.lock"])
def test_where_there_can_be_no_folder_it_says_so(tmp_path, monkeypatch, place):
    """The kernel says of both that there is no such folder, as of one that was removed just now."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(StoreError, match=r"x\.lock cannot be locked: .*No such file.*name another"):
        Lock(Path(place), "this")


def test_whoever_only_asks_who_holds_it_keeps_nobody_out(tmp_path, monkeypatch):
    """`elastix runs` asks that of every run, perhaps just when one of them starts."""
    path = tmp_path / "x.lock"
    Lock(path, WHAT).close()
    asking = os.open(path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
    with Lock(path, WHAT):
        assert holder(path) is not None
    os.close(asking)


def test_on_a_full_disk_nobody_holds_it_and_the_error_says_why(tmp_path, monkeypatch):
    path = tmp_path / "x.lock"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(Full, match=r"No space left.*Nothing was changed\. Make room"):
            Lock(path, WHAT)
    assert holder(path) is None
    Lock(path, WHAT).close()
