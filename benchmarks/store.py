"""The lineage store against torch.save, HDF5, safetensors and memcpy, in one run.

    python -m benchmarks.store --out FILE.json [--models 200] [--stored 100000]

Everything is read from and written to the same file system; what must be durable is synced by
each of them in the same way. `_cpu` is process CPU seconds, `_wall` elapsed seconds. All take
turns, many times; a ratio is the median over the rounds, and `_spread` the smallest and largest.

A round of writing is the whole trace: its parts differ in how much of a model is new, so that the
ratio of one part says little about that of another.

Reads are warm: files in the page cache, digests compared before (the store compares each tensor's
once in a process; the others compare none). A full read ends with every byte copied into tensors
that exist already, as `load_state_dict` does it. A read of a prefix (the first 3 layers of 12)
ends when its tensors are handed out: the store and safetensors map them, torch.load reads the
file. That takes microseconds, less than to fill the processor's caches again which others have
emptied: it is done ten times in a turn, after a first time of its own, `prefix_once_`.
`prefix_copied_` is the same with every byte copied out; no store can gain more there than
`prefix_copied_cpu_gain_safetensors_limit`, which is what memcpy alone takes. `small_` repeats it
with models of 200 kB, such as a search for small networks has them.
"""

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks import store_questions, store_trace
from benchmarks.record import save as record
from elastix.state import Ref, State
from elastix.store import Store

Tensors = dict[str, torch.Tensor]
PREFIX = 3  # layers
AGAIN = 10  # times a prefix is read in a turn
SMALL_WIDTH = 64


@dataclass
class Laps:
    """Elapsed and CPU seconds of one contestant, a pair for each turn that it had."""

    turns: list[tuple[float, float]] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> "Laps":
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter(), time.process_time()
        self.turns.append((now[0] - self._began[0], now[1] - self._began[1]))

    @property
    def wall(self) -> float:
        """Seconds of all turns."""
        return sum(wall for wall, _ in self.turns)

    @property
    def cpu(self) -> float:
        """CPU seconds of all turns."""
        return sum(cpu for _, cpu in self.turns)


def ratios(name: str, over: Laps, under: Laps, what: str = "cpu") -> dict[str, Any]:
    """Turn by turn: the median of `over / under`, and the extremes."""
    place = ("wall", "cpu").index(what)
    found = [a[place] / b[place] for a, b in zip(over.turns, under.turns, strict=True)]
    return {name: statistics.median(found), f"{name}_spread": [min(found), max(found)]}


