"""Whoever is killed while it writes, a reader finds what was there before, or what came after."""

import json
from itertools import count

import pytest

from elastix import whole_files
from elastix.whole_files import FileWriter

MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
FIRST, SECOND = FileWriter("run", 0), FileWriter("run", 1)


def model(text, shards, within="."):
    """Writes one as libraries of Hugging Face do: one file, or shards and an index."""

    def write(folder):
        folder = folder / within
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        if shards == 1:
            (folder / MODEL).write_text(text)
            return
        names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
        for name in names:
            (folder / name).write_text(text)
        weights = {f"layer{n}": name for n, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))

    return write


def read(folder):
    """What its parts say, as those libraries look for them."""
    if (folder / MODEL).exists():
        return {(folder / MODEL).read_text()}
    weights = json.loads((folder / INDEX).read_text())["weight_map"]
    return {(folder / name).read_text() for name in weights.values()}


class Killed(BaseException):
    pass


def kill_at(monkeypatch, change):
    """Raise before the change of that number which is made to names in a folder."""
    changes = count()
    named = [(whole_files.Path, name) for name in ("rename", "replace", "unlink")]
    for owner, name in [*named, (whole_files, "_exchanged"), (whole_files.shutil, "rmtree")]:
        original = getattr(owner, name)

        def call(*args, original=original, **kwargs):
            if next(changes) == change:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("within", [".", "0_Transformer"])
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_model_is_the_old_one_or_the_new_one_wherever_its_writer_is_killed(
    tmp_path, before, after, within
):
    for change in count():
        top = tmp_path / str(change)
        folder = top / within
        whole_files.add(top, model("old", before, within), FIRST)
        (folder / "notes.txt").write_text("mine")
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, change)
            try:
                whole_files.add(top, model("new", after, within), FIRST)
                ended = True
            except Killed:
                ended = False
        assert read(folder) in ({"old"}, {"new"}), change
        whole_files.add(top, model("next", after, within), SECOND)
        assert read(folder) == {"next"}
        assert (folder / "notes.txt").read_text() == "mine"
        if ended:
            break
    assert change > 2
    files = {file.name for file in folder.iterdir()}
    assert len(files) == 2 + (1 if after == 1 else after + 1), files  # and nothing of the old one


def test_no_shard_of_another_model_is_removed(tmp_path):
    whole_files.add(tmp_path / "out", model("old", 3), FIRST)
    other = tmp_path / "out" / "head-00001-of-00002.safetensors"
    other.touch()
    whole_files.add(tmp_path / "out", model("new", 2), FIRST)
    assert other.exists()


@pytest.mark.parametrize("damaged", ["", "[]", '{"weight_map": 3}', "{"])
def test_an_index_that_is_damaged_is_replaced(tmp_path, damaged):
    whole_files.add(tmp_path / "out", model("old", 2), FIRST)
    (tmp_path / "out" / INDEX).write_text(damaged)
    whole_files.add(tmp_path / "out", model("new", 2), FIRST)
    assert read(tmp_path / "out") == {"new"}


def test_a_directory_is_added_to_through_a_link_and_by_a_dot(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    whole_files.add(tmp_path / "link", model("a", 1), FIRST)
    assert read(tmp_path / "there") == {"a"}
    monkeypatch.chdir(tmp_path / "there")
    whole_files.add(whole_files.Path("."), model("b", 2), FIRST)
    assert read(tmp_path / "there") == {"b"}


def replaced(folder):
    """Replace a directory, with a kill at each change; where one left none under its name."""
    missing = []
    for change in count():
        path = folder / f"{change}[1]"
        whole_files.replace(path, model("old", 2), FIRST)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, change)
            try:
                whole_files.replace(path, model("new", 2), FIRST)
                ended = True
            except Killed:
                ended = False
        if not path.exists():
            missing.append(change)
        else:
            assert read(path) in ({"old"}, {"new"})
        whole_files.replace(path, model("next", 2), SECOND)
        assert read(path) == {"next"}
        if ended:
            break
    assert change > 1
    assert {file.name for file in folder.iterdir()} == {f"{n}[1]" for n in range(change + 1)}
    return missing


def test_what_is_replaced_is_always_there_and_nothing_is_left_behind(tmp_path):
    assert replaced(tmp_path) == []


@pytest.mark.parametrize("how", [None, lambda *_: -1])
def test_where_names_cannot_be_exchanged_there_is_none_between_two_renames(
    tmp_path, monkeypatch, how
):
    monkeypatch.setattr(whole_files, "_renameat2", how)
    assert len(replaced(tmp_path)) == 1


@pytest.mark.parametrize("put", [whole_files.replace, whole_files.add])
def test_what_cannot_be_written_takes_no_room(tmp_path, put):
    folder = tmp_path / "out"
    put(folder, model("old", 2), FIRST)

    def write(to):
        model("new", 3)(to)
        raise OSError("no space left on device")

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="no space"):
        put(folder, write, FIRST)
    assert sorted(tmp_path.rglob("*")) == before
    assert read(folder) == {"old"}


@pytest.mark.parametrize("there", [True, False])
def test_a_file_is_replaced_where_a_link_leads(tmp_path, there):
    kept, link = tmp_path / "disk" / "kept.pt", tmp_path / "latest.pt"
    kept.parent.mkdir()
    if there:
        kept.write_text("old")
    link.symlink_to(kept)
    whole_files.replace(link, lambda to: to.write_text("new") and None, FIRST)
    assert link.is_symlink()
    assert kept.read_text() == "new"
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {kept.name, link.name}


@pytest.mark.parametrize("put", [whole_files.replace, whole_files.add])
@pytest.mark.parametrize("worker", [0, 1])
def test_runs_that_write_the_same_do_not_disturb_each_other(tmp_path, put, worker):
    """Trials of a search that share an output directory: one took the other's files away."""
    folder = tmp_path / "out"
    folder.mkdir()

    def write(to):
        model("first", 3)(to)
        put(folder, model("second", 2), FileWriter("another run", worker))
        assert read(folder) == {"second"}
        assert read(to) == {"first"}

    put(folder, write, FIRST)
    assert read(folder) == {"first"}
    assert not list(tmp_path.rglob("*.partial"))
