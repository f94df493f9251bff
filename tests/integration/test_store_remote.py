"""Packs on a file system of pyarrow: the index made anew elsewhere, and errors in every call."""

import errno
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSystemHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from elastix.errors import ConfigError, Full, StoreError
from elastix.store import Store
from elastix.testing.store_contract import child, same, small


class Unreliable(FileSystemHandler):
    """A file system whose n-th call fails, and whose files fail when they are closed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.countdown = 0
        self.error = errno.EIO
        self.calls = 0

    def _step(self) -> None:
        self.calls += 1
        self.countdown -= 1
        if self.countdown == 0:
            raise OSError(self.error, "injected")

    def get_type_name(self) -> str:
        return "unreliable"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        self._step()
        return self.inner.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        self._step()
        return self.inner.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._step()
        self.inner.create_dir(path, recursive=recursive)

    def delete_file(self, path: str) -> None:
        self._step()
        self.inner.delete_file(path)

    def open_input_stream(self, path: str) -> Any:
        self._step()
        return self.inner.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        self._step()
        return self.inner.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._step()
        return self.inner.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def delete_dir(self, path: str) -> None:
        raise NotImplementedError

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError


@pytest.fixture
def bucket(tmp_path: Path) -> Unreliable:
    (tmp_path / "bucket").mkdir()
    return Unreliable(SubTreeFileSystem(str(tmp_path / "bucket"), LocalFileSystem()))


def test_another_machine_makes_its_own_index(tmp_path: Path, bucket: Unreliable) -> None:
    remote = PyFileSystem(bucket)
    with Store("runs/a", filesystem=remote, index=tmp_path / "one") as store:
        ref = store.put(small(1), score=0.5)
        other = store.put(child(small(1), ref, "layer1.weight", {"n": 2}))
        store.tag("best", other)
        store.retire(ref)
        log = store.log()
    with Store("runs/a", filesystem=remote, index=tmp_path / "two") as store:
        assert store.log() == log
        assert store.ancestors("best") == [ref]
        assert store.verify() == []
        store.put(small(3))
    with Store("runs/a", filesystem=remote, index=tmp_path / "one") as store:
        assert len(store.log()) == 2  # what the other one put is found when it is opened
        assert same(store.get(store.log()[0].ref), small(3))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_every_call_may_fail(tmp_path: Path, bucket: Unreliable, error: int) -> None:
    bucket.error = error
    promised = []
    with Store("runs/a", filesystem=PyFileSystem(bucket), index=tmp_path / "index") as store:
        promised.append((store.put(small(0)), small(0)))
        number = 1
        caughts: list[StoreError] = []
        for operation in ("put", "get", "tag", "gc"):
            at = 1
            while True:
                number += 1
                bucket.calls, bucket.countdown = 0, at
                try:
                    if operation == "put":
                        promised.append((store.put(small(number)), small(number)))
                    elif operation == "get":
                        store._reader._models.clear()
                        store.get(promised[0][0])
                    elif operation == "tag":
                        store.tag(f"tag{number}", promised[0][0])
                    else:
                        store.retire(promised.pop()[0])
                        store.gc()
                except StoreError as caught:
                    caughts.append(caught)
                bucket.countdown = 0
                if bucket.calls < at or at > 60:
                    break
                at += 9 if operation == "gc" else 1
                promised.append((store.put(small(number + 100_000)), small(number + 100_000)))
                for ref, state in promised[:1] + promised[-3:]:
                    assert same(store.get(ref), state)
        assert len(caughts) >= 6
        assert all("injected" in str(caught) for caught in caughts)
        assert error == errno.EIO or all(isinstance(caught, Full) for caught in caughts)
        assert store.verify() == []
        store.rebuild()
        for ref, state in promised:
            assert same(store.get(ref), state)


def test_unknown_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Store("nowhere://bucket/x")
