"""What makes no sense as an argument of a dataset or loader is refused before any work starts."""

import io
import tarfile
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import TensorDataset

import elastix
from elastix.errors import ConfigError
from elastix.train.replica.context import Context

NUMBERS = [-1, 0, 2.5, "2", None, True]
FORMATS = {
    "paths": [None, 3, 2.5, True, [], [None], [3], {"a": 1}, b"a.tar", "", object()],
    "decode": ["jpg", 3, b"", [len]],
}
TABLES = FORMATS | {
    "columns": ["n", 3, [3], [None], True],
    "mixed": NUMBERS,
}
SHARED = {
    "dataset": [None, 3, "images", b"images", {"a": 1}, [1, 2][:0], object(), iter([1])],
    "budget": [None, True, -1, 0, 2.5, "", "lots", "-1GB", "1 PB", [1], float("nan")],
}
LOADER = {
    "dataset": [None, 3, "images", {"a": 1}, iter([1]), [], object()],
    "batch_size": [*NUMBERS, float("nan")],
    "per_worker": ["yes", 1, None],
    "shuffle": ["yes", 1, None],
    "seed": [-1, 2.5, "0", True, 2**63],
    "collate_fn": [None, "stack", 3],
    "num_workers": [-1, 2.5, "2", None, True],
    "prefetch_factor": [-1, 0, 2.5, "2", None, True],
    "augment": ["flip", 3],
    "slices": [-1, 0, 2.5, "2", True, 3],
    "microbatch": [-1, 0, 2.5, "2", True, 3],
    "rehearse": [3, "memory", elastix.Rehearsal],
}


def each(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tarfile.open("a.tar", "w") as archive:
        info = tarfile.TarInfo("0.n")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
    table = pa.table({"n": [1, 2]})
    pa.parquet.write_table(table, "a.parquet")
    with pa.ipc.new_file("a.arrow", table.schema) as writer:
        writer.write_table(table)
    return tmp_path


@pytest.mark.parametrize(("name", "value"), each(FORMATS))
def test_a_tar_refuses(folder, name, value):
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError):
        elastix.Tar(**{"paths": "a.tar", name: value})
    assert sorted(folder.iterdir()) == before  # no index was made


@pytest.mark.parametrize(("name", "value"), each(TABLES))
@pytest.mark.parametrize("kind", ["Parquet", "Arrow"])
def test_a_table_refuses(folder, kind, name, value):
    with pytest.raises(ConfigError):
        getattr(elastix, kind)(**{"paths": f"a.{kind.lower()}", name: value})


@pytest.mark.parametrize(("name", "value"), each(SHARED))
def test_shared_refuses(name, value):
    with pytest.raises(ConfigError):
        elastix.Shared(**{"dataset": TensorDataset(torch.rand(3)), name: value})


class Member:
    """Prepared; whatever comes as far as to open a loader was let through."""

    prepared = True
    device = torch.device("cpu")
    settings = SimpleNamespace(seed_of_order=0, exact=False)

    def open_loader(self, source):
        raise AssertionError(f"a loader was opened: {source}")


@pytest.mark.parametrize(("name", "value"), each(LOADER))
def test_a_loader_refuses(name, value):
    data = TensorDataset(torch.rand(8))
    with pytest.raises(ConfigError):
        Context(Member(), {}).loader(**{"dataset": data, "batch_size": 4, name: value})
