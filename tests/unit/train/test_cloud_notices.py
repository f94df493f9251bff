"""Notices of three clouds from servers that answer as these do; bad answers disturb nobody."""

import logging
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray

from elastix.train.on_ray import cloud_notices, preemption_notices
from elastix.train.on_ray.cloud_notices import Service
from tests.fake_metadata import Aws, Azure, Fake, Gcp


def test_aws_is_asked_with_a_token_and_says_when_it_takes_an_instance_back():
    with Aws() as fake:
        service = Service("aws", fake.address)
        assert not service.going()
        for action in ("terminate", "stop", "hibernate"):
            fake.action = {"action": action, "time": "2030-01-01T00:00:00Z"}
            assert service.going()
        assert fake.tokens == 1
        fake.forget_tokens()  # six hours have passed
        assert service.going()
        assert fake.tokens == 2
        fake.action = None  # taken back
        assert not service.going()
    assert not [path for path in fake.asked if "rebalance" in path]  # which sets no deadline


def test_google_says_preempted_or_that_a_host_is_taken_from_under_it():
    with Gcp() as fake:
        service = Service("gcp", fake.address)
        assert not service.going()
        fake.event = "MIGRATE_ON_HOST_MAINTENANCE"  # the machine goes on elsewhere
        assert not service.going()
        fake.event = "TERMINATE_ON_HOST_MAINTENANCE"
        assert service.going()
        fake.event, fake.preempted = "NONE", "TRUE"
        assert service.going()


def test_azure_tells_each_machine_of_the_others_too():
    with Azure(name="mine") as fake:
        service = Service("azure", fake.address)
        assert not service.going()
        fake.events = [fake.event("Preempt", "other"), fake.event("Freeze", "mine")]
        assert not service.going()
        for kind in ("Preempt", "Terminate", "Reboot", "Redeploy"):
            fake.events = [fake.event(kind, "other", "mine")]
            assert service.going()
        fake.events = []
        assert not service.going()
    assert {method for method, _ in fake.calls} == {"GET"}  # no event is begun early


class Bad(Fake):
    """Answers all with the same."""

    status, body = 200, b""

    def reply(self, _method, _path, _headers, _goes):
        return self.status, self.body


HTML = b"<html><body>Sign in to the wireless network</body></html>"
BAD = {
    "html": (200, HTML),
    "nothing": (200, b""),
    "not found": (404, b"not found"),
    "an error": (500, b"oops"),
    "elsewhere": (302, b""),
    "huge": (200, b"T" * 10_000_000),
    "no text": (200, b"\xff\xfe\x00TRUE"),
    "json of another kind": (200, b"[1, 2]"),
    "json of other fields": (200, b'{"action": ["terminate"], "Events": {"EventType": "Preempt"}}'),
    "events that are none": (200, b'{"action": "dance", "Events": [1, null, {"EventType": []}]}'),
    "deep json": (200, b"[" * 60_000),
    "half of it": (200, b'{"action": "termin'),
}


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("name", list(BAD))
def test_bad_answers_are_no_notice(cloud, name, caplog):
    with Bad() as fake, caplog.at_level(logging.WARNING):
        fake.status, fake.body = BAD[name]
        service = Service(cloud, fake.address)
        assert not any(service.going() for _ in range(3))
    assert len(caplog.records) <= 1  # said once, not every five seconds


def test_what_was_known_stays_while_the_answers_are_bad():
    with Aws() as fake:
        fake.action = {"action": "terminate"}
        service = Service("aws", fake.address)
        assert service.going()
        fake.broken = True
        assert service.going()
        fake.broken, fake.action = False, None
        assert not service.going()
    assert not service.going()  # nobody listens there any more


@contextmanager
def drip():
    """A server that says one byte after the other, and never ends its header."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def serve():
            while not over.is_set():
                line, _ = server.accept()
                with line:
                    line.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
                    while not over.wait(0.05):
                        try:
                            line.sendall(b"x")
                        except OSError:
                            break

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()


def test_one_bad_answer_at_the_beginning_is_no_bad_answer_for_ever(monkeypatch):
    """What is asked for once, a token or a name, may be nonsense that time."""
    with Aws() as aws, Azure("vm-3") as azure:
        services = Service("aws", aws.address), Service("azure", azure.address)
        azure.events = [azure.event("Preempt", "vm-3")]
        aws.action = {"action": "terminate"}
        for fake in (aws, azure):
            monkeypatch.setattr(fake, "reply", nonsense(fake.reply))
        assert not any(service.going() for service in services)
        monkeypatch.undo()
        assert all(service.going() for service in services)


def nonsense(reply):
    """Text where text is expected, and no JSON."""

    def answer(method, path, headers, goes):
        status, text = reply(method, path, headers, goes)
        return status, text if text.startswith("{") else "\N{GREEK SMALL LETTER PI}"

    return answer


def test_who_answers_without_end_is_left_after_a_while(monkeypatch):
    monkeypatch.setattr(cloud_notices, "_TIMEOUT_S", 0.5)
    with drip() as address:
        began = time.monotonic()
        assert not Service("aws", address).going()
        assert time.monotonic() - began < 30


def test_no_proxy_is_asked(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with Gcp() as fake:
        fake.preempted = "TRUE"
        assert Service("gcp", fake.address).going()


def test_a_watcher_tells_of_changes_alone(monkeypatch):
    waits = []
    with Gcp() as fake:

        def wait(seconds):
            waits.append(seconds)
            if len(waits) == 3:
                fake.preempted = "TRUE"

        monkeypatch.setattr(preemption_notices, "time", SimpleNamespace(sleep=wait))
        watcher = preemption_notices.NoticeWatcher("gcp", fake.address)
        assert watcher.change(known=False)
        assert waits == [cloud_notices.EVERY_S] * 3
        fake.preempted = "FALSE"
        assert not watcher.change(known=True)


def test_nobody_is_asked_unless_that_is_wanted(monkeypatch):
    monkeypatch.setattr(preemption_notices, "as_actor", pytest.fail)
    assert preemption_notices.Notices(None, None).look({"node"}) == set()


def test_this_ray_tells_which_nodes_are_being_drained():
    """If this fails, Ray has changed: look for a public call, else for where it has gone."""
    assert callable(ray._private.state.state.get_draining_nodes)


def test_a_ray_that_does_not_tell_disturbs_nobody(monkeypatch, caplog):
    monkeypatch.setattr(ray._private.state, "state", SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        assert preemption_notices.draining_nodes() == preemption_notices.draining_nodes() == set()
    assert len(caplog.records) == 1
    monkeypatch.delattr(ray._private, "state")
    assert preemption_notices.draining_nodes() == set()
    preemption_notices._told.clear()
