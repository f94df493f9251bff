"""The doctor's checks, each shown a machine in order and some that are not."""

import importlib.metadata
import json
import socket
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from elastix.cli import app
from elastix.commands import doctor

GIB = 1 << 30


def one(findings):
    found = list(findings)
    assert len(found) == 1, found
    return found[0]


def test_python():
    assert doctor.python((3, 11, 0)).status == "ok"
    assert doctor.python((3, 10, 14)).status == "fail"


def test_packages_are_judged_by_what_elastix_asks_for():
    versions = {"torch": "2.13.0+cpu", "ray": "2.49.1"}

    def installed(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    wanted = ["torch>=2.9", "ray[default]>=2.50", "numpy>=2", 'wandb>=1; extra == "wandb"']
    found = {f.check: f for f in doctor.packages(wanted, installed)}
    assert {name: f.status for name, f in found.items()} == {
        "torch": "ok",
        "ray": "fail",
        "numpy": "fail",
    }
    assert "2.49.1" in found["ray"].fact
    assert "pip install 'ray[default]>=2.50'" in found["ray"].mend


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".ray").mkdir()
    return tmp_path


def write_token(home, mode=0o600, text="secret"):
    path = home / ".ray" / "auth_token"
    path.write_text(text)
    path.chmod(mode)


def test_no_token_and_no_mode_is_how_a_machine_begins(home):
    assert one(doctor.token({}, home)).status == "ok"


def test_a_token_without_the_mode_makes_job_submission_fail(home):
    write_token(home)
    found = one(doctor.token({}, home))
    assert (found.status, found.mend) == ("warn", "export RAY_AUTH_MODE=token")
    assert "refused" in found.fact


def test_token_and_mode(home):
    write_token(home)
    assert one(doctor.token({"RAY_AUTH_MODE": "token"}, home)).status == "ok"
    write_token(home, text="\n")
    assert one(doctor.token({"RAY_AUTH_MODE": "token"}, home)).status == "fail"
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}
    assert one(doctor.token(given, home)).status == "ok"


def test_the_mode_without_a_token(home):
    found = one(doctor.token({"RAY_AUTH_MODE": "token"}, home))
    assert found.status == "fail"
    assert "ray get-auth-token --generate" in found.mend


def test_a_token_that_others_can_read(home):
    write_token(home, 0o644)
    _, found = doctor.token({"RAY_AUTH_MODE": "token"}, home)
    assert found.status == "warn"
    assert found.mend.startswith("chmod 600 ")


def test_a_token_is_never_shown(home):
    write_token(home, 0o644)
    for environ in ({}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "disabled"}):
        assert "secret" not in str(list(doctor.token(environ, home)))


def test_authentication_turned_off(home):
    assert one(doctor.token({"RAY_AUTH_MODE": "disabled"}, home)).status == "warn"


def test_a_cluster_that_does_not_answer(tmp_path):
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        found = one(doctor.cluster({"RAY_ADDRESS": address}, tmp_path / "none"))
        assert found.status == "fail"
        assert address in found.fact
        stale = tmp_path / "current"
        stale.write_text(address)
        assert one(doctor.cluster({}, stale)).status == "warn"
    assert one(doctor.cluster({}, tmp_path / "none")).status == "ok"
    assert one(doctor.cluster({"RAY_ADDRESS": "auto"}, tmp_path / "none")).status == "ok"
    assert one(doctor.cluster({"RAY_ADDRESS": "local"}, tmp_path / "none")).status == "ok"
    assert one(doctor.cluster({"RAY_ADDRESS": "nonsense"}, tmp_path)).status == "fail"


def test_an_address_that_cannot_exist_is_one_where_nobody_answers(tmp_path):
    for address in ("127.0.0.1:99999", f"{'x' * 64}.example:6379"):
        found = one(doctor.cluster({"RAY_ADDRESS": address}, tmp_path / "none"))
        assert (found.status, found.fact) == ("fail", f"nobody answers at {address}")


def test_an_ipv6_address_is_asked_without_its_brackets(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(doctor, "_answers", lambda *address: asked.append(address))
    one(doctor.cluster({"RAY_ADDRESS": "[::1]:6379"}, tmp_path))
    assert asked == [("::1", 6379)]


def test_a_gpu_that_fails_is_told_of_beside_the_others(monkeypatch):
    def memory(index):
        if index == 0:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ...")
        return 60 * GIB, 80 * GIB

    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_name", lambda index: "H100"),
        ("mem_get_info", memory),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    _, broken, sound = doctor.devices()
    assert (broken.check, broken.status) == ("gpu 0", "fail")
    assert (sound.check, sound.status) == ("gpu 1", "ok")
    assert broken.fact == "torch cannot use it: CUDA error: uncorrectable ECC error encountered"
    assert "CUDA_VISIBLE_DEVICES" in broken.mend


def test_a_host_without_an_address():
    found = doctor.network("no-such-host.invalid", {})
    assert found.status == "fail"
    assert "/etc/hosts" in found.mend


def test_a_host_that_has_an_ipv6_address_alone(monkeypatch):
    only = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [only])
    found = doctor.network("machine", {"http_proxy": "proxy:80"})
    assert found.status == "warn", found.fact
    assert "::1" in found.mend


