"""That gradients of a pipeline are not clipped by the norm of one stage alone.

torch.nn.utils.clip_grad_norm_ knows the gradients that it is given, which are those of this
process's stage. Each stage would be scaled by another factor.
"""

from typing import Any, NoReturn

from torch.nn.utils import clip_grad

from elastix.errors import ConfigError


def refuse() -> None:
    """From now on, in this process. What it calls for the norm is replaced: scripts import it.

    Raises:
        ConfigError: where clip_grad_norm_ is called.
    """
    clip_grad._get_total_norm = _refused


def _refused(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - whatever it is called with
    raise ConfigError(
        "torch.nn.utils.clip_grad_norm_ was called, and crew has an axis 'pipe': it goes by the "
        "norm of this process's stage, and each stage would be scaled by another factor. Nothing "
        "was clipped; the run ends. Add up the squares of torch.nn.utils.get_total_norm(gradients) "
        'over ctx.mesh["pipe"].get_group() with torch.distributed.all_reduce, and give the root to '
        "torch.nn.utils.clip_grads_with_norm_."
    )
