"""What samples cost that are dear to decode, and what the loader costs beside torch's.

    python -m benchmarks.data --out FILE

Synthetic JPEGs are read by K trials on this host, in the same order and with the same augmentation:
with torch's DataLoader in each trial's own process (`private`) or one process more for each
(`private_process`), from one `elastix.Shared`, and from Ray Data's `materialize` (in the order of
its blocks; it is not asked to shuffle). Every decode is counted where it happens. The first three
give the same batches, by a digest of every sixteenth row and column, and take turns; medians are
given. Times are CPU seconds of all processes together and, where it says wall, of the slowest
trial. Processes of Ray are started before the clock.

Then the CPU of the training thread that a batch costs, a step of a trial that is alone in its
process beside a plain loop of torch, the time until a run goes on in the middle of ten million rows
beside `skip` of Hugging Face's streams (if `datasets` is installed), and samples repeated or
dropped under losses and joins over each format (benchmarks.formats).
"""

import argparse
import hashlib
import io
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.formats import CPU, MANY, Alone, resumed, under_schedules
from benchmarks.peers import ray_data
from benchmarks.peers.ray_data import BATCH, KEPT, decoded
from benchmarks.record import save
from elastix.config import CheckpointConfig
from elastix.data.loader import Loader
from elastix.data.shared import Shared
from elastix.data.source import Source
from elastix.train.control.messages import OutcomeKind
from elastix.train.replica.context import Context
from elastix.train.replica.link import Settings
from elastix.train.replica.solo import run_alone

PIXELS, CROP = 256, 140
MODES = ("private", "private_process", "shared")


class Pictures(Dataset[torch.Tensor]):
    """JPEGs in memory, decoded and made smaller."""

    def __init__(self, raw: list[bytes], notes: Path) -> None:
        """`notes`: gets a byte for each decode, by whichever process."""
        self.raw = raw
        self.notes = notes

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(decoded(self.raw[index], self.notes))


def jpegs(count: int) -> list[bytes]:
    """Pictures with structure at all scales, as photographs have."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        picture = np.zeros((PIXELS, PIXELS, 3), np.float32)
        for scale, weight in ((4, 0.6), (16, 0.25), (64, 0.15)):
            small = Image.fromarray(rng.integers(0, 255, (scale, scale, 3), dtype=np.uint8))
            large = small.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
            picture += np.asarray(large, np.float32) * weight
        picture += rng.normal(0, 6, picture.shape)
        file = io.BytesIO()
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def crop(sample: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A part of the picture, mirrored or not."""
    top, left = (int(n) for n in rng.integers(0, KEPT - CROP, 2))
    part = sample[top : top + CROP, left : left + CROP]
    return part.flip(1) if rng.random() < 0.5 else part


def batches(dataset: Dataset[Any], epochs: int, seed: int) -> Iterator[Any]:
    """As ctx.loader gives them to a group of one."""
    loader = Loader(0, source_of(dataset, seed), Alone())
    for epoch in loader.epochs(epochs):
        for batch in epoch:
            yield batch
            loader.commit((0,))


def torch_batches(dataset: Dataset[Any], epochs: int, seed: int, num_workers: int) -> Iterator[Any]:
    """The same ones, read by torch's DataLoader."""
    source = source_of(dataset, seed)
    for epoch in range(epochs):
        start, stop = epoch * source.length, (epoch + 1) * source.length
        cuts = [(at, min(at + BATCH, stop)) for at in range(start, stop, BATCH)]
        keys = [source.keys((cut,)) for cut in cuts]
        yield from DataLoader(source.keyed, batch_sampler=keys, num_workers=num_workers)


def source_of(dataset: Dataset[Any], seed: int) -> Source:
    return Source(dataset=dataset, batch_size=BATCH, seed=seed, augment=crop, device=CPU)


