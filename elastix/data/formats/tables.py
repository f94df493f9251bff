"""Rows of Parquet and Arrow files by position.

A row cannot be reached alone: the row group (Parquet) or record batch (Arrow) that it is in is read
whole. So some are kept, and the loader shuffles in blocks (see sample_order) such that the
rows of as many blocks as are kept come mixed, and each block is read once in an epoch.

Not here: other file systems than this machine's.
"""

import os
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
from blake3 import blake3

from elastix.arguments import checked
from elastix.data.formats.files import (
    Fingerprint,
    Paths,
    check_decode,
    check_index,
    check_same,
    fingerprint,
    found,
)
from elastix.data.formats.indexed import Indexed
from elastix.errors import ConfigError, Corrupt

Row = dict[str, Any]
_MOST_OPEN = 16


@checked
class _Rows(Indexed):
    """What both kinds of files have in common."""

    def __init__(
        self,
        paths: Paths,
        decode: Callable[[Row], Any] | None = None,
        *,
        columns: Sequence[str] | None = None,
        mixed: int = 8,
    ) -> None:
        """Open files, reading what says where their rows are and none of the rows.

        Args:
            paths: a file, a pattern such as "data/*.parquet", or a list of them.
            decode: makes what the loader is given of a row's dict; without it, the dict is.
            columns: the only ones to read; all by default.
            mixed: blocks (row groups, record batches) that are kept in memory, and whose rows come
                mixed when the loader shuffles. More mixes better, and takes memory.
        """
        if mixed < 1:
            raise ConfigError(f"mixed must be a number of blocks >= 1, not {mixed!r}.")
        if columns is not None and (
            not isinstance(columns, list | tuple) or not all(isinstance(n, str) for n in columns)
        ):
            raise ConfigError(f"columns must be a list of names, not {columns!r}.")
        if columns is not None and not columns:
            raise ConfigError(
                "columns=[] would leave nothing of a row. No dataset was made. Leave it out."
            )
        check_decode(decode)
        self.mixed = mixed
        self._decode = decode
        self._columns = None if columns is None else list(columns)
        self._paths = found(paths)
        self._types: dict[str, pa.DataType] | None = None  # of the columns, alike in all files
        footers = blake3()
        self._made_from: list[Fingerprint] = []
        self._places: list[tuple[int, int]] = []  # file, block of it
        blocks: list[int] = []
        for number, path in enumerate(self._paths):
            with _understood(path):
                source = self._source(path)
                self._made_from.append(fingerprint(source.fileno()))
                opened, sizes = self._opened(path, source)
                self._check_columns(path, opened.schema)
                footers.update(_footer(source))
            if any(size < 0 for size in sizes):
                raise Corrupt(f"{path} has a block of {min(sizes)} rows. It is damaged.")
            self._places += [(number, block) for block in range(len(sizes))]
            blocks += sizes
        self.blocks = tuple(blocks)
        self.files = footers.hexdigest(16)
        self._starts = [0, *accumulate(blocks)]
        self._files: OrderedDict[int, tuple[Any, Any]] = OrderedDict()  # source, reader
        self._kept: OrderedDict[int, tuple[Any, pa.Table]] = OrderedDict()  # source, rows
        self._process = os.getpid()
        if not len(self):
            raise ConfigError(f"{self._paths[0]} has no rows. No dataset was made.")

    @abstractmethod
    def _source(self, path: Path) -> Any:  # noqa: ANN401 - pyarrow has no types
        """The open file."""

    @abstractmethod
    def _opened(self, path: Path, source: Any) -> tuple[Any, list[int]]:  # noqa: ANN401
        """A reader with a `schema`, and the rows of each block."""

    @abstractmethod
    def _block(self, opened: Any, block: int) -> pa.Table:  # noqa: ANN401 - pyarrow has no types
        """All of a block, at least in the columns that are wanted."""

    def _check_columns(self, path: Path, schema: pa.Schema) -> None:
        names = schema.names
        missing = [name for name in self._columns or () if name not in names]
        if missing:
            raise ConfigError(
                f"{path} has no column {missing}; it has {names}. No dataset was made."
            )
        wanted = [name for name in names if self._columns is None or name in self._columns]
        twice = sorted({name for name in wanted if wanted.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{path} has several columns of the name {twice}, and a row is a dict, which would "
                "keep one of them. No dataset was made. Name others with columns=[...]."
            )
        types = {name: schema.field(name).type for name in wanted}
        if self._types is None:
            self._types = types
        if self._types.keys() != types.keys():
            raise ConfigError(
                f"{self._paths[0]} has the columns {sorted(self._types)}, and {path} has "
                f"{sorted(wanted)}. No dataset was made. Name those of all with columns=[...], or "
                "make a dataset of each and put them together with torch's ConcatDataset."
            )
        for name, first in self._types.items():
            if not _same_values(first, types[name]):
                raise ConfigError(
                    f"column {name!r} is {types[name]} in {path}, and {first} in the files before "
                    "it, so its values would be of several types. No dataset was made. Write the "
                    "files with one schema, or leave the column out with columns=[...]."
                )
            if pa.types.is_null(first):
                self._types[name] = types[name]  # nothing was said of it yet

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - whatever decode makes
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples; a block that several of them are in is read once."""
        name = type(self).__name__
        wanted = [check_index(index, len(self), f"the {name} dataset") for index in indices]
        places = [bisect_right(self._starts, index) - 1 for index in wanted]
        rows: list[Any] = [None] * len(wanted)
        for number in dict.fromkeys(places):
            mine = [n for n, place in enumerate(places) if place == number]
            source, table = self._table(number)
            offsets = [wanted[n] - self._starts[number] for n in mine]
            with _understood(self._paths[self._places[number][0]]):
                taken = [table.slice(offset, 1).to_pylist()[0] for offset in offsets]
            self._check_unchanged(self._places[number][0], source)  # Arrow's rows lie in the file
            for n, row in zip(mine, taken, strict=True):
                rows[n] = row
        return rows if self._decode is None else [self._decode(row) for row in rows]

    def _table(self, number: int) -> tuple[Any, pa.Table]:
        """The rows of a block, with the file that they are from."""
        if self._process != os.getpid():  # after a fork: what the parent has open is the parent's
            self._files, self._kept, self._process = OrderedDict(), OrderedDict(), os.getpid()
        file, block = self._places[number]
        if number not in self._kept:
            path = self._paths[file]
            source, opened = self._reader(file)
            with _understood(path):
                table = self._block(opened, block)
                if self._columns is not None:  # Parquet's also reads "a" where "a.b" is a name
                    table = table.select(self._columns)
                table.validate()
            if table.num_rows != self.blocks[number]:
                raise Corrupt(
                    f"{path} has {table.num_rows} rows in block {block}, and said that there were "
                    f"{self.blocks[number]}. Nothing of it was used. Write the file again."
                )
            self._kept[number] = source, table
            if len(self._kept) > self.mixed:
                self._kept.popitem(last=False)
        else:  # what is mapped may not be looked at if it was cut off: that kills
            self._check_unchanged(file, self._kept[number][0])
        self._kept.move_to_end(number)
        return self._kept[number]

    def _reader(self, file: int) -> tuple[Any, Any]:
        """The open file, and who reads blocks of it."""
        if file not in self._files:
            path = self._paths[file]
            with _understood(path):
                source = self._source(path)
            self._check_unchanged(file, source)
            with _understood(path):
                self._files[file] = source, self._opened(path, source)[0]
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
        self._check_unchanged(file, self._files[file][0])
        self._files.move_to_end(file)
        return self._files[file]

    def _check_unchanged(self, file: int, source: Any) -> None:  # noqa: ANN401
        check_same(self._paths[file], fingerprint(source.fileno()), self._made_from[file])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_kept": OrderedDict(), "_process": 0}


class Parquet(_Rows):
    """Rows of Parquet files by position: a dict of Python values by column, or what `decode` makes.

    Row groups are read whole. The loader shuffles in blocks: row groups come in a random order, and
    the rows of `mixed` of them are shuffled together. So write files with many row groups, small
    enough that every worker can keep `mixed` of them in memory.

    Raises:
        ConfigError: no such file or column, no rows, or an impossible number.
        Corrupt: a file is damaged or no Parquet file.
        Conflict: when reading: a file was changed since it was opened.
    """

    def _source(self, path: Path) -> Any:  # noqa: ANN401
        return pa.OSFile(os.fspath(path))

    def _opened(self, path: Path, source: Any) -> tuple[Any, list[int]]:  # noqa: ANN401
        opened = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
        footer = opened.metadata
        rows = [footer.row_group(n).num_rows for n in range(footer.num_row_groups)]
        if sum(rows) != footer.num_rows:
            raise Corrupt(
                f"{path} says that it has {footer.num_rows} rows, and its row groups have "
                f"{sum(rows)}. It is damaged. Nothing was read from it."
            )
        return _ParquetReader(opened), rows

    def _block(self, opened: Any, block: int) -> pa.Table:  # noqa: ANN401
        columns = self._columns
        return opened.file.read_row_group(block, columns=columns, use_threads=False)


class _ParquetReader:
    def __init__(self, file: Any) -> None:  # noqa: ANN401
        self.file = file
        self.schema = file.schema_arrow


class Arrow(_Rows):
    """Rows of Arrow IPC files (Feather 2) by position: a dict by column, or what `decode` makes.

    Files are mapped into memory, so that workers of a host share them. The loader shuffles in
    blocks, as with `Parquet`; a block is a record batch. The files of Hugging Face datasets are
    Arrow streams, not of this kind: give the loader the `datasets.Dataset` itself.

    Raises:
        ConfigError: no such file or column, no rows, or an impossible number.
        Corrupt: a file is damaged or no Arrow IPC file.
        Conflict: when reading: a file was changed since it was opened.
    """

    def _source(self, path: Path) -> Any:  # noqa: ANN401
        return pa.memory_map(os.fspath(path))

    def _opened(self, path: Path, source: Any) -> tuple[Any, list[int]]:  # noqa: ANN401
        if source.size() and source.read_at(6, 0) != b"ARROW1":
            _refuse_stream(path, source)
        opened = pyarrow.ipc.open_file(source)
        batches = range(opened.num_record_batches)
        return opened, [opened.get_batch(n).num_rows for n in batches]

    def _block(self, opened: Any, block: int) -> pa.Table:  # noqa: ANN401
        return pa.Table.from_batches([opened.get_batch(block)])


def _footer(source: Any) -> bytes:  # noqa: ANN401 - pyarrow has no types
    """The end of a file, which says what is where in it, with its length."""
    size: int = source.size()
    least = min(size, 10)  # a length of four bytes and what both kinds of files end with
    tail = source.read_at(least, size - least)
    length = int.from_bytes(tail[-8:-4] if tail.endswith(b"PAR1") else tail[:4], "little")
    length = min(size, length + least)
    return size.to_bytes(8, "little") + bytes(source.read_at(length, size - length))


def _same_values(a: pa.DataType, b: pa.DataType) -> bool:
    """Whether values of both are of the same types in Python; where all are null, of any."""
    a, b = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (a, b))
    if pa.types.is_null(a) or pa.types.is_null(b):
        return True
    if _is_list(a) and _is_list(b):
        return _same_values(a.value_type, b.value_type)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        fields = [
            {f.name: f.type for f in map(kind.field, range(kind.num_fields))} for kind in (a, b)
        ]
        return fields[0].keys() == fields[1].keys() and all(
            _same_values(inner, fields[1][name]) for name, inner in fields[0].items()
        )
    return bool(a == b) or any(is_it(a) and is_it(b) for is_it in _ALIKE)


def _is_any(*names: str) -> Callable[[pa.DataType], bool]:
    several = [getattr(pa.types, f"is_{name}") for name in names]
    return lambda kind: any(is_it(kind) for is_it in several)


_is_list = _is_any("list", "large_list", "fixed_size_list")
_ALIKE = (
    _is_any("integer"),
    _is_any("floating"),
    _is_any("string", "large_string", "string_view"),
    _is_any("binary", "large_binary", "fixed_size_binary", "binary_view"),
)


def _refuse_stream(path: Path, source: Any) -> None:  # noqa: ANN401
    """Raise for an Arrow stream, such as the files of Hugging Face datasets."""
    try:
        pyarrow.ipc.open_stream(source)
    except (pa.ArrowException, OSError, EOFError):
        return  # it is something else, or damaged
    raise ConfigError(
        f"{path} is an Arrow stream, which has no index. No dataset was made. If Hugging Face's "
        "library wrote it, use datasets.load_from_disk; else write it with pyarrow.ipc.new_file."
    )


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """What pyarrow says about damage, as our error with the path."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise Corrupt(
            f"{path} cannot be read: {error}. No row of it was used. Write or copy it again."
        ) from error
