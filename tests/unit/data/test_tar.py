"""Tar archives by position: every sample is its own, and damage is told, never read."""

import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import elastix
from elastix.data.formats.archive import members
from elastix.data.formats.tar import make_index
from elastix.errors import ConfigError, Conflict, Corrupt, ElastixError


def add(archive: tarfile.TarFile, name: str, body: bytes = b"", **more) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(body)
    for key, value in more.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(body))


def write(path: Path, files, tar_format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, body in files:
            add(archive, name, body)
    return path


def pairs(first: int, count: int):
    for n in range(first, first + count):
        yield f"{n:04d}.jpg", b"picture %d" % n * (n % 7)
        yield f"{n:04d}.cls", b"%d" % n


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path / "a.tar", pairs(0, 9))


def test_positions_run_through_all_archives_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "s-1.tar", pairs(4, 3))
    write(tmp_path / "s-0.tar", pairs(0, 4))
    data = elastix.Tar(tmp_path / "s-*.tar", decode=lambda parts: int(parts["cls"]))
    assert [data[i] for i in range(len(data))] == list(range(7))
    assert data[-1] == 6
    with pytest.raises(IndexError, match="7 samples and no sample 7"):
        data[7]
    assert elastix.Tar([tmp_path / "s-1.tar"])[0] == {
        "__key__": "0004",
        "jpg": b"picture 4" * 4,
        "cls": b"4",
    }


NAMES = st.from_regex(
    r"(([a-c]|\.\.|é)/){0,2}[a-d]{1,2}(\.(jpg|cls|JPG|seg\.png))?", fullmatch=True
)
LONG = st.integers(90, 300).map(lambda n: "long/" * (n // 5) + "x" * 40 + ".jpg")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.dictionaries(NAMES | LONG, st.binary(max_size=1500), min_size=1, max_size=20),
    tar_format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_samples_are_what_a_plain_reader_finds(tmp_path, files, tar_format):
    path = write(tmp_path / "any.tar", files.items(), tar_format)
    expected: dict[str, dict] = {}
    twice = False
    with tarfile.open(path) as archive:
        for member in archive:
            folder, slash, base = member.name.rpartition("/")
            stem, dot, part = base.partition(".")
            if dot and stem:
                sample = expected.setdefault(folder + slash + stem, {})
                twice = twice or part.lower() in sample
                sample[part.lower()] = archive.extractfile(member).read()
    if twice or not expected:
        with pytest.raises(Corrupt if twice else ConfigError):
            elastix.Tar(path)
        return
    for data in (elastix.Tar(path), elastix.Tar(path)):  # made, then read from beside the archive
        found = [data[i] for i in range(len(data))]
        assert [{"__key__": key, **parts} for key, parts in expected.items()] == found


def test_the_index_is_made_once_and_names_no_place_of_another_archive(path, monkeypatch):
    first = elastix.Tar(path)
    beside = path.with_name("a.tar.index")
    assert beside.is_file()
    monkeypatch.setattr("elastix.data.formats.tar.members", None)  # nobody reads headers again
    assert [elastix.Tar(path)[i] for i in range(9)] == [first[i] for i in range(9)]


def test_an_index_of_another_archive_is_made_anew(path):
    elastix.Tar(path)
    write(path, pairs(20, 4))
    data = elastix.Tar(path)
    assert [data[i]["__key__"] for i in range(len(data))] == ["0020", "0021", "0022", "0023"]


def test_an_archive_changed_while_it_is_read_is_refused(path):
    data = elastix.Tar(path)
    write(path, pairs(20, 9))
    with pytest.raises(Conflict, match="changed while it was being read"):
        data[0]


def test_an_archive_changed_while_it_is_open_is_refused(path):
    data = elastix.Tar(path)
    data[0]
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(1024)
        file.write(b"other")
    os.utime(path, ns=(before + 1, before + 1))
    with pytest.raises(Conflict, match="changed while it was being read"):
        data[1]


def test_positions_are_whole_numbers_of_any_type(tmp_path):
    write(tmp_path / "many.tar", pairs(0, 300))
    data = elastix.Tar(tmp_path / "many.tar")
    for index in (np.int8(4), torch.tensor(4, dtype=torch.uint8), np.int16(-296)):
        assert data[index]["cls"] == b"4"
    assert data[np.int8(-1)]["cls"] == b"299"
    for index in (4.0, 1.5, "4", None, slice(4, 5)):
        with pytest.raises(TypeError):
            data[index]


def test_an_archive_of_the_same_size_and_time_is_still_not_taken_for_the_other(path):
    info = path.stat()
    elastix.Tar(path)
    write(path, list(pairs(0, 9))[::-1])  # same files, other places
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert path.stat().st_size == info.st_size
    data = elastix.Tar(path)
    with pytest.raises(Corrupt, match="elastix data index"):
        [data[i] for i in range(9)]
    make_index(path)
    data = elastix.Tar(path)
    assert sorted(int(data[i]["cls"]) for i in range(9)) == list(range(9))


@pytest.mark.parametrize("cut", [0, 8, 100, 300, 700, -1])
def test_a_damaged_index_is_made_anew(path, cut):
    whole = [elastix.Tar(path)[i] for i in range(9)]
    beside = path.with_name("a.tar.index")
    raw = bytearray(beside.read_bytes())
    beside.write_bytes(raw[:cut])
    assert [elastix.Tar(path)[i] for i in range(9)] == whole
    raw[cut] ^= 0x41
    beside.write_bytes(raw)
    assert [elastix.Tar(path)[i] for i in range(9)] == whole
    beside.write_bytes((2**63).to_bytes(8, "little") + bytes(raw[8:]))
    assert [elastix.Tar(path)[i] for i in range(9)] == whole


def test_an_index_that_points_outside_is_not_believed(path):
    whole = [elastix.Tar(path)[i] for i in range(9)]
    beside = path.with_name("a.tar.index")
    raw = beside.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8:length]), raw[length:]
    for place in range(0, len(body) - header["text"], 8 * 7):
        for value in (2**63 - 1, 2**64 - 1, 1 << 40):
            forged = body[:place] + value.to_bytes(8, "little") + body[place + 8 :]
            text = json.dumps({**header, "digest": blake3(forged).hexdigest()}).encode()
            beside.write_bytes(len(text).to_bytes(8, "little") + text + forged)
            try:
                data = elastix.Tar(path)
                found = [data[i] for i in range(len(data))]
            except Corrupt:  # a header's digest was forged: then nothing can be read
                continue
            assert found == whole


