"""Who may write to a store, beside whom; what an index that knows less than another may not do."""

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from elastix.errors import ConfigError, Conflict, Corrupt, NotFound, StoreError
from elastix.state import State
from elastix.store import Store, gc, owner, pack_replay
from elastix.store.local_packs import LocalPacks
from elastix.testing.store_contract import child, same, small


def test_no_index_is_made_anew_beside_an_open_store(tmp_path: Path) -> None:
    """A trainer that has not written yet has no pack by which it could be noticed."""
    with Store(tmp_path) as store:
        store.put(small(0))
    with Store(tmp_path) as trainer:
        with Store(tmp_path) as other, pytest.raises(Conflict, match="has this store open"):
            other.rebuild()
        ref = trainer.put(small(1))
        trainer.tag("best", ref)
        trainer.gc()  # ends its pack
        with Store(tmp_path) as other:
            other.gc()
            assert same(other.get("best"), small(1))
        assert same(trainer.get(ref), small(1))
    with Store(tmp_path) as store:
        store.rebuild()
        assert same(store.get("best"), small(1))


def test_a_forked_child_that_closes_a_store_leaves_its_parent_the_owner(tmp_path: Path) -> None:
    with Store(tmp_path) as trainer:
        trainer.put(small(0))
        log = tmp_path / "index.sqlite-wal"
        before = log.stat().st_size
        assert before  # SQLite: no connection may be carried over a fork and used
        if not (pid := os.fork()):
            with suppress(BaseException), trainer:
                pass
            os._exit(0)
        os.waitpid(pid, 0)
        assert log.stat().st_size == before
        with Store(tmp_path) as other, pytest.raises(Conflict, match="has this store open"):
            other.rebuild()
        ref = trainer.put(small(1))
    with Store(tmp_path) as store:
        assert same(store.get(ref), small(1))


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_an_index_lost_under_a_writer_costs_nothing(tmp_path: Path, how: str) -> None:
    with Store(tmp_path) as trainer:
        first = trainer.put(small(1))
        trainer.gc()
        second = trainer.put(small(2))
        if how == "removed":
            for file in tmp_path.glob("index.sqlite*"):
                file.unlink()
            for _ in range(2):  # what the first leaves behind is no index either
                with pytest.raises(Conflict, match="Nothing was changed"):
                    Store(tmp_path)
        else:
            with (tmp_path / "index.sqlite").open("r+b") as file:
                file.write(b"this is no database" * 100)
            with suppress(Conflict), Store(tmp_path) as other:  # the log may still have it whole
                other.gc()
        third = trainer.put(small(3))
        trainer.tag("best", third)
    with Store(tmp_path) as store:
        store.gc()
        for n, ref in enumerate((first, second, "best"), 1):
            assert same(store.get(ref), small(n))


def _older(index: Path, older: bytes) -> None:
    index.with_name("restored").write_bytes(older)
    index.with_name("restored").replace(index)


def _no_log(index: Path, older: bytes) -> None:
    for end in ("-wal", "-shm"):
        index.with_name(index.name + end).unlink()


def _emptied(index: Path, older: bytes) -> None:
    for end in ("-wal", "-shm"):
        index.with_name(index.name + end).write_bytes(b"")
    index.write_bytes(b"")


