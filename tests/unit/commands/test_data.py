"""`elastix data index`: an index for archives, for records and for streams."""

import json
import pickle
import tarfile

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import elastix
from elastix import cli
from elastix.data.formats.streams import _crc, _masked, pickled
from elastix.errors import ConfigError

SCRIPT = """
from torch.utils.data import IterableDataset

class Numbers(IterableDataset):
    def __iter__(self):
        print("reading")
        return iter([{"n": n, "text": "x" * n} for n in range(5)])

numbers = Numbers()

def make():
    return Numbers()

class Rows:
    def iter_rows(self):
        return iter(range(3))

rows = Rows()
none = []
three = 3
"""


def run(*words, code: int = 0):
    result = CliRunner().invoke(cli.app, ["data", "index", *map(str, words)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def script(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path / "mine.py"


def record(raw: bytes) -> bytes:
    """As TensorFlow's documentation has it."""
    length = len(raw).to_bytes(8, "little")
    sums = [_masked(_crc(part)).to_bytes(4, "little") for part in (length, raw)]
    return length + sums[0] + raw + sums[1]


def test_the_checksum_is_crc_32c():
    assert _crc(b"123456789") == 0xE3069283  # the check value of its definition


def test_an_archive_is_given_its_index(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("1.jpg", "1.cls", "README"):
            archive.addfile(tarfile.TarInfo(name))
    told = json.loads(run(tmp_path / "*.tar", "--json").stdout)
    note = "a.tar.index; elastix.Tar; 1 files are of no sample"
    assert told == [{"path": str(tmp_path / "a.tar"), "samples": 1, "note": note}]
    assert (tmp_path / "a.tar.index").is_file()
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    assert "no valid tar header" in run(tmp_path / "a.tar", code=1).stderr
    assert "there is no file" in run(tmp_path / "b.tar", code=2).stderr


def test_tables_have_their_own(tmp_path):
    table = pa.table({"n": list(range(10))})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=4)
    with pyarrow.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    shown = run(tmp_path / "t.parquet", tmp_path / "t.arrow").stdout
    assert "10\t3 row groups; elastix.Parquet" in shown
    assert "10\t1 record batches; elastix.Arrow" in shown


@pytest.mark.parametrize("name", ["numbers", "make"])
def test_a_stream_is_written_once(tmp_path, script, name):
    out = tmp_path / "new" / "s.tar"
    told = json.loads(run(f"{script}:{name}", "--out", out, "--json").stdout)
    assert told[0]["samples"] == 5
    data = elastix.Tar(out, decode=lambda parts: pickle.loads(parts["pkl"]))
    assert [data[i] for i in range(5)] == [{"n": n, "text": "x" * n} for n in range(5)]
    assert "is there already" in run(f"{script}:{name}", "--out", out, code=2).stderr


def test_rows_of_ray_data_and_what_is_no_stream(tmp_path, script):
    out = tmp_path / "s.tar"
    run(f"{script}:rows", "--out", out)
    assert len(elastix.Tar(out)) == 3
    for name, said in (("none", "no samples"), ("three", "gone through"), ("four", "no 'four'")):
        assert said in run(f"{script}:{name}", "--out", tmp_path / "x.tar", code=2).stderr
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"mine.py", "s.tar", "s.tar.index"}


def test_a_stream_of_what_cannot_be_pickled_is_refused():
    with pytest.raises(ConfigError, match="sample 1 of the stream cannot be pickled"):
        list(pickled([1, lambda: 2]))


def test_records_of_tensorflow(tmp_path):
    bodies = [b"", b"first", b"x" * 5000]
    path, out = tmp_path / "r.tfrecord", tmp_path / "r.tar"
    path.write_bytes(b"".join(map(record, bodies)))
    assert "--out FILE.tar" in run(path, code=2).stderr
    run(path, "--out", out)
    data = elastix.Tar(out)
    assert [data[i]["tfrecord"] for i in range(3)] == bodies
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], (2**63).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(damaged)
        assert "No archive was written" in run(path, "--out", tmp_path / "z.tar", code=1).stderr
    huge = (2**63).to_bytes(8, "little")
    path.write_bytes(huge + _masked(_crc(huge)).to_bytes(4, "little") + b"x" * 100)
    assert "cut off" in run(path, "--out", tmp_path / "z.tar", code=1).stderr
    assert not (tmp_path / "z.tar").exists()
