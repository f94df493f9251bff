"""`elastix serve-model`, as a process: it answers, follows the tag, and ends with Ctrl-C."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest
import torch
from typer.testing import CliRunner

from elastix.cli import app
from elastix.state import State
from elastix.store import Store


def put(folder, weight):
    with Store(folder / "store") as store:
        ref = store.put(State({"weight": torch.full((1, 2), weight)}))
        store.tag("best", ref)
    return ref


def ask(address, inputs):
    body = json.dumps({"inputs": inputs}).encode()
    request = urllib.request.Request(
        f"{address}predict", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.fixture
def words(tmp_path):
    (tmp_path / "models.py").write_text(
        "from torch import nn\ndef build():\n    print('built')\n    return nn.Linear(2, 1, False)"
    )
    put(tmp_path, 1.0)
    where = ["--store", str(tmp_path / "store"), "--model", str(tmp_path / "models.py")]
    return ["serve-model", "best", *where]


def test_it_answers_and_follows_the_tag_until_ctrl_c(tmp_path, words):
    command = [sys.executable, "-m", "elastix", *words, "--port", "0", "--every", "0.05", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = ""
            for line in process.stdout:
                told += line
                if line == "}\n":
                    break
            address = json.loads(told)["address"]
            assert ask(address, [[1, 2]])["outputs"] == [[3.0]]
            second = put(tmp_path, 2.0)
            while (found := ask(address, [[1, 2]]))["ref"] != second:
                assert found["outputs"] == [[3.0]]
            assert found["outputs"] == [[6.0]]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""  # what the script prints is no JSON
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("more", "code", "fact"),
    [
        (["--every", "0"], 2, "--every is a number of seconds"),
        (["--input-dtype", "text"], 2, "--input-dtype is one of"),
        (["--model", "nowhere.py"], 2, "there is no file nowhere.py"),
        (["--store", "/no/such/store"], 1, "no store"),
        (["--host", "192.0.2.1", "--port", "0"], 2, "cannot be listened on"),
        (["--host", "a" * 64, "--port", "0"], 2, "cannot be listened on"),
        (["--host", "", "--port", "0"], 2, "--host is empty"),
    ],
)
def test_bad_calls_say_what_is_wrong(words, more, code, fact):
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == code, done.output
    assert fact in done.output
    assert "Traceback" not in done.output
