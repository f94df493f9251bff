"""Parquet and Arrow files by position: the same rows in any order, and damage is told."""

import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import elastix
from elastix.errors import ConfigError, Conflict, Corrupt, ElastixError

ROWS = 23


def table(first: int = 0, count: int = ROWS) -> pa.Table:
    numbers = list(range(first, first + count))
    return pa.table(
        {
            "n": numbers,
            "text": [f"row {n}" for n in numbers],
            "raw": [b"%d" % n * (n % 5) for n in numbers],
            "vector": [[float(n)] * (n % 3) for n in numbers],
        }
    )


def write_parquet(path, first: int = 0, count: int = ROWS, block: int = 5):
    pyarrow.parquet.write_table(table(first, count), path, row_group_size=block)


def write_arrow(path, first: int = 0, count: int = ROWS, block: int = 5):
    with pyarrow.ipc.new_file(str(path), table().schema) as writer:
        writer.write_table(table(first, count), max_chunksize=block)


KINDS = {"Parquet": write_parquet, "Arrow": write_arrow}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path, kind):
    KINDS[kind](tmp_path / "a.data")
    return tmp_path / "a.data"


def test_rows_by_position_are_those_of_the_table_in_any_order(tmp_path, kind, path):
    KINDS[kind](tmp_path / "b.data", ROWS, 9)
    data = getattr(elastix, kind)(tmp_path / "*.data", mixed=2)
    expected = table(0, ROWS + 9).to_pylist()
    assert len(data) == ROWS + 9
    assert data.blocks == (5, 5, 5, 5, 3, 5, 4)
    for index in (31, 0, 17, 5, 4, 22, 23, -1):
        assert data[index] == expected[index]
    mixed = [30, 2, 30, 11, 1, 29]
    assert data.__getitems__(mixed) == [expected[index] for index in mixed]
    with pytest.raises(IndexError, match="32 samples and no sample 32"):
        data[32]


def test_a_row_has_the_columns_that_were_named_and_no_other(tmp_path):
    """Parquet also reads what a dotted name would be within a column of structs."""
    dotted = pa.table({"x": [{"y": 1}, {"y": 2}], "x.y": [4, 5], "z": [6, 7]})
    pyarrow.parquet.write_table(dotted, tmp_path / "a.parquet")
    read = elastix.Parquet(tmp_path / "a.parquet", columns=["z", "x.y"])
    assert list(read[1].items()) == [("z", 7), ("x.y", 5)]


def test_columns_and_decode_say_what_a_sample_is(kind, path):
    make = getattr(elastix, kind)
    assert make(path, columns=["text"])[7] == {"text": "row 7"}
    assert make(path, lambda row: row["n"] * 2, columns=["n"])[7] == 14
    with pytest.raises(ConfigError, match=r"no column \['nn'\]; it has \['n', 'text'"):
        make(path, columns=["nn"])
    with pytest.raises(ConfigError, match="nothing of a row"):
        make(path, columns=[])
    with pytest.raises(ConfigError, match="not 0"):
        make(path, mixed=0)


def test_a_block_is_read_once_while_it_is_kept(kind, path, monkeypatch):
    data = getattr(elastix, kind)(path, mixed=2)
    read = []
    inner = data._block
    monkeypatch.setattr(
        data, "_block", lambda file, block: (read.append(block), inner(file, block))[1]
    )
    data.__getitems__([0, 6, 1, 7, 2])
    assert read == [0, 1]
    data.__getitems__([11, 0, 12])
    assert read == [0, 1, 2, 0]
    assert len(data._kept) == 2


def test_a_dataset_that_was_pickled_reads_the_same(kind, path):
    data = getattr(elastix, kind)(path)
    data[3]
    copy = pickle.loads(pickle.dumps(data))
    assert copy[3] == data[3]
    assert len(pickle.dumps(data)) < 3000  # no rows in it


def test_a_file_changed_since_it_was_opened_is_refused(kind, path):
    data = getattr(elastix, kind)(path)
    KINDS[kind](path, 100, 30)
    with pytest.raises(Conflict, match="changed while it was being read"):
        data[0]


def rewrite(path, change):
    """In place, so that who has it open sees it; and by the clock of the file system, later."""
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        change(file)
    os.utime(path, ns=(before + 1, before + 1))


@pytest.mark.parametrize("index", [0, 20], ids=["kept", "not kept"])
def test_a_file_changed_while_it_is_open_is_refused(kind, path, index):
    data = getattr(elastix, kind)(path)
    data[0]
    raw = path.read_bytes()
    rewrite(path, lambda file: file.write(raw.replace(b"row", b"ROW")))
    with pytest.raises(Conflict, match="changed while it was being read"):
        data[index]


def test_a_file_cut_off_while_it_is_open_kills_nobody(kind, path):
    data = getattr(elastix, kind)(path)
    child = os.fork()  # what is mapped, and not there any more, would kill this process
    if child == 0:
        refused = 0
        data[0]
        os.truncate(path, 64)
        for index in (0, 20):  # of a block that is kept, and of one that is not
            try:
                data[index]
            except Conflict:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_positions_are_whole_numbers_of_any_type(kind, path):
    data = getattr(elastix, kind)(path)
    expected = data[20]
    for index in (np.int8(20), np.uint8(20), torch.tensor(20, dtype=torch.uint8), np.int8(-3)):
        assert data[index] == expected
    for index in (20.0, "20", None, slice(20, 21)):
        with pytest.raises(TypeError):
            data[index]


