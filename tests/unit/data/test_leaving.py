"""What a process that reads data does at its end: as far as it can, and never more than a word."""

import errno

import pytest

from elastix.data import leaving


@pytest.mark.parametrize("what", ["processes", "shared"])
def test_who_cannot_clear_up_says_so_and_goes(monkeypatch, caplog, what):
    """For want of file handles, say. The run is over, and would end with an error of that."""
    did = []

    def fails(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    processes = fails if what == "processes" else lambda: did.append("processes")
    shared = fails if what == "shared" else lambda *_: did.append("shared")
    monkeypatch.setattr(leaving.loader_processes, "end_all", processes)
    monkeypatch.setattr(leaving.dataset, "leave", shared)
    monkeypatch.setattr(leaving.dataset, "clear", shared)
    leaving.leave()
    leaving.clear(killed=False)
    assert set(did) == {"processes", "shared"} - {what}
    assert "Too many open files" in caplog.text
