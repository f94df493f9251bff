"""Store: keeps States by their content, like git for tensors.

A stored State has a permanent ref. Equal tensors are kept once, no matter who writes them. Tags are
names that can move. Not here: files (packs.py), the index (index.py), who may commit (ledger.py).

Invariant: once `put` has returned a ref, `get` returns the same bits for it until it is retired, no
matter which process is killed when. Damage is reported by name, and everything else stays readable.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from blake3 import blake3

from elastix.arguments import check_value, checked, of_kind, require
from elastix.errors import ConfigError, NotFound, ReadOnly, StateError, StoreError
from elastix.lazy_import import later
from elastix.notebook import facts, size
from elastix.sharding import tensors_of, whole_of
from elastix.state import Manifest, Ref, State, TensorInfo, raw_bytes
from elastix.store import exchange, lineage
from elastix.store.consolidation import consolidate
from elastix.store.gc import Collected
from elastix.store.index import Missing
from elastix.store.ledger import Ledger
from elastix.store.lineage import Diff, Mode, Signature
from elastix.store.local_packs import LocalPacks
from elastix.store.log import SHOWN, Log, entries
from elastix.store.packs import SEAL_AT_BYTES, Packs, storage_errors
from elastix.store.reader import Reader
from elastix.store.records import Header, Kind, Model
from elastix.store.remote import RemotePacks, locate
from elastix.store.requests import ANY, Put, PutPlan, Request, Retire, Tag, check_filters
from elastix.store.shares import Share, Vanished, joined
from elastix.store.soup import Soup, Validate, cook
from elastix.store.tensors import flatten, plain
from elastix.store.verify import Damage, Stats

if TYPE_CHECKING:
    import torch
    from pyarrow.fs import FileSystem
else:
    torch = later("torch")

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/@-]{0,199}")
_ATTEMPTS = 16
_PATH_BYTES = 504  # SQLite's 512, less what it adds for its journal
SHARES_SEAL_AT_BYTES = 16 << 20  # of a run's checkpoints most are dropped soon: packs that go whole


@dataclass(frozen=True)
class Match:
    """The model that `nearest` found, and how many layers it shares."""

    ref: Ref
    length: int
    score: float | None


@checked
class Store:
    """A directory of packs and their index. Thread-safe; any number of processes may use it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        filesystem: FileSystem | None = None,
        index: str | os.PathLike[str] | None = None,
        read_only: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        """Open a store, or create it.

        Args:
            path: a directory, or a URI that pyarrow.fs supports (s3://, gs://, hdfs://).
            filesystem: the pyarrow file system that `path` is on. Packs are uploaded whole there.
            index: directory of the index. By default it is in the store, and for a remote store
                in the user's cache.
            read_only: change nothing. Works while a StoreServer runs, and on a read-only disk.
            ledger: the owner of the index if that is another process; StoreServer.open sets it.

        Raises:
            ConfigError: `path` is a file.
            NotFound: `path` is not a store, and `read_only` is set.
            Conflict: a StoreServer owns the store, or a process on another machine or with
                another index uses it, and neither `ledger` nor `read_only` is set. Or the index
                must be rebuilt while another process has the store open.
            TooNew: a later version of elastix wrote the store.
            StoreError: it cannot be opened.
        """
        require(
            isinstance(path, str | os.PathLike) and str(path) != "" and "\0" not in str(path),
            f"path must be a directory or a URI, not {path!r}. No store was opened.",
        )
        check_value("Store", "read_only", bool, read_only)
        root, remote, folder = locate(path, filesystem, index)
        self._packs: Packs = RemotePacks(remote, root) if remote else LocalPacks(Path(root))
        self._where = str(path)
        self._read_only = read_only
        self._pid = os.getpid()
        if remote is None:
            _check_folder(Path(root), folder, begin=not read_only)
        self._writer = None if read_only else self._packs.writer()
        self._own = ledger is None
        self._ledger = ledger or Ledger(
            folder / "index.sqlite", self._packs, self._writer, read_only
        )
        self._reader = Reader(self._packs, self._ledger)
        self.written_bytes = 0  # of tensors, by `put`

    @property
    def ledger(self) -> Ledger:
        """The owner of the index. A server of this store passes requests on to it."""
        return self._ledger

    def close(self) -> None:
        """Seal the packs that this Store wrote. It cannot be used afterwards.

        In a forked child this does nothing, because the open files belong to the parent.
        """
        if self._pid != os.getpid():
            return
        if self._writer is not None:
            with self._writer.lock:
                self._writer.close()
        if self._own:
            self._ledger.close()

    def __repr__(self) -> str:
        return f"Store({self._where!r})"

    def _repr_html_(self) -> str:
        """What is in it, and the latest models."""
        try:
            found, latest = self.stats(), self.log(limit=SHOWN)
        except StoreError as error:  # closed, say: a notebook shows that and goes on
            return facts(repr(self), [("not readable", error)])
        pairs = [
            ("models", found.models),
            ("bytes of all models", size(found.logical_bytes)),
            ("bytes on disk", size(found.physical_bytes)),
        ]
        return facts(repr(self), pairs) + latest._repr_html_()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------- writing

    def put(
        self,
        state: State,
        *,
        parents: Sequence[str] | None = None,
        signature: Signature | None = None,
        score: float | None = None,
    ) -> Ref:
        """Store a State durably. Storing an equal State again changes nothing, not even the score.

        The tensors must not change during the call. Use `clone` if the State is being trained.

        Args:
            state: what to store. Only tensors that are not in the store yet are written.
            parents: tags or refs of the models it derives from. By default `state.parents`.
            signature: the signature of its model, for `nearest`.
            score: higher is better. Breaks ties in `nearest`.

        Returns:
            Its ref: a permanent name, the digest of its manifest.

        Raises:
            StateError: a tensor cannot be stored (the message names it), or the metadata is not
                JSON.
            Full: no space left. ReadOnly, StoreError: see the message. Nothing was stored.
        """
        writer = self._check_writable()
        of_kind("state", state, State)
        if state.parts:
            raise StateError(
                f"the State holds parts of {len(state.parts)} tensors, {min(state.parts)!r} among "
                "them. Nothing was stored. Each process puts its parts with put_share; put_shares "
                "makes a model of them."
            )
        chosen = state.parents if parents is None else self._parents(parents)
        payloads, infos, tied = flatten(state)
        manifest = Manifest(infos, plain(state.meta), tuple(chosen))
        ref = manifest.ref
        above = {parent: self._above(parent) for parent in manifest.parents}
        model = Model(
            manifest,
            lineage.inherited(manifest, above),
            tied,
            lineage.as_stored(signature),
            _score(score),
        )
        digests = {bytes.fromhex(info.digest): name for name, info in infos.items()}
        for _ in range(_ATTEMPTS):
            with writer.lock:
                outlook = self._ledger.outlook(ref, tuple(digests))
                if outlook.stored:
                    return ref
                needed = {d: (infos[digests[d]], payloads[digests[d]]) for d in outlook.missing}
                request = self._write(ref, model, needed, outlook)
                (reply,) = self._ledger.submit([request])
                if writer.size >= SEAL_AT_BYTES or isinstance(reply, Missing):
                    writer.seal()
            if isinstance(reply, StoreError):
                raise reply
            if reply is None:
                self._reader.keep(ref, request.place, request.model)
                return ref
        raise StoreError(
            f"model {ref[:12]} was not stored: {_ATTEMPTS} times gc or a retirement came "
            "between writing and committing it. Try again when they are over."
        )

    def _write(
        self,
        ref: Ref,
        model: Model,
        needed: Mapping[bytes, tuple[TensorInfo, memoryview]],
        plan: PutPlan,
    ) -> Put:
        """Payloads, then the manifest, then one sync. The index comes after, never before."""
        writer = self._check_writable()
        try:
            blobs = []
            for digest, (info, payload) in needed.items():
                header = Header(Kind.TENSOR, len(payload), digest, dtype=info.dtype)
                blobs.append((digest, writer.append(header, payload)))
            model = replace(model, time_s=plan.time_s)
            body = model.to_bytes()
            header = Header(Kind.MODEL, len(body), blake3(body).digest(), plan.seq)
            place = writer.append(header, body)
            writer.sync()
        except BaseException:
            writer.cut()
            raise
        self.written_bytes += sum(place.length for _, place in blobs)
        return Put(ref, model, place, plan.seq, tuple(blobs))

    def put_share(self, state: State) -> Share:
        """Store some of a model's tensors durably. `put_shares` then combines them to a model.

        Raises:
            StateError, Full, ReadOnly, StoreError: as for `put`. No model is visible yet.
        """
        writer = self._check_writable()
        payloads, infos, tied = flatten(state)
        digests = {bytes.fromhex(info.digest): name for name, info in infos.items()}
        with writer.lock:
            # Now and not when it was filled: gc may remove a sealed pack that no model needs yet.
            if writer.size >= SHARES_SEAL_AT_BYTES:
                writer.seal()
            places = {}
            try:
                for digest in self._ledger.missing(tuple(digests)):
                    name = digests[digest]
                    payload = payloads[name]
                    header = Header(Kind.TENSOR, len(payload), digest, dtype=infos[name].dtype)
                    places[digest] = writer.append(header, payload)
                writer.sync()
            except BaseException:
                writer.cut()
                raise
        return Share(infos, tied, places)

    def put_shares(
        self,
        shares: Sequence[Share],
        *,
        meta: Mapping[str, Any] | None = None,
        parents: Sequence[str] = (),
        signature: Signature | None = None,
        score: float | None = None,
        tags: Sequence[str] = (),
    ) -> Ref:
        """Store the model that consists of these shares, and move tags to it, in one transaction.

        Args:
            shares: written by any processes; together they have every tensor of the model.
            meta: as State.meta.
            parents: as for `put`.
            signature: as for `put`.
            score: as for `put`.
            tags: names to be moved to this model.

        Raises:
            Vanished: some tensors must be written again. Nothing was changed.
            StoreError: as for `put`; or parts of a tensor are missing, or contradict each other.
        """
        writer = self._check_writable()
        whole = joined(shares)
        for name, stored in tensors_of(whole.infos).items():
            try:
                whole_of(name, stored, whole.infos)
            except StateError as error:
                raise StoreError(f"{error} Nothing was stored.") from error
        manifest = Manifest(whole.infos, plain(meta or {}), self._parents(parents))
        ref = manifest.ref
        above = {parent: self._above(parent) for parent in manifest.parents}
        owners = lineage.inherited(manifest, above)
        layers = lineage.as_stored(signature)
        model = Model(manifest, owners, whole.tied, layers, _score(score))
        for name in tags:
            self._check_tag(name)
        blobs = tuple(whole.places.items())
        missing: Sequence[bytes] = ()
        for _ in range(2):  # once more if it was the manifest's own pack that went
            with writer.lock:
                put = self._write(ref, model, {}, self._ledger.outlook(ref, ()))
                wishes = [Tag(name, ref, ANY) for name in tags]
                replies = self._ledger.submit([replace(put, blobs=blobs), *wishes])
                if isinstance(replies[0], Missing):
                    missing = replies[0].digests
                    writer.seal()
                    continue
            for reply in replies:
                if isinstance(reply, StoreError):
                    raise reply
            self._reader.keep(ref, put.place, put.model)
            return ref
        gone = set(missing or whole.places)
        lost = [n for n, info in whole.infos.items() if bytes.fromhex(info.digest) in gone]
        raise Vanished(ref, lost)

    def _parents(self, names: Sequence[str]) -> tuple[Ref, ...]:
        require(
            isinstance(names, list | tuple),
            f"parents must be a list of tags or refs, not {names!r}. Nothing was stored.",
        )
        return tuple(map(self._known, names))

    def _above(self, parent: Ref) -> tuple[Manifest, Mapping[str, Ref]] | None:
        if not _is_ref(parent):
            raise ConfigError(f"a parent is a ref of 64 hexadecimal digits, not {parent!r}.")
        try:
            _, model = self._reader.model(parent)
        except NotFound:  # retired, or kept elsewhere: the edge is remembered all the same
            return None
        return model.manifest, model.owners

    def tag(self, name: str, ref: str, *, expected: str | None = ANY) -> None:
        """Tag a model durably. If another model has the tag, it moves.

        Args:
            name: 1 to 200 letters, digits and `._/@-`, which cannot be taken for a ref.
            ref: tag or ref of the model.
            expected: the ref that the tag must have at present, or None if the tag must not exist
                yet. Checked only if given.

        Raises:
            ConfigError: that cannot be a tag. NotFound: no such model.
            Conflict: the tag is not where it was expected. Nothing was changed.
        """
        self._check_tag(name)
        self._submit(Tag(name, self._ledger.find(ref).ref, expected))

    @staticmethod
    def _check_tag(name: str) -> None:
        if (
            not isinstance(name, str)
            or _TAG.fullmatch(name) is None
            or ".." in name
            or _looks_like_ref(name)
        ):
            raise ConfigError(
                f"{name!r} cannot be a tag: 1 to 200 letters, digits or '._/@-', not beginning "
                "with a sign, without '..', and no 4 or more hexadecimal digits alone."
            )

    def untag(self, name: str, *, expected: str = ANY) -> None:
        """Remove a tag, only if it is at `expected` (if given). The model stays.

        Raises:
            Conflict: the tag is not where it was expected. NotFound: there is no such tag.
        """
        if not isinstance(name, str) or name not in self._ledger.tags():
            raise NotFound(f"there is no tag {name!r} in this store. Nothing was changed.")
        self._submit(Tag(name, None, expected))

    def retire(self, ref: str) -> None:
        """Mark a model for removal: `gc` frees its bytes. Its children keep their lineage.

        Raises:
            Conflict: the model has a tag. NotFound: no such model.
        """
        name = Ref(ref) if _is_ref(ref) else self._ledger.find(ref).ref
        self._submit(Retire(name))

    def _submit(self, request: Request) -> None:
        self._check_writable()
        (reply,) = self._ledger.submit([request])
        if isinstance(reply, StoreError):
            raise reply

    def _check_writable(self) -> Any:  # noqa: ANN401 - a Writer, never None
        if self._pid != os.getpid():
            raise StoreError(
                "this Store was opened before the process forked. Nothing was done. Open another "
                "in the child."
            )
        if self._writer is None:
            raise ReadOnly("this store was opened with read_only=True. Nothing was changed.")
        return self._writer

    # ---------------------------------------------------------------------------------- reading

    def get(
        self,
        ref: str,
        names: str | Sequence[str] = "*",
        *,
        lazy: bool = False,
    ) -> State:
        """Get a stored State, or only the tensors whose names match.

        The tensors are memory-mapped and not read: pages are loaded when they are used, and a page
        that is written to becomes private to this State. Each tensor's digest is checked when
        this Store first reads it.

        Args:
            ref: a tag, a ref, or the beginning of a ref.
            names: a pattern such as "encoder.*", or several. Metadata and parents always come.
            lazy: check and build each tensor only when it is first used.

        Raises:
            NotFound: no such model, or it was retired.
            Corrupt: the message names the model and the tensor.
        """
        patterns = (names,) if isinstance(names, str) else names
        require(
            isinstance(patterns, list | tuple) and all(isinstance(one, str) for one in patterns),
            f"names must be a pattern of text or a list of them, not {names!r}.",
        )
        return self._reader.read(ref, tuple(patterns), lazy)

    def manifest(self, ref: str) -> Manifest:
        """Names, dtypes, shapes and digests of a stored State.

        Raises:
            NotFound: no such model. Corrupt: its record is damaged.
        """
        return self._reader.model(ref)[1].manifest

    def score(self, ref: str) -> float | None:
        """The score that a model was stored with.

        Raises:
            NotFound: no such model.
        """
        return self._ledger.find(ref).score

    def nbytes(self, ref: str) -> int:
        """Bytes of a model's tensors, before deduplication.

        Raises:
            NotFound: no such model.
        """
        return self._ledger.find(ref).nbytes

    def signature(self, ref: str) -> Signature | None:
        """The signature that a model was stored with; None if with none.

        Raises:
            NotFound: no such model. Corrupt: its record is damaged.
        """
        stored = self._reader.model(ref)[1].signature
        return Signature.from_json(stored) if stored else None

    # ---------------------------------------------------------------------------------- lineage

    def tags(self) -> dict[str, Ref]:
        """All tags, with their refs."""
        return self._ledger.tags()

    def log(
        self,
        ref: str | None = None,
        limit: int | None = None,
        *,
        where: Mapping[str, str | int | float | bool] | None = None,
    ) -> Log:
        """Models, the latest first: all of them, or `ref` and its ancestors; `limit` at most.

        Args:
            ref: a tag, a ref, or the beginning of a ref.
            limit: None for all.
            where: only models whose top-level metadata has these values.

        Raises:
            NotFound: no such model.
            ConfigError: a value that models are not indexed by, or no such limit.
        """
        check_value("Store.log", "limit", int | None, limit)
        require(limit is None or limit >= 0, f"limit must be >= 0 or None, not {limit!r}.")
        check_filters(where, None)
        tags, only = self._ledger.tags(), None
        if ref is not None:
            first = self._ledger.find(ref).ref
            only = [first, *self._ledger.relatives("ancestors", first)]
        return entries(self._ledger.rows(limit, only, where), tags)

    def diff(self, a: str, b: str) -> Diff:
        """Tensors and metadata that differ between the models `a` and `b`.

        Raises:
            NotFound: no such model.
        """

        def equal(name: str) -> bool:
            one, other = (self.get(ref, glob.escape(name)).tensors[name] for ref in (a, b))
            return torch.equal(raw_bytes(one), raw_bytes(other))

        return lineage.diff(self.manifest(a), self.manifest(b), equal)

    def ancestors(self, ref: str) -> list[Ref]:
        """All models that a model derives from, nearest first, including retired ones.

        Raises:
            NotFound: no such model.
        """
        return self._ledger.relatives("ancestors", self._known(ref))

    def descendants(self, ref: str) -> list[Ref]:
        """All models that derive from a model, nearest first, including retired ones.

        Raises:
            NotFound: no such model.
        """
        return self._ledger.relatives("descendants", self._known(ref))

    def common_ancestor(self, a: str, b: str) -> Ref | None:
        """The nearest common ancestor; a model counts as its own ancestor. None if there is none.

        Raises:
            NotFound: no such model.
        """
        found = self._ledger.relatives("common_ancestor", self._known(a), self._known(b))
        return found[0] if found else None

    def owner(self, ref: str, tensor: str) -> Ref:
        """The ancestor (or the model itself) that first wrote this tensor.

        Raises:
            NotFound: no such model or tensor.
        """
        row, model = self._reader.model(ref)
        stored = tensors_of(model.manifest.tensors).get(tensor, {})
        owners = {model.owners.get(name, row.ref) for name in stored}
        if not owners:
            raise NotFound(f"model {row.ref[:12]} has no tensor {tensor!r}.")
        if len(owners) == 1:
            return owners.pop()
        line = (row.ref, *self._ledger.relatives("ancestors", row.ref))
        return next(one for one in line if one in owners)  # the last that changed a part of it

    def nearest(
        self,
        signature: Signature,
        mode: Mode = "lp",
        *,
        where: Mapping[str, str | int | float | bool] | None = None,
        tagged: str | None = None,
        but: str | list[str] | tuple[str, ...] = (),
        until_s: float | None = None,
    ) -> Match | None:
        """Find the stored model that shares most layers; then the highest score, then the oldest.

        Args:
            signature: the signature of the new model.
            mode: "lp" for the longest common prefix, "lcs" for the longest common subsequence.
            where: only models whose top-level metadata has these values.
            tagged: only models with a tag that matches this glob pattern.
            but: a tag or a ref of a model to be left out, or several.
            until_s: only models that were stored by then, in seconds since 1970.

        Returns:
            None if no model shares a layer.

        Raises:
            ConfigError: no such mode or time, or a value that models are not indexed by.
            NotFound: one of `but` is no model.
        """
        if mode not in ("lp", "lcs"):
            raise ConfigError(f"mode must be 'lp' or 'lcs', not {mode!r}.")
        of_kind("signature", signature, Signature)
        told = "until_s (in seconds since 1970)"  # a time, and not how long something takes
        check_value("Store.nearest", told, float | None, until_s)
        check_filters(where, tagged)
        left_out = list(map(self._known, but if isinstance(but, list | tuple) else [but]))
        ids = signature.paths if mode == "lp" else signature.ids
        found = self._ledger.nearest(ids, mode, dict(where or {}), tagged, left_out, until_s)
        return Match(Ref(found.ref.hex()), found.length, found.score) if found else None

    def _known(self, name: str) -> Ref:
        return Ref(name) if _is_ref(name) else self._ledger.find(name).ref

    def soup(self, refs: Sequence[str], validate: Validate) -> Soup:
        """Average the weights of models with a common ancestor ("model soup"), if that helps.

        It starts with the best model. Each of the others is included only if the average with it
        scores at least as high. The parents of the stored average are the models in it.

        Args:
            refs: tags or refs of at least two models with the same architecture.
            validate: returns the score of a State of the model alone; higher is better. It is
                called at most twice for each model.

        Returns:
            The average, or the best model if no average is as good; then `averaged` is False, and
            nothing was stored.

        Raises:
            ConfigError: they have no common ancestor, or `validate` did not return a number.
            StateError: their tensors have different names or shapes. NotFound: no such model.
        """
        self._check_writable()
        return cook(self, refs, validate)

    # ----------------------------------------------------------------------------------- upkeep

    def verify(self) -> list[Damage]:
        """Read every byte and compare digests. An empty list means that nothing is damaged."""
        return self._ledger.verify()

    def gc(self) -> Collected:
        """Free the bytes of retired models, of incomplete writes, and of duplicates.

        Raises:
            ReadOnly: the store was opened read-only.
            StoreError: see the message. No model was lost.
        """
        writer = self._check_writable()
        with writer.lock:
            writer.seal()
        return self._ledger.gc()

    def stats(self) -> Stats:
        """Numbers of models and bytes, and how much is shared."""
        return self._ledger.stats()

    def rebuild(self) -> None:
        """Rebuild the index from the packs.

        Raises:
            Conflict: another process is writing.
        """
        writer = self._check_writable()
        with writer.lock:
            writer.close()
        self._ledger.rebuild()

    # --------------------------------------------------------------------------------- exchange

    def export(self, ref: str, path: str | os.PathLike[str], *, whole: bool = False) -> None:
        """Write a model as one safetensors file, with its metadata and parents.

        Args:
            ref: tag or ref of the State.
            path: the file. An existing file is replaced.
            whole: include the tensors of the optimizer and of other objects, whose names begin
                with "@". Without them `model.load_state_dict(load_file(path))` works as it is.

        Raises:
            NotFound: no such model. Corrupt: it cannot be read.
            StoreError: it cannot be written, or safetensors cannot hold a dtype or a tensor's name.
        """
        state = self.get(ref)
        chosen = state if whole else State(state.model, state.meta, state.parents)
        exchange.export(chosen, _file(path))

    def consolidate(self, ref: str) -> Ref:
        """Store a model that is kept in parts again, with whole tensors, and move its tags.

        The bytes, and so the digests, are those that one process would have written. Metadata,
        parents and score are copied. The original stays until it is retired.

        Returns:
            The new ref, or `ref` itself if its tensors are whole already.

        Raises:
            NotFound: no such model. Corrupt: it cannot be read.
            Full, ReadOnly, StoreError: as for `put`.
        """
        self._check_writable()
        return consolidate(self, ref)

    def import_(self, path: str | os.PathLike[str], **options: Any) -> Ref:  # noqa: ANN401
        """Store the contents of a safetensors file, written by `export` or by anything else.

        Args:
            path: the file.
            options: the keyword arguments of `put`.

        Raises:
            NotFound: no such file. Corrupt: it cannot be read. As for `put`: the others.
        """
        return self.put(exchange.read(_file(path)), **options)

    def catalogue(self, path: str | os.PathLike[str]) -> None:
        """Write `log` as a Parquet table, with the metadata as JSON text."""
        exchange.catalogue(self.log(), _file(path))


