"""A stored model with its code, as a Hugging Face folder or as ONNX. What is written is tried.

Both are written to a folder within theirs and loaded again; only what gives the same is put there.
"""

import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from elastix.commands.built_model import built_model, first_line, without_cache
from elastix.commands.estimate import input_dtype_of, shape_of
from elastix.errors import ConfigError, StateError, StoreError
from elastix.state import State, dtype_name, raw_bytes
from elastix.store.packs import storage_errors

BATCHES = (1, 3, 7)
"""Sizes of the batches on which an ONNX file is compared with its model."""
_TOLERANCE = 1e-4
_MOST = 1 << 62
_MOST_INSIDE = 1_500_000_000  # bytes in one ONNX file, which protobuf limits


def write(
    state: State,
    kind: str,
    path: Path,
    model: str,
    config: object,
    shape: str,
    dtype: str,
    *,
    force: bool,
) -> None:
    """Write `path` and what belongs beside it.

    Args:
        state: from the store.
        kind: "huggingface" or "onnx".
        path: DIR/model.safetensors or DIR/model.onnx.
        model: what builds the module; see `elastix estimate`. Or a config.json.
        config: JSON or its text for the function; None to call it without.
        shape: of one sample.
        dtype: of a sample.
        force: whether files that are there are replaced.

    Raises:
        ConfigError: the words name no such model, a package is missing, or a file is there.
        StateError: the model is another one than was stored.
        StoreError: it cannot be exported, gives something else there, or cannot be written.
    """
    put: Callable[[torch.nn.Module, Path], None]
    if kind == "huggingface":
        put, module = _put_huggingface, _transformers_model(model, config)
    else:
        sizes, kind_of_sample = shape_of(shape), input_dtype_of(dtype)
        samples = [_sample(batch, sizes, kind_of_sample) for batch in BATCHES]
        module = built_model(model, config)

        def put(module: torch.nn.Module, draft: Path) -> None:
            _put_onnx(module, draft, samples)

    state.load_into(module)
    _check_unrounded(state, module)
    folder = path.parent
    made = not folder.exists()
    draft = folder / f".{secrets.token_hex(8)}"  # within, so on the same file system
    with storage_errors(f"writing {path}"):
        try:
            draft.mkdir(parents=True)
            put(module, draft)
            usual = draft / "usual"  # safetensors makes files that nobody else may read
            usual.touch()
            mode = usual.stat().st_mode
            usual.unlink()
            files = sorted(draft.iterdir())
            there = [file.name for file in files if (folder / file.name).exists()]
            if there and not force:
                raise ConfigError(
                    f"{folder} has {', '.join(there)} already. Nothing was written. Give another "
                    "name, or --force."
                )
            for file in files:
                file.chmod(mode)
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            if made:
                with suppress(OSError):
                    folder.rmdir()  # nothing came of it


def _check_unrounded(state: State, module: torch.nn.Module) -> None:
    """Loading gives tensors the types of the module, which may hold less."""
    own = module.state_dict()
    for name, stored in state.model.items():
        loaded = own.get(name)
        if not isinstance(loaded, torch.Tensor) or loaded.dtype == stored.dtype:
            continue
        if not _same(loaded.to(stored.dtype), stored):
            raise StateError(
                f"{name!r} was stored in {dtype_name(stored)}, and the model is built in "
                f"{dtype_name(loaded)}, to which it would be rounded. Nothing was written. Build "
                "the model in the type that it was stored in."
            )


# ---------------------------------------------------------------------- Hugging Face


