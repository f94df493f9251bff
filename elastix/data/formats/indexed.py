"""Whether a position in a dataset means a sample, and what to do where it does not.

Without that, nobody could say which samples were used when workers come and go: a stream can only
be read from its beginning, and differently by each number of readers.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, cast

import numpy as np
from blake3 import blake3
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from elastix.errors import ConfigError

_PATHS = 10_000  # of very many so many are looked at, evenly spaced


class Indexed(Dataset[Any]):
    """A dataset of files: whether they are the same ones when a run goes on, and their blocks.

    Where samples are read in blocks, the loader shuffles in blocks too.

    Attributes:
        blocks: samples of each block, in the order of positions; none to shuffle without.
        mixed: blocks that the dataset keeps, and that are shuffled together.
        files: a digest of what its files say is in them; empty if nobody knows.
    """

    blocks: tuple[int, ...] = ()
    mixed: int = 0
    files: str = ""


def known_by(dataset: object) -> str:
    """By which a dataset is known again that has as many samples: its files or indices, and paths.

    Empty if nobody knows: it is not read for this. What is known of paths stands behind a colon:
    States of earlier versions have nothing of these.
    """
    if isinstance(dataset, Subset):
        try:
            indices = np.asarray(dataset.indices, dtype=np.int64).tobytes()
        except (TypeError, ValueError, OverflowError):
            return ""
        files, colon, paths = known_by(dataset.dataset).partition(":")
        return blake3(indices + files.encode()).hexdigest(16) + colon + paths
    if isinstance(dataset, ConcatDataset):
        parts = [known_by(part).partition(":") for part in dataset.datasets]
        of_files, of_paths = [files for files, _, _ in parts], [paths for _, _, paths in parts]
        lengths = dataset.cumulative_sizes
        known = blake3(repr((of_files, lengths)).encode()).hexdigest(16) if any(of_files) else ""
        order = f":{blake3(repr(of_paths).encode()).hexdigest(16)}" if any(of_paths) else ""
        return known + order
    if isinstance(dataset, Indexed):
        return dataset.files
    paths = _by_paths(dataset)
    return f":{paths}" if paths else ""


def _by_paths(dataset: object) -> str:
    """A digest of the paths that it holds one of for each sample; empty if it does not.

    What glob and os.listdir give is in an order of the file system's, which may be another one on
    each node. The folder that all paths are in does not count: nodes may keep copies elsewhere.
    """
    try:
        length, held = len(cast("Sequence[Any]", dataset)), vars(dataset)
    except Exception:  # noqa: BLE001 - the user's code, which says it where samples are counted
        return ""
    found = []
    for name, values in sorted(held.items()):
        if isinstance(values, np.ndarray):
            values = values.tolist() if values.dtype.kind in "OU" and values.ndim == 1 else ()
        if not isinstance(values, list | tuple) or len(values) != length:
            continue
        rows = [*map(_row, values[:: length // _PATHS + 1])]
        if rows and all(rows):
            paths = [path for path, *_ in rows]
            folder = _in_common(min(paths), max(paths)).rpartition("/")[0]
            cut = [(path[len(folder) :].lstrip("/"), *rest) for path, *rest in rows]
            found.append((name, cut))
    return blake3(repr(found).encode(errors="surrogatepass")).hexdigest(16) if found else ""


def _in_common(one: str, other: str) -> str:
    """With what both begin; so does all that stands between them in the order of text."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (a, b) in pairs if a != b), len(one))]


def _row(value: object) -> tuple[Any, ...]:
    """A path, and what may stand beside it: a label, or the name of a mask; empty if it is none.

    A path alone is looked at: to ask another object for its path may fetch a file from afar.
    """
    row: Sequence[Any] = value if isinstance(value, list | tuple) and value else (value,)
    path = row[0]  # a row of numbers may be long
    if isinstance(path, PurePath):
        path = str(path)
    if not (isinstance(path, str) and "." in path and path.rpartition(".")[2].isalnum()):
        return ()
    beside = [one.name if isinstance(one, PurePath) else one for one in row[1:]]
    names = (one.rpartition("/")[2] if isinstance(one, str) else one for one in beside)
    return str(path), *(one for one in names if isinstance(one, int | str))


