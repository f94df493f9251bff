"""What a step changes beside model and optimizer state, kept so that the step can be done again.

For FailureConfig(recovery="rollback"): a step in which a worker was lost is void. Its gradients are
None, so parameters and the optimizer's tensors stay as they are, but the rest of the loop's body
runs: schedulers step, learning rates change, averages move. All that is put back before the step is
done again. Parameters that the loop changes by itself are put back where the run has to be exact.
Not here: buffers (comm.gradients.buffer_bucket) and samples (data.loader).
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastix.state import Stateful, raw_bytes


class Rewind:
    """The small part of a State as it was at the last boundary.

    Attributes:
        due: the step since then is void.
    """

    def __init__(self) -> None:
        self.due = False
        self._kept: dict[str, Any] = {}
        self._parameters: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._again = False  # the step has to begin with just these

    def keep(self, others: Mapping[str, Stateful]) -> None:
        """Remember `others` as they are: optimizers but for their tensors, the rest whole."""
        for name, other in others.items():
            if isinstance(other, torch.optim.Optimizer):
                self._kept[name] = [
                    {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                    for group in other.param_groups
                ]
            elif name != "rng":  # what is done again may be done with other random numbers
                self._kept[name] = copy.deepcopy(other.state_dict())

    def keep_parameters(self, modules: Iterable[torch.nn.Module], *, again: bool) -> None:
        """Remember them as they are. On the CPU: other memory may have no room for a copy.

        Args:
            modules: whose.
            again: the slices of the void step will be computed again, from just these.
        """
        self._again = again
        parameters = {id(p): p for module in modules for p in module.parameters()}
        self._parameters = [
            (parameter, parameter.detach().to("cpu", copy=True))
            for parameter in parameters.values()
        ]

    def begins_otherwise(self) -> bool:
        """Whether the slices of a step that is done again begin with other parameters than before.

        Their bytes are compared, since a change may have gone past their version counters.
        """
        kept, self._parameters = self._parameters, []
        if not self._again:
            return False
        self._again = False
        return not all(torch.equal(raw_bytes(p), raw_bytes(value)) for p, value in kept)

    def restore(self, others: Mapping[str, Stateful]) -> None:
        """Put back what was kept, if the step since then is void."""
        if not self.due:
            return
        self.due = False
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
        for name, kept in self._kept.items():
            other = others[name]
            if isinstance(other, torch.optim.Optimizer):
                for group, values in zip(other.param_groups, kept, strict=True):
                    group.update(copy.deepcopy(values))
            else:
                other.load_state_dict(copy.deepcopy(kept))