def synced(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fdatasync(handle)
    os.close(handle)


def bytes_below(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


# ------------------------------------------------------------------------------------- writing


def save_h5(tensors: Tensors, path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, tensor in tensors.items():
            file.create_dataset(name, data=tensor.numpy())


SAVERS: dict[str, tuple[str, Callable[[Tensors, Path], None]]] = {
    "torch_save": (".pt", lambda tensors, path: torch.save(tensors, path)),
    "safetensors": (".safetensors", lambda tensors, path: save_file(tensors, path)),
    "hdf5": (".h5", save_h5),
}


@dataclass(frozen=True)
class Written:
    """What became of one trace."""

    unique: int
    logical: int
    stored: int
    file_bytes: dict[str, int]
    laps: dict[str, Laps]


def write_trace(root: Path, models: int, width: int, kept: Sequence[int]) -> Written:
    """The trace into the store, into files, and its new bytes into one raw file; taking turns.

    Files other than those of the models `kept` are removed at once: ten gigabytes of them would
    push everything out of the page cache.
    """
    laps = {name: Laps() for name in ("store", "raw", *SAVERS)}
    file_bytes = dict.fromkeys(SAVERS, 0)
    seen: set[int] = set()
    refs: list[Ref] = []
    unique = logical = 0
    for name in SAVERS:
        (root / name).mkdir(parents=True)
    raw = os.open(root / "raw", os.O_WRONLY | os.O_CREAT)
    with Store(root / "store") as store:
        store.put(State({"warm": torch.ones(1)}))
        for number, step in enumerate(store_trace.trace(models, width=width)):
            new = [t for t in step.tensors.values() if t.data_ptr() not in seen]
            keep_alive.extend(new)
            seen.update(t.data_ptr() for t in new)
            unique += sum(t.nbytes for t in new)
            logical += sum(t.nbytes for t in step.tensors.values())
            parents = () if step.parent is None else (refs[step.parent],)
            state = State(step.tensors, {"number": number}, parents)
            paths = {name: root / name / f"{number}{SAVERS[name][0]}" for name in SAVERS}

            def put(state: State = state) -> None:
                refs.append(store.put(state))

            def write_raw(new: list[torch.Tensor] = new) -> None:
                for tensor in new:
                    os.write(raw, tensor.numpy().data)
                os.fdatasync(raw)

            def save(
                name: str, tensors: Tensors = step.tensors, paths: dict[str, Path] = paths
            ) -> None:
                SAVERS[name][1](tensors, paths[name])
                synced(paths[name])

            turns: dict[str, Callable[[], None]] = {"store": put, "raw": write_raw}
            turns |= {name: partial(save, name) for name in SAVERS}
            order = list(turns)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                with laps[name]:  # whoever is first finds cold caches: they take turns at that
                    turns[name]()
            for name, path in paths.items():
                file_bytes[name] += path.stat().st_size
                if number not in kept:
                    path.unlink()
    os.close(raw)
    (root / "raw").unlink()
    return Written(unique, logical, bytes_below(root / "store"), file_bytes, laps)


def writing(
    root: Path, models: int, width: int, kept: Sequence[int], rounds: int
) -> dict[str, Any]:
    """The trace, time and again. What the last round wrote stays, for reading."""
    traces: list[Written] = []
    for _ in range(rounds):
        shutil.rmtree(root, ignore_errors=True)
        keep_alive.clear()
        traces.append(write_trace(root, models, width, kept))
    last = traces[-1]
    found: dict[str, Any] = {
        "trace_models": models,
        "trace_unique_bytes": last.unique,
        "trace_logical_over_unique": last.logical / last.unique,
        "bytes_ratio": last.stored / last.unique,
    }
    whole = {n: Laps([(t.laps[n].wall, t.laps[n].cpu) for t in traces]) for n in last.laps}
    found |= ratios("put_wall_ratio_raw", whole["store"], whole["raw"], "wall")
    found |= ratios("put_cpu_ratio_torch_save", whole["store"], whole["torch_save"])
    found |= ratios("put_cpu_ratio_safetensors", whole["store"], whole["safetensors"])
    puts = [wall for trace in traces for wall, _ in trace.laps["store"].turns]
    found["put_ms"] = 1e3 * statistics.median(puts)
    for name, lap in whole.items():
        found[f"write_{name}_wall_s"] = statistics.median(wall for wall, _ in lap.turns)
        found[f"write_{name}_cpu_s"] = statistics.median(cpu for _, cpu in lap.turns)
    for name in SAVERS:
        found[f"bytes_ratio_{name}"] = last.file_bytes[name] / last.unique
    return found


keep_alive: list[torch.Tensor] = []  # so that no address is used twice


# ------------------------------------------------------------------------------------- reading


def load_h5(path: Path) -> Tensors:
    with h5py.File(path) as file:
        return {
            f"{a}": torch.from_numpy(file[a][()]) for a in file if isinstance(file[a], h5py.Dataset)
        }


def fill(target: Tensors, source: Tensors | Any) -> None:  # noqa: ANN401 - any mapping
    for name, tensor in target.items():
        tensor.copy_(source[name])


def readers(
    root: Path, store: Store, ref: Ref, number: int, whole: Tensors, part: Tensors, own: Tensors
) -> dict[str, Callable[[], object]]:
    """Every way to read one model, and the part of it that `part` names."""
    pt, st = root / f"torch_save/{number}.pt", root / f"safetensors/{number}.safetensors"
    h5 = root / f"hdf5/{number}.h5"
    pattern = [f"layers.{layer}.*" for layer in range(PREFIX)]
    mapped = partial(torch.load, mmap=True)
    return {
        "memcpy": partial(fill, whole, own),
        "store": partial(read_store, store, ref, "*", whole),
        "torch_load": partial(read_file, torch.load, pt, whole),
        "safetensors": partial(read_file, load_file, st, whole),
        "hdf5": partial(read_file, load_h5, h5, whole),
        "prefix_store": partial(store.get, ref, pattern),
        "prefix_torch_load": partial(torch.load, pt),
        "prefix_torch_load_mmap": partial(mapped, pt),
        "prefix_safetensors": partial(slices, st, part),
        "prefix_copied_memcpy": partial(fill, part, own),
        "prefix_copied_store": partial(read_store, store, ref, pattern, part),
        "prefix_copied_torch_load": partial(read_file, torch.load, pt, part),
        "prefix_copied_safetensors": partial(read_slices, st, part),
    }


def reading(root: Path, picked: Sequence[int], rounds: int) -> dict[str, Any]:
    """Warm reads of whole models and of prefixes. In each round every way reads every model."""
    with Store(root / "store", read_only=True) as store:
        refs = {entry.meta.get("number"): entry.ref for entry in store.log()}
        whole = {n: torch.empty_like(t) for n, t in store.get(refs[picked[0]]).tensors.items()}
        part = {n: t for n, t in whole.items() if int(n.split(".")[1]) < PREFIX}
        ways = []
        for number in picked:
            own = {k: t.clone() for k, t in store.get(refs[number]).tensors.items()}
            ways.append(readers(root, store, refs[number], number, whole, part, own))
            for action in ways[-1].values():  # warm: the page cache, the digests, the allocator
                action()
        equal = all(
            torch.equal(t, ways[-1]["prefix_safetensors"]()[n])  # type: ignore[index]
            for n, t in ways[-1]["prefix_store"]().tensors.items()  # type: ignore[attr-defined]
        )
        laps = take_turns(ways, rounds)
    found: dict[str, Any] = {"prefix_equal_to_safetensors": equal}
    found |= ratios("read_cpu_ratio_memcpy", laps["store"], laps["memcpy"])
    for name in ("torch_load", "safetensors", "hdf5"):
        found |= ratios(f"read_cpu_ratio_memcpy_{name}", laps[name], laps["memcpy"])
    for kind in ("prefix", "prefix_once", "prefix_copied"):
        for name in ("torch_load", "safetensors"):
            key = f"{kind}_cpu_gain_{name}"
            found |= ratios(key, laps[f"{kind}_{name}"], laps[f"{kind}_store"])
    found |= ratios(
        "prefix_cpu_gain_torch_load_mmap", laps["prefix_torch_load_mmap"], laps["prefix_store"]
    )
    found |= ratios(
        "prefix_copied_cpu_gain_safetensors_limit",
        laps["prefix_copied_safetensors"],
        laps["prefix_copied_memcpy"],
    )
    for name in ways[0]:
        for lap, times in turns(name):
            each = 1e6 * statistics.median(cpu for _, cpu in laps[lap].turns) / times / len(picked)
            found[f"read_{lap}_cpu_us"] = each
    return found


def take_turns(ways: Sequence[dict[str, Callable[[], object]]], rounds: int) -> dict[str, Laps]:
    """Every model read in every way, each way first in its turn."""
    laps: dict[str, Laps] = {}
    names = list(ways[0])
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for lap, times in turns(name):
                with laps.setdefault(lap, Laps()):
                    for _ in range(times):
                        for way in ways:
                            way[name]()
    return laps


def turns(name: str) -> list[tuple[str, int]]:
    """The laps of a way to read, and how many times it reads every model in them."""
    if name.startswith("prefix_") and not name.startswith("prefix_copied_"):
        return [(name.replace("prefix", "prefix_once"), 1), (name, AGAIN)]
    return [(name, 1)]


def read_store(store: Store, ref: Ref, names: str | list[str], target: Tensors) -> None:
    fill(target, store.get(ref, names).tensors)


def read_file(load: Callable[[Path], Any], path: Path, target: Tensors) -> None:
    fill(target, load(path))


def read_slices(path: Path, target: Tensors) -> None:
    fill(target, slices(path, target))


def slices(path: Path, names: Tensors) -> Tensors:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


BARS: dict[str, tuple[str, float]] = {
    "bytes_ratio": ("<=", 1.01),
    "put_wall_ratio_raw": ("<=", 1.5),
    "put_cpu_ratio_torch_save": ("<=", 0.8),
    "read_cpu_ratio_memcpy": ("<=", 2.5),
    "prefix_cpu_gain_torch_load": (">=", 10),
    "prefix_cpu_gain_safetensors": (">=", 3),
    "lp_p50_us_100k": ("<=", 50),
    "lp_p99_us_100k": ("<=", 1000),
    "lp_actor_p50_us": ("<=", 2000),
    "lcs_p50_ms_100k": ("<=", 10),
    "open_s_100k": ("<=", 2),
    "rebuild_s_100k": ("<=", 60),
}


def show(found: dict[str, Any]) -> None:
    """A line for each number, those with a bar beside it."""
    for name, value in found.items():
        if name.endswith("_spread"):
            continue
        sign, bar = BARS.get(name, ("", 0.0))
        words = [f"{sign} {bar:g}", "held" if (value <= bar) == (sign == "<=") else "MISSED"]
        low, high = found.get(f"{name}_spread", (None, None))
        spread = "" if low is None else f"({low:.3g} to {high:.3g})"
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{name:46} {shown:>12}  {' '.join([*(words if sign else []), spread])}".rstrip())


def main() -> int:
    """Run everything, print it beside the bars, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--stored", type=int, default=100_000)
    parser.add_argument("--traces", type=int, default=5, help="rounds of writing")
    parser.add_argument("--rounds", type=int, default=13, help="rounds of reading")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the imported modules' objects are traversed at nobody's cost
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        picked = range(0, options.models, max(1, options.models // 40))
        found = writing(root / "large", options.models, store_trace.WIDTH, picked, options.traces)
        found |= reading(root / "large", picked, options.rounds)
        keep_alive.clear()
        shutil.rmtree(root / "large")
        small = writing(root / "small", options.models, SMALL_WIDTH, picked, options.traces)
        small |= reading(root / "small", picked, options.rounds)
        keep_alive.clear()
        found |= {f"small_{name}": value for name, value in small.items()}
        found |= store_questions.over_chains(root / "many", options.stored)
        found |= store_questions.through_an_actor(root / "many")
    finally:
        shutil.rmtree(root)
    show(found)
    if options.out:
        record(options.out, found)
    return 0 if found["equal_to_oracle"] and found["prefix_equal_to_safetensors"] else 1


if __name__ == "__main__":
    sys.exit(main())
