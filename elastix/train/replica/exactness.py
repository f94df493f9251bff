"""What `RunConfig(exact=True)` asks of a worker: that it computes what any other would.

Random numbers are set at each place of the run, operators are those that give the same every time,
and workers that round differently are refused. Not here: the order of sums (comm.slice_tree).
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from blake3 import blake3

from elastix.comm.slice_tree import is_power_of_two
from elastix.config import ExchangeConfig, FailureConfig, RunConfig
from elastix.data.random_numbers import come_to
from elastix.data.source import Source
from elastix.errors import ConfigError

logger = logging.getLogger(__name__)
_OPERATOR = re.compile(r"^(\S+) does not have a deterministic implementation")


def check_configs(run: RunConfig, failure: FailureConfig, exchange: ExchangeConfig) -> None:
    """Refuse options whose effect depends on the number of workers.

    Raises:
        ConfigError: names the option.
    """
    if run.exact and exchange.wire is not None:
        raise ConfigError(
            f"RunConfig(exact=True) and ExchangeConfig(wire={exchange.wire!r}): to be the same for "
            "any number of workers, each sum of two slices would have to be rounded, within a "
            "worker too. Nothing was started. Leave out one of the two."
        )
    if run.exact and failure.guard is not None and failure.guard.metric is not None:
        raise ConfigError(
            f"RunConfig(exact=True) and Guard(metric={failure.guard.metric!r}): a reported loss is "
            "that of one worker's slices, so which steps are void would depend on the number of "
            "workers. Nothing was started. Leave metric out: the guard judges the norm of the "
            "gradient, which is the same for any number."
        )


def check_loader(source: Source) -> None:
    """Refuse a loader whose batches are not cut into slices of which a tree can be made.

    Raises:
        ConfigError: says what to write.
    """
    if source.per_worker:
        raise ConfigError(
            "RunConfig(exact=True) and a loader with per_worker=True, whose batches follow the "
            "number of workers, and the result with them. No loader was made. Give batch_size for "
            "the whole group, or leave exact out."
        )
    if source.slices is not None and not is_power_of_two(source.slices):
        low = 1 << source.slices.bit_length() - 1
        raise ConfigError(
            f"RunConfig(exact=True) adds slices up over a binary tree, so there have to be a power "
            f"of two, not {source.slices}. No loader was made. Use slices={low} or "
            f"slices={2 * low}, of a batch_size that they divide."
        )
    if source.slices is not None:
        return
    raise ConfigError(
        "RunConfig(exact=True) needs slices, which are the same whoever computes them. No loader "
        "was made. Write ctx.loader(..., slices=8), a power of two that divides batch_size, and "
        "the loop that belongs to it (docs/train-function.md), or leave exact out."
    )


def check_rate_scaling() -> None:
    """Refuse learning rates that follow the group.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "ctx.scale_rate under RunConfig(exact=True): learning rates would follow the number of "
        "workers, and the result with them. Nothing was scaled. Leave one of the two out."
    )


class RandomPlaces:
    """Sets the random numbers at each place that all workers come to, in the training thread.

    They depend on the place, and not on what a worker did before: on which slices it computed, in
    which step it joined, or what it drew on its own to show some pictures. Epochs have places too
    (data.loader).

    Args:
        seed: of the run.
        step: how many are committed.

    Attributes:
        part: which part of each slice, and which stage, this process computes, if its worker is
            several; numbered from 0.
    """

    def __init__(self, seed: int, step: Callable[[], int]) -> None:
        self.part = 0
        self._seed = seed
        self._step = step

    def prepared(self) -> None:
        """The model is built, and the State has come."""
        come_to(self._seed, "prepared")

    def boundary(self) -> None:
        """Between two steps, or after the last one."""
        come_to(self._seed, "boundary", self._step())

    def slice(self, number: int) -> None:
        """A slice of the next step is computed."""
        come_to(self._seed, "slice", self._step(), number, *((self.part,) if self.part else ()))

    def over(self) -> None:
        """A step's slices are computed, and the step has ended."""
        come_to(self._seed, "step", self._step())


class AnyPlaces(RandomPlaces):
    """Of a run that need not be exact: random numbers go on as they are."""

    def __init__(self) -> None:
        super().__init__(0, lambda: 0)

    def prepared(self) -> None:
        """Nothing."""

    def boundary(self) -> None:
        """Nothing."""

    def slice(self, number: int) -> None:
        """Nothing."""

    def over(self) -> None:
        """Nothing."""


def computes_with(device: torch.device, crew: Mapping[str, int] | None = None) -> str:
    """On what a worker's last bits depend: two that say the same are taken to round alike.

    Args:
        device: that each of its processes computes on.
        crew: the mesh of these, if they are several.
    """
    parts = [f"torch {torch.__version__}", f"{_processor()}"]
    parts.append(torch.backends.cpu.get_cpu_capability())
    threads = torch.get_num_threads()
    parts.append(f"{threads} thread{'s' if threads > 1 else ''}")
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    parts += [f"crew with {axis} {size}" for axis, size in (crew or {}).items()]
    return ", ".join(parts)


def kind_number(computes_with: str) -> int:
    """What stands for such a text where workers exchange numbers; fits an int64, and is not 0."""
    return (int.from_bytes(blake3(computes_with.encode()).digest(8)) >> 2) | 1


@lru_cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def look_at_origin(stored: object, here: str) -> None:
    """Say so if the State that a run goes on from was computed with something else than here.

    Args:
        stored: what the State says of it; None for one that no exact run has made.
        here: see `computes_with`.
    """
    if stored != here:
        logger.warning(
            "the State that this exact run goes on from was computed %s, and what is here is %s. "
            "From here on it is exact, but its bytes are not those of a run that was made here "
            "from its beginning.",
            f"with {stored}" if stored else "without exact=True",
            here,
        )


@contextmanager
def deterministic_operators() -> Iterator[None]:
    """Within: operators give the same bits each time, or raise.

    Raises:
        ConfigError: one cannot; names it.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    # It fills what nobody has written yet, which costs time and no correct program sees.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # chooses algorithms by the clock
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "torch.use_deterministic_algorithms" not in said:
            raise
        found = _OPERATOR.match(said)
        name = found[1] if found else "an operator"
        raise ConfigError(
            f"RunConfig(exact=True) and {name}: torch has no implementation of it that "
            "gives the same bits every time. The run ends; what was "
            "committed before is exact. Use another operator in its place, or leave exact out. "
            f"torch says: {said.splitlines()[0]}"
        ) from error
    finally:
        enabled, warn_only, fill, benchmark = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
