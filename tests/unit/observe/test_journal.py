"""The journal: append-only lines that survive a killed writer."""

import os
import resource
import shutil

import pytest

from elastix.errors import Corrupt, Full, NotFound, StoreError, TooNew
from elastix.events import Resumed, RunStarted, SamplesLeftOut
from elastix.observe import journal as journal_module
from elastix.observe import sealed_lines
from elastix.observe.journal import Journal, Tail, read, read_only
from tests.interrupts import CtrlC


def event(step: int) -> Resumed:
    return Resumed(t=float(step), step=step, ref="")


def write(path, *steps: int) -> None:
    with Journal(path) as journal:
        for step in steps:
            journal.append(event(step))


def test_what_is_appended_is_read_in_order(tmp_path):
    path = tmp_path / "deep" / "journal.jsonl"
    write(path, 1, 2, 3)
    assert list(read(path)) == [event(1), event(2), event(3)]


@pytest.mark.parametrize("what", [{1}, object(), b"x"])
def test_what_json_has_no_word_for_is_a_store_error_and_nothing_is_torn(tmp_path, what):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(event(1))
        with pytest.raises(StoreError, match="cannot hold Resumed"):
            journal.append(Resumed(t=2.0, step=2, ref=what))
        journal.append(event(3))
    assert list(read(path)) == [event(1), event(3)]


