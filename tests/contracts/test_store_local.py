"""The contract of a Store, on a local directory and on a file system of pyarrow."""

from pathlib import Path

from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from elastix.store import Store
from elastix.testing.store_contract import StoreContract


class TestLocal(StoreContract):
    def open_store(self, folder: Path) -> Store:
        return Store(folder / "store")


class TestRemote(StoreContract):
    def open_store(self, folder: Path) -> Store:
        (folder / "bucket").mkdir(exist_ok=True)
        remote = SubTreeFileSystem(str(folder / "bucket"), LocalFileSystem())
        return Store("store", filesystem=remote, index=folder / "index")
