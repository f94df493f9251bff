"""A disk that is really full, and one that is really read-only: small file systems of their own."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastix.cli import app
from elastix.errors import Full, ReadOnly, StoreError
from elastix.events import RunEnded, RunStarted
from elastix.observe.journal import Journal
from elastix.search.results import Results
from elastix.search.trial import Suggestion, Trial
from elastix.search.trial_database import TrialDatabase, TrialRow
from elastix.state import Ref, State
from elastix.store import Store
from elastix.testing.models import chain
from elastix.testing.store_contract import same, small


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting needs root: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def free_bytes(folder: Path) -> int:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize


def fill(store: Store, states: dict[Ref, State]) -> None:
    for number in range(1000):
        state = small(number, size=8000)
        states[store.put(state)] = state


def take_the_rest(disk: Path) -> None:
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filler, b"x" * 4096)
    os.close(filler)
    assert free_bytes(disk) == 0


def test_gc_runs_on_a_full_disk(disk: Path) -> None:
    states: dict[Ref, State] = {}
    with Store(disk / "store") as store:
        with pytest.raises(Full, match="retire models and run gc"):
            fill(store, states)
        take_the_rest(disk)
        for ref, state in states.items():
            assert same(store.get(ref), state)
        refs = list(states)
        for ref in refs[::2]:
            store.retire(ref)
        freed = store.gc().freed_bytes
        assert freed > 1_000_000
        for ref in refs[1::2]:
            assert same(store.get(ref), states[ref])
        assert store.verify() == []
        assert same(store.get(store.put(small(5000))), small(5000))
    with Store(disk / "store") as store:
        assert len(store.log()) == len(refs[1::2]) + 1


def test_whoever_comes_to_a_full_disk_makes_room_again_and_again(disk: Path) -> None:
    with Store(disk / "store") as store:
        refs = [store.put(small(n, size=3000)) for n in range(30)]
    take_the_rest(disk)
    for _ in range(20):  # more than the reserve has parts
        with Store(disk / "store") as store:
            assert len(store.log()) == 30
    for ref in refs[::2]:
        with Store(disk / "store") as store:
            store.retire(ref)
    with Store(disk / "store") as store:
        assert store.gc().freed_bytes > 100_000
        for ref in refs[1::2]:
            assert same(store.get(ref), small(refs.index(ref), size=3000))
        assert store.verify() == []
    with Store(disk / "store"):
        assert (disk / "store" / "reserve").stat().st_size == 1 << 20


def test_a_full_disk_is_told_of_where_no_reserve_is_left(disk: Path) -> None:
    with Store(disk / "store") as store:
        store.put(small(1))
    (disk / "store" / "reserve").unlink()
    take_the_rest(disk)
    with pytest.raises(Full, match="Make room"), Store(disk / "store"):
        pass


def test_models_with_a_tag_can_be_let_go_of_on_a_full_disk(disk: Path) -> None:
    """As the checkpoints of a run have one each."""
    states: dict[Ref, State] = {}
    with Store(disk / "store") as store:
        models = {f"run/step-{n}": store.put(small(10_000 + n, size=500)) for n in range(400)}
        for name, ref in models.items():
            store.tag(name, ref)
        with pytest.raises(Full):
            fill(store, states)
        take_the_rest(disk)
        for name in models:
            store.untag(name)
        for ref in models.values():
            store.retire(ref)
        assert store.gc().freed_bytes > 100_000
        assert store.tags() == {}
        assert same(store.get(store.put(small(5000))), small(5000))


def test_a_read_only_disk(disk: Path) -> None:
    with Store(disk / "store") as store:
        ref = store.put(small(1))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        with pytest.raises((ReadOnly, StoreError)):
            Store(disk / "store")
        with Store(disk / "store", read_only=True) as store:
            assert same(store.get(ref), small(1))
            assert store.verify() == []
            for change in (lambda: store.put(small(2)), lambda: store.tag("a", ref), store.gc):
                with pytest.raises(ReadOnly):
                    change()
            with pytest.raises(ReadOnly):
                store.retire(ref)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@pytest.fixture
def view(disk: Path, tmp_path: Path) -> Iterator[Path]:
    """The same file system, mounted once more for reading alone."""
    folder = tmp_path / "view"
    folder.mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("is_open", [True, False])
def test_who_may_only_read_sees_what_others_store_later(
    disk: Path, view: Path, is_open: bool
) -> None:
    with Store(disk / "store") as writer:
        writer.tag("best", writer.put(small(1), signature=chain("a b")))
    with Store(view / "store", read_only=True) as reader:
        for number in (2, 3, 4):
            with Store(disk / "store") as writer:
                later = writer.put(small(number), signature=chain("a b"), score=float(number))
                writer.tag("best", later)
                if is_open:
                    look(reader, later, number)
            look(reader, later, number)


def look(reader: Store, ref: Ref, number: int) -> None:
    assert same(reader.get("best"), small(number))
    assert reader.nearest(chain("a b")).ref == ref
    assert reader.tags() == {"best": ref}
    assert reader.log()[0].ref == ref
    assert reader.ancestors("best") == []
    assert reader.stats().models == number
    assert reader.verify() == []


@pytest.mark.parametrize("how", ["read-only", "full"])
def test_a_campaign_on_a_disk_without_a_place_is_read_whole(disk: Path, how: str) -> None:
    facts = {"name": "c", "metrics": ["m"], "modes": ["max"], "searcher": "Random", "began_s": 1.0}
    rows = [TrialRow(Trial(n, Suggestion({"x": n}), losses=(-n,)), done=n) for n in range(1, 9)]
    with TrialDatabase(disk / "runs" / "c") as database:
        database.commit(rows[:4], {"campaign": facts})
        database.commit(rows[4:])
        killed = disk / "runs" / "killed"
        shutil.copytree(disk / "runs" / "c", killed)  # as a process that is killed leaves it
    assert (killed / "campaign.sqlite-wal").stat().st_size > 0
    (killed / "campaign.sqlite-shm").unlink()
    if how == "full":
        take_the_rest(disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        for name in ("c", "killed"):
            assert [trial.number for trial in Results.open(disk, name)] == list(range(1, 9))
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_read_only_without_an_index(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        ref = store.put(small(1))
    for file in (tmp_path / "store").glob("index.sqlite*"):
        file.unlink()
    with Store(tmp_path / "store", read_only=True) as store:
        assert same(store.get(ref), small(1))
    assert not list((tmp_path / "store").glob("index.sqlite*"))


@pytest.mark.parametrize("how", ["read-only", "full"])
def test_what_a_killed_writer_has_left_in_the_log_of_the_index_is_read(
    disk: Path, how: str
) -> None:
    """It was about to carry the log over into the index: one page of two is there."""
    killed = disk / "killed"
    with Store(disk / "store") as store:
        first, second, gone = (store.put(small(n)) for n in range(3))
        store.tag("moves", first)
        store.tag("goes", first)
    with Store(disk / "store") as store:
        last = store.put(small(3))
        store.tag("moves", second)
        store.untag("goes")
        store.retire(gone)
        store.gc()
        shutil.copytree(disk / "store", killed)  # as a process that is killed leaves it
        known, tags = [entry.ref for entry in store.log()], store.tags()
    assert (killed / "index.sqlite-wal").stat().st_size > 0
    carried_over = shutil.copytree(killed, disk / "carried over") / "index.sqlite"
    with contextlib.closing(sqlite3.connect(carried_over)) as sql:
        sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = carried_over.read_bytes()
    with (killed / "index.sqlite").open("r+b") as index:
        for at in range(4096, len(whole), 2 * 4096):
            index.seek(at)
            index.write(whole[at : at + 4096])
    (killed / "index.sqlite-shm").unlink()
    if how == "full":
        take_the_rest(disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        with Store(killed, read_only=True) as store:
            assert [entry.ref for entry in store.log()] == known
            assert store.tags() == tags == {"moves": second}
            assert same(store.get(last), small(3))
            assert store.verify() == []
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@pytest.mark.parametrize("locks", ["there", "gone"])
def test_a_run_is_removed_from_a_disk_that_is_full_to_the_last_byte(disk: Path, locks: str) -> None:
    folder = disk / "runs" / "r"
    facts = {"name": "r", "seed": 0, "config": {}, "scaling": {}, "versions": {}}
    with Journal(folder / "journal.jsonl") as journal:
        for event in (RunStarted(**facts), RunEnded(outcome="finished", step=1)):
            journal.append(event)
    if locks == "gone":  # as in a copy of the folder
        (folder / "journal.lock").unlink()
    with Store(disk) as store:
        store.tag("r/step-1", store.put(small(1)))
        store.tag("other", store.put(small(2)))
    take_the_rest(disk)
    done = CliRunner().invoke(app, ["runs", "rm", "r", "--store", str(disk), "--yes"])
    assert done.exit_code == 0, done.output
    assert [entry.name for entry in (disk / "runs").iterdir()] == [".notes.lock"]
    with Store(disk, read_only=True) as store:
        assert store.tags().keys() == {"other"}