def test_empty_and_missing_files_are_refused(tmp_path, kind):
    make = getattr(elastix, kind)
    KINDS[kind](tmp_path / "none.data", 0, 0)
    with pytest.raises(ConfigError, match="has no rows"):
        make(tmp_path / "none.data")
    with pytest.raises(ConfigError, match="no file"):
        make(tmp_path / "missing.data")
    (tmp_path / "zero.data").write_bytes(b"")
    with pytest.raises(Corrupt, match=r"zero\.data cannot be read"):
        make(tmp_path / "zero.data")


def test_a_file_that_was_cut_off_is_told(kind, path):
    raw = path.read_bytes()
    for size in range(0, len(raw) - 1, 97):
        path.write_bytes(raw[:size])
        with pytest.raises(Corrupt):
            getattr(elastix, kind)(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_footer_is_a_typed_error_and_moves_no_row(tmp_path, data):
    path = tmp_path / "d.parquet"
    write_parquet(path)
    raw = bytearray(path.read_bytes())
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(footer, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        rows = elastix.Parquet(path)
        assert len(rows) == sum(rows.blocks)
        rows.__getitems__([0, len(rows) - 1])
    except ElastixError:
        return


def test_files_with_other_columns_are_refused_unless_those_of_all_are_named(tmp_path, kind, path):
    other = table().drop_columns(["text"]).select(["raw", "n", "vector"])
    if kind == "Parquet":
        pyarrow.parquet.write_table(other, tmp_path / "b.data")
    else:
        with pyarrow.ipc.new_file(str(tmp_path / "b.data"), other.schema) as writer:
            writer.write_table(other)
    with pytest.raises(ConfigError, match=r"a\.data has the columns.*b\.data has"):
        getattr(elastix, kind)(tmp_path / "*.data")
    named = getattr(elastix, kind)(tmp_path / "*.data", columns=["n", "raw"])
    assert named[ROWS + 3] == named[3] == {"n": 3, "raw": b"333"}


def files_of(tmp_path, kind, *tables) -> list:
    paths = [tmp_path / f"{n}.data" for n in range(len(tables))]
    for path, rows in zip(paths, tables, strict=True):
        if kind == "Parquet":
            pyarrow.parquet.write_table(rows, path)
        else:
            with pyarrow.ipc.new_file(str(path), rows.schema) as writer:
                writer.write_table(rows)
    return paths


INT, TEXT = pa.array([1, 2]), pa.array(["a", "b"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (INT, pa.array([1.5, 2.0])),  # as pandas writes whole numbers beside a missing one
        (INT, TEXT),
        (pa.array([[1], []]), pa.array([["a"], []])),
        (pa.array([{"x": 1}] * 2), pa.array([{"x": "a"}] * 2)),
        (pa.array([{"x": 1}] * 2), pa.array([{"y": 1}] * 2)),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path, kind, first, second):
    tables = [pa.table({"n": column, "m": TEXT}) for column in (first, second)]
    paths = files_of(tmp_path, kind, *tables)
    with pytest.raises(ConfigError, match=r"column 'n' is .* in .*1\.data, and"):
        getattr(elastix, kind)(paths)
    assert getattr(elastix, kind)(paths, columns=["m"])[3] == {"m": "b"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (INT, INT.cast(pa.int16())),
        (TEXT, TEXT.cast(pa.large_string())),
        (TEXT, TEXT.dictionary_encode()),
        (pa.nulls(2), INT),
        (pa.array([[], []]), pa.array([[1], []])),
    ],
)
def test_columns_of_the_same_values_are_taken(tmp_path, kind, first, second):
    tables = [pa.table({"n": first}), pa.table({"n": second})]
    data = getattr(elastix, kind)(files_of(tmp_path, kind, *tables))
    assert [row["n"] for row in data] == first.to_pylist() + second.to_pylist()


def test_files_are_known_again_by_what_is_in_them(tmp_path, kind):
    rows = [pa.table({"n": [f"{value}" * n for n in range(9)]}) for value in ("a", "a", "bb")]
    same, again, others = files_of(tmp_path, kind, *rows)
    made = getattr(elastix, kind)
    assert made(same).files == made(again).files != made(others).files


def test_columns_of_one_name_are_refused_unless_others_are_named(tmp_path):
    columns = [pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])]
    twice = pa.Table.from_arrays(columns, names=["n", "n", "m"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="several columns of the name"):
        elastix.Parquet(tmp_path / "a.parquet")
    assert elastix.Parquet(tmp_path / "a.parquet", columns=["m"])[1] == {"m": 6}


def test_an_arrow_stream_is_refused_by_its_name(tmp_path):
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table().schema) as writer:
        writer.write_table(table())
    with pytest.raises(ConfigError, match="load_from_disk"):
        elastix.Arrow(tmp_path / "a.arrow")
