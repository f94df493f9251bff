"""What the store benchmark stores: families of models, as a search that freezes layers has them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from elastix.store.lineage import Layer, Signature, digest64

LAYERS = 12
WIDTH = 512  # a layer is WIDTH x WIDTH float32 and a bias: 1 MB


@dataclass(frozen=True)
class Step:
    """One model of the trace: the place of its parent, and its tensors."""

    parent: int | None
    tensors: dict[str, torch.Tensor]


def trace(models: int, seed: int = 0, width: int = WIDTH) -> Iterator[Step]:
    """Each model keeps the first layers of a recent one and has trained the others."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made: list[dict[str, torch.Tensor]] = []
    for _ in range(models):
        parent = choose.randrange(max(0, len(made) - 20), len(made)) if made else None
        keep = choose.randint(1, 9) if parent is not None else 0
        tensors = {}
        for layer in range(LAYERS):
            for name, shape in (("weight", (width, width)), ("bias", (width,))):
                key = f"layers.{layer}.{name}"
                if parent is not None and layer < keep:
                    tensors[key] = made[parent][key]
                else:
                    tensors[key] = torch.rand(shape, generator=generator)
        made.append(tensors)
        yield Step(parent, tensors)


KINDS = [
    f"Conv2d({a}, {b}, kernel_size=({k}, {k}))"
    for a in (16, 32)
    for b in (16, 32, 64)
    for k in (1, 3, 5)
]
KINDS += [f"BatchNorm2d({n})" for n in (16, 32, 64)] + [f"Linear({n}, 10)" for n in (64, 128, 256)]


def chain(kinds: list[int]) -> Signature:
    """Layers one after the other."""
    return graph([(kind, [place - 1] if place else []) for place, kind in enumerate(kinds)])


def graph(nodes: list[tuple[int, list[int]]]) -> Signature:
    """Layers with their inputs as places of earlier ones."""
    layers: list[Layer] = []
    for place, (kind, inputs) in enumerate(nodes):
        tensors = (("weight", (kind + 1, 3)),)
        path = digest64(KINDS[kind], tensors, sorted(layers[i].path for i in inputs))
        layers.append(Layer(f"layers.{place}", KINDS[kind], tensors, path))
    return Signature(tuple(layers))


def chains(choose: random.Random, models: int) -> list[list[int]]:
    """Mutated descendants of a few random chains, 6 to 20 layers each."""
    made = [
        [choose.randrange(len(KINDS)) for _ in range(choose.randint(6, 20))] for _ in range(200)
    ]
    while len(made) < models:
        made.append(mutated(choose, made[choose.randrange(len(made))]))
    return made[:models]


def mutated(choose: random.Random, kinds: list[int]) -> list[int]:
    """One layer replaced, inserted or removed."""
    kinds = list(kinds)
    place = choose.randrange(len(kinds))
    action = choose.randrange(3)
    if action == 0 and len(kinds) < 20:
        kinds.insert(place, choose.randrange(len(KINDS)))
    elif action == 1 and len(kinds) > 6:
        del kinds[place]
    else:
        kinds[place] = choose.randrange(len(KINDS))
    return kinds


def skips(choose: random.Random, kinds: list[int]) -> list[tuple[int, list[int]]]:
    """The same layers as a graph, with skip connections."""
    return [
        (
            kind,
            sorted({place - 1, choose.randrange(place)} if choose.random() < 0.3 else {place - 1}),
        )
        if place
        else (kind, [])
        for place, kind in enumerate(kinds)
    ]
