"""Which Ray a driver uses that was told of none."""

import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray._private import services
from ray._private.utils import validate_socket_filepath

from elastix.errors import ConfigError
from elastix.train.on_ray import find_ray


@pytest.fixture(autouse=True)
def nobody_handles_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@pytest.fixture
def asked(monkeypatch):
    """Addresses that ray.init was called with."""
    addresses = []
    monkeypatch.setattr(ray, "init", lambda address, **_: addresses.append(address))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


@pytest.fixture
def calls(monkeypatch):
    """A Ray that is only told of."""

    class Made(list):
        starter = None

    made = Made()
    asked = threading.Event()

    def init(address, **options):
        asked.clear()
        assert not asked.wait(0.2), "another thread would start it as well"
        made.append("init")
        made.starter = threading.current_thread()

    def is_initialized():
        asked.set()
        return made[-1:] == ["init"]

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: made.append("shutdown"))
    monkeypatch.setattr(ray, "is_initialized", is_initialized)
    note(monkeypatch, None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


def test_several_threads_share_one_ray_until_the_last_lets_go_of_it(calls):
    with ThreadPoolExecutor(4) as threads:
        held = [threads.submit(find_ray.hold_ray) for _ in range(4)]
        assert [each.result() for each in held] == [True] * 4
    for _ in range(4):
        assert calls == ["init"]
        assert calls.starter.is_alive()  # the kernel ends with it what it has started
        find_ray.let_go_of_ray()
    assert calls == ["init", "shutdown"]
    assert not calls.starter.is_alive()
    assert find_ray.hold_ray()
    find_ray.let_go_of_ray()
    assert calls == ["init", "shutdown"] * 2


def test_a_ray_of_the_user_is_left_alone(calls):
    ray.init(None)
    assert not find_ray.hold_ray()
    assert calls == ["init"]


def test_a_ray_that_could_not_be_started_is_held_by_nobody(calls, monkeypatch):
    def fail(address, **options):
        raise ConnectionError

    with monkeypatch.context() as broken:
        broken.setattr(ray, "init", fail)
        with pytest.raises(ConnectionError):
            find_ray.hold_ray()
    assert find_ray.hold_ray()
    find_ray.let_go_of_ray()
    assert calls == ["init", "shutdown"]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def note(monkeypatch, server):
    address = None if server is None else f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(find_ray, "read_ray_address", lambda: address)


def test_a_cluster_that_has_gone_is_not_waited_for(monkeypatch, asked, listener):
    note(monkeypatch, listener)
    listener.close()
    find_ray.find_or_start_ray()
    assert asked == ["local"]


def test_a_cluster_that_answers_is_used(monkeypatch, asked, listener):
    note(monkeypatch, listener)
    find_ray.find_or_start_ray()
    assert asked == [None]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_cluster_with_an_ipv6_address_is_used(monkeypatch, asked):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = f"[::1]:{server.getsockname()[1]}"
        monkeypatch.setattr(find_ray, "read_ray_address", lambda: address)
        find_ray.find_or_start_ray()
    assert asked == [None]


def test_that_a_local_ray_wants_a_token_is_no_warning(monkeypatch, asked, caplog):
    """If this fails, Ray has changed: look whether it still warns where nothing is wrong."""
    tokens = pytest.importorskip(find_ray._TOKENS, reason="this Ray has none")
    note(monkeypatch, None)
    logger = logging.getLogger(tokens.__name__)
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "propagate", False)  # as Ray sets it when it is started
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    tokens._warn_token_auth_enabled()
    assert len(caplog.records) == 1
    find_ray.find_or_start_ray()
    tokens._warn_token_auth_enabled()
    assert len(caplog.records) == 1
    tokens._warn_token_auth_disabled()
    assert len(caplog.records) == 2


def test_without_a_note_ray_decides(monkeypatch, asked):
    note(monkeypatch, None)
    find_ray.find_or_start_ray()
    assert asked == [None]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_that_was_given_is_left_to_ray_and_named_if_nobody_answers(
    monkeypatch, asked, listener, caplog, scheme
):
    note(monkeypatch, None)
    address = f"{scheme}127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    find_ray.find_or_start_ray()
    assert caplog.messages == []
    listener.close()
    find_ray.find_or_start_ray()
    assert f"nobody answers at RAY_ADDRESS={address}." in caplog.text
    assert asked == [None, None]


@pytest.mark.parametrize("address", ["127.0.0.1:99999", ".example:6379", f"{'a' * 64}:6379"])
def test_an_address_that_can_be_none_is_gone(address):
    assert find_ray.is_gone(address)


def test_a_folder_whose_path_is_too_long_for_sockets_is_named(monkeypatch, tmp_path):
    note(monkeypatch, None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: validate_socket_filepath("x" * 108))
    monkeypatch.setattr(find_ray.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}.*Set RAY_TMPDIR=/tmp"):
        find_ray.find_or_start_ray()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_file_that_ray_cannot_write_is_named_with_what_to_do(monkeypatch, number):
    def init(address, **options):
        raise OSError(number, os.strerror(number), "/home/me/.ray")

    monkeypatch.setattr(ray, "init", init)
    fact = f"{os.strerror(number)}: '/home/me/.ray'. Nothing was started.*Set RAY_TMPDIR and HOME"
    with pytest.raises(ConfigError, match=fact):
        find_ray.init_ray("local")


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_a_full_folder_that_ray_says_nothing_of_is_named(monkeypatch, tmp_path, kind):
    def init(address, **options):
        raise kind("Timed out waiting for file gcs_server_port")

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(find_ray.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(ConfigError, match=f"100 bytes free in {tmp_path}, .*Make room, or set RAY"):
        find_ray.init_ray("local")
    monkeypatch.setattr(find_ray.shutil, "disk_usage", lambda path: usage._replace(free=1 << 30))
    with pytest.raises(kind, match="Timed out waiting"):
        find_ray.init_ray("local")


def test_a_cluster_that_cannot_be_reached_is_left_to_ray_to_tell(monkeypatch):
    def init(address, **options):
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConnectionError, match="no cluster"):
        find_ray.init_ray("local")


def test_sigterm_that_ray_loses_while_it_starts_ends_the_process_all_the_same(monkeypatch):
    def init(address, **options):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SystemExit) as ended:
        find_ray.init_ray("local")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # another ends it at once
    assert ended.value.code == 128 + signal.SIGTERM


def test_ray_leaves_a_user_s_handler_of_sigterm_in_place(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    def init(address, **options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.setattr(ray, "init", init)
    try:
        find_ray.init_ray("local")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_ray_s_processes_do_not_get_what_is_sent_to_the_group(monkeypatch):
    started = []

    def init(address, **options):
        started.append(services.ConsolePopen(["sleep", "60"]))

    popen = services.ConsolePopen
    monkeypatch.setattr(ray, "init", init)
    find_ray.init_ray("local")
    (process,) = started
    try:
        assert os.getpgid(process.pid) == process.pid
    finally:
        process.kill()
        process.wait()
    assert services.ConsolePopen is popen
