"""Where workers take steps by themselves: when all take one together, and what is refused between.

A worker has this only with ExchangeConfig(every_steps=...). Its own steps are the train function's
affair; nobody else counts them.

Not here: after which batches an outer step is due (inner_steps), and what it does to parameters
(comm.gradients.outer_reducer).
"""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from elastix.comm.gradients.outer_reducer import OuterReducer
from elastix.data.backward_window import Ratio
from elastix.data.loader import Loader
from elastix.data.source import Source
from elastix.train.replica import refusals
from elastix.train.replica.inner_steps import InnerSteps
from elastix.train.replica.parts import WorkerParts
from elastix.train.replica.step_commits import StepCommits


class OuterSteps:
    """One worker's.

    Args:
        parts: of the worker.
        steps: of it; those that count are the outer ones.
        every: so many inner steps make an outer one due.

    Attributes:
        reducer: takes outer steps; None before `ctx.prepare`.
    """

    def __init__(self, parts: WorkerParts, steps: StepCommits, every: int) -> None:
        self.reducer: OuterReducer | None = None
        self._me = parts.me
        self._tracked = parts.tracked
        self._copies = parts.copies
        self._steps = steps
        self._inner = InnerSteps(every)

    @property
    def _pending(self) -> bool:
        return any(loader.pending for loader in self._tracked.loaders)

    def source(self, source: Source) -> Source:
        """What a loader is to draw from, if it is asked for that.

        Raises:
            ConfigError: batches in slices are steps of the group.
        """
        if source.slices is not None:
            raise refusals.not_with_inner_steps("ctx.loader(slices=...)", "ctx.loader without")
        return replace(source, tiny_whole=True)

    def asked(self, loader: int | None) -> None:
        """That loader is asked for a batch: the outer step comes first if it is due. Collective.

        Raises:
            ConfigError: it is none, so no batches are counted.
        """
        if loader is None:
            raise refusals.not_with_inner_steps("ctx.boundary", "ctx.loader")
        if self._inner.asked(loader):
            self.step()

    def drawn(self, loader: int, size: int, ratio: Ratio) -> None:
        """A batch of an inner step begins, which is split as if there were no others."""
        self._steps.window.drawn(loader, size, ratio)
        self._steps.passed()
        self._inner.drawn(loader)
        self._tracked.void = self._me not in ratio  # what it computes on placeholders

    def exhausted(self, loader: Loader) -> bool:
        """An epoch of it is over; whether the outer step was taken, as it is there. Collective."""
        for_good = loader.pending and loader.in_last_epoch
        together = self._inner.ends(loader.number, for_good=for_good)
        if together:
            self.step()
        return together

    def adding(self) -> AbstractContextManager[None]:
        """Within it, passes are some of several that make an inner step."""
        return self._inner.adding()

    def step(self) -> None:
        """Take the outer step, if there were inner ones. Collective."""
        if self.reducer is None:
            return
        self._inner.over()
        if self._pending:
            self._copies.finish()  # the parameters are about to move
            self.reducer.step()

    def over(self) -> None:
        """A State has come: inner steps count from here."""
        self._inner.over()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """One is about to take a step: an inner one, or the outer one.

        Raises:
            ConfigError: it is an inner one with gradients of no batch.
        """
        if self.reducer is None:
            return
        self._copies.finish()  # the parameters are about to move
        if optimizer is self.reducer.optimizer:
            return
        self.reducer.watch(optimizer)
        if self._pending:
            return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(parameter.grad is not None for parameter in parameters):
            raise refusals.steps_between_outer_steps()

    def look_if_none(self) -> None:
        """At the end of the train function.

        Raises:
            ConfigError: it has added up gradients, and never taken a step.
        """
        if self._inner.none and not self._steps.step:
            raise refusals.never_took_an_inner_step()
