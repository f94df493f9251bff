"""`elastix doctor`: what is wrong with this machine for a run, and how to mend it.

Each check looks at one thing and takes what it looks at as arguments, so that tests can show it a
broken machine. Nothing is started, and nothing is changed.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer
from packaging.requirements import Requirement
from rich.filesize import decimal

from elastix.commands.output import AsJson, print_table
from elastix.commands.store_arguments import STORE, Folder

Status = Literal["ok", "warn", "fail"]
_GIB = 1 << 30
_PORTS = {6379: "the head of a Ray cluster", 8265: "Ray's dashboard and job server"}
_CURRENT = Path("/tmp/ray/ray_current_cluster")


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        mend: what to do about it; empty where nothing is wrong.
    """

    check: str
    status: Status
    fact: str
    mend: str = ""


def doctor(store: Folder = STORE, as_json: AsJson = False) -> None:
    """Tell what is wrong here and how to mend it: versions, Ray, devices, ports, memory, disk.

    Exit code 1 if something will not work; warnings alone give 0.
    """
    findings = list(examine(Path(store)))
    rows = [(f.status, f.check, f.fact + (f" -> {f.mend}" if f.mend else "")) for f in findings]
    print_table(as_json, [asdict(f) for f in findings], ("", "what", "found"), rows)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def examine(store: Path) -> Iterator[Finding]:
    """All checks, one after the other."""
    yield python(sys.version_info[:3])
    yield from packages(importlib.metadata.requires("elastix") or (), importlib.metadata.version)
    yield from token(os.environ, Path.home())
    yield from cluster(os.environ, _CURRENT)
    yield from devices()
    yield network(socket.gethostname(), os.environ)
    yield from ports(_PORTS)
    yield shared_memory(Path("/dev/shm"), shutil.disk_usage)
    yield disk("store", store, shutil.disk_usage)
    yield disk("ray's files", Path(os.environ.get("RAY_TMPDIR", "/tmp")), shutil.disk_usage)
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE))


def python(version: tuple[int, ...]) -> Finding:
    """The interpreter."""
    shown = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("python", "fail", shown, "install Python 3.11 or newer")
    return Finding("python", "ok", f"{shown} on {platform.platform(terse=True)}")


