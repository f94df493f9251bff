"""Small signatures for tests."""

from elastix.store.lineage import Layer, Signature, digest64


def chain(kinds: str) -> Signature:
    """A chain of layers, one for each word."""
    return graph([(kind, [i - 1] if i else []) for i, kind in enumerate(kinds.split())])


def graph(nodes: list[tuple[str, list[int]]]) -> Signature:
    """A graph of layers: (kind, inputs as places of earlier ones)."""
    layers: list[Layer] = []
    for i, (kind, inputs) in enumerate(nodes):
        tensors = (("weight", (len(kind), 2)),)
        path = digest64(kind, tensors, sorted(layers[j].path for j in inputs))
        layers.append(Layer(f"layer{i}", kind, tensors, path))
    return Signature(tuple(layers))
