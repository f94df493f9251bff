"""Two users of one host with the same dataset, and memory that is full: with real users and mounts.

Needs root, which may become anybody and mount a file system.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import elastix
from elastix.data.shared import dataset, locks
from elastix.errors import Conflict
from tests.chaos.test_shared_kills import child, ended
from tests.pictures import Pictures, same

ANN, BEN = 61234, 61235
DATA = Pictures(length=60, size=20_000, vary=4000)

pytestmark = [
    pytest.mark.skipif(not locks.available(), reason="no locks that die with their holder here"),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture
def memory(monkeypatch) -> Iterator[Path]:
    """A folder of memory in which everybody may make folders, as /dev/shm is."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    path.chmod(0o1777)
    monkeypatch.setattr(dataset, "_MEMORY", path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small(monkeypatch, tmp_path) -> Iterator[Path]:
    """A file system in memory with room for some of the samples."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    monkeypatch.setattr(dataset, "_MEMORY", path)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def all_right(shared: elastix.Shared) -> bool:
    return all(same(shared[index], index, DATA) for index in range(len(DATA)))


def users_folder(memory: Path, user: int) -> Path:
    return memory / f"elastix-{user}-{elastix.Shared(DATA)._key}"


def test_two_users_of_one_dataset_have_memory_of_their_own(memory):
    """Neither sees what the other has, though both are at work at the same time."""
    meet, met = os.pipe(), os.pipe()

    def ann() -> None:
        become(ANN)
        shared = elastix.Shared(DATA)
        assert all_right(shared)
        os.write(meet[1], b"1")
        assert os.read(met[0], 1) == b"1"
        assert all_right(shared)
        assert shared.counts.decodes == len(DATA)

    def ben() -> None:
        assert os.read(meet[0], 1) == b"1"
        become(BEN)
        shared = elastix.Shared(DATA)
        assert all_right(shared)
        assert shared.counts.decodes == len(DATA)
        with pytest.raises(PermissionError):
            list(users_folder(memory, ANN).iterdir())
        os.write(met[1], b"1")
        os.kill(os.getpid(), signal.SIGKILL)

    processes = [child(ann), child(ben)]
    assert [ended(process) for process in processes] == [0, -signal.SIGKILL]
    (left,) = memory.iterdir()  # nobody else may remove that
    assert (left.stat().st_uid, stat.S_IMODE(left.stat().st_mode)) == (BEN, 0o700)

    def ben_again() -> None:
        become(BEN)
        elastix.Shared(Pictures(length=2))[0]

    assert ended(child(ben_again)) == 0
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_folder_that_another_user_has_put_there_is_refused(memory, mode):
    mine = users_folder(memory, ANN)

    def ben() -> None:
        become(BEN)
        mine.mkdir()
        mine.chmod(mode)

    def ann() -> None:
        become(ANN)
        with pytest.raises(Conflict, match=f"belongs to user {BEN}"):
            elastix.Shared(DATA)[0]

    assert ended(child(ben)) == 0
    assert ended(child(ann)) == 0


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "full").open("wb", 0) as file:
        while True:
            file.write(bytes(1024))


def in_three_processes(act: Callable[[], object]) -> list[int]:
    return [ended(process) for process in [child(act) for _ in range(3)]]


def test_with_a_budget_beyond_the_memory_what_does_not_fit_is_read_by_each(small):
    def read() -> None:
        shared = elastix.Shared(DATA, budget="100MB")
        assert all_right(shared)
        assert all_right(shared)
        # Whoever comes when the others have filled it has no room for a file to share by.
        assert shared.counts.hits > 0 or shared.folder is None

    assert in_three_processes(read) == [0, 0, 0]
    assert list(small.iterdir()) == []


def test_memory_that_somebody_else_fills_meanwhile(small):
    def read() -> None:
        shared = elastix.Shared(DATA, budget="100MB")
        assert same(shared[0], 0, DATA)
        fill(small)
        assert all_right(shared)
        assert all_right(shared)

    assert in_three_processes(read) == [0, 0, 0]
    assert [path.name for path in small.iterdir()] == ["full"]


def test_memory_that_is_full_from_the_start(small, caplog):
    fill(small)
    shared = elastix.Shared(DATA, budget="100MB")
    assert all_right(shared)
    assert shared.folder is None
    assert "No space left" in caplog.text
    assert [path.name for path in small.iterdir()] == ["full"]
