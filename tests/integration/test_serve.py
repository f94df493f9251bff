"""`elastix serve` in a real browser: live, read-only, and for whoever has the token alone."""

import http.client
import json
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
import torch
from selenium.webdriver.support.ui import WebDriverWait

from elastix.observe.journal import Journal
from elastix.state import State
from elastix.store import Store
from tests.browser import chromium, missing
from tests.report_data import run_events

EVENTS = list(run_events(steps=120, ended=False))
HALF = len(EVENTS) // 2
STEPS = "Number(document.querySelector('.tiles > :nth-child(2) dd').firstChild.textContent)"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run that is half through, and two models of which one descends from the other."""
    root = tmp_path_factory.mktemp("store")
    with Journal(root / "runs" / "digits" / "journal.jsonl") as journal:
        for event in EVENTS[:HALF]:
            journal.append(event)
    with Store(root) as models:
        first = models.put(State({"w": torch.ones(3), "b": torch.ones(1)}, {"step": 1}))
        second = State({"w": torch.zeros(3), "b": torch.ones(1)}, {"step": 2, "x": "<b>bold</b>"})
        models.tag("digits/best", models.put(second, parents=[first], score=0.5))
    return root


@pytest.fixture(scope="module")
def address(store):
    command = [sys.executable, "-m", "tests.integration.serve_driver"]
    words = ["serve", "--store", str(store), "--port", "0", "--json"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True) as server:
        text = ""
        while not text.rstrip().endswith("}"):
            text += server.stdout.readline()
        yield json.loads(text)["address"]
        server.terminate()


def ask(address, path, method="GET", **headers):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=250)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def cookie(address):
    place = urlsplit(address)
    status, _, headers = ask(address, f"/?{place.query}")
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    return headers["Set-Cookie"].split(";")[0]


def test_who_has_no_token_gets_nothing(address):
    for path in ("/", "/run/digits", "/models", "/data/", "/nowhere", "/?token=wrong"):
        status, text, _ = ask(address, path)
        assert (status, "digits" in text) == (403, False), path
    status, _, _ = ask(address, "/", Cookie="elastix_token=wrong")
    assert status == 403
    status, _, _ = ask(address, f"/?{urlsplit(address).query}", Host="evil.example")
    assert status == 403


def test_what_strangers_send_leaves_no_traceback_on_the_terminal(store):
    command = [sys.executable, "-m", "tests.integration.serve_driver", "serve", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--store", str(store)], **pipes) as server:
        address = server.stdout.readline().split(" at ")[1].split()[0]
        status, _, _ = ask(address, "/", Cookie="a" * 100_000)
        assert status == 400
        server.terminate()
        assert "Traceback" not in server.stderr.read()


def files(store):
    """What is in the store, less SQLite's shared memory, in which readers take their place."""
    found = [path for path in store.rglob("*") if path.is_file() and path.suffix != ".sqlite-shm"]
    return {path: path.stat().st_mtime_ns for path in found}


def test_it_reads_only_and_knows_no_other_files(address, store):
    key = cookie(address)
    for method in ("POST", "PUT", "DELETE"):
        assert ask(address, "/run/digits", method, Cookie=key)[0] == 405
    for path in ("/run/none", "/run/..%2F..%2Fetc", "/run/%2e%2e", "/model/none", "/x"):
        assert ask(address, path, Cookie=key)[0] == 404, path
    before = files(store)
    for path in ("/", "/run/digits", "/models"):
        status, _, headers = ask(address, path, Cookie=key)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert files(store) == before


def test_what_has_not_changed_is_not_sent_again(address):
    key = cookie(address)
    version = json.loads(ask(address, "/data/run/digits", Cookie=key)[1])["version"]
    if ask(address, f"/data/run/digits?seen={version}", Cookie=key)[0] != 204:  # a minute passed
        version = json.loads(ask(address, "/data/run/digits", Cookie=key)[1])["version"]
        assert ask(address, f"/data/run/digits?seen={version}", Cookie=key)[0] == 204
    assert ask(address, "/data/run/digits?seen=old", Cookie=key)[0] == 200


@pytest.fixture(scope="module")
def browser(address):
    if missing():
        pytest.skip(f"no browser: {missing()}")
    with chromium(local=True) as found:
        found.get(address)  # which gives it the token
        yield found


def until(browser, condition):
    WebDriverWait(browser, 250, 0.1).until(lambda b: b.execute_script(f"return {condition}"))


