"""Modules that a new process needs anyway, imported at a time and in a way that costs little."""

import gc
from importlib import import_module


def import_frozen(*names: str) -> None:
    """Import modules with the garbage collector off, then keep it off all objects there are.

    An import makes hundreds of thousands of objects and no garbage; the collections that they set
    off take a third of its time. Later full collections would walk over them too, for a tenth of a
    second in the middle of a step.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            import_module(name)
        gc.freeze()
    finally:
        if collected:
            gc.enable()