@pytest.mark.parametrize("change", [_older, _no_log, _emptied])
def test_an_index_changed_under_a_writer_is_nobodys_to_collect_by(
    tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    state = small(1)
    heir = State({**state.tensors, "head": torch.ones(3)}, {"heir": True})
    with Store(tmp_path) as store:
        first = store.put(state)
    index = tmp_path / "index.sqlite"
    older = index.read_bytes()
    code = (
        "import sys; from elastix.errors import Conflict; from elastix.store import Store\n"
        "try: store = Store(sys.argv[1])\n"
        "except Conflict as error: sys.exit(str(error))\n"
        "store.retire(sys.argv[2]); store.gc()"
    )
    with Store(tmp_path) as trainer:
        ref = trainer.put(heir)  # shares its tensors with the first
        change(index, older)
        command = [sys.executable, "-c", code, str(tmp_path), first]
        other = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "has this store open" in other.stderr
        with suppress(StoreError):  # what its index says may be gone for now
            assert same(trainer.get(ref), heir)
    with Store(tmp_path) as store:
        store.rebuild()
        assert same(store.get(ref), heir)
        assert same(store.get(first), state)


def test_gc_leaves_what_its_index_has_not_read(tmp_path: Path) -> None:
    with Store(tmp_path) as store, Store(tmp_path) as other:
        ref = store.put(small(1))
        store.gc()
        other._ledger.index.sql.execute("PRAGMA foreign_keys")  # open
        with sqlite3.connect(tmp_path / "index.sqlite") as sql:  # as an index made meanwhile is
            for table in ("models", "blobs", "uses", "packs"):
                sql.execute(f"DELETE FROM {table}")
        sql.close()
        kept = other.gc().kept
        assert set(kept.values()) == {"the index has not read it to its end"}
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    with Store(tmp_path) as store:
        assert same(store.get(ref), small(1))


def test_a_reader_of_a_store_that_is_just_being_made_is_told_of_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        ref = store.put(small(0))
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    with sqlite3.connect(tmp_path / "index.sqlite") as begun:
        begun.execute("PRAGMA journal_mode=WAL")  # and no table yet
    begun.close()
    with Store(tmp_path, read_only=True) as reader:
        assert same(reader.get(ref), small(0))
    assert not caplog.records


def test_two_indexes_are_not_used_at_once(tmp_path: Path) -> None:
    with Store(tmp_path / "store", index=tmp_path / "a") as one:
        one.put(small(1))
        with pytest.raises(Conflict, match=rf"another index \({tmp_path / 'a'}\)"):
            Store(tmp_path / "store", index=tmp_path / "b")
    with Store(tmp_path / "store", index=tmp_path / "b") as store:
        assert len(store.log()) == 1


def test_an_old_index_finds_what_was_moved(tmp_path: Path) -> None:
    with Store(tmp_path / "store", index=tmp_path / "a") as store:
        kept = store.put(small(1))
        dropped = store.put(small(2, size=5000))
        store.tag("best", kept)
    with Store(tmp_path / "store", index=tmp_path / "b") as store:
        store.retire(dropped)
        assert store.gc().removed
    with Store(tmp_path / "store", index=tmp_path / "a") as store:
        assert same(store.get("best"), small(1))
        with pytest.raises(Corrupt, match="there is no pack"):
            store.get(dropped)
        with pytest.raises(Corrupt, match="Nothing was collected"):
            store.gc()
        store.rebuild()
        store.gc()
        assert [entry.ref for entry in store.log()] == [kept]
        assert same(store.get("best"), small(1))


def test_two_machines_never_write_to_one_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as here:
        ref = here.put(small(1))
        monkeypatch.setattr(owner, "machine", lambda: "another")
        with pytest.raises(Conflict, match="on another machine"):
            Store(tmp_path)
        with Store(tmp_path, read_only=True) as reader:  # from the packs, not the index
            assert same(reader.get(ref), small(1))
            assert reader._ledger.index.sql.execute("PRAGMA database_list").fetchone()[2] == ""
    with Store(tmp_path, read_only=True) as reader:  # nobody writes: the index will do
        assert reader._ledger.index.sql.execute("PRAGMA database_list").fetchone()[2] != ""
    with Store(tmp_path) as there:
        there.put(small(2))


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux emulates flock there: only what may be written can be locked alone (flock(2))."""
    real = fcntl.flock

    def flock(handle: Any, how: int) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        forbidden = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}
        if forbidden.get(how & ~fcntl.LOCK_NB) == mode:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("nfs")
def test_locks_as_nfs_has_them(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        ref, dropped = store.put(small(1)), store.put(small(2, size=5000))
        store.retire(dropped)
        with Store(tmp_path) as second:
            held = second.get(ref)
            second.put(small(3))
            assert second.gc().kept  # the other's pack, and the one that is held
        store._writer._lock.close()  # as if its process had died
        with Store(tmp_path) as third:
            third.gc()
            assert same(third.get(ref), small(1))
            assert same(held, small(1))
    with Store(tmp_path, read_only=True) as reader:
        assert same(reader.get(ref), small(1))


class FailingCommit:
    """SQLite's connection, whose next commit fails for want of a disk that works."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql
        self.fails = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sql, name)

    def execute(self, query: str, *values: Any) -> Any:
        if query == "COMMIT" and self.fails:
            self.fails -= 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_WRITE"
            raise error
        return self._sql.execute(query, *values)


