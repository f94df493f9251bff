"""The command line, as processes see it: tables, JSON, exit codes, no tracebacks."""

import json
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from elastix.cli import app
from elastix.state import Ref
from elastix.store import Store
from elastix.testing.models import chain
from elastix.testing.store_contract import child, small


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, Ref, Ref]:
    root = tmp_path / "store"
    with Store(root) as store:
        first = store.put(small(1), signature=chain("a b c"), score=0.5)
        second = store.put(
            child(small(1), first, "layer1.weight", {"n": 2}), signature=chain("a b d"), score=0.75
        )
        store.tag("best", second)
    return root, first, second


def run(root: Path, *words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["store", *words, "--store", str(root)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def answer(root: Path, *words: str, code: int = 0) -> object:
    return json.loads(run(root, *words, "--json", code=code).stdout)


def test_looking(built: tuple[Path, Ref, Ref]) -> None:
    root, first, second = built
    log = answer(root, "log")
    assert [entry["ref"] for entry in log] == [second, first]
    assert log[0]["tags"] == ["best"]
    assert first[:12] in run(root, "log").stdout
    assert [entry["ref"] for entry in answer(root, "log", first[:8])] == [first]
    shown = answer(root, "show", "best")
    assert shown["tensors"]["layer0.weight"]["owner"] == first
    assert shown["tensors"]["layer1.weight"]["owner"] == second
    assert "layer1.weight" in run(root, "show", "best").stdout
    assert answer(root, "diff", first, "best")["changed"] == ["layer1.weight"]
    assert "~\tlayer1.weight" in run(root, "diff", first, "best").stdout
    assert answer(root, "nearest", "best")["ref"] == first
    assert answer(root, "nearest", "best", "--mode", "lp")["length"] == 2
    stats = answer(root, "stats")
    assert (stats["models"], stats["blobs"]) == (2, 4)
    assert answer(root, "verify") == []
    assert "nothing damaged" in run(root, "verify").stdout


def test_changing(built: tuple[Path, Ref, Ref], tmp_path: Path) -> None:
    root, first, second = built
    path = tmp_path / "x.safetensors"
    answer(root, "export", "best", str(path))
    assert set(load_file(path)) == set(small(1).tensors)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": torch.ones(3)}, foreign, {"from": "elsewhere"})
    ref = answer(root, "import", str(foreign), "--tag", "new", "--parent", "best")["ref"]
    shown = answer(root, "show", "new")
    assert (shown["ref"], shown["parents"], shown["meta"]) == (ref, [second], {"from": "elsewhere"})
    run(root, "export", "all", str(tmp_path / "new" / "all.parquet"))
    assert answer(root, "tag", "old", first) == {"best": second, "new": ref, "old": first}
    assert answer(root, "tag", "old", "--delete") == {"best": second, "new": ref}
    assert answer(root, "retire", first)["retired"] == first
    assert answer(root, "gc")["freed_bytes"] >= 0
    assert len(answer(root, "log")) == 2


def test_errors_are_messages_with_exit_codes(built: tuple[Path, Ref, Ref], tmp_path: Path) -> None:
    root, _, second = built
    assert "no tag or model 'nothing'" in run(root, "show", "nothing", code=1).stderr
    assert "tagged best" in run(root, "retire", second, code=1).stderr
    assert "no store at" in run(tmp_path / "absent", "log", code=1).stderr
    assert not (tmp_path / "absent").exists()
    changing = ("gc",), ("retire", second), ("tag", "x", second), ("rebuild",)
    for verb in changing:  # a typo begins no store
        assert "no store at" in run(tmp_path / "absent", *verb, code=1).stderr
    assert not (tmp_path / "absent").exists()
    file = tmp_path / "taken.safetensors"
    file.write_text("mine")
    assert "is a file" in run(file, "log", code=2).stderr
    assert "exists" in run(root, "export", "best", str(file), code=2).stderr
    assert file.read_text() == "mine"
    run(root, "export", "best", str(file), "--force")
    assert set(load_file(file)) == set(small(1).tensors)
    assert "exists" in run(root, "export", "best", str(tmp_path), "--force", code=2).stderr
    assert "list of all" in run(root, "export", "best", str(tmp_path / "x.parquet"), code=2).stderr
    wrong = run(root, "nearest", "best", "--mode", "x", code=2).stderr
    assert "Nothing was searched" in wrong
    run(root, "tag", "-", second, code=2)
    assert "Nothing was changed" in run(root, "tag", "name", code=2).stderr
    none = run(root, "nearest", "best", "--tagged", "no-such-*", code=1).stderr
    assert "no other stored model with such a tag" in none
    (pack,) = (root / "packs").glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[70] ^= 1
    pack.write_bytes(data)
    (damage, *_) = answer_damaged(root)
    assert damage["tensor"] == "layer0.weight"
    assert "'layer0.weight'" in run(root, "export", "best", str(tmp_path / "y"), code=1).stderr


def test_an_index_beyond_reading_is_made_anew(built: tuple[Path, Ref, Ref]) -> None:
    root, first, second = built
    for name in ("index.sqlite", "index.sqlite-wal"):
        if (root / name).exists():
            (root / name).write_bytes(b"not a database" * 400)
    assert answer(root, "rebuild") == {"models": 2, "packs": 1}
    assert {entry["ref"] for entry in answer(root, "log")} == {first, second}


def test_an_index_that_can_be_opened_and_not_read_is_made_anew(
    built: tuple[Path, Ref, Ref],
) -> None:
    """Its errors advise that command, which met them as it looked whether there is a store."""
    root, first, second = built
    index = root / "index.sqlite"
    with sqlite3.connect(index) as sql:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'packs'"
        (page,) = sql.execute(query).fetchone()
        (size,) = sql.execute("PRAGMA page_size").fetchone()
    sql.close()
    data = index.read_bytes()
    index.write_bytes(data[: (page - 1) * size] + bytes(size) + data[page * size :])
    assert "elastix store rebuild" in run(root, "gc", code=1).stderr
    assert answer(root, "rebuild") == {"models": 2, "packs": 1}
    assert {entry["ref"] for entry in answer(root, "log")} == {first, second}


def answer_damaged(root: Path) -> list[dict[str, str]]:
    return list(json.loads(run(root, "verify", "--json", code=1).stdout))
