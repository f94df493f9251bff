"""A script that is loaded for its train function must not train by itself meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from elastix.errors import ConfigError

_loading: ContextVar[Path | None] = ContextVar("the script that is being loaded", default=None)


@contextmanager
def loading(script: Path) -> Iterator[None]:
    """Meanwhile `refuse_while_loading` raises."""
    before = _loading.set(script)
    try:
        yield
    finally:
        _loading.reset(before)


def refuse_while_loading(what: str) -> None:
    """Raise ConfigError if the script that is being loaded calls `what`."""
    script = _loading.get()
    if script is not None:
        raise ConfigError(
            f"{script} calls {what} itself when it is loaded, and only its train function is "
            f"wanted here. Nothing was started. Run it with `python {script}`, or put the call "
            'under `if __name__ == "__main__":`.'
        )