@pytest.mark.parametrize("then", ["nothing", "tag", "put", "put it again"])
def test_what_a_failed_commit_left_is_carried_out_before_what_follows(
    tmp_path: Path, then: str
) -> None:
    """Its record is on the disk and cannot be taken back: an index made anew reads it."""
    state = small(1)
    store = Store(tmp_path)
    ref = store.put(state)
    store._ledger.index.sql = FailingCommit(store._ledger.index.sql)
    with pytest.raises(StoreError, match="whether it takes effect is unknown"):
        store.retire(ref)
    if then == "tag":
        with pytest.raises(NotFound, match="was retired"):
            store.tag("kept", ref)
    elif then == "put":
        store.put(small(2))
        with pytest.raises(NotFound, match="was retired"):
            store.get(ref)
    elif then == "put it again":
        assert store.put(state) == ref
    store.close()
    alive = then == "put it again"
    for _ in range(2):
        with Store(tmp_path) as store:
            assert (ref in {entry.ref for entry in store.log()}) == alive
            assert store.tags() == {}
            assert not alive or same(store.get(ref), state)
            store.rebuild()


@pytest.mark.parametrize("then", ["it goes on", "it is closed", "both are closed"])
def test_a_model_that_another_process_tagged_is_not_retired_by_a_commit_that_failed_before(
    tmp_path: Path, then: str
) -> None:
    """The record of the retirement is in a pack for good, and whoever reads it must know better."""
    state, other = small(1), Store(tmp_path)
    store = Store(tmp_path)
    ref = store.put(state)
    store._ledger.index.sql = FailingCommit(store._ledger.index.sql)
    with pytest.raises(StoreError, match="whether it takes effect is unknown"):
        store.retire(ref)
    other.tag("kept", ref)
    if then == "it goes on":
        store.put(small(2))
    store.close()
    if then != "both are closed":
        other.put(small(3))
        assert same(other.get("kept"), state)
    other.close()
    for _ in range(3):
        with Store(tmp_path, read_only=True) as reader:
            assert same(reader.get("kept"), state)
        with Store(tmp_path) as store:
            assert store.tags() == {"kept": ref}
            assert same(store.get(ref), state)
            assert store.verify() == []
            store.rebuild()
    with Store(tmp_path) as store:
        store.gc()
        store.rebuild()
        assert same(store.get("kept"), state)
        store.untag("kept")
        store.retire(ref)
        store.rebuild()
        with pytest.raises(NotFound):
            store.get(ref)


@pytest.mark.parametrize("name", ["other", "kept"])
def test_a_tag_that_another_process_moved_is_not_moved_back_by_a_commit_that_failed_before(
    tmp_path: Path, name: str
) -> None:
    other, store = Store(tmp_path), Store(tmp_path)
    ours, theirs = store.put(small(1)), store.put(small(2))
    store._ledger.index.sql = failing = FailingCommit(store._ledger.index.sql)
    for ref in (theirs, ours):
        failing.fails = 1
        with pytest.raises(StoreError, match="whether it takes effect is unknown"):
            store.tag("kept", ref)
    other.tag(name, theirs)
    store.put(small(3))
    wanted = {"kept": ours, name: theirs}
    assert store.tags() == other.tags() == wanted
    store.close()
    other.rebuild()
    assert other.tags() == wanted
    other.close()