def test_one_address_that_can_be_listened_on_is_enough(monkeypatch):
    """Of a machine that has moved, /etc/hosts may name the old address as well."""
    elsewhere, here = (
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in ("203.0.113.1", "127.0.0.1")
    )
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere, here])
    assert doctor.network("machine", {}).fact == "machine is 127.0.0.1, and can be listened on"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere])
    assert doctor.network("machine", {}).status == "fail"


def test_a_proxy_in_the_way():
    assert doctor.network("localhost", {}).status == "ok"
    found = doctor.network("localhost", {"http_proxy": "proxy:80"})
    assert found.status == "warn"
    assert "127.0.0.1" in found.mend
    spared = {"http_proxy": "proxy:80", "no_proxy": "example, 127.0.0.1"}
    assert doctor.network("localhost", spared).status == "ok"


def test_a_port_in_use_is_named():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert "in use" in one(doctor.ports({port: "something"})).fact
    assert "free" in one(doctor.ports({port: "something"})).fact


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(64 << 20, 60 << 20, "warn"), (8 * GIB, 6 * GIB, "ok"), (8 * GIB, GIB // 4, "warn")],
)
def test_shared_memory(tmp_path, total, free, status):
    assert doctor.shared_memory(tmp_path, lambda _: (total, total - free, free)).status == status


def test_no_shared_memory(tmp_path):
    assert doctor.shared_memory(tmp_path / "shm", lambda _: (1, 1, 1)).status == "fail"


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [
        (1000 * GIB, 500 * GIB, "ok"),
        (1000 * GIB, 80 * GIB, "warn"),
        (1000 * GIB, 40 * GIB, "fail"),
        (8 * GIB, 4 * GIB, "warn"),
        (3 * GIB, GIB // 4, "fail"),
    ],
)
def test_room_on_a_disk(tmp_path, total, free, status):
    there = tmp_path / "not" / "yet"
    found = doctor.disk("store", there, lambda path: (total, total - free, free))
    assert found.status == status
    assert str(tmp_path) in found.fact
    assert bool(found.mend) == (status != "ok")


def test_what_is_on_no_disk_is_not_to_be_made_room_on():
    found = doctor.disk("store", Path("/proc/nobody"), lambda path: (0, 0, 0))
    assert (found.status, found.mend) == ("fail", "choose another directory")
    assert found.fact == "/proc is on no disk, and keeps no files"


def test_a_file_is_no_place_for_a_store(tmp_path):
    (tmp_path / "store").write_text("")
    for path in (tmp_path / "store", tmp_path / "store" / "runs"):
        found = doctor.disk("store", path, lambda _: (1000 * GIB, 0, 1000 * GIB))
        assert (found.status, found.fact) == ("fail", f"{tmp_path / 'store'} is no directory")


def test_open_files():
    assert doctor.files((1024, -1)).mend == "ulimit -n 65536"
    assert doctor.files((1024, 2048)).mend == "ulimit -n 2048"
    assert doctor.files((65536, 65536)).status == doctor.files((-1, -1)).status == "ok"


def test_the_command_exits_with_1_only_for_what_will_not_work(monkeypatch, tmp_path):
    def result(*statuses):
        found = [doctor.Finding("x", status, "fact", "mend") for status in statuses]
        monkeypatch.setattr(doctor, "examine", lambda store: iter(found))
        return CliRunner().invoke(app, ["doctor", "--json"])

    assert result("ok", "warn").exit_code == 0
    failed = result("ok", "fail")
    assert failed.exit_code == 1
    assert [f["status"] for f in json.loads(failed.stdout)] == ["ok", "fail"]


def test_the_store_is_where_all_commands_look_for_it(monkeypatch, tmp_path):
    looked_at = []
    monkeypatch.setattr(doctor, "examine", lambda store: looked_at.append(store) or ())
    for arguments, env in (([], {"ELASTIX_STORE": "/shared"}), (["--store=~/runs"], {})):
        assert CliRunner().invoke(app, ["doctor", *arguments], env=env).exit_code == 0
    assert looked_at == [Path("/shared"), Path("~/runs").expanduser()]


def test_the_command_on_this_machine(tmp_path):
    found = CliRunner().invoke(app, ["doctor", "--json", "--store", str(tmp_path)])
    checks = {f["check"]: f for f in json.loads(found.stdout)}
    assert {"python", "torch", "ray", "cpus", "gpus", "network", "store"} <= set(checks)
    assert checks["torch"]["status"] == "ok"
    failures = [f for f in checks.values() if f["status"] == "fail"]
    assert found.exit_code == bool(failures)
    assert all(f["mend"] for f in failures)