@pytest.mark.parametrize(
    "forged",
    [
        {"samples": 9.0},
        {"samples": -1},
        {"parts": 10**30},
        {"text": "much"},
        {"names": None},
        {"names": [1, 2]},
        {"names": {"a": 1, "b": 2}},
        {"left_out": "\x1b[31m"},
    ],
)
def test_an_index_that_somebody_made_up_is_not_believed(path, forged):
    whole = [elastix.Tar(path)[i] for i in range(9)]
    beside = path.with_name("a.tar.index")
    raw = beside.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    text = json.dumps({**json.loads(raw[8:length]), **forged}).encode()
    text += b" " * (-len(text) % 8)
    beside.write_bytes(len(text).to_bytes(8, "little") + text + raw[length:])
    data = elastix.Tar(path)
    assert [data[i] for i in range(len(data))] == whole


def test_a_folder_that_may_not_be_written_to_costs_the_index_only(path, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr("elastix.data.formats.tar._replace", refuse)
    assert len(elastix.Tar(path)) == 9
    assert not path.with_name("a.tar.index").exists()
    with pytest.raises(ConfigError, match="could not be written"):
        make_index(path)


# ------------------------------------------------------------------------------ hostile archives


def test_every_way_to_cut_an_archive_off_is_told(path):
    raw = path.read_bytes()
    end = raw.rstrip(b"\0")
    for size in [*range(0, len(end) + 1023, 257), len(end) + 100]:
        path.write_bytes(raw[:size])
        with pytest.raises(Corrupt):
            elastix.Tar(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_typed_error_or_leaves_the_headers_as_they_are(tmp_path, data):
    path = write(tmp_path / "d.tar", [("a.jpg", b"x" * 600), ("é" * 80 + ".cls", b"5")])
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 4500))
        raw[place : place + 1] = data.draw(st.binary(max_size=12))
    found = []
    try:
        for member in members(lambda at, n: bytes(raw[at : at + n]), len(raw), "d.tar"):
            assert 0 <= member.header <= member.header + 512 + member.size <= len(raw)
            found.append(member)
    except ElastixError:
        return
    assert len(found) <= 2


def sealed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize(
    "size",
    [b"\x80" + b"\0" * 3 + (2**63).to_bytes(8), b"\x80" + b"\xff" * 11, b"7" * 12, b"-1 ", b"9z"],
)
def test_lengths_that_cannot_be_are_refused(path, size):
    raw = bytearray(path.read_bytes())
    raw[124:136] = size.ljust(12, b"\0")
    path.write_bytes(sealed(raw[:512]) + bytes(raw[512:]))
    with pytest.raises(Corrupt):
        elastix.Tar(path)


