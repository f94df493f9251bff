"""How much memory a trial took, how much there is, and whether want of it ended something.

On Linux; where /proc does not say, a number is 0, which means: unknown. Not here: what follows
from it (packer, campaign_loop).
"""

import ctypes
import gc
import re
from pathlib import Path

import torch

_TRIM_ABOVE = 64 << 20  # bytes kept by malloc that are worth the time of giving them back
_SPARED = 0.95  # of what is free: Ray ends workers above that
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
        _give_back()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        except OSError:
            self.base = 0  # the peak would be that of another trial
        else:
            self.base = resident("VmRSS")

    def read(self) -> int:
        """Bytes, the base among them; 0: unknown."""
        if self._device is not None:
            return int(torch.cuda.max_memory_allocated(self._device))
        return resident("VmHWM") if self.base else 0


def resident(field: str = "VmRSS") -> int:
    """Bytes of a line of /proc/self/status."""
    return _field(Path("/proc/self/status"), f"{field}:") << 10


def free(device: torch.device | None = None) -> int:
    """Bytes that processes on this host, or on that GPU, may take beyond what they hold."""
    if device is not None and device.type == "cuda":
        return int(_SPARED * torch.cuda.mem_get_info(device)[0])
    unused = _field(Path("/proc/meminfo"), "MemAvailable:") << 10
    group = _cgroup()
    limit = _number(group / "memory.max")
    if limit:
        held = _number(group / "memory.current") - _field(group / "memory.stat", "inactive_file")
        unused = min(unused, max(0, limit - held))
    return int(_SPARED * unused)


def kills() -> int:
    """How often the system has ended a process of this control group for want of memory."""
    events = _cgroup() / "memory.events"
    path, name = (events, "oom_kill") if events.is_file() else (Path("/proc/vmstat"), "oom_kill")
    return _field(path, name)


def _give_back() -> None:
    """What was freed malloc keeps; the next trial's peak would be that of the one before."""
    held = resident()
    if held - _Kept.least > _TRIM_ABOVE:
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:  # not glibc
            return
        held = resident()
    _Kept.least = held


class _Kept:
    least = 0


def _cgroup() -> Path:
    """Of this process, as version 2 has it; the root within a container."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return root
    inside = next((line[3:] for line in lines if line.startswith("0::")), "/")
    own = root / inside.lstrip("/")
    return own if (own / "memory.events").is_file() else root


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
