"""Ray Data beside elastix.Shared: pictures that are decoded once, and read by several trials.

    python -m benchmarks.peers.ray_data FOLDER TRIALS EPOCHS REPEATS

`Dataset.materialize` is Ray's way to decode once for all (ray-project/ray#28171). What is timed is
the decoding and the reading; Ray, its workers and the trials' actors are there before.
"""

import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from PIL import Image

KEPT, BATCH = 160, 64
Picture = npt.NDArray[np.uint8]


def decoded(raw: bytes, notes: Path) -> Picture:
    """A JPEG, made smaller. `notes` gets a byte for it."""
    handle = os.open(notes, os.O_WRONLY | os.O_APPEND)
    os.write(handle, b"x")
    os.close(handle)
    image = Image.open(io.BytesIO(raw)).convert("RGB")
    return np.array(image.resize((KEPT, KEPT), Image.Resampling.BILINEAR))


def runs(raw: list[bytes], trials: int, epochs: int, repeats: int) -> list[dict[str, Any]]:
    """In a process of its own: who forks after Ray was there has its threads' locks."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "raw").write_bytes(pickle.dumps(raw))
        numbers = map(str, (trials, epochs, repeats))
        command = [sys.executable, "-m", "benchmarks.peers.ray_data", folder, *numbers]
        subprocess.run(command, check=True, capture_output=True)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "found").read_text())
        return found


def cpu_s() -> float:
    """Of this process and all below it, also of those that have ended."""
    mine = psutil.Process()
    every = [process.cpu_times() for process in (mine, *mine.children(recursive=True))]
    total: float = sum(t.user + t.system + t.children_user + t.children_system for t in every)
    return total


def main(folder: Path, trials: int, epochs: int, repeats: int) -> None:
    import ray
    import torch

    from benchmarks.data import crop

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    notes = folder / "notes"
    notes.touch()

    @ray.remote(num_cpus=0)
    class Trial:
        """Reads all batches."""

        def read(self, dataset: Any, seed: int) -> int:  # noqa: ANN401 - Ray's
            torch.set_num_threads(1)
            rng, count = np.random.default_rng(seed), 0
            for _ in range(epochs):
                for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy"):
                    rows = [crop(torch.from_numpy(row), rng) for row in batch["picture"]]
                    count += len(torch.stack(rows))
            return count

    def dataset(raw: list[bytes]) -> Any:  # noqa: ANN401 - Ray's
        rows = ray.data.from_items([{"raw": one} for one in raw])
        return rows.map(lambda row: {"picture": decoded(row["raw"], notes)}).materialize()

    raw = pickle.loads((folder / "raw").read_bytes())
    actors = [Trial.remote() for _ in range(trials)]  # type: ignore[attr-defined]
    ray.get([actor.read.remote(dataset(raw[:BATCH]), 0) for actor in actors])
    found = []
    for _ in range(repeats):
        notes.write_bytes(b"")
        began, used = time.perf_counter(), cpu_s()
        materialized = dataset(raw)
        counts = ray.get([actor.read.remote(materialized, 5) for actor in actors])
        if counts != [epochs * len(raw)] * trials:
            raise RuntimeError(f"trials read {counts} samples")
        found.append(
            {
                "wall_s": time.perf_counter() - began,
                "cpu_s": cpu_s() - used,
                "decodes_a_sample": notes.stat().st_size / len(raw),
            }
        )
    ray.shutdown()
    (folder / "found").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