@pytest.mark.parametrize("size", ["9223372036854775808", "-1", "1e3", "9" * 400, "²"])
def test_lengths_in_pax_headers_that_cannot_be_are_refused(tmp_path, size):
    path = tmp_path / "p.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "a.jpg", b"1234", pax_headers={"size": size})
    with pytest.raises(Corrupt):
        elastix.Tar(path)


def test_links_devices_and_folders_are_no_samples_and_names_are_only_keys(tmp_path):
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "../../etc/passwd.txt", b"no path")
        add(archive, "/root/x.txt", b"nor this")
        add(archive, "folder.d", type=tarfile.DIRTYPE)
        add(archive, "link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "null.jpg", type=tarfile.CHRTYPE)
        add(archive, "README", b"no dot")
        add(archive, ".hidden", b"no name")
        add(archive, "__meta__", b"")
    data = elastix.Tar(path)
    assert [data[i] for i in range(len(data))] == [
        {"__key__": "../../etc/passwd", "txt": b"no path"},
        {"__key__": "/root/x", "txt": b"nor this"},
    ]
    assert make_index(path) == (2, 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["odd.tar", "odd.tar.index"]


def test_a_hard_link_is_refused_as_a_sample_would_be_without_its_bytes(tmp_path):
    path = write(tmp_path / "a.tar", [("a.jpg", b"1")])
    with tarfile.open(path, "a") as archive:
        add(archive, "b.jpg", type=tarfile.LNKTYPE, linkname="a.jpg")
    with pytest.raises(Corrupt, match=r"'b\.jpg' as a hard link.*--hard-dereference"):
        elastix.Tar(path)


def test_a_pattern_does_not_find_the_indexes_that_it_made(path):
    assert len(elastix.Tar(path.parent / "*")) == len(elastix.Tar(path.parent / "*")) == 9


def test_two_stars_stand_for_any_number_of_folders(tmp_path, path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path / "deep" / "er" / "b.tar", pairs(9, 2))
    assert len(elastix.Tar(tmp_path / "**" / "*.tar")) == 11


def test_a_file_that_is_given_twice_is_refused(path):
    with pytest.raises(ConfigError, match=r"a\.tar was given twice"):
        elastix.Tar([path, path.parent / "*.tar"])


def test_files_are_known_again_by_what_is_in_them(tmp_path, path):
    first = elastix.Tar(path)
    assert pickle.loads(pickle.dumps(first)).files == first.files
    copied = write(tmp_path / "copy.tar", pairs(0, 9))
    assert elastix.Tar(copied).files == first.files
    assert elastix.Tar(write(tmp_path / "b.tar", pairs(1, 9))).files != first.files


def test_a_file_that_is_there_twice_is_refused_by_name(tmp_path):
    path = write(tmp_path / "t.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.JPG", b"3")])
    with pytest.raises(Corrupt, match=r"'a\.JPG' twice"):
        elastix.Tar(path)


def test_archives_without_a_sample_compressed_ones_and_two_in_one_file_are_refused(tmp_path):
    empty = write(tmp_path / "e.tar", [])
    with pytest.raises(ConfigError, match="has no sample"):
        elastix.Tar(empty)
    with tarfile.open(tmp_path / "z.tar", "w:gz") as archive:
        add(archive, "a.jpg", b"1")
    with pytest.raises(Corrupt, match="gunzip"):
        elastix.Tar(tmp_path / "z.tar")
    whole = write(tmp_path / "w.tar", pairs(0, 2)).read_bytes()
    (tmp_path / "w.tar").write_bytes(whole + whole)
    with pytest.raises(Corrupt, match="behind its end"):
        elastix.Tar(tmp_path / "w.tar")
    with pytest.raises(ConfigError, match="no file"):
        elastix.Tar(tmp_path / "none-*.tar")
    with pytest.raises(ConfigError, match="no file was given"):
        elastix.Tar([])


def test_a_dataset_that_was_pickled_reads_the_same(path):
    data = elastix.Tar(path)
    packed = pickle.dumps(data)
    assert data[3] == pickle.loads(packed)[3]
    write(path, pairs(0, 8))
    with pytest.raises(Conflict):
        pickle.loads(packed)


def test_thousands_of_archives_do_not_use_up_file_handles(tmp_path):
    paths = [write(tmp_path / f"{n:03d}.tar", pairs(n, 1)) for n in range(70)]
    data = elastix.Tar(paths)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [int(data[i]["cls"]) for i in range(70)] == list(range(70))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


def test_a_file_that_would_take_the_place_of_a_samples_name_is_refused(tmp_path):
    with pytest.raises(Corrupt, match="another name"):
        elastix.Tar(write(tmp_path / "a.tar", [("a.__key__", b"b"), ("a.jpg", b"")]))
