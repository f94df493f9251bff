"""The reducer's operation over how far each worker has moved since the last one.

Workers take inner steps by themselves, with the optimizers of the train function. An outer step
puts `anchor - parameter` into `param.grad`, and reduces it as any gradient: buckets, commit round,
recovery. What all have agreed on is the gradient of the outer optimizer, which goes on from the
anchor, where all were after the last outer step. Buffers are averaged with it, by their change.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv 2311.08105, algorithm 1. Unlike there, workers count by their samples since the last outer
step, so an epoch's last batches and losses are weighed as they are.

What the train function changes between an outer step and the next batch, on all workers alike,
stays changed: they go on from there. Gradients of inner steps are its own, too.

A parameter that no inner optimizer holds, as of an average of weights, is averaged itself.

Invariant: at a boundary parameters are at the anchor, so it is no part of a State.
"""

from collections.abc import Callable, Collection, Sequence

import torch

from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.reducer import Reducer, Steps
from elastix.comm.protocol.operation import OperationOutcome
from elastix.sharding import like, local


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
    ) -> None:
        super().__init__(modules, driver, steps, may_void=True, wire=wire)
        self._moving = [p for bucket in self._gradients for p in bucket.parameters]
        self._rates = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        # One by one: sharded parameters and others cannot be told apart to torch's faster ways.
        self.optimizer = torch.optim.SGD(self._moving, **self._rates, foreach=False)  # type: ignore[arg-type]
        self._held = held
        self._anchors = [local(p.detach()).clone() for p in self._moving]

    def set_out(self) -> None:
        """See Reducer: all workers are at one place now, from which they go their own ways."""
        super().set_out()
        for parameter, anchor in zip(self._moving, self._anchors, strict=True):
            anchor.copy_(local(parameter.detach()))

    def step(self) -> None:
        """All go on from one place. Collective."""
        own = [parameter.grad for parameter in self._moving]
        for parameter, anchor in zip(self._moving, self._anchors, strict=True):
            distance = anchor - local(parameter.detach())
            moves = parameter.requires_grad or bool(distance.any())  # frozen since it has moved
            parameter.grad = like(distance, parameter) if moves else None
        self._counts = True
        self._begin()
        self._end()
        held = self._held()
        with torch.no_grad():
            for parameter, anchor in zip(self._moving, self._anchors, strict=True):
                local(parameter.detach()).copy_(anchor)
                if id(parameter) not in held and parameter.grad is not None:
                    parameter.sub_(parameter.grad)
                    parameter.grad = None
        for group in self.optimizer.param_groups:
            group.update(self._rates)  # a State may have those of an earlier run
        self.optimizer.step()
        for parameter, gradient in zip(self._moving, own, strict=True):
            parameter.grad = gradient

    def accept(self, outcome: OperationOutcome) -> None:
        """See Reducer. If nobody who is left has samples, buffers do not change either."""
        super().accept(outcome)
        if not self._counter.samples():
            self._leave_no_trace()
