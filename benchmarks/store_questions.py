"""Which of many stored models shares most with a new one? A part of benchmarks.store."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from benchmarks import store_trace
from elastix.state import Manifest, Ref, State
from elastix.store import Signature, Store, shared
from elastix.store.local_packs import LocalPacks
from elastix.store.nearest import Candidate, Neighbours, pack_ids
from elastix.store.packs import SEAL_AT_BYTES
from elastix.store.records import Header, Kind, Model

_OPENINGS = 7
"""A single one may meet Python's garbage collection, which takes longer."""


def fill_packs(root: Path, signatures: Sequence[Signature], choose: random.Random) -> list[float]:
    """Records of many small models in packs, without an index."""
    writer = LocalPacks(root).writer()
    scores = [choose.random() for _ in signatures]
    parent: tuple[Ref, ...] = ()
    for number, (signature, score) in enumerate(zip(signatures, scores, strict=True)):
        tensor = torch.tensor([float(number), 1.0])
        manifest: Manifest = State({"weight": tensor}, {"number": number}, parent).manifest()
        body = Model(manifest, signature=signature.to_json(), score=score).to_bytes()
        payload = tensor.numpy().data.cast("B")
        digest = bytes.fromhex(manifest.tensors["weight"].digest)
        writer.append(Header(Kind.TENSOR, 8, digest, dtype="float32"), payload)
        header = Header(Kind.MODEL, len(body), blake3(body).digest(), seq=number + 1)
        writer.append(header, body)
        parent = (manifest.ref,)
        if writer.size >= SEAL_AT_BYTES:
            writer.seal()
    writer.close()
    return scores


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def latencies(ask: Callable[[Signature], object], queries: Sequence[Signature]) -> list[float]:
    found = []
    for query in queries:
        began = time.perf_counter()
        ask(query)
        found.append(time.perf_counter() - began)
    return found


def scan(
    signatures: Sequence[Signature], scores: Sequence[float], query: Signature, mode: str
) -> tuple[int, float]:
    """(length, score) of the best by a plain scan over all models."""
    if mode == "lp":
        wanted = set(query.paths)
        return max(
            (len(wanted.intersection(s.paths)), x) for s, x in zip(signatures, scores, strict=True)
        )
    return max((lcs_length(query.ids, s.ids), x) for s, x in zip(signatures, scores, strict=True))


def lcs_length(a: Sequence[int], b: Sequence[int]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def over_chains(root: Path, stored: int) -> dict[str, Any]:
    """Questions over many models: how quick, and equal to a plain scan."""
    choose = random.Random(1)
    kinds = store_trace.chains(choose, stored)
    signatures = [store_trace.chain(k) for k in kinds]
    scores = fill_packs(root, signatures, choose)
    queries = [
        store_trace.chain(
            store_trace.mutated(choose, store_trace.mutated(choose, choose.choice(kinds)))
        )
        for _ in range(2000)
    ]
    found: dict[str, Any] = {"stored_models": stored}
    began = time.perf_counter()
    Store(root).close()
    found["rebuild_s_100k"] = time.perf_counter() - began
    opened = []
    for _ in range(_OPENINGS):
        began = time.perf_counter()
        with Store(root) as store:
            store.nearest(queries[0])
            opened.append(time.perf_counter() - began)
    found["open_s_100k"] = statistics.median(opened)
    store = Store(root)
    store.nearest(queries[0])
    began = time.perf_counter()
    store.nearest(queries[0], "lcs")
    found["first_lcs_s_100k"] = time.perf_counter() - began
    with store:
        lp = latencies(store.nearest, queries)
        lcs = latencies(lambda query: store.nearest(query, "lcs"), queries[:200])
        equal = True
        for mode, number in (("lp", 20), ("lcs", 4)):
            for query in queries[:number]:
                match = store.nearest(query, mode)  # type: ignore[arg-type]
                best = scan(signatures, scores, query, mode)
                equal &= match is not None and (match.length, match.score) == best
                equal &= match is None or match.length == len(
                    shared(query, store.signature(match.ref) or query, mode)  # type: ignore[arg-type]
                )
    found |= {
        "lp_p50_us_100k": 1e6 * statistics.median(lp),
        "lp_p99_us_100k": 1e6 * percentile(lp, 0.99),
        "lcs_p50_ms_100k": 1e3 * statistics.median(lcs),
        "lcs_p99_ms_100k": 1e3 * percentile(lcs, 0.99),
    }
    graphs, graph_equal = over_graphs(choose, kinds)
    return found | graphs | {"equal_to_oracle": equal and graph_equal}


def over_graphs(choose: random.Random, kinds: list[list[int]]) -> tuple[dict[str, Any], bool]:
    """The same for graphs with skip connections, in memory."""
    graphs = [store_trace.skips(choose, k) for k in kinds]
    signatures = [store_trace.graph(g) for g in graphs]
    scores = [choose.random() for _ in graphs]
    neighbours = Neighbours(
        Candidate(key, scores[key], pack_ids(s.paths), pack_ids(s.ids))
        for key, s in enumerate(signatures)
    )
    queries = []
    for _ in range(1000):
        nodes = list(choose.choice(graphs))
        place = choose.randrange(len(nodes))
        nodes[place] = (choose.randrange(len(store_trace.KINDS)), nodes[place][1])
        queries.append(store_trace.graph(nodes))
    times = latencies(lambda query: neighbours.lp(query.paths), queries)
    equal = True
    for query in queries[:20]:
        best = neighbours.lp(query.paths)
        expected = scan(signatures, scores, query, "lp")
        equal &= (best.length, scores[best.key]) == expected if best else expected[0] == 0
    return {
        "lp_graph_p50_us_100k": 1e6 * statistics.median(times),
        "lp_graph_p99_us_100k": 1e6 * percentile(times, 0.99),
    }, equal


def through_an_actor(root: Path, seed: int = 2) -> dict[str, Any]:
    """Questions through StoreServer."""
    import ray

    from elastix.store.server import StoreServer

    choose = random.Random(seed)
    queries = [store_trace.chain(k) for k in store_trace.chains(choose, 700)]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        server = StoreServer.start(root)
        with server.open() as store:
            latencies(store.nearest, queries[:100])
            times = latencies(store.nearest, queries[100:])
        server.stop()
    finally:
        ray.shutdown()
    return {
        "lp_actor_p50_us": 1e6 * statistics.median(times),
        "lp_actor_p99_us": 1e6 * percentile(times, 0.99),
    }