def packages(requirements: Iterable[str], installed: Callable[[str], str]) -> Iterator[Finding]:
    """What elastix needs, in versions that it was written for. Extras are only named if there."""
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = installed(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            mend = f"pip install '{wanted}'"
            yield Finding(wanted.name, "fail", "not installed", mend)
            continue
        if wanted.specifier.contains(version, prereleases=True):
            yield Finding(wanted.name, "ok", version)
        else:
            mend = f"pip install '{wanted}'"
            yield Finding(wanted.name, "fail", f"{version}, needs {wanted.specifier}", mend)


def token(environ: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Ray's token authentication: Ray turns it on by itself in some places and not in others."""
    mode = environ.get("RAY_AUTH_MODE", "").lower()
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    given = "RAY_AUTH_TOKEN" in environ
    try:
        kept = path.is_file()
        there = given or (kept and bool(path.read_bytes().strip()))
    except OSError as error:
        fact = f"{path} cannot be read: {error.strerror}"
        yield Finding("ray token", "fail", fact, "let this user read it: chown, or chmod 600")
        return
    where = "RAY_AUTH_TOKEN" if given else str(path)
    if mode == "disabled":
        yield Finding(
            "ray token",
            "warn",
            "RAY_AUTH_MODE=disabled: whoever reaches the cluster's ports can run code on it",
            "unset RAY_AUTH_MODE, or set it to token",
        )
    elif mode == "token" and not there:
        yield Finding(
            "ray token",
            "fail",
            f"RAY_AUTH_MODE=token, and there is no token in RAY_AUTH_TOKEN or {path}",
            "ray get-auth-token --generate, and the same file on every node",
        )
    elif there and mode != "token":
        yield Finding(
            "ray token",
            "warn",
            f"there is a token in {where}, so clusters that start here ask for it, and "
            "RAY_AUTH_MODE is not set: `ray job submit` would send none and be refused",
            "export RAY_AUTH_MODE=token",
        )
    elif there:
        yield Finding("ray token", "ok", f"RAY_AUTH_MODE=token, token from {where}")
    else:
        yield Finding(
            "ray token",
            "ok",
            "none yet: ray.init() makes one; for `ray start` run `ray get-auth-token --generate`",
        )
    if kept and stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Finding("ray token", "warn", f"others can read {path}", f"chmod 600 {path}")


def cluster(environ: Mapping[str, str], current: Path) -> Iterator[Finding]:
    """The Ray that fit() would connect to: does it answer, and is it of this version?"""
    address = environ.get("RAY_ADDRESS", "auto")
    stale = address in ("", "auto")
    if stale:  # what `ray start` has left, which may be gone
        address = current.read_text().strip() if current.exists() else "local"
    if address == "local":
        yield Finding("ray cluster", "ok", "none runs here: fit() starts a local one")
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")  # an IPv6 address stands in them
    if not host or not port.isdigit() or not _answers(host, int(port)):
        mend = f"rm {current}, or ray start --head" if stale else "correct or unset RAY_ADDRESS"
        fact = f"nobody answers at {address}"
        yield Finding("ray cluster", "warn" if stale else "fail", fact, mend)
        return
    import ray  # only now: it takes a second

    if ray.is_initialized():
        yield Finding("ray cluster", "ok", f"this process is connected to {address}")
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        first = str(error).strip().splitlines()[0]
        mend = "the same Ray and Python, and the same token, here as on the cluster"
        yield Finding("ray cluster", "fail", f"{address} refuses: {first}", mend)
        return
    try:
        have = ray.cluster_resources()
        free = ray.available_resources()
        room = ", ".join(
            f"{free.get(k, 0):g} of {have[k]:g} {k}" for k in ("CPU", "GPU") if k in have
        )
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        yield Finding("ray cluster", "ok", f"{address}: {alive} nodes, free are {room}")
    finally:
        ray.shutdown()


def devices() -> Iterator[Finding]:
    """What torch can use, and what it cannot although it is there."""
    import torch

    usable = len(os.sched_getaffinity(0))
    yield Finding("cpus", "ok", f"{usable} usable of {os.cpu_count()}")
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        if driver:
            mend = "install torch with CUDA, or a newer driver; look at `nvidia-smi`"
            fact = f"there is an NVIDIA driver, but torch {torch.__version__} sees no device"
            yield Finding("gpus", "fail", fact, mend)
        else:
            yield Finding("gpus", "ok", "none: workers train on CPUs")
        return
    for index in range(torch.cuda.device_count()):
        try:
            name, (free, total) = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)
        except RuntimeError as error:  # CUDA's own; torch counts a broken GPU as well
            said = str(error).partition("\n")[0]
            mend = "look at `nvidia-smi` and `dmesg`, or leave it out of CUDA_VISIBLE_DEVICES"
            yield Finding(f"gpu {index}", "fail", f"torch cannot use it: {said}", mend)
            continue
        fact = f"{name}, {decimal(free)} of {decimal(total)} free"
        crowded = free < 0.5 * total
        mend = "somebody else is at work on it; look at `nvidia-smi`" if crowded else ""
        yield Finding(f"gpu {index}", "warn" if crowded else "ok", fact, mend)


def network(host: str, environ: Mapping[str, str]) -> Finding:
    """The name by which nodes find this one."""
    try:
        address = _listened_on(host)
    except OSError as error:
        mend = f"give {host} an address of this machine in /etc/hosts"
        return Finding("network", "fail", f"{host} has no address to listen on: {error}", mend)
    proxied = any(environ.get(name) for name in ("http_proxy", "HTTP_PROXY"))
    spared = environ.get("no_proxy", environ.get("NO_PROXY", ""))
    if proxied and not ({address, host, "*"} & {part.strip() for part in spared.split(",")}):
        mend = f"export no_proxy={','.join(filter(None, (spared, 'localhost', address)))}"
        fact = "an HTTP proxy is set, and calls to Ray's dashboard and job server go through it"
        return Finding("network", "warn", fact, mend)
    return Finding("network", "ok", f"{host} is {address}, and can be listened on")


def _listened_on(host: str) -> str:
    """The first of a name's addresses, of IPv4 or IPv6, that is one of this machine: gloo's choice.

    Raises:
        OSError: there is none.
    """
    refused = OSError("the name has none")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as error:
            refused = error
        else:
            return str(address[0])
    raise refused


def ports(wanted: Mapping[int, str]) -> Iterator[Finding]:
    """Ray's fixed ports; all others are chosen free."""
    for port, purpose in wanted.items():
        taken = _answers("127.0.0.1", port)
        fact = f"{'in use' if taken else 'free'} ({purpose})"
        mend = "fine if that is your Ray; else give `ray start` another one" if taken else ""
        yield Finding(f"port {port}", "ok", fact, mend)


Usage = Callable[[Path], tuple[int, int, int]]
"""As shutil.disk_usage: total, used, free."""


def shared_memory(mount: Path, usage: Usage) -> Finding:
    """Where Ray's object store and torch's DataLoader keep what processes share."""
    if not mount.is_dir():
        return Finding(
            "shared memory", "fail", f"there is no {mount}", f"mount -t tmpfs shm {mount}"
        )
    total, _, free = usage(mount)
    fact = f"{decimal(free)} of {decimal(total)} free in {mount}"
    if total < _GIB:
        mend = "docker run --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)"
        return Finding("shared memory", "warn", f"{fact}: loaders with workers may crash", mend)
    if free < _GIB // 2:
        return Finding("shared memory", "warn", fact, f"look for what is left over in {mount}")
    return Finding("shared memory", "ok", fact)


def disk(what: str, path: Path, usage: Usage) -> Finding:
    """Room where something is going to be written, and the right to write there."""
    existing = path.absolute()
    while not os.path.exists(existing):  # noqa: PTH110 - Path's raises where nobody may look
        existing = existing.parent
    if not existing.is_dir():
        return Finding(what, "fail", f"{existing} is no directory", "choose another directory")
    if not os.access(existing, os.W_OK):
        return Finding(what, "fail", f"{existing} cannot be written", "choose another directory")
    total, used, free = usage(existing)
    if not total:  # /proc, /sys
        fact = f"{existing} is on no disk, and keeps no files"
        return Finding(what, "fail", fact, "choose another directory")
    fact = f"{decimal(free)} of {decimal(total)} free at {existing}"
    full = used / total
    if full > 0.95 or free < _GIB // 2:
        mend = "make room; Ray keeps no more objects on a disk that is 95 % full"
        return Finding(what, "fail", fact, mend)
    if full > 0.9 or free < 5 * _GIB:
        return Finding(what, "warn", fact, "make room, or keep fewer States")
    return Finding(what, "ok", fact)


def files(limits: tuple[int, int]) -> Finding:
    """Open files: Ray needs many for each worker."""
    soft, hard = limits
    if 0 <= soft < 4096:
        mend = f"ulimit -n {65536 if hard < 0 else min(65536, hard)}"
        return Finding("open files", "warn", f"at most {soft}", mend)
    return Finding("open files", "ok", f"at most {soft if soft >= 0 else 'any number'}")


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return True
    except (OSError, OverflowError, UnicodeError):  # no such port, and what can be no host
        return False
