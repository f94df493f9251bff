"""Where the nodes of a lineage forest are drawn. Pure."""

from collections.abc import Mapping

from elastix.errors import Corrupt


def layout(parents: Mapping[int, int | None]) -> dict[int, tuple[int, float]]:
    """A place for each node: its depth, and a row such that no edges of a tree cross.

    Leaves get rows of their own, in order; an inner node stands in the middle of its children.

    Args:
        parents: by node; a parent that is no node itself counts as none.

    Returns:
        Depth (0 for a root) and row by node.

    Raises:
        Corrupt: somebody is their own ancestor.
    """
    children: dict[int | None, list[int]] = {}
    for node, parent in parents.items():
        children.setdefault(parent if parent in parents else None, []).append(node)
    places: dict[int, tuple[int, float]] = {}
    row = 0
    # Without recursion: a lineage may be deeper than Python's stack.
    stack = [(root, 0, False) for root in reversed(children.get(None, []))]
    while stack:
        node, depth, below_done = stack.pop()
        below = children.get(node, [])
        if not below:
            places[node] = (depth, float(row))
            row += 1
        elif below_done:
            rows = [places[child][1] for child in below]
            places[node] = (depth, (min(rows) + max(rows)) / 2)
        else:
            stack.append((node, depth, True))
            stack += [(child, depth + 1, False) for child in reversed(below)]
    if len(places) < len(parents):
        lost = sorted(set(parents) - set(places))
        raise Corrupt(f"trials {lost[:5]} are their own ancestors; no lineage can be drawn.")
    return places
