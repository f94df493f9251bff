"""A model behind HTTP: what it answers, what it refuses, and that it follows its tag."""

import asyncio
import json
import math
import threading
import time

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from elastix.commands import model_server
from elastix.commands.model_server import ServedModel, address_of, application, following
from elastix.errors import ConfigError, NotFound, StateError
from elastix.state import State
from elastix.store import Store

MODELS = """
from pathlib import Path

from torch import nn

def build():
    return nn.Linear(2, 1, bias=False)

def other():
    return nn.Linear(3, 1)

def licensed():
    if Path(__file__).with_name("expired").exists():
        raise SystemExit("no licence")
    return build()
"""


def put(folder, weight, tag="best"):
    with Store(folder / "store") as store:
        ref = store.put(State({"weight": torch.full((1, 2), float(weight))}))
        store.tag(tag, ref)
    return ref


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    put(tmp_path, 1)
    return tmp_path


def served(folder, name="best", function="build"):
    target = f"{folder / 'models.py'}:{function}"
    return ServedModel(str(folder / "store"), name, target, None, torch.float32)


def asked(model, *requests, host="127.0.0.1"):
    """Status and JSON of each: a path, or what `post` takes."""

    async def ask():
        found = []
        async with TestClient(TestServer(application(model, host))) as client:
            for request in requests:
                if isinstance(request, str):
                    answer = await client.get(request)
                else:
                    answer = await client.post("/predict", **request)
                found.append((answer.status, await answer.json()))
        return found

    return asyncio.run(ask())


def test_it_answers_what_the_model_says_and_who_it_is(folder):
    model = served(folder)
    (status, found), (_, about) = asked(model, {"json": {"inputs": [[1, 2], [3, 4]]}}, "/")
    assert (status, found) == (200, {"ref": model.ref, "outputs": [[3.0], [7.0]]})
    assert about["name"] == "best"
    assert (about["ref"], about["failure"]) == (model.ref, "")


@pytest.mark.parametrize(
    ("request_", "status", "fact"),
    [
        ({"data": "{", "headers": {"Content-Type": "application/json"}}, 400, "no JSON"),
        ({"data": '{"inputs": [[1, 2]]}', "headers": {"Content-Type": "text/plain"}}, 415, "JSON"),
        ({"data": "[" * 10**5, "headers": {"Content-Type": "application/json"}}, 400, "no JSON"),
        ({"json": {}, "headers": {"Host": "evil.example"}}, 403, "its own machine"),
        ({"json": [1]}, 400, "send {"),
        ({"json": {"input": [[1, 2]]}}, 400, "send {"),
        ({"json": {"inputs": "text"}}, 422, "no tensor"),
        ({"json": {"inputs": [[1, 2], [3]]}}, 422, "no tensor"),
        ({"json": {"inputs": []}}, 422, "at least one"),
        ({"json": {"inputs": 5}}, 422, "at least one"),
        ({"json": {"inputs": [[1, 2, 3]]}}, 422, "does not take inputs of shape (1, 3)"),
    ],
)
def test_what_is_no_batch_is_refused_and_the_next_is_answered(folder, request_, status, fact):
    found, after = asked(served(folder), request_, {"json": {"inputs": [[1, 2]]}})
    assert found[0] == status
    assert fact in found[1]["error"]
    assert after[0] == 200


@pytest.mark.parametrize(
    ("host", "name", "status"),
    [
        ("127.0.0.1", "localhost:80", 200),
        ("127.0.0.1", "a b[", 400),
        ("127.0.0.1", "localhost:port", 400),
        ("localhost", "127.0.0.1", 200),
        ("127.0.0.2", "127.0.0.2:8378", 200),
        ("127.0.0.2", "evil.example", 403),
        ("::1", "[::1]:8378", 200),
        ("::1", "evil.example", 403),
        ("0.0.0.0", "served.example", 200),
    ],
)
def test_who_listens_to_its_own_machine_answers_to_its_own_names(folder, host, name, status):
    request = {"json": {"inputs": [[1, 2]]}, "headers": {"Host": name}}
    assert asked(served(folder), request, host=host)[0][0] == status


def test_the_address_is_one_that_can_be_called():
    assert address_of("127.0.0.1", 80) == "http://127.0.0.1:80/"
    assert address_of("::1", 80) == "http://[::1]:80/"


def test_tokens_have_no_fractions(folder):
    tokens = folder / "tokens.py"
    tokens.write_text("from torch import nn\nbuild = lambda: nn.Embedding(1, 2)")
    model = ServedModel(str(folder / "store"), "best", str(tokens), None, torch.int64)
    assert json.loads(model.answer([[0, 0]]))["outputs"] == [[[1.0, 1.0], [1.0, 1.0]]]
    with pytest.raises(ConfigError, match="fractions"):
        model.answer([[0.5]])


