"""How much memory a trial took, how much there is, and whether want of it ended something.

On Linux; where /proc does not say, a number is 0, which means: unknown. Not here: what follows
from it (packer, campaign_loop).
"""

import ctypes
import gc
import os
import re
import resource
from functools import cache
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TRIM_ABOVE = 64 << 20  # bytes kept by malloc that are worth the time of giving them back
_SLIGHT = 1 << 20  # bytes that make no difference
_SPARED = 0.95  # of what is free: Ray ends workers above that
_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SIGNS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|OutOfMemory|out of memory"
    r"|^MemoryError|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED|Cannot allocate memory"
    r"|unable to mmap|low on memory"
)


def out_of_memory(said: str) -> bool:
    """Whether an error, as text, is for want of memory: torch's, Python's, Ray's, the system's."""
    return _SIGNS.search(said) is not None


def refused_bytes(said: str) -> int:
    """How much memory an error says could not be had; 0: it does not say."""
    plain = re.search(r"tried to allocate (\d+) bytes", said)
    if plain:
        return int(plain[1])
    found = re.search(r"Tried to allocate ([\d.]+) ([KMG])iB", said)  # CUDA's
    return int(float(found[1]) * (1 << {"K": 10, "M": 20, "G": 30}[found[2]])) if found else 0


class PeakMemory:
    """The most that this process holds while a trial runs: its own memory, or a GPU's.

    Attributes:
        base: bytes when it began.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin. What earlier trials have left behind is given back to the system first."""
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self.base = torch.cuda.memory_allocated(self._device)
            return
        held = _give_back()
        # VmHWM starts again; where it does not, the peak would be that of another trial.
        self.base = held if _write("/proc/self/clear_refs", b"5") else 0

    def read(self) -> int:
        """Bytes, the base among them; 0: unknown."""
        if self._device is not None:
            return int(torch.cuda.max_memory_allocated(self._device))
        if not self.base:
            return 0
        # Ten times faster. It may be of what this process was before it became this program.
        ever = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return max(ever, self.base) if ever < self.base + _SLIGHT else status("VmHWM")


def resident() -> int:
    """Bytes that this process holds in memory."""
    fields = _read("/proc/self/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status: "VmHWM" is the most that was held since it began."""
    _, found, rest = _read("/proc/self/status").partition(f"{field}:".encode())
    return int(rest.split(None, 1)[0]) << 10 if found else 0


def free(device: torch.device | None = None) -> int:
    """Bytes that processes on this host, or on that GPU, may take beyond what they hold."""
    if device is not None and device.type == "cuda":
        return int(_SPARED * torch.cuda.mem_get_info(device)[0])
    unused = _field(Path("/proc/meminfo"), "MemAvailable:") << 10
    for group in _cgroups():
        limit = _number(group / "memory.max")
        if limit:
            files = _field(group / "memory.stat", "inactive_file")
            unused = min(unused, max(0, limit - _number(group / "memory.current") + files))
    return int(_SPARED * unused)


def kills() -> int:
    """How often the system has ended a process of this control group for want of memory."""
    events = [group / "memory.events" for group in _cgroups()]
    counts = next((path for path in events if path.is_file()), Path("/proc/vmstat"))
    return _field(counts, "oom_kill")


def _give_back() -> int:
    """What was freed malloc keeps; the next trial's peak would be that of the one before.

    Returns:
        Bytes that this process holds now.
    """
    held = resident()
    if held - _Kept.least > _TRIM_ABOVE:
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:  # not glibc
            return held
        held = _Kept.least = resident()
    _Kept.least = min(_Kept.least, held)
    return held


class _Kept:
    least = 0  # after what was freed had been given back


# Every trial does it, and some take half a millisecond. So files of /proc stay open.


@cache
def _open(path: str, flags: int, process: int) -> int:
    """A file of this process; a forked one opens its own."""
    del process
    return os.open(path, flags | os.O_CLOEXEC)


def _read(path: str) -> bytes:
    """A file of /proc that has no more than a page; nothing where there is none."""
    try:
        return os.pread(_open(path, os.O_RDONLY, os.getpid()), _PAGE, 0)
    except OSError:
        return b""


def _write(path: str, value: bytes) -> bool:
    """Whether it could be done."""
    try:
        return os.pwrite(_open(path, os.O_WRONLY, os.getpid()), value, 0) == len(value)
    except OSError:
        return False


def _cgroups() -> list[Path]:
    """Of this process, as version 2 has them: its own, then what that is in, up to the root.

    Limits of all of them hold: SLURM's and systemd's are further up.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    inside = Path(next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), ""))
    return [_GROUPS / group for group in (inside, *inside.parents)]


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
