"""A train function that goes on until somebody has measured enough."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastix.train.replica.context import Context

EPOCHS = 1 << 40


class _EndlessContext(Context):
    """A Context whose loaders never come to their last epoch; all else is as it was."""

    def loader(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Context.loader
        """See Context."""
        loader = super().loader(*args, **kwargs)
        plain = loader.epochs
        vars(loader)["epochs"] = lambda total: plain(max(total, EPOCHS))
        return loader


@dataclass(frozen=True)
class Endless:
    """`train` with all its epochs endless: what a script plans for is no matter of its speed."""

    train: Callable[[Context], None]

    def __call__(self, ctx: Context) -> None:
        """Run it."""
        self.train(_EndlessContext(ctx._member, ctx.config))