_COMMAND = (
    "Write it once to files with an index: `elastix data index SCRIPT.py:NAME --out FILE.tar`, "
    "where NAME is the dataset or a function that makes it; then use elastix.Tar."
)
_FILES = "`elastix data index FILES --out FILE.tar` gives TFRecord files one; then use elastix.Tar."
_STREAMS = {
    "ray.data": "Ray Data makes its blocks in tasks, so a position in it means no sample.",
    "datasets.iterable_dataset": "A datasets.IterableDataset is a stream.",
    "tfrecord": "TFRecord files are streams.",
    "torchdata": "A torchdata pipe is a stream.",
}


def by_position(dataset: Any) -> Dataset[Any]:  # noqa: ANN401 - whatever the user has
    """The dataset, if it has a length and a sample for each position below it.

    Some that are both come in a thin wrapper: torch's DataLoader asks a class that derives from
    IterableDataset for nothing but a stream.

    Raises:
        ConfigError: it does not have them, or they mean something else on each worker.
    """
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    for base in type(dataset).__mro__:
        _refuse_shares(dataset, base, name)
    for module, why in _STREAMS.items():
        if name.startswith(module + "."):
            raise ConfigError(f"{name} has no index. {why} No loader was made. {_COMMAND}")
    if isinstance(dataset, str | bytes | dict):
        raise ConfigError(
            f"{dataset!r:.80} is no dataset. No loader was made. Give an object with __len__ and "
            "__getitem__; elastix.Tar and elastix.Parquet make one of files."
        )
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "ctx.loader was given a DataLoader. No loader was made. Give it the dataset of that: "
            "ctx.loader(loader.dataset, batch_size=...). It draws the batches itself, so that each "
            "sample is used once whoever comes and goes."
        )
    if not (_has(dataset, "__len__") and _has(dataset, "__getitem__")):
        raise ConfigError(
            f"{type(dataset).__name__} has no length and no sample for each position below it, so "
            "elastix cannot promise that each sample is used exactly once when workers come and "
            "go. No loader was made. Give it __len__ and __getitem__ (a map-style dataset). Or: "
            f"{_COMMAND} {_FILES}"
        )
    if isinstance(dataset, IterableDataset):
        return _ByPosition(dataset)
    return cast("Dataset[Any]", dataset)


def _has(dataset: object, method: str) -> bool:
    """Whether its class has its own: that of torch's Dataset does nothing but raise."""
    found = getattr(type(dataset), method, None)
    return found is not None and found is not getattr(Dataset, method, None)


def _refuse_shares(dataset: Any, base: type, name: str) -> None:  # noqa: ANN401
    """Streaming datasets whose length is a rank's share, padded or cut."""
    if base.__name__ != "StreamingDataset":
        return
    package = base.__module__.partition(".")[0]
    if package == "streaming":
        raise ConfigError(
            f"{name} (MosaicML Streaming) has a length that is one rank's share, padded to be the "
            "same on all, so samples would be repeated. No loader was made. Use "
            "streaming.LocalDataset on the same folder: it has the samples by position."
        )
    if package == "litdata":
        world = getattr(getattr(dataset, "distributed_env", None), "world_size", 1)
        if world != 1 or getattr(dataset, "drop_last", False):
            raise ConfigError(
                f"{name} (litdata) has a length that is one rank's share of {world} or leaves out "
                "the last samples. No loader was made. Make it with drop_last=False, and where "
                "torch.distributed is not set up: elastix shares the samples out itself."
            )


class _ByPosition(Dataset[Any]):
    """A dataset that is a stream by its class and has samples by position all the same."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._dataset[index]
