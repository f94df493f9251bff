"""Whether a run that is called again has anything left to do. Not here: how it goes on (worker).

It has not if it ended well and is called with the same config, seed and train function.
"""

import json
import pickletools
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from blake3 import blake3

from elastix.events import RunStarted
from elastix.observe.progress import Progress

_OWN_ID = re.compile(rb"[0-9a-f]{32}")  # cloudpickle draws one for each class of a script
_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def mark(train: bytes) -> str:
    """Equal for equal train functions, in another process too.

    Covers what was pickled, and the files of all modules that it names: a function that is
    imported is pickled as its name alone. Installed packages are taken to stay as they are.
    """
    named = {text for _, text, _ in pickletools.genops(train) if isinstance(text, str)}
    found = blake3(_OWN_ID.sub(b"", train))
    for name in sorted((named & sys.modules.keys()) - {"__main__"}):
        found.update(_source(sys.modules[name]))
    return found.hexdigest()[:16]


def _source(module: ModuleType) -> bytes:
    file = getattr(module, "__file__", None) or ""
    if not file or file.startswith(_INSTALLED):
        return b""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


def over(before: Progress, now: RunStarted) -> bool:
    """Whether the run that `before` tells of ended well, and `now` would begin it unchanged."""
    then = before.run
    if then is None or before.outcome != "finished" or not now.code:
        return False
    config = json.loads(json.dumps(dict(now.config)))
    return (then.code, then.seed, dict(then.config)) == (now.code, now.seed, config)