def test_a_page_follows_its_run_without_being_loaded_again(browser, address, store):
    browser.get(address)
    assert "token" not in browser.current_url
    until(browser, "document.querySelector('a[href=\"/run/digits\"]') !== null")
    browser.execute_script("document.querySelector('a[href=\"/run/digits\"]').click()")
    until(browser, "location.pathname === '/run/digits'")
    until(browser, "document.documentElement.dataset.drawn !== undefined")
    before = browser.execute_script(f"return {STEPS}")
    browser.execute_script(
        "window.here = document.querySelector('nav a');"
        "document.querySelector('#workers-table th:nth-child(5) button').click();"
        "return Plotly.relayout('curve-0', {'xaxis.range': [10, 20]})"
    )
    with Journal(store / "runs" / "digits" / "journal.jsonl") as journal:
        for event in EVENTS[HALF:]:
            journal.append(event)
    until(browser, f"{STEPS} === 120")
    assert before < 120
    assert browser.execute_script("return window.here === document.querySelector('nav a')")
    order = "document.querySelector('#workers-table th:nth-child(5)').getAttribute('aria-sort')"
    assert browser.execute_script(f"return {order}") == "ascending"
    until(browser, "document.getElementById('curve-0')._fullData[0].x.length === 4")
    kept = "document.getElementById('curve-0')._fullLayout.xaxis.range"
    assert browser.execute_script(f"return {kept}") == [10, 20]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_page_is_watched_for_a_minute_while_its_run_goes_on(browser, address, store):
    """It follows in small steps, is never loaded again, asks nobody else, and nobody complains."""
    browser.get_log("browser")
    seen = []
    with Journal(store / "runs" / "watched" / "journal.jsonl") as journal:
        journal.append(EVENTS[0])
        browser.get(address.split("/?")[0] + "/run/watched")
        until(browser, "document.documentElement.dataset.drawn !== undefined")
        browser.execute_script("window.unchanged = true")
        rest = EVENTS[1:]
        began = time.monotonic()
        for number, event in enumerate(rest):
            time.sleep(max(0.0, began + 60 * number / len(rest) - time.monotonic()))
            journal.append(event)
            seen.append(browser.execute_script(f"return {STEPS}"))
    until(browser, f"{STEPS} === 120")
    assert time.monotonic() - began > 55
    shown = [steps for steps in seen if steps is not None]  # before the first step: a dash
    assert shown == sorted(shown)
    assert len(set(shown)) > 5
    assert browser.execute_script("return window.unchanged")
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert all(name.startswith(address.split("/?")[0]) for name in asked)
    logged = [e["message"] for e in browser.get_log("browser") if "GPU stall" not in e["message"]]
    assert [text for text in logged if "favicon" not in text] == []


def test_no_request_leaves_the_page_and_nobody_complains(browser, address):
    browser.get_log("browser")
    for path in ("/", "/run/digits", "/models"):
        browser.get(address.split("/?")[0] + path)
        until(browser, "document.documentElement.dataset.drawn !== undefined")
        until(browser, "performance.getEntriesByType('resource').length > 0")
        asked = browser.execute_script(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
        assert asked
        assert all(name.startswith(address.split("/?")[0]) for name in asked)
        states = "[...document.querySelectorAll('h1 .badge')].map(badge => badge.textContent)"
        assert "" not in browser.execute_script(f"return {states}")  # an empty pill
    logged = [e["message"] for e in browser.get_log("browser") if "GPU stall" not in e["message"]]
    assert [text for text in logged if "favicon" not in text] == []


def test_a_model_says_what_differs_from_its_parent(browser, address):
    browser.get(address.split("/?")[0] + "/models")
    until(browser, "document.querySelectorAll('#models-table tbody tr').length === 2")
    browser.execute_script("document.querySelector('#models-table tbody tr td a').click()")
    until(browser, "location.pathname.startsWith('/model/')")
    until(browser, "document.documentElement.dataset.drawn !== undefined")
    text = browser.execute_script("return document.querySelector('main').innerText")
    assert "changed\tw" in text
    assert "<b>bold</b>" in text
    assert "1 tensor is the same." in text
    assert "ancestor" in text


def test_a_link_stays_the_one_under_the_mouse_when_its_page_changes(browser, address, store):
    browser.get(address.split("/?")[0] + "/models")
    rows = "document.querySelectorAll('#models-table tbody tr')"
    until(browser, f"{rows}.length === 2")
    until(browser, "document.documentElement.dataset.drawn !== undefined")
    browser.execute_script(
        "window.links = [...document.querySelectorAll('nav a, #models-table a')];"
        f"window.texts = links.map(link => link.textContent); window.first = {rows}[0]"
    )
    with Store(store) as models:
        models.put(State({"w": torch.full((3,), 2.0)}, {"step": 3}))
    until(browser, f"{rows}.length === 3")
    kept = "links.every((link, at) => link.isConnected && link.textContent === texts[at])"
    assert browser.execute_script(f"return links.length >= 5 && {kept}")
    assert browser.execute_script(f"return {rows}[1] === first")  # the new one is above it