def _transformers_model(model: str, config: object) -> torch.nn.Module:
    """A model with a config that says how to build it."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--format huggingface needs transformers, which is not installed. Nothing was written. "
            "pip install 'elastix[transformers]'"
        ) from error
    path = Path(model)
    if path.suffix == ".json" or path.is_dir():
        return _by_config(transformers, path)
    module = built_model(model, config)
    if not isinstance(module, cast("type", transformers.PreTrainedModel)):
        raise ConfigError(
            f"{model} builds a {type(module).__name__}, which is no model of transformers, and a "
            "Hugging Face folder needs its config. Nothing was written. Take --format "
            "safetensors for the weights, or onnx."
        )
    return module


def _by_config(transformers: Any, path: Path) -> torch.nn.Module:  # noqa: ANN401 - a module
    try:
        path.stat()  # or transformers would look for it on its hub
        config = transformers.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
        (name,) = config.architectures or [""]
        kind = getattr(transformers, name)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise ValueError(f"{name} is no model")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not say which model of transformers to build: {error}. Nothing was "
            'written. It has to be a config.json with one name under "architectures"; or name '
            "the function that builds the model: --model FILE.py:FUNCTION."
        ) from error
    built: torch.nn.Module = kind(config)
    return built


def _put_huggingface(module: Any, draft: Path) -> None:  # noqa: ANN401 - PreTrainedModel
    own = module.state_dict()
    beside = [name for name, value in own.items() if not isinstance(value, torch.Tensor)]
    if beside:  # a get_extra_state gave it
        raise StoreError(
            f"the model keeps {beside[0]!r}, which is no tensor, and a Hugging Face folder has "
            "tensors alone. Nothing was put in place. Export as safetensors, which has it among "
            "its metadata."
        )
    module.save_pretrained(draft, max_shard_size=_MOST)  # in one file
    again = type(module).from_pretrained(draft).state_dict()
    for name, tensor in own.items():
        if name not in again or not _same(again[name], tensor):
            raise StoreError(
                f"transformers reads another {name!r} than was written. Nothing was put in place. "
                "Export as safetensors, which holds every tensor under its own name."
            )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the last bit: a NaN is what it was."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(raw_bytes(one), raw_bytes(other))


# ---------------------------------------------------------------------- ONNX


def _sample(batch: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Of zeros and ones where it is whole numbers: tokens of any vocabulary."""
    generator = torch.Generator().manual_seed(batch)
    if dtype.is_floating_point:
        return torch.randn(batch, *sizes, generator=generator, dtype=dtype)
    return torch.randint(2, (batch, *sizes), generator=generator).to(dtype)


def _put_onnx(module: torch.nn.Module, draft: Path, samples: Sequence[torch.Tensor]) -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it, and says so late
    except ImportError as error:
        raise ConfigError(
            f"--format onnx needs a package that is not installed: {error}. Nothing was written. "
            "pip install 'elastix[onnx]'"
        ) from error
    without_cache(module)
    expected = [_answers(module, sample) for sample in samples]
    path = draft / "model.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # each package that is not installed
    own = module.state_dict().values()  # what a get_extra_state gives is among them
    large = sum(one.nbytes for one in own if isinstance(one, torch.Tensor)) > _MOST_INSIDE
    try:
        torch.onnx.export(
            module,
            (samples[1],),
            path,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=large,
            verbose=False,
        )
        onnx.checker.check_model(str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        found = [session.run(None, {name: sample.numpy()}) for sample in samples]
    except Exception as error:  # whatever torch, onnx and the runtime have
        raise StoreError(
            f"torch cannot export this model to ONNX: {first_line(error)}. Nothing was written. "
            "Usual reasons are a forward pass that branches on values, or a batch that it does not "
            "pass through. Export as safetensors, and run it in torch."
        ) from error
    for batch, ours, theirs in zip(BATCHES, expected, found, strict=True):
        _compare(batch, ours, [torch.from_numpy(one) for one in theirs])


def _answers(module: torch.nn.Module, sample: torch.Tensor) -> list[torch.Tensor]:
    try:
        with torch.no_grad():
            answer = module(sample)
    except Exception as error:
        raise ConfigError(
            f"the model does not take a batch of shape {tuple(sample.shape)} and type "
            f"{sample.dtype}: {first_line(error)}. Nothing was written. Look at --shape, which is "
            "of one sample without the batch, and --input-dtype. A model of several inputs cannot "
            "be exported here."
        ) from error
    return [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]


def _compare(batch: int, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    if len(ours) == len(theirs) and all(map(_alike, ours, theirs)):
        return
    raise StoreError(
        f"run by onnxruntime on a batch of {batch} the exported model gives something else than "
        f"the stored one, by more than {_TOLERANCE:g} of its largest value. Nothing was written. "
        "Its forward pass may depend on the batch, or draw random numbers."
    )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.double(), other.double()
    largest = one[one.isfinite()].abs().max() if one.isfinite().any() else 0.0
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=0.0, atol=_TOLERANCE * float(largest), equal_nan=True
    )
