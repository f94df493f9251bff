"""A dataset that several share: always dataset[i], within the budget, and gone in the end."""

import os
import pickle
import stat
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import elastix
from elastix.data.cache_eviction import ReaderPosition
from elastix.data.sample_order import order
from elastix.data.shared import arena as arenas
from elastix.data.shared import dataset as shared_dataset
from elastix.data.shared.arena import Arena, Layout
from elastix.data.shared.locks import available
from elastix.data.shared.packing import pack, unpack
from elastix.errors import ConfigError, Conflict
from tests.pictures import Pictures, check, same

pytestmark = pytest.mark.skipif(not available(), reason="no locks that die with their holder here")


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """In place of /dev/shm, so that tests see nobody else's."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(shared_dataset, "_MEMORY", path)
    return path


# --------------------------------------------------------------------------------------- packing


class Plain(torch.Tensor):
    """As torchvision has them."""


SAMPLES = [
    b"",
    (torch.arange(6).reshape(2, 3), 5),
    {"a": torch.tensor(3.5), "b": [torch.zeros(0), torch.ones(3, dtype=torch.bfloat16)]},
    np.arange(10, dtype=">i2")[::3],
    torch.randn(4, 5).t(),
    torch.arange(20.0).reshape(4, 5)[1:2, 2],
    torch.tensor([1 + 2j]).imag,
    torch.tensor([1 + 2j, 3]),
    torch.tensor([True, False]),
    torch.nn.Parameter(torch.ones(2)),
    torch.arange(4).to_sparse(),
    torch.ones(3).as_subclass(Plain),
    "text",
    None,
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_a_sample_comes_out_as_it_went_in(sample):
    found = unpack(bytearray(pack(sample)))
    assert type(found) is type(sample)
    assert repr(found) == repr(sample)


def test_what_is_unpacked_is_its_own():
    raw = bytearray(pack(torch.zeros(8)))
    first, second = unpack(bytearray(raw)), unpack(bytearray(raw))
    first += 1
    assert second.sum() == 0


# ----------------------------------------------------------------------------------------- arena


class Model:
    """An arena and what should be in it."""

    def __init__(self, folder: Path, blocks: int = 12, length: int = 20):
        self.files = [
            os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("table", "arena")
        ]
        self.arena = Arena(*self.files, Layout(length, 256, blocks))
        self.expected: dict[int, bytes] = {}

    def close(self):
        self.arena.close()
        for file in self.files:
            os.close(file)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 19), st.integers(0, 1500), st.booleans(), st.booleans())
    ),
    in_order=st.booleans(),
)
def test_an_arena_holds_what_was_put_and_nothing_else(tmp_path_factory, steps, in_order):
    folder = tmp_path_factory.mktemp("arena")
    model = Model(folder)
    before = arenas.IN_ORDER
    arenas.IN_ORDER = in_order
    try:
        for index, size, willing, dies in steps:
            raw = bytes([index]) * size

            def choose(short, arena, willing=willing):
                going, free = [], 0
                for other in model.expected if willing else ():
                    if free < short:
                        going.append(other)
                        free += arena.layout.blocks_for(arena.nbytes(other))
                return going if free >= short else None

            kept, evicted = model.arena.put(index, raw, choose)
            if kept and index not in model.expected:
                for other in list(model.expected)[:evicted]:
                    del model.expected[other]
                model.expected[index] = raw
            if dies:
                model.arena._words[arenas._DIRTY] = 1  # as if the last one had died over it
            for other in range(20):
                found = model.arena.get(other)
                assert (None if found is None else bytes(found)) == model.expected.get(other)
            check(model.arena)
    finally:
        arenas.IN_ORDER = before
        model.close()


def test_a_copy_that_is_not_whole_is_seen_by_its_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(arenas, "IN_ORDER", False)
    model = Model(tmp_path)
    model.arena.put(3, b"whole" * 100, lambda *_: None)
    assert bytes(model.arena.get(3)) == b"whole" * 100
    model.arena._memory[300] ^= 1
    assert model.arena.get(3) is None
    model.close()


@pytest.mark.parametrize("refused_at", [9, 10, 11], ids=["blocks", "chains", "free ones"])
def test_where_the_machine_has_no_more_memory_the_arena_stays(tmp_path, monkeypatch, refused_at):
    monkeypatch.setattr(arenas, "_LEAST_EXTENT", 4 * 256)
    model = Model(tmp_path, blocks=64)
    real = os.posix_fallocate
    given_out = []

    def refuse(file, at, size):
        if len(given_out) == refused_at:
            raise OSError(28, "No space left on device")
        given_out.append(size)
        real(file, at, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    kept = [model.arena.put(i, bytes([i]) * 700, lambda *_: None)[0] for i in range(10)]
    assert kept == [True] * 4 + [False] * 6
    assert bytes(model.arena.get(2)) == b"\2" * 700
    other = Arena(*model.files, Layout(20, 256, 64))  # one that comes later finds the same
    assert bytes(other.get(2)) == b"\2" * 700
    model.close()


# --------------------------------------------------------------------------------------- Shared


def test_samples_are_those_of_the_dataset_and_are_decoded_once(memory, tmp_path):
    data = Pictures(notes=str(tmp_path / "notes"), vary=3000)
    first, second = elastix.Shared(data), elastix.Shared(data)
    (tmp_path / "notes").unlink()  # the first sample was read to know the dataset by it
    for index in order(0, 0, 40).tolist():
        assert same(first[index], index, data)
        assert same(second[index], index, data)
    several = second.__getitems__([3, 9, 3])
    assert all(same(s, i, data) for i, s in zip((3, 9, 3), several, strict=True))
    made = (tmp_path / "notes").read_text().split()
    assert sorted(map(int, made)) == list(range(40))
    assert (first.counts.decodes, first.counts.hits) == (40, 0)
    assert (second.counts.decodes, second.counts.hits) == (0, 43)
    assert len(first) == 40
    with pytest.raises(IndexError):
        first[40]


def test_what_a_reader_does_to_its_sample_nobody_else_sees(memory):
    data = Pictures()
    first, second = elastix.Shared(data), elastix.Shared(data)
    first[5]["array"][:] = 0
    second[5]["array"][:] = 1
    assert same(first[5], 5, data)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(20_000, 60_000),
    vary=st.integers(0, 2500),
    reads=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39)), max_size=150),
    told=st.booleans(),
)
def test_any_interleaving_gives_the_dataset_within_the_budget(memory, budget, vary, reads, told):
    data = Pictures(vary=vary)
    several = [elastix.Shared(data, budget) for _ in range(3)]
    for step, (who, index) in enumerate(reads):
        if told:
            several[who].announce(ReaderPosition(who, step // 40, step % 40, 5), 1)
        assert same(several[who][index], index, data)
        arena = several[who]._attached.arena
        assert arena.used_bytes <= budget
    if reads:
        check(several[reads[0][0]]._attached.arena)
    for shared in several:
        shared.close()
    assert list(memory.iterdir()) == []


def decodes(data, budget, readers, epochs=3, told=True, lag=0):
    several = [elastix.Shared(data, budget) for _ in readers]
    length = len(data)
    for step in range(epochs * length + lag * len(readers)):
        for who, seed in enumerate(readers):
            at = step - who * lag
            if 0 <= at < epochs * length:
                epoch, offset = divmod(at, length)
                if told:
                    several[who].announce(ReaderPosition(seed, epoch, offset, epochs), 1)
                several[who][int(order(seed, epoch, length)[offset])]
    total = sum(shared.counts.decodes for shared in several)
    for shared in several:
        shared.close()
    return total


def test_everything_is_decoded_once_if_it_fits(memory):
    assert decodes(Pictures(), "1MB", [1, 2, 3]) == 40


def test_known_futures_need_no_more_decodes_than_keeping_what_came_first(memory):
    data = Pictures(length=60)
    budget = 17_000 + 20 * 2200  # a third of them
    for readers in ([1], [1, 1, 1], [1, 2, 3]):
        lag = 5 if len(set(readers)) == 1 else 0
        clairvoyant = decodes(data, budget, readers, lag=lag)
        first_stay = decodes(data, budget, readers, lag=lag, told=False)
        assert clairvoyant <= first_stay + 2
        if len(readers) > 1:
            assert clairvoyant < 0.75 * first_stay


def test_nothing_is_left_when_the_last_one_goes(memory):
    first, second = elastix.Shared(Pictures()), elastix.Shared(Pictures())
    assert list(memory.iterdir()) == []  # nothing is read yet
    first[0], second[1]
    (folder,) = memory.iterdir()
    assert folder == first.folder == second.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first.close()
    assert same(second[2], 2, Pictures())
    assert list(memory.iterdir()) == [folder]
    del second
    assert list(memory.iterdir()) == []
    assert same(first[3], 3, Pictures())  # begins anew
    first.close()
    assert list(memory.iterdir()) == []


def test_other_datasets_do_not_meet(memory):
    assert elastix.Shared(Pictures(size=900))._key != elastix.Shared(Pictures(size=901))._key
    tensors = [TensorDataset(torch.arange(8.0)), TensorDataset(torch.arange(8.0) + 8)]
    keys = {elastix.Shared(t)._key for t in tensors}
    assert len(keys) == 2
    assert elastix.Shared(TensorDataset(torch.arange(8.0)))._key in keys


def test_a_copy_that_was_sent_elsewhere_meets_the_original(memory):
    first = elastix.Shared(Pictures())
    first[7]
    second = pickle.loads(pickle.dumps(first))
    assert same(second[7], 7, Pictures())
    assert second.counts.hits == 1


def test_threads_of_a_process_share_one(memory):
    data = Pictures(length=60)
    shared = elastix.Shared(data)
    wrong = []

    def read(seed):
        wrong.extend(i for i in order(seed, 0, 60) if not same(shared[i], int(i), data))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    assert shared.counts.decodes == 60


def test_who_reads_while_another_thread_closes_is_given_the_sample(memory, monkeypatch):
    data = Pictures()
    shared = elastix.Shared(data)
    shared[0]
    attached = shared._attached

    def closed(index):
        shared.close()  # as another thread may, once this one has begun

    monkeypatch.setattr(attached.arena, "get", closed)
    assert same(shared[3], 3, data)
    monkeypatch.setattr(attached, "has", closed)
    monkeypatch.setattr(shared, "_attached", attached)
    monkeypatch.setattr(shared, "_process", os.getpid())
    assert same(shared.__getitems__([5])[0], 5, data)


def test_who_leaves_waits_for_no_thread_that_hangs_in_a_decode(memory, monkeypatch):
    monkeypatch.setattr(shared_dataset, "_LEFT", threading.Event())
    monkeypatch.setattr(shared_dataset, "_SHARERS", weakref.WeakSet())
    monkeypatch.setattr(shared_dataset, "_LEAST_PATIENCE_S", 0.01)
    stuck, going = threading.Event(), threading.Event()

    def hang(index):
        stuck.set()
        going.wait()
        return index, None

    shared, other = elastix.Shared(Pictures(8)), elastix.Shared(Pictures(9))
    monkeypatch.setattr(shared, "_made", hang)
    reader = threading.Thread(target=lambda: shared[3])
    leaver = threading.Thread(target=shared_dataset.leave)
    assert other[0] is not None
    reader.start()
    try:
        assert stuck.wait(60)
        leaver.start()
        leaver.join(60)
        assert not leaver.is_alive()
        assert other.folder is None
    finally:
        going.set()
        reader.join()
        leaver.join()
        shared.close()


def test_an_iterator_of_positions_is_gone_through_once(memory):
    shared = elastix.Shared(Pictures())
    assert len(shared.__getitems__(iter([1, 2, 2]))) == 3


def test_processes_of_a_loader_share_with_their_parent(memory):
    data = Pictures()
    shared = elastix.Shared(data)
    shared.announce(ReaderPosition(0, 0, 0, 1), 40)
    shared[0]
    reader = DataLoader(shared, batch_size=8, num_workers=1, collate_fn=list)
    samples = [sample for batch in reader for sample in batch]
    assert all(same(sample, i, data) for i, sample in enumerate(samples))
    assert all(same(shared[i], i, data) for i in range(40))
    assert shared.counts.decodes == 1
    shared.close()
    assert list(memory.iterdir()) == []


# -------------------------------------------------------------------------------- what is refused


class Random(Pictures):
    def __getitem__(self, index):
        return os.urandom(8)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "budget", "said"),
    [
        (Random(), "1MB", r"Random\[0\] is not the same twice"),
        (Pictures(0), "1MB", "Pictures is empty"),
        (Stream(), "1MB", "elastix data index"),
        (Pictures(), 3000, "no room for a single sample"),
        (Pictures(), "many", "not 'many'"),
        (Pictures(), "-1", "not '-1'"),
    ],
)
def test_what_cannot_be_shared_is_refused(data, budget, said):
    with pytest.raises(ConfigError, match=said):
        elastix.Shared(data, budget)


def test_what_cannot_be_pickled_is_refused():
    data = Pictures()
    data.lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"cannot be pickled.*Open files when they are first read"
    ):
        elastix.Shared(data)


class Views(Dataset):
    """Samples are views of what the dataset holds, or all of one buffer."""

    def __init__(self, buffer: bool) -> None:
        self.rows = torch.arange(40.0).reshape(8, 5)
        self.buffer = torch.zeros(5) if buffer else None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index].as_strided((5,), (1,))
        return row if self.buffer is None else self.buffer.copy_(row)


@pytest.mark.parametrize("buffer", [True, False], ids=["one buffer", "views of its data"])
@pytest.mark.parametrize("there_is_memory", [True, False])
def test_who_decodes_a_sample_is_given_one_of_its_own(memory, buffer, there_is_memory):
    if not there_is_memory:
        memory.rmdir()
    data = Views(buffer)
    expected = data.rows.clone()
    shared = elastix.Shared(data)
    samples = [*shared.__getitems__([1, 2, 3]), shared[4]]
    assert torch.equal(torch.stack(samples), expected[1:5])
    samples[0] += 1
    assert torch.equal(data.rows, expected)
    assert torch.equal(shared[1], expected[1])


def test_a_sample_is_the_same_whoever_decodes_it(memory):
    columns = torch.randn(4, 3, 6, 5).to(memory_format=torch.channels_last)
    shared = elastix.Shared(TensorDataset(columns))
    decoded, there = shared[1], shared[1]
    assert shared.counts.hits == 1
    assert decoded[0].stride() == there[0].stride()  # on which last bits of a batch depend


def test_memory_is_taken_as_samples_come(memory):
    shared = elastix.Shared(TensorDataset(torch.zeros(10, 4)), "400GB")
    shared[0]
    used = sum(file.stat().st_blocks * 512 for file in shared.folder.iterdir())
    assert used < 2 * 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GB", 8 * 10**9), ("1.5 MiB", 1.5 * 2**20), (77, 77), ("12k", 12_000), ("2TB", 2 * 10**12)],
)
def test_budgets_are_read(text, expected):
    assert shared_dataset._bytes(text) == expected


def test_a_folder_that_others_may_enter_is_refused(memory):
    shared = elastix.Shared(Pictures())
    folder = memory / f"elastix-{os.geteuid()}-{shared._key}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(Conflict, match="mode 755"):
        shared[0]
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(Conflict, match="is no folder"):
        shared[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else")
def test_a_folder_of_somebody_else_is_refused(memory):
    shared = elastix.Shared(Pictures())
    folder = memory / f"elastix-{os.geteuid()}-{shared._key}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(Conflict, match="belongs to user 12345"):
        shared[0]


def test_what_is_not_of_a_dataset_is_nobodys_to_clear(memory):
    """Whoever ends a run clears up, and may find what a user has put there under such a name."""
    notes = memory / f"elastix-{os.geteuid()}-notes" / "today"
    notes.parent.mkdir(mode=0o700)
    notes.write_text("dear diary")
    left = memory / f"elastix-{os.geteuid()}-{elastix.Shared(Pictures())._key}"
    left.mkdir(mode=0o700)
    shared_dataset.clear(60.0)
    assert not left.exists()
    assert notes.read_text() == "dear diary"


def test_without_shared_memory_the_dataset_is_read_as_it_is(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(shared_dataset, "_MEMORY", tmp_path / "none")
    shared = elastix.Shared(Pictures())
    assert same(shared[3], 3, Pictures())
    assert "cannot be shared" in caplog.text
    assert shared.folder is None


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x7f" * 120)


def emptied(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(bytes(120))


@pytest.mark.parametrize(
    ("name", "damage"), [("table", overwritten), ("table", emptied), ("arena", Path.unlink)]
)
def test_what_was_damaged_by_others_is_left_and_the_dataset_is_read(memory, caplog, name, damage):
    first = elastix.Shared(Pictures())
    assert same(first[3], 3, Pictures())
    damage(first.folder / name)
    second = elastix.Shared(Pictures())
    assert same(second[3], 3, Pictures())
    assert second.folder is None
    assert "was damaged" in caplog.text or "were removed" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_pickled_by_torch():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    there = unpack(bytearray(pack(nested)))
    assert [part.tolist() for part in there.unbind()] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
