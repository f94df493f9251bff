"""A dataset that opens its file at first use, and is read here before processes are forked."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from elastix.data.loader import Loader
from elastix.data.source import Source
from tests.unit.data.test_loader import Pace

SIZE = 8


class Lines(Dataset):
    """Samples of a file. Two processes go to theirs first, and read when both have."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None
        self.reader = os.getpid()
        self.both = multiprocessing.get_context("fork").Barrier(2, timeout=60)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(index * SIZE)
        if os.getpid() != self.reader:
            self.both.wait()
        return int(self.file.read(SIZE))


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"{index:<{SIZE}}" for index in range(12)))
    return Lines(path)


def read(lines):
    cpu = torch.device("cpu")
    ahead = Source(dataset=lines, batch_size=2, shuffle=False, num_workers=2, device=cpu)
    loader = Loader(0, ahead, Pace())
    seen = []
    for epoch in loader.epochs(1):
        for batch in epoch:
            seen += batch.tolist()
            loader.commit((0,))
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_processes_do_not_share_the_position_in_a_file_that_was_open_before(lines):
    assert lines[5] == 5
    assert read(lines) == list(range(12))
    assert lines.file.tell() == 6 * SIZE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("flags", [0, getattr(os, "O_NOFOLLOW", 0)])
def test_who_reads_on_in_its_process_begins_where_the_file_stood(lines, flags):
    """Also from a file that has no name any more, or that was not to be a link."""
    with os.fdopen(os.open(lines.path, os.O_RDONLY | flags), "rb", buffering=0) as file:
        file.seek(3)
        lines.path.unlink()
        lines.__class__ = ReadsOn
        lines.file = file
        assert read(lines) == list(range(12))
        assert file.tell() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_where_proc_is_not_mounted_a_loader_reads_as_it_did(lines, monkeypatch):
    """Each process opens the file itself here, as this one has not."""
    listed = Path.iterdir
    monkeypatch.setattr(
        Path,
        "iterdir",
        lambda path: listed(Path("/nowhere") if path == Path("/proc/self/fd") else path),
    )
    assert read(lines) == list(range(12))


class ReadsOn(Lines):
    """Each process reads what it was given with the file open, and nothing of what others do."""

    def __getitem__(self, index: int) -> int:
        here = self.file.tell()
        self.both.wait()
        self.file.read(1)
        self.both.wait()
        assert self.file.tell() == here + 1
        return index
