"""Streams that are written once to a tar archive, so that their samples have positions.

Source of the format: TensorFlow's TFRecord (length, its masked CRC-32C, the bytes, theirs).
"""

import io
import pickle
import secrets
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from elastix.errors import ConfigError, Corrupt

RECORD, PICKLE = "tfrecord", "pkl"
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def samples_of(stream: Any) -> Iterator[Any]:  # noqa: ANN401 - whatever can be gone through
    """The samples of a stream, in its order; of a Ray Data dataset its rows.

    Raises:
        ConfigError: it cannot be gone through.
    """
    if hasattr(stream, "iter_rows"):
        stream = stream.iter_rows()
    try:
        return iter(stream)
    except TypeError as error:
        raise ConfigError(
            f"{type(stream).__name__} cannot be gone through. Nothing was written. Name a dataset "
            "that can be iterated over, or a function without arguments that makes one."
        ) from error


def pickled(samples: Iterable[Any]) -> Iterator[tuple[str, bytes]]:
    """Samples as files of an archive, for `elastix.Tar(path, decode=...)` to unpickle.

    Raises:
        ConfigError: one of them cannot be pickled.
    """
    for number, sample in enumerate(samples):
        try:
            raw = pickle.dumps(sample, protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"sample {number} of the stream cannot be pickled: {error}. Nothing was written. "
                "Let the stream give arrays, tensors and plain values."
            ) from error
        yield f"{number:09d}.{PICKLE}", raw


def records(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """The records of TFRecord files, as files of an archive. The bytes' own sums are not checked.

    Raises:
        Corrupt: a file is no TFRecord file, is damaged, or was cut off.
    """
    number = 0
    for path in paths:
        with path.open("rb") as file:
            while head := file.read(12):
                at = file.tell() - len(head)
                length = int.from_bytes(head[:8], "little")
                if len(head) < 12 or _masked(_crc(head[:8])) != int.from_bytes(head[8:], "little"):
                    raise Corrupt(
                        f"{path} has no TFRecord at byte {at}: the length's checksum is another. "
                        "It is damaged, compressed, or no TFRecord file. No archive was written."
                    )
                raw = file.read(length) if length <= path.stat().st_size - at - 16 else b""
                if len(raw) < length or len(file.read(4)) < 4:
                    raise Corrupt(
                        f"{path} was cut off in the record at byte {at}. No archive was written. "
                        "Copy it again."
                    )
                yield f"{number:09d}.{RECORD}", raw
                number += 1


def write_tar(files: Iterable[tuple[str, bytes]], out: Path) -> int:
    """Write an archive, whole or not at all; how many files it has.

    Raises:
        ConfigError: there is one already, or there is nothing to write.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already. Nothing was written. Choose another name.")
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    count = 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}. Nothing was written.") from error
    try:
        with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as archive:
            for name, body in files:
                info = tarfile.TarInfo(name)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
                count += 1
        if not count:
            raise ConfigError(f"the stream has no samples. {out} was not written.")
        draft.rename(out)
    finally:
        draft.unlink(missing_ok=True)
    return count


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def _crc(raw: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in raw:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