@pytest.mark.parametrize("moment", ["view", "sizes"])
def test_verify_beside_gc_finds_nothing_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    other = Store(tmp_path)
    parent = small(1)
    refs = [other.put(parent), other.put(small(2, size=9000))]
    refs.append(other.put(child(parent, refs[0], "layer0.weight", {"n": 1})))
    done = []

    def meanwhile() -> None:
        if not done:
            done.append(True)
            other.retire(refs[1])
            other.put(small(4))
            other.gc()
            store.tag("written", refs[0])  # by the verifying store: its index is free

    def first(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            meanwhile()
            return method(*args)

        return called

    with Store(tmp_path) as store:
        monkeypatch.setattr(LocalPacks, moment, first(getattr(LocalPacks, moment)))
        assert store.verify() == []
        monkeypatch.undo()
        assert done
        assert store.verify() == []
    other.close()


def test_verify_of_a_reader_beside_gc_writes_nothing(tmp_path: Path) -> None:
    with Store(tmp_path) as other:
        ref = other.put(small(1))
        other.gc()  # ends its pack
        other.put(small(2))
        with Store(tmp_path, read_only=True) as store, pytest.MonkeyPatch.context() as patch:
            view = LocalPacks.view

            def collected(packs: LocalPacks, pack: str) -> Any:
                patch.undo()
                other.retire(ref)
                assert other.gc().removed
                return view(packs, pack)

            patch.setattr(LocalPacks, "view", collected)
            assert store.verify() == []


def test_verify_of_a_reader_that_has_a_copy_of_the_index_finds_nothing_beside_gc(
    tmp_path: Path,
) -> None:
    """What gc has removed since is no damage: the copy cannot know."""
    with Store(tmp_path) as killed:
        ref = killed.put(small(1))
        killed.gc()  # ends its pack
        killed.put(small(2))
    (tmp_path / "index.sqlite").unlink()  # as a kill may leave it: no writer has made it anew
    with Store(tmp_path, read_only=True) as store, Store(tmp_path) as other:
        before = store.verify()
        other.retire(ref)
        assert other.gc().removed
        assert (before, store.verify()) == ([], [])
        damaged = next(pack for pack in (tmp_path / "packs").iterdir() if pack.stat().st_size > 200)
        damaged.write_bytes(damaged.read_bytes()[:80] + b"another" + damaged.read_bytes()[87:])
        assert store.verify() != []


def test_a_pack_that_another_collects_while_records_are_counted_ends_no_gc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store, Store(tmp_path) as other:
        refs = [other.put(small(number)) for number in range(3) if not number or other.gc()]
        other.retire(refs[0])
        scan = gc.scan

        def meanwhile(*args: Any) -> Any:
            monkeypatch.undo()
            other.retire(refs[1])
            assert other.gc().removed
            return scan(*args)

        monkeypatch.setattr(gc, "scan", meanwhile)
        store.gc()
        assert gc.scan is scan, "nothing was collected meanwhile"
        assert same(store.get(refs[2]), small(2))
    with Store(tmp_path) as store:
        store.rebuild()
        assert [entry.ref for entry in store.log()] == [refs[2]]


def test_a_pack_that_another_collects_while_packs_are_listed_is_not_lost(tmp_path: Path) -> None:
    with Store(tmp_path) as store, Store(tmp_path) as other:
        ref = other.put(small(1))
        other.gc()

        class Packs(LocalPacks):
            def sizes(self) -> dict[str, int]:
                other.retire(ref)
                assert other.gc().removed
                return super().sizes()

        with store._ledger.asking() as index:
            assert pack_replay.lost_packs(index, Packs(tmp_path)) == []


def test_a_pack_that_is_collected_while_packs_are_listed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:
        store.put(small(1))
        store.gc()  # ends its pack
        store.put(small(2))
    packs = LocalPacks(tmp_path)
    before = packs.sizes()
    listed = os.scandir

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name = entry.name
            self._entry = entry

        def is_file(self, *, follow_symlinks: bool) -> bool:
            return self._entry.is_file(follow_symlinks=follow_symlinks)

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            Path(self._entry).unlink()
            return self._entry.stat(follow_symlinks=follow_symlinks)

    class Entries:
        def __enter__(self) -> list[Any]:
            first, *rest = listed(tmp_path / "packs")
            return [Entry(first), *rest]

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda _: Entries())
    assert len(packs.sizes()) == len(before) - 1 == 1


@pytest.mark.parametrize("name", [None, 7, b"best", Path("best")])
def test_what_cannot_name_a_model_is_said_to_be_so(tmp_path: Path, name: Any) -> None:
    with Store(tmp_path) as store:
        ref = store.put(small(1))
        calls = (store.get, store.retire, store.signature, store.score, store.manifest)
        for call in calls:
            with pytest.raises(ConfigError, match="a model is named by"):
                call(name)
        assert same(store.get(ref), small(1))


def link_cases() -> dict[str, str]:
    return {
        "reserve.draft": "file",
        "index.sqlite": "file",
        "index.sqlite-wal": "file",
        "owner.lock": "new",
        "index.lock": "new",
        "packs": "folder",
        "writers": "folder",
    }


@pytest.mark.parametrize("name", link_cases())
def test_a_store_of_others_leads_nowhere(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    root.mkdir()
    victim = tmp_path / "victim"
    if link_cases()[name] == "file":
        victim.write_text("precious")
    elif link_cases()[name] == "folder":
        victim.mkdir()
    (root / name).symlink_to(victim)
    if name != "packs":
        (root / "packs").mkdir()
    for read_only in (False, True):
        with pytest.raises(Corrupt, match="is a link"):
            Store(root, read_only=read_only)
    assert not victim.is_file() or victim.read_text() == "precious"
    assert not victim.is_dir() or not list(victim.iterdir())
    assert victim.exists() == (link_cases()[name] != "new")


def test_an_export_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".out.{os.getpid()}").symlink_to(victim)
    with Store(tmp_path / "store") as store:
        store.export(store.put(State({"w": torch.ones(3)})), tmp_path / "out")
    assert victim.read_text() == "precious"
