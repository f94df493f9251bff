"""Calls of the train function that all workers make together, and that are no step.

`evaluate` and `mean` are operations of the group, as steps are. `clip` is the affair of a worker's
own processes, where it has several. The closures of an LBFGS optimizer ask for `mean_loss`.

Invariant: none is made where it would be made another number of times at each worker: in a metric,
or in the loop over the slices of a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from elastix.comm.protocol.calls import OperationKind
from elastix.data.source import Collate
from elastix.train.replica import refusals, schedule_runs
from elastix.train.replica.evaluation import Evaluation, ExactEvaluation, Metric
from elastix.train.replica.parts import WorkerParts
from elastix.train.replica.rounds import GroupMean
from elastix.train.replica.step_commits import StepCommits
from elastix.train.replica.worker_processes import WorkerProcesses
from elastix.train.replica.worker_state import WorkerState


class GroupCalls:
    """One worker's.

    Args:
        parts: of the worker.
        steps: of it.
        state: of it; runs a round with the group, or by itself while this worker is on the way.
        processes: of it.
        step_together: takes the outer step that is due before all look at the model, if any is.
    """

    def __init__(
        self,
        parts: WorkerParts,
        steps: StepCommits,
        state: WorkerState,
        processes: WorkerProcesses,
        step_together: Callable[[], None],
    ) -> None:
        self._state = state
        self._processes = processes
        self._me = parts.me
        self._device = parts.device
        self._settings = parts.settings
        self._driver = parts.driver
        self._tracked = parts.tracked
        self._copies = parts.copies
        self._phase = parts.phase
        self._steps = steps
        self._step_together = step_together

    def refuse(self, call: str) -> None:
        """Where it would be made another number of times at each worker, or of what is wrong.

        Raises:
            ConfigError: it stands at such a place.
            RuntimeError: a process of this worker is lost.
        """
        self._driver.check_within(wait=False)
        self._steps.metrics.refuse(call)
        self._steps.slices.refuse(call)

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
        microbatch: int | None = None,
    ) -> dict[str, float]:
        """Means of a metric over a dataset that the group shares out. Collective."""
        self.refuse("ctx.evaluate")
        mates = self._processes.mates
        parts = mates.part[1] if mates is not None else 1
        if self._tracked.staged:
            metric = schedule_runs.required(metric)
            if microbatch is None:
                raise refusals.evaluation_needs_microbatch()
        if microbatch is not None and batch_size % (microbatch * parts):
            raise refusals.odd_batches(batch_size, microbatch, parts)
        self._step_together()
        self._steps.check(thoroughly=True)
        metric = self._steps.metrics.watched(metric)
        model, seed = self._tracked.model, self._settings.seed
        given = (model, metric, dataset, batch_size, collate, self._device, mates, microbatch)
        work = Evaluation(*given)
        if self._settings.exact:
            work = ExactEvaluation(*given, seed=seed, modules=self._tracked.every_module)
        self._copies.finish()
        self._phase("evaluate", self._steps.step)
        piped = mates is not None and mates.piped
        modules = self._tracked.modules.values() if piped else ()
        with schedule_runs.gradients_aside(modules):
            return work.means(self._state.together(work))

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients, so that those of the whole model have at most that norm."""
        self.refuse("ctx.clip_grad_norm_")
        mates = self._processes.mates
        if mates is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        if self._tracked.staged and any(loader.pending for loader in self._tracked.loaders):
            raise refusals.step_not_taken_together("ctx.clip_grad_norm_")
        return mates.clip(parameters, max_norm)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Over the group, by the shares of the last batch. Collective."""
        self.refuse("ctx.mean")
        self._steps.check()
        self._phase("mean", self._steps.step)
        return self._mean(OperationKind.MEAN, values)

    def mean_loss(self, loss: float) -> float:
        """The same for an optimizer that computes the loss itself; 0 without samples."""
        return self._mean(OperationKind.MEAN_LOSS, {"loss": loss}, empty=0.0)["loss"]

    def _mean(
        self, kind: OperationKind, values: Mapping[str, float], empty: float = math.nan
    ) -> dict[str, float]:
        mates = self._processes.mates
        if mates is not None:
            values = mates.mean(values)
        ratio, slices = self._steps.window.ratio, self._steps.slices
        drawn = slices.step is None and any(loader.pending for loader in self._tracked.loaders)
        samples = None if drawn else slices.samples  # the batch in hand is not of the last slices
        if samples is None and ratio and not self._state.on_the_way:
            samples = ratio.get(self._me, 0)
        work = GroupMean(kind, values, samples)
        result = self._state.together(work)
        if mates is not None:
            mates.averaged(values)
        return work.means(result, empty)
