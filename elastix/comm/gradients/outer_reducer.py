"""The reducer's operation over how far each worker has moved since the last one.

Workers take inner steps by themselves, with the optimizers of the train function. An outer step
puts `anchor - parameter` into `param.grad`, and reduces it as any gradient: buckets, commit round,
recovery. What all have agreed on is the gradient of the outer optimizer, which goes on from the
anchor, where all were after the last outer step. Buffers are averaged with it, by their change.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv 2311.08105, algorithm 1. Unlike there, workers count by their samples since the last outer
step, so an epoch's last batches and losses are weighed as they are.

What the train function changes between an outer step and the next batch, on all workers alike,
stays changed: they go on from there. Gradients of inner steps are its own, too. Two habits would
make workers part, and are refused: to put back weights of before the outer step, and to update a
frozen average of weights in inner steps.

A parameter that no inner optimizer holds, as of an average of weights, is averaged itself.

Invariant: at a boundary parameters are at the anchor, so it is no part of a State. While the outer
step is under way each holds how far it has moved, which saves a copy, and nobody may look at it.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.reducer import Reducer
from elastix.comm.gradients.steps import Steps
from elastix.comm.protocol.operation import OperationOutcome
from elastix.errors import ConfigError
from elastix.sharding import like, local

_LOOKED_AT = 8  # parameters, at the first elements of which the train function's doing is seen


class OuterReducer(Reducer):
    """See the module, and Reducer.

    Args:
        lr: of the outer optimizer.
        momentum: of Nesterov's kind; 0 for none.
        held: gives the ids of the parameters that inner optimizers hold.

    Attributes:
        optimizer: the outer one, over the parameters of the modules.
    """

    hooked = False

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        driver: GroupDriver,
        steps: Steps,
        *,
        lr: float,
        momentum: float,
        held: Callable[[], Collection[int]],
        wire: torch.dtype | None = None,
        piped: bool = False,
    ) -> None:
        super().__init__(modules, driver, steps, may_void=True, wire=wire, piped=piped)
        self._moving = [p for bucket in self._gradients for p in bucket.parameters]
        self._rates = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        # One by one: sharded parameters and others cannot be told apart to torch's faster ways.
        self.optimizer = torch.optim.SGD(self._moving, **self._rates, foreach=False)  # type: ignore[arg-type]
        self._held = held
        self._anchors = [local(p.detach()).clone() for p in self._moving]
        self._looked_at: list[torch.nn.Parameter] = []
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # A few of their values: after the last inner step; and, from an outer step to the boundary,
        # after the inner step before it and after itself.
        self._after_inner: list[torch.Tensor] = []
        self._left: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._frozen_at: list[int] = []  # versions, at the last boundary

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to take an inner step: notice what its steps come to."""
        if optimizer not in self._watched:
            self._watched.add(optimizer)
            optimizer.register_step_post_hook(self._has_moved)
            held = self._held()
            inner = [parameter for parameter in self._moving if id(parameter) in held]
            self._looked_at = inner[:: max(1, -(-len(inner) // _LOOKED_AT))]
            self._after_inner, self._left = [], ([], [])

    def _has_moved(self, *_: Any) -> None:  # noqa: ANN401 - a hook of torch
        self._after_inner = self._look()

    def _look(self) -> list[torch.Tensor]:
        tensors = [local(parameter.detach()) for parameter in self._looked_at]
        return [tensor[(slice(4),) * tensor.dim()].clone() for tensor in tensors]

    def set_out(self) -> None:
        """See Reducer: all workers are at one place now, from which they go their own ways.

        Raises:
            ConfigError: this one was put back to where it was before the outer step.
        """
        super().set_out()
        before, after = self._left
        self._left = [], []
        if before and not _same(before, after) and _same(before, self._look()):
            raise ConfigError(
                "weights of before an outer step were put back after it, so each worker would go "
                "on from its own: ExchangeConfig(every_steps=...) takes that step at the beginning "
                "of ctx.evaluate, here with other weights in the model. Nothing was stored of it; "
                "the run ends. To try other weights within an epoch, an average (EMA) for one, "
                "call ctx.evaluate on the model as it is first, put the others in after that, call "
                "it again, and put back what the model had in between. At the end of an epoch that "
                "step was taken before."
            )
        self._set_out_from_here()

    def rebase(self) -> None:
        """See Reducer."""
        super().rebase()
        self._left = [], []
        self._set_out_from_here()

    def _set_out_from_here(self) -> None:
        for parameter, anchor in zip(self._moving, self._anchors, strict=True):
            anchor.copy_(local(parameter.detach()))
        self._frozen_at = [parameter._version for _, parameter in self._prepared.frozen]

    def _look_at_frozen(self) -> None:
        """A single number may be one that follows a plan: all workers have it alike."""
        for (name, parameter), version in zip(self._prepared.frozen, self._frozen_at, strict=False):
            if parameter._version != version and parameter.numel() > 1:
                raise ConfigError(
                    f"parameter {name} was frozen at ctx.prepare and was changed in inner steps, "
                    "where weights are each worker's own; nobody would average it. The outer step "
                    "was not taken; the run ends. An average of weights (EMA) whose parameters "
                    "require gradients at ctx.prepare, and which no optimizer holds, is averaged "
                    "with each outer step: leave out requires_grad_(False). Or change it after "
                    "the loop over an epoch."
                )

    def step(self) -> None:
        """All go on from one place. Collective.

        Raises:
            ConfigError: a frozen parameter was changed in inner steps.
        """
        self._look_at_frozen()
        gradients = [parameter.grad for parameter in self._moving]
        try:
            for parameter, anchor in zip(self._moving, self._anchors, strict=True):
                mine = local(parameter.detach())
                moves = parameter.requires_grad or not torch.equal(mine, anchor)  # frozen since
                if moves:
                    torch.sub(anchor, mine, out=mine)
                parameter.grad = like(mine, parameter) if moves else None
            self._counts = True
            self._begin()
            self._end()
        finally:
            for parameter, anchor in zip(self._moving, self._anchors, strict=True):
                local(parameter.detach()).copy_(anchor)
        held = self._held()
        with torch.no_grad():
            for parameter in self._moving:
                if id(parameter) not in held and parameter.grad is not None:
                    parameter.sub_(parameter.grad)
                    parameter.grad = None
        for group in self.optimizer.param_groups:
            group.update(self._rates)  # a State may have those of an earlier run
        self.optimizer.step()
        for parameter, gradient in zip(self._moving, gradients, strict=True):
            parameter.grad = gradient
        self._left, self._after_inner = (self._after_inner, self._look()), []

    def accept(self, outcome: OperationOutcome) -> None:
        """See Reducer. If nobody who is left has samples, buffers do not change either."""
        super().accept(outcome)
        if not self._counter.samples():
            self._leave_no_trace()


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))
