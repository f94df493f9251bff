"""A model as the user's own code builds it, for verbs that need more than its tensors."""

import json
import re
from typing import Any

import torch

from elastix.commands.estimate import builder
from elastix.errors import ConfigError


def built_model(model: str, config: object) -> torch.nn.Module:
    """The module that a function builds.

    Args:
        model: MODULE[:FUNCTION] or FILE.py[:FUNCTION], as for `elastix estimate`.
        config: JSON or its text for the function; None to call it without.

    Raises:
        ConfigError: there is no such function, it raises, or it gives no module.
    """
    text = config if config is None or isinstance(config, str) else json.dumps(config)
    build = builder(model, text)
    try:
        module: object = build()
    except Exception as error:
        raise ConfigError(
            f"{model} raised when it was to build the model: {first_line(error)}. Nothing was "
            "done. It is called with --config, else with the config that a trial was stored "
            "with, else with the default of its module's `space`, else with nothing."
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"{model} gave {type(module).__name__}, which is no torch.nn.Module. Nothing was "
            "done. Name the function that builds the model."
        )
    return module


def without_cache(module: torch.nn.Module) -> None:
    """Have a model of transformers answer with its outputs alone, not with what it keeps for later.

    Its config is changed, so it is not to be saved afterwards.
    """
    settings: Any = getattr(module, "config", None)
    if getattr(settings, "use_cache", False):
        settings.use_cache = False


def first_line(error: BaseException) -> str:
    """What went wrong first, in one line without a terminal's colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