def test_what_is_not_finite_is_null(folder):
    put(folder, math.inf)
    ((_, found),) = asked(served(folder), {"json": {"inputs": [[1, 1]]}})
    assert found["outputs"] == [[None]]


def test_another_model_answers_once_the_tag_has_moved(folder):
    model = served(folder)
    first = model.ref
    assert not model.refresh()
    second = put(folder, 5)
    assert model.ref == first
    assert model.refresh()
    assert model.ref == second
    assert json.loads(model.answer([[1, 1]])) == {"ref": second, "outputs": [[10.0]]}


def test_what_cannot_be_loaded_changes_nothing_and_is_told_of(folder):
    model = served(folder)
    first = model.ref
    with Store(folder / "store") as store:
        store.tag("best", store.put(State({"bias": torch.zeros(3)})))
    assert not model.refresh()
    assert (model.ref, "another model than was stored" in model.failure) == (first, True)
    with Store(folder / "store") as store:
        store.untag("best")
    assert not model.refresh()
    assert "best" in model.failure
    assert json.loads(model.answer([[1, 1]]))["outputs"] == [[2.0]]
    put(folder, 3)
    assert model.refresh()
    assert model.failure == ""


def test_a_program_that_wants_to_end_is_told_of_and_the_model_goes_on(folder):
    model = served(folder, function="licensed")
    first = model.ref
    (folder / "expired").touch()
    put(folder, 5)
    assert not model.refresh()
    assert (model.ref, model.failure) == (first, "SystemExit: no licence")


def test_a_state_that_cannot_be_loaded_is_not_read_at_each_look(folder, monkeypatch):
    """It may have gigabytes. It is tried again after a while: the code may be mended by then."""
    model = served(folder, function="licensed")
    read, get, now = [], Store.get, [0.0]
    monkeypatch.setattr(Store, "get", lambda self, ref: read.append(ref) or get(self, ref))
    monkeypatch.setattr(model_server.time, "monotonic", lambda: now[0])
    (folder / "expired").touch()
    second = put(folder, 5)
    for _ in range(10):
        assert not model.refresh()
    assert (read, model.failure) == ([second], "SystemExit: no licence")
    now[0] += 3
    for _ in range(10):
        assert not model.refresh()
    assert read == [second] * 2
    (folder / "expired").unlink()
    now[0] += 3
    assert not model.refresh(), "twice as long now"
    third = put(folder, 6)
    assert model.refresh(), "another model is tried at once"
    put(folder, 5)
    assert model.refresh()
    assert read == [second, second, third, second]
    assert (model.ref, model.failure) == (second, "")


def test_what_is_not_there_at_the_beginning_is_an_error(folder):
    with pytest.raises(NotFound):
        served(folder, name="worst")
    with pytest.raises(StateError):
        served(folder, function="other")
    with pytest.raises(ConfigError):
        served(folder, function="none")


def test_no_request_fails_while_the_tag_moves(folder):
    """Requests run all the time, from several clients, and see each model at last."""
    model = served(folder)
    heard = []

    async def ask(client, over):
        while not over.is_set():
            answer = await client.post("/predict", json={"inputs": [[1, 1]]})
            found = await answer.json()
            heard.append((answer.status, found["ref"], found["outputs"][0][0]))

    async def move(over):
        expected = {model.ref: 2.0}
        async with TestClient(TestServer(application(model))) as client:
            clients = [asyncio.create_task(ask(client, over)) for _ in range(4)]
            for weight in (2, 3, 4):
                ref = await asyncio.to_thread(put, folder, weight)
                expected[ref] = 2.0 * weight
                while not any(who == ref for _, who, _ in heard):
                    await asyncio.sleep(0)
            over.set()
            await asyncio.gather(*clients)
        return expected

    told = []
    with following(model, 0.01, told.append) as thread:
        expected = asyncio.run(move(threading.Event()))
    thread.join()
    assert {status for status, _, _ in heard} == {200}
    assert {ref for _, ref, _ in heard} == set(expected)
    assert all(expected[ref] == value for _, ref, value in heard)
    assert sum(line.endswith(" now") for line in told) == 3


def test_it_follows_its_tag_though_nobody_reads_what_it_says(folder):
    def unread(_line):
        raise BrokenPipeError

    model = served(folder)
    with following(model, 0.01, unread) as thread:
        for weight in (2, 3):
            ref = put(folder, weight)
            while model.ref != ref and thread.is_alive():
                time.sleep(0.01)
            assert model.ref == ref
    thread.join()