def cpu_s() -> float:
    """Of this process and its children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in both)


def trial(
    mode: str, raw: list[bytes], epochs: int, notes: Path, answers: "SimpleQueue[Any]"
) -> None:
    """One trial: reads all batches, and says what they cost and what they were."""
    torch.set_num_threads(1)
    began, used = time.perf_counter(), cpu_s()
    pictures = Pictures(raw, notes)
    shared = Shared(pictures, "8GB") if mode == "shared" else None
    if shared is not None:
        read = batches(shared, epochs, seed=5)
    else:
        read = torch_batches(pictures, epochs, seed=5, num_workers=mode == "private_process")
    digest = hashlib.sha256()
    for batch in read:
        digest.update(batch.numpy()[:, ::16, ::16].tobytes())
    wall = time.perf_counter() - began
    if shared is not None:
        shared.close()
    answers.put((wall, cpu_s() - used, digest.hexdigest()))


def together(mode: str, trials: int, raw: list[bytes], epochs: int) -> dict[str, Any]:
    """K trials at once."""
    context = multiprocessing.get_context("fork")
    answers: SimpleQueue[Any] = context.SimpleQueue()
    with tempfile.NamedTemporaryFile() as notes:
        arguments = (mode, raw, epochs, Path(notes.name), answers)
        started = [context.Process(target=trial, args=arguments) for _ in range(trials)]
        for process in started:
            process.start()
        said = [answers.get() for _ in started]
        for process in started:
            process.join()
        decodes = Path(notes.name).stat().st_size
    return {
        "wall_s": max(wall for wall, *_ in said),
        "cpu_s": sum(cpu for _, cpu, _ in said),
        "decodes_a_sample": decodes / len(raw),
        "digests": sorted({digest for *_, digest in said}),
    }


def ingest(count: int, epochs: int, repeats: int) -> dict[str, Any]:
    """Private decoding beside shared, for 1, 2 and 4 trials."""
    raw = jpegs(count)
    found: dict[str, Any] = {"pictures": count, "epochs": epochs}
    for trials in (1, 2, 4):
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for _ in range(repeats):
            for mode, mine in runs.items():
                mine.append(together(mode, trials, raw, epochs))
        digests = {d for mine in runs.values() for one in mine for d in one["digests"]}
        if len(digests) != 1:
            raise RuntimeError(f"{MODES} have read different batches, or not all of them")
        medians = {mode: _medians(mine) for mode, mine in runs.items()}
        found[f"trials_{trials}"] = {
            **medians,
            "ray_materialize": _medians(ray_data.runs(raw, trials, epochs, repeats)),
            "cpu_ratio": medians["shared"]["cpu_s"] / medians["private"]["cpu_s"],
            "wall_ratio": medians["shared"]["wall_s"] / medians["private"]["wall_s"],
        }
    return found


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    names = ("wall_s", "cpu_s", "decodes_a_sample")
    return {name: statistics.median(run[name] for run in runs) for name in names}


def cost_of_batches(repeats: int) -> Mapping[str, float]:
    """Microseconds of CPU in the training thread a batch, ours and torch's, over digits."""
    data = TensorDataset(torch.rand(4096, 1, 8, 8), torch.arange(4096) % 10)

    def ours() -> int:
        loader = Loader(0, Source(dataset=data, batch_size=BATCH, device=CPU), Alone())
        count = 0
        for _ in next(iter(loader.epochs(1))):
            loader.commit((0,))
            count += 1
        return count

    def theirs() -> int:
        return sum(1 for _ in DataLoader(data, BATCH, shuffle=True))

    found: dict[str, list[float]] = {"elastix_us": [], "torch_us": []}
    for _ in range(repeats):
        for name, read in (("elastix_us", ours), ("torch_us", theirs)):
            began = time.thread_time()
            count = read()
            found[name].append((time.thread_time() - began) / count * 1e6)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, "ratio": medians["elastix_us"] / medians["torch_us"]}


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def descend(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[list[torch.Tensor]]
) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def lone_steps(rounds: int, epochs: int = 6) -> Mapping[str, float]:
    """Microseconds of CPU that a step of a small model takes, in a plain loop and in a lone trial.

    The least of all rounds, of whole runs less what one epoch takes.
    """
    data = TensorDataset(torch.rand(1792, 64), torch.arange(1792) % 10)
    settings = Settings(
        directory=Path(tempfile.gettempdir()),
        run="trial",
        seed=0,
        min_workers=1,
        checkpoint=CheckpointConfig(),
        alone=True,
    )

    def plain(count: int) -> None:
        made = small_model()
        for _ in range(count):
            descend(*made, DataLoader(data, BATCH, shuffle=True))

    def trial(ctx: Context) -> None:
        made = ctx.prepare(*small_model())
        for epoch in ctx.loader(data, BATCH).epochs(ctx.config["epochs"]):
            descend(*made, epoch)

    def alone(count: int) -> None:
        outcome = run_alone(trial, {"epochs": count}, settings, lambda _: None)
        if outcome.kind is not OutcomeKind.FINISHED:
            raise RuntimeError(f"{outcome.kind}: {outcome.summary}\n{outcome.traceback}")

    least: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for name, run in (("plain_us", plain), ("elastix_us", alone)):
            for count in (1, epochs):
                began = time.thread_time()
                run(count)
                took = time.thread_time() - began
                least[name, count] = min(took, least.get((name, count), took))
    steps = (epochs - 1) * 1792 // BATCH
    us = {n: (least[n, epochs] - least[n, 1]) / steps * 1e6 for n in ("plain_us", "elastix_us")}
    return {**us, "ratio": us["elastix_us"] / us["plain_us"]}


def skipped() -> Mapping[str, Mapping[str, float]]:
    """Seconds until a stream of Hugging Face has a batch behind half of its rows, which it skips.

    In the order of the rows, and shuffled in a buffer. Empty if `datasets` is not installed.
    """
    try:
        from datasets import Dataset as Rows
    except ImportError:
        return {}
    found = {}
    rows = Rows.from_dict({"n": np.arange(MANY)}).to_iterable_dataset()
    shuffled = rows.shuffle(seed=0, buffer_size=1000)
    for name, stream in (("hugging_face", rows), ("hugging_face_shuffled", shuffled)):
        began, used = time.perf_counter(), time.process_time()
        next(iter(stream.skip(MANY // 2).iter(BATCH)))
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        found[name] = {"rows": MANY, "cpu_s": cpu, "wall_s": wall}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="of a lone trial's steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "ingest": ingest(options.pictures, options.epochs, options.repeats),
        "batch": cost_of_batches(options.repeats),
        "lone_step": lone_steps(options.rounds),
        "resume": {**resumed(), **skipped()},
        "schedules": under_schedules(rows=1000, schedules=20),
    }
    save(options.out, results)


if __name__ == "__main__":
    main()
