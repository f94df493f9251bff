"""What stands beside a result, and that no folder of the machine stands in it."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.record import save
from benchmarks.table import RESULTS, ROOT

_PLACE = re.compile(r"(?<![\w.>-])/(?:home|root|tmp|work|usr|opt|var|Users|mnt|data|srv)/")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_result_names_a_folder_of_a_machine(path):
    assert _PLACE.findall(path.read_text(encoding="utf-8")) == []


def test_neither_messages_nor_the_command_name_folders(tmp_path, monkeypatch):
    out = tmp_path / "x.json"
    given = [
        "--out",
        str(ROOT / "build/x.json"),
        "--python",
        "/elsewhere/bin/python3",
        "--parts",
        "a",
    ]
    monkeypatch.setattr(sys, "argv", ["x", *given])
    said = f"File {ROOT}/benchmarks/x.py, {sys.prefix}/lib, {tmp_path}, {Path.home()}/a"
    save(out, {"not_measured": said})
    told = json.loads(out.read_text())["not_measured"]
    assert told.startswith("File benchmarks/x.py, ENVIRONMENT/lib, ")
    assert _PLACE.findall(told) == []
    command = json.loads((tmp_path / "about.json").read_text())["x"]["command"]
    assert command.endswith(" --out build/x.json --python python3 --parts a")


def test_parts_keep_the_date_at_which_they_were_measured(tmp_path, monkeypatch):
    out = tmp_path / "x.json"
    for part in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["x", "--parts", part])
        save(out, {}, parts=[part])
    parts = json.loads((tmp_path / "about.json").read_text())["x"]["parts"]
    assert [found["command"].split()[-1] for found in parts.values()] == ["one", "two"]
    assert list(parts) == ["one", "two"]