def _check_folder(root: Path, index: Path, begin: bool) -> None:
    with storage_errors(f"reading {root}"):
        is_file = root.exists() and not root.is_dir()
        empty = not (root / "packs").is_dir() and not (index / "index.sqlite").exists()
    if is_file:
        raise ConfigError(
            f"{root} is a file; a store is a directory. Nothing was changed. Give another path."
        )
    length = len(os.fsencode(index / "index.sqlite"))
    require(
        not begin or length <= _PATH_BYTES,
        f"the path of the index in {index} would have {length} bytes, and SQLite takes "
        f"{_PATH_BYTES}. No store was opened. Give a shorter path, or another directory for the "
        "index (index=).",
    )
    if empty and not begin:
        raise NotFound(f"there is no store at {root}, neither packs nor an index. Name another.")


def _file(path: str | os.PathLike[str]) -> Path:
    named = isinstance(path, str | os.PathLike) and Path(path).name != "" and "\0" not in str(path)
    require(named, f"path must be the path of a file, not {path!r}. Nothing was read or written.")
    return Path(path)


def _score(given: float | None) -> float | None:
    try:
        return None if given is None else float(given)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"score must be a number, not {given!r}. Nothing was stored.") from error


def _is_ref(name: str) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[0-9a-f]{64}", name) is not None


def _looks_like_ref(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{4,64}", name) is not None
