"""What a checkpoint costs training, and whether it survives a death while it is being saved.

Stall and CPU: one process with a 400 MB State, trained in steps of about a second, saves in turn
with torch.save and fsync, torch's distributed checkpoint (DCP), DCP in the background with
asynchronous staging, and elastix; every save is durable at its end, holds other bytes than the one
before, and only then is the one before removed, by all of them.

- `stall_ms`: how long the training thread was held up: in the call that saves, and before the
  optimizer's step, where what is still being copied is waited for. Median over the rounds.
- `cpu_s`: CPU seconds of the process for one save, in all threads, less those of the training
  itself. Median.
- `survived_share`: three processes save a replicated State in the background; one of them is
  killed with SIGKILL at one of ten offsets within the usual duration of a save. Share of the
  checkpoints that were accepted (the call had returned everywhere) and can be loaded, bit for bit.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter as clock
from time import process_time, thread_time

import torch

from benchmarks.checkpoint_deaths import survived_dcp, survived_elastix
from benchmarks.peers.dcp import DcpAsync, DcpSave, TorchSave, alone
from benchmarks.record import save
from elastix.config import CheckpointConfig
from elastix.state import State
from elastix.store import Store
from elastix.train.checkpoint.assembly import CheckpointEnded, CheckpointId, Message, Order
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.checkpoint.saver import Occasion, Saver

STATE_MB = 400
_TENSORS = 48
_STEP_S = 1.0


class Elastix:
    """A worker's saver and the coordinator in one process, as in a run of one worker."""

    def __init__(self, folder: Path) -> None:
        outlets = Outlets(
            send=self._tell,
            emit=lambda event: None,
            journaled=lambda: 1 << 60,
            sync=lambda: None,
            fail=lambda error: None,
        )
        self._checkpoints = Checkpoints(
            Store(folder), "bench", CheckpointConfig(keep_last=1), outlets
        )
        self._saver = Saver(self._send, lambda: Store(folder))
        self._mark = CheckpointId(0)

    def begin(self, tensors: dict[str, torch.Tensor]) -> None:
        """At the boundary."""
        self._mark = CheckpointId(self._mark.step + 1)
        occasion = Occasion(mark=self._mark, reason="every_steps", members=(0,))
        self._saver.save(State(tensors), occasion, tensors.keys())

    def copied(self) -> None:
        """Before the optimizer's step."""
        self._saver.finish()

    def durable(self) -> None:
        """Until it is stored."""
        release = self._saver.wait(self._mark)
        if release.error is not None:
            raise release.error
        self._checkpoints.settle(60.0)  # the one before is dropped

    def close(self) -> None:
        """Let go of the folder."""
        self._saver.close()
        self._checkpoints.close()

    def _send(self, message: Message) -> None:
        self._checkpoints.told(0, message)

    def _tell(self, worker: int | None, order: Order | CheckpointEnded) -> None:
        del worker
        self._saver.tell(order)


Saving = TorchSave | DcpSave | DcpAsync | Elastix
SYSTEMS: dict[str, Callable[[Path], Saving]] = {
    "torch_save_fsync": TorchSave,
    "dcp": DcpSave,
    "dcp_async": DcpAsync,
    "elastix": Elastix,
}


def compute(seconds: float) -> float:
    """Forward and backward, in one thread; CPU seconds of this thread."""
    before = thread_time()
    a = torch.randn(256, 256)
    deadline = clock() + seconds
    while clock() < deadline:
        for _ in range(20):
            a = torch.tanh(a @ a)
    return thread_time() - before


def one_step(
    saving: Saving, tensors: dict[str, torch.Tensor], step_s: float
) -> tuple[float, float]:
    """A boundary, a step, and the wait for the save: seconds of stall, CPU seconds of the save."""
    before = process_time()
    started = clock()
    saving.begin(tensors)
    held = clock() - started
    own = compute(step_s)
    started = clock()
    saving.copied()
    held += clock() - started
    saving.durable()
    spent = process_time() - before - own
    for tensor in tensors.values():  # the optimizer's step, after all was measured
        tensor.add_(1.0)
    return held, spent


def measure(rounds: int, state_mb: int, step_s: float, folder: Path) -> dict[str, dict[str, float]]:
    """Stall in milliseconds and CPU in seconds by system, medians over the rounds."""
    elements = state_mb * 250_000 // _TENSORS
    tensors = {f"t{i}": torch.randn(elements) for i in range(_TENSORS)}
    stall: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    with alone():
        savings = {name: system(folder / name) for name, system in SYSTEMS.items()}
        for number in range(rounds + 1):
            first = number % len(SYSTEMS)  # nobody always comes after the same one
            for name in [*SYSTEMS, *SYSTEMS][first : first + len(SYSTEMS)]:
                held, spent = one_step(savings[name], tensors, step_s)
                if number > 0:  # in the first, buffers are made and modules imported
                    stall[name].append(1e3 * held)
                    cpu[name].append(spent)
            if number > 0:
                rows = [f"{n} {stall[n][-1]:.1f} ms {cpu[n][-1]:.2f} s" for n in SYSTEMS]
                print(f"round {number}: " + "  ".join(rows), flush=True)
        for saving in savings.values():
            saving.close()
    return {
        "stall_ms": {name: statistics.median(values) for name, values in stall.items()},
        "cpu_s": {name: statistics.median(values) for name, values in cpu.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--state-mb", type=int, default=STATE_MB)
    parser.add_argument("--step-s", type=float, default=_STEP_S)
    parser.add_argument("--offsets", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent.resolve()) as folder:
        results: dict[str, dict[str, float]] = measure(
            options.rounds, options.state_mb, options.step_s, Path(folder)
        )
        results["survived_share"] = {
            name: survived(options.offsets, options.repeats, Path(folder))
            for name, survived in (("dcp_async", survived_dcp), ("elastix", survived_elastix))
        }
    for figure, values in results.items():
        print(figure, "  ".join(f"{name} {value:.3g}" for name, value in values.items()))
    save(options.out, results)


if __name__ == "__main__":
    main()
