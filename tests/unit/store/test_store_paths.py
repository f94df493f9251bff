"""A store is one store, whatever its directory is called, and by whichever name it is opened."""

import os
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem

from elastix.config import RunConfig
from elastix.errors import ConfigError
from elastix.store import Store, owner
from elastix.store.packs import one_line
from elastix.store.remote import RemoteClaims
from elastix.testing.store_contract import same, small

ODD = {
    "two lines": "two\nlines",
    "carriage return": "a\rb",
    "quotes": 'it\'s "quoted"',
    "spaces": " spaces ",
    "not ASCII": "Größe-目录-\N{RIGHT-TO-LEFT OVERRIDE}x",
    "signs of a URI": "100%25#part?query&x=1;y",
    "brackets": "//[brackets]*",
    "backslash": "back\\slash\\n",
    "bytes that are no text": os.fsdecode(b"\xff\xfe"),
    "an option": "-rf",
    "home, not of anybody": "~nobody.of.that.name",
    "long": "x" * 255,
}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("home/jörg/models", "home/jörg/models"),
        ("back\\slash", "back\\slash"),
        ("two\nlines", "two\\nlines"),
        ("\u2028\x1b[1m", "\\u2028\\x1b[1m"),
        (os.fsdecode(b"\xff"), "\\udcff"),
    ],
)
def test_a_path_in_a_note_reads_as_it_is_and_has_one_line(name: str, shown: str) -> None:
    assert one_line(Path(name)) == shown


def another_process_puts(path: str) -> None:
    if not (pid := os.fork()):
        code = 1
        try:
            with Store(path) as store:
                store.tag("second", store.put(small(2)))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_a_directory_may_be_called_anything(tmp_path: Path, name: str) -> None:
    """Opened by two at once, rebuilt, read without writing, found in an error."""
    path = f"{tmp_path}/{name}"
    with Store(path) as store:
        store.tag("first", store.put(small(1)))
        with Store(path) as other:
            other.tag("other", other.put(small(3)))
            assert same(other.get("first"), small(1))
        another_process_puts(path)
        assert same(store.get("second"), small(2))
        index = tmp_path / "another"
        with pytest.raises(owner.Taken, match="with another index"):
            Store(path, index=index)
    with Store(path) as store:
        store.rebuild()
        assert store.verify() == []
        assert set(store.tags()) == {"first", "second", "other"}
    with Store(path, read_only=True) as store:
        assert same(store.get("second"), small(2))


def by_link(folder: Path) -> str:
    (folder.parent / "link").symlink_to(folder)
    return str(folder.parent / "link")


def above_a_link(folder: Path) -> str:
    """The directory above what the link leads to, and not the one that the link is in."""
    (folder / "below").mkdir()
    away = folder.parent / "away"
    away.mkdir()
    (away / "link").symlink_to(folder / "below")
    return f"{away}/link/.."


def test_a_path_that_is_too_long_for_an_index_is_told_of(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["y" * 200] * 12)
    with pytest.raises(ConfigError, match=r"SQLite takes 504.*index="):
        Store(deep)
    assert list(tmp_path.iterdir()) == []
    with Store(deep, index=tmp_path / "index") as store:
        assert same(store.get(store.put(small(1))), small(1))
    most = 504 - len(f"{tmp_path}/{'x' * 200}//index.sqlite")
    with Store(tmp_path / ("x" * 200) / ("y" * most)) as store:
        store.put(small(1))
    with pytest.raises(ConfigError, match="SQLite"):
        Store(tmp_path / ("x" * 200) / ("y" * (most + 1)))


NAMES = {
    "trailing slashes": lambda folder: f"{folder}//",
    "dots": lambda folder: f"{folder}/./packs/..",
    "link": by_link,
    "above a link": above_a_link,
    "relative": os.path.relpath,
    "path": lambda folder: folder,
    "file URI": lambda folder: folder.as_uri(),
    "file URI of a host": lambda folder: folder.as_uri().replace("file://", "FILE://localhost"),
    "file URI with one slash": lambda folder: folder.as_uri().replace("file://", "file:"),
    "home": lambda folder: f"~/{folder.name}",
}


@pytest.mark.parametrize("named", NAMES.values(), ids=NAMES)
def test_all_names_of_a_store_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: object
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "a store, 100%"
    with Store(folder) as store:
        ref = store.put(small(1))
        before = sorted(tmp_path.rglob("*"))
        name = named(folder)  # type: ignore[operator]
        with Store(name) as other:
            assert same(other.get(ref), small(1))
            assert same(store.get(other.put(small(2))), small(2))
        with Store(name, read_only=True) as reader:
            assert len(reader.log()) == 2
    made = {path.name for path in tmp_path.rglob("*")} - {path.name for path in before}
    assert made <= {"link", "away", "below"} | {p.name for p in folder.rglob("*")}


def test_a_store_stays_where_it_is_when_its_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    with Store("runs/store") as store, Store("packs", index="index") as apart:
        monkeypatch.chdir(there)
        refs = [each.put(small(1)) for each in (store, apart)]
        assert all(
            same(each.get(ref), small(1)) for each, ref in zip((store, apart), refs, strict=True)
        )
        store.gc()
    assert list(there.iterdir()) == []
    with Store(here / "runs" / "store") as store:
        assert same(store.get(refs[0]), small(1))
    with Store(here / "packs", index=here / "index") as store:
        assert same(store.get(refs[1]), small(1))


@pytest.mark.parametrize("uri", ["file://", "file:", "file://runs/store", "file:///a%00b"])
def test_a_file_uri_that_names_no_directory_here_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="No store was opened"):
        Store(uri)


def test_a_run_keeps_its_store_in_the_directory_that_a_shell_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert RunConfig(store="~/store").store == "/home/me/store"
    assert RunConfig(store="~nobody.of.that.name/x").store == "~nobody.of.that.name/x"


def test_a_far_store_has_one_index_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    far, root = LocalFileSystem(), str(tmp_path / "far")
    with Store(root, filesystem=far) as store:
        ref = store.put(small(1))
        with Store(f"{root}/", filesystem=far) as other:
            assert same(other.get(ref), small(1))
            other.put(small(2))
            store.gc()  # alone with its index
    assert len(list((tmp_path / ".cache" / "elastix").iterdir())) == 1


def test_a_far_store_knows_its_index_by_every_name(tmp_path: Path) -> None:
    far, root = LocalFileSystem(), str(tmp_path / "far")
    (tmp_path / "index").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "index")
    RemoteClaims(far, root, tmp_path / "index").enter(first=True)
    claims = RemoteClaims(far, root, tmp_path / "link")
    claims.enter(first=False)
    with claims.collecting():
        pass
    odd = RemoteClaims(far, root, tmp_path / os.fsdecode(b"\xff\n"))
    odd.enter(first=False)


def test_in_a_working_folder_that_is_gone_no_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ConfigError, match=r"working folder is gone.*No store was opened"):
        Store("runs/store")
    with Store(tmp_path / "store") as store:
        store.put(small(1))
