"""Directories that a train loop has reported as checkpoints: RUN/checkpoints/NAME.

They are the script's own files, for use elsewhere. Nothing here knows of States.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastix import whole_files
from elastix.errors import ConfigError

_FACTS = ".elastix.json"


@dataclass(frozen=True)
class ReportedCheckpoints:
    """Those of one run.

    Attributes:
        directory: where they are; all workers reach it.
        keep: how many of the best to keep, and the latest; None keeps all.
        score: name of the metric that says which are best; None: the latest are.
        lowest: the lowest are.
    """

    directory: Path
    keep: int | None = None
    score: str | None = None
    lowest: bool = False

    def path(self, name: str) -> Path:
        """Of the one called `name`.

        Raises:
            ConfigError: that is no name of a directory within.
        """
        if Path(name).name != name or name.startswith("."):
            raise ConfigError(
                f"checkpoint_dir_name={name!r} is no name of a directory. Nothing was reported. "
                "Give one without a slash that does not begin with a dot."
            )
        return self.directory / name

    def writer(self, checkpoint: Any, metrics: dict[str, Any]) -> Callable[[Path], None]:  # noqa: ANN401
        """What writes a copy of it, with its metrics.

        Raises:
            ConfigError: it is no checkpoint, or lacks the metric that says which are best.
        """
        if not callable(getattr(checkpoint, "to_directory", None)):
            raise ConfigError(
                f"train.report got checkpoint={checkpoint!r}. Nothing was kept. Give "
                "train.Checkpoint.from_directory(path)."
            )
        if self.score is not None and self.score not in metrics:
            raise ConfigError(
                f"the best checkpoints are those of {self.score!r}, and train.report was given a "
                f"checkpoint with {', '.join(metrics) or 'nothing'}. Nothing was kept. Report that "
                "metric too, or leave out checkpoint_score_attribute."
            )
        metrics = {
            name: getattr(value, "item", lambda v=value: v)() for name, value in metrics.items()
        }

        def write(to: Path) -> None:
            shutil.rmtree(to, ignore_errors=True)
            to.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.to_directory(str(to))
            number = 1 + max((at for at, _, _ in self._all()), default=0)
            (to / _FACTS).write_text(json.dumps({"number": number, "metrics": metrics}))

        return write

    def all(self) -> list[tuple[Path, dict[str, Any]]]:
        """Their directories and metrics, in the order in which they were reported."""
        return [(path, metrics) for _, path, metrics in self._all()]

    def retire(self, latest: Path) -> None:
        """Remove those that are not to be kept."""
        if self.keep is None:
            return
        ranked = self._all()
        if self.score is not None:
            ranked.sort(key=lambda one: self._rank(one[2]))
        for _, path, _ in ranked[: -self.keep]:
            if path != latest:
                whole_files.remove_whole(path)
        whole_files.sweep_removed(self.directory)

    def _rank(self, metrics: dict[str, Any]) -> float:
        """The highest is the best; whatever is not a number is the worst."""
        try:
            score = float(metrics[self.score or ""])
        except (KeyError, TypeError, ValueError):
            return -math.inf
        if math.isnan(score):
            return -math.inf
        return -score if self.lowest else score

    def _all(self) -> list[tuple[int, Path, dict[str, Any]]]:
        found = []
        for facts in self.directory.glob(f"[!.]*/{_FACTS}"):
            if not facts.parent.name.endswith(".partial"):
                told = json.loads(facts.read_text())
                found.append((int(told["number"]), facts.parent, told["metrics"]))
        return sorted(found, key=lambda one: one[0])