def test_what_is_in_a_journals_place_is_said_and_the_lock_is_let_go(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        Journal(path)
    path.rmdir()
    write(path, 1)
    assert list(read(path)) == [event(1)]


def test_an_event_can_be_read_before_the_journal_is_closed(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(event(1))
        assert list(read(path)) == [event(1)]


def test_a_journal_opened_again_goes_on_at_its_end(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, 1)
    write(path, 2)
    assert list(read(path)) == [event(1), event(2)]


@pytest.mark.parametrize("torn", [b'{"event":"Resu', b"\xff\xfe", b"x" * 200_000])
@pytest.mark.parametrize("whole", [(), (1, 2)])
def test_a_torn_last_line_is_no_event_and_is_cut_when_opened_again(tmp_path, torn, whole):
    path = tmp_path / "journal.jsonl"
    write(path, *whole)
    intact = path.read_bytes()
    with path.open("ab") as file:
        file.write(torn)
    assert list(read(path)) == [event(step) for step in whole]
    write(path)
    assert path.read_bytes() == intact
    write(path, 9)
    assert list(read(path)) == [event(step) for step in (*whole, 9)]


def test_a_last_line_that_lacks_only_its_break_is_torn(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read(path)) == [event(1)]


@pytest.mark.parametrize("bad", [b"no json\n", b"\xff\xff\n", b'{"event":"Nonsense"}\n', b"\n"])
def test_a_corrupt_line_is_named_by_its_number(tmp_path, bad):
    path = tmp_path / "journal.jsonl"
    write(path, 1, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bad + second)
    with pytest.raises(Corrupt, match=r"line 2 of .*journal\.jsonl"):
        list(read(path))


@pytest.mark.parametrize("bad", [b"[1]\n", b"7\n", b'"text"\n', b"null\n"])
def test_a_line_of_json_that_is_no_record_is_corrupt_too(tmp_path, bad):
    path = tmp_path / "journal.jsonl"
    write(path, 1)
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(Corrupt, match="line 2"):
        list(read(path))


def test_events_before_a_corrupt_line_are_handed_out(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, 1)
    path.write_bytes(path.read_bytes() + b"no json\n")
    reader = read(path)
    assert next(reader) == event(1)
    with pytest.raises(Corrupt):
        next(reader)


def test_there_may_be_no_journal(tmp_path):
    with pytest.raises(NotFound, match="nowhere"):
        list(read(tmp_path / "nowhere"))


def test_a_tail_tells_each_event_once_and_waits_for_whole_lines(tmp_path):
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert tail.news() == []  # there is none yet
    write(path, 1, 2)
    assert tail.news() == [event(1), event(2)]
    assert tail.news() == []
    with path.open("ab") as file:
        file.write(b'{"event":"Resu')  # its writer is killed here
    assert tail.news() == []
    write(path, 3)
    assert tail.news() == [event(3)]
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(Corrupt, match=r"journal\.jsonl"):
        tail.news()


def test_a_full_disk_is_told_of_and_nothing_follows_what_was_not_written(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, 1)
    with Journal(path) as journal:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limit[1]))
        try:
            with pytest.raises(Full, match=r"journal\.jsonl cannot be written"):
                journal.append(event(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        with pytest.raises(Full, match=r"journal\.jsonl cannot be written"):
            journal.append(event(3))
    write(path, 4)
    assert list(read(path)) == [event(1), event(4)]


def take_away(path, how):
    if how == "folder removed":
        shutil.rmtree(path.parent)
    elif how == "folder moved":
        path.parent.rename(path.parent.with_name("elsewhere"))
    else:
        path.unlink()
        path.write_text("")


@pytest.mark.parametrize("how", ["folder removed", "file replaced", "folder moved"])
def test_a_journal_that_was_taken_away_is_written_no_more(tmp_path, how, monkeypatch):
    monkeypatch.setattr("elastix.observe.journal._LOOK_EVERY_S", 0.0)
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    journal.append(event(1))
    take_away(path, how)
    for step in (2, 3):
        with pytest.raises(StoreError, match="removed or replaced"):
            journal.append(event(step))
    journal.close()
    assert not path.exists() or not path.read_text()


class Short:
    """A file that takes a part of what it is given, as a disk does that is nearly full."""

    def __init__(self, file):
        self._file = file

    def write(self, data):
        return self._file.write(data[:50])

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("wrap", [Short, lambda file: file])
def test_ctrl_c_before_any_line_of_an_append_leaves_a_journal_that_goes_on(
    tmp_path, wrap, monkeypatch
):
    """It is heard as soon as the line was handed to the system, before anybody has noted that."""
    monkeypatch.setattr("elastix.observe.journal._LOOK_EVERY_S", 0.0)
    files = [journal_module.__file__, sealed_lines.__file__]
    with Journal(tmp_path / "whole.jsonl") as journal, CtrlC(files) as counted:
        journal._file = wrap(journal._file)
        journal.append(event(2))
    told = set()
    for number, (place, visits) in enumerate(counted.visits.items()):
        for visit in range(1, visits + 1):
            path = tmp_path / f"{number}-{visit}" / "journal.jsonl"
            with Journal(path) as journal:
                journal._file = wrap(journal._file)
                journal.append(event(1))
                with pytest.raises(KeyboardInterrupt), CtrlC(files, place, visit):
                    journal.append(event(2))
                journal.append(event(3))
            steps = tuple(found.step for found in read(path))
            assert steps in ((1, 3), (1, 2, 3)), place
            told.add(steps)
    assert len(told) == 2, "it came before and after the line was written"


@pytest.mark.parametrize("text", [b"", b'{"event":"Resu'])
def test_a_journal_that_another_process_changes_is_written_no_more(tmp_path, text, monkeypatch):
    """As log rotation does (copytruncate), or a second writer whose lock was removed."""
    monkeypatch.setattr("elastix.observe.journal._LOOK_EVERY_S", 0.0)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(event(1))
    there = path.read_bytes() + text if text else b""
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(there)
    for step in (2, 3):
        with pytest.raises(StoreError, match=r"journal\.jsonl was changed by another process"):
            journal.append(event(step))
    journal.close()
    assert path.read_bytes() == there


@pytest.mark.parametrize("how", ["folder removed", "file replaced", "folder moved"])
def test_a_journal_that_was_taken_away_a_moment_ago_does_not_close_in_silence(
    tmp_path, how, monkeypatch
):
    monkeypatch.setattr("elastix.observe.journal._LOOK_EVERY_S", 60.0)
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    journal.append(event(1))
    take_away(path, how)
    journal.append(event(2))  # nobody has looked since
    with pytest.raises(StoreError, match="removed or replaced"):
        journal.close()
    path.parent.mkdir(exist_ok=True)
    Journal(path).close()  # the lock was let go of


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b"\xff", b"null"])
def test_what_is_no_json_that_can_be_read_is_corrupt(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(Corrupt, match="line 1 of"):
        list(read(path))


def test_only_some_kinds_are_read(tmp_path):
    path = tmp_path / "journal.jsonl"
    left_out = SamplesLeftOut(t=2.0, loader=0, spans=((0, 4),))
    with Journal(path) as journal:
        for entry in (event(1), left_out, event(3)):
            journal.append(entry)
    assert list(read_only(path, SamplesLeftOut)) == [left_out]
    assert list(read_only(path, Resumed, SamplesLeftOut)) == [event(1), left_out, event(3)]


def test_other_kinds_are_passed_over_unread(tmp_path):
    """In a journal of an earlier version, which has no checksums."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event":"Resumed","t":nonsense}\n')
    assert list(read_only(path, SamplesLeftOut)) == []
    with pytest.raises(Corrupt, match="Restore the file from a backup"):
        list(read_only(path, Resumed))


def test_nobody_waits_at_a_pipe_in_the_place_of_a_journal(tmp_path):
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(StoreError, match="cannot be written"):
        Journal(tmp_path / "journal.jsonl")


@pytest.mark.parametrize(
    "newer",
    [b'{"event":"Dreamt","t":3.0,"of":"sheep"}', b'{"event":"Resumed","t":3.0,"whence":[7]}'],
)
def test_what_a_later_version_wrote_is_not_taken_for_damage(tmp_path, newer):
    """It names that version; and what of it can be read without knowing those lines, is."""
    path = tmp_path / "journal.jsonl"
    facts = {"name": "r", "seed": 0, "config": {}, "scaling": {}}
    began = RunStarted(t=1.0, versions={"elastix": "9.8.7"}, **facts)
    left_out = SamplesLeftOut(t=2.0, loader=0, spans=((0, 4),))
    with Journal(path) as journal:
        for entry in (began, left_out):
            journal.append(entry)
        after = journal._end[1]
    with path.open("ab") as file:
        file.write(sealed_lines.seal(newer, after)[0])
    Journal(path).close()  # and cuts nothing off
    for reads in (lambda: list(read(path)), lambda: Tail(path).news()):
        with pytest.raises(TooNew, match=r"another version of elastix, 9\.8\.7: "):
            reads()
    assert list(read_only(path, RunStarted, SamplesLeftOut)) == [began, left_out]
    assert path.read_bytes().count(b"\n") == 3
