"""Counts of a tree's structure, of this one or of another: `python -m benchmarks.structure [ROOT]`.

For comparing the tree before a change with the tree after it. Prints one JSON object; --out FILE
writes it too. With `--before COMMIT` it prints a table in Markdown instead: that commit's tree
beside the one at ROOT.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_WORDS = re.compile(r"^\| \*{0,2}([^|*]+)\*{0,2} \|", re.M)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default=".", type=Path, help="a checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", help="a commit of the repository at ROOT, to compare with")
    options = parser.parse_args()
    if options.before is not None:
        print(table(counts_of_commit(options.root, options.before), counts(options.root)))
        return
    text = json.dumps(counts(options.root), indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def counts_of_commit(root: Path, commit: str) -> dict[str, Any]:
    """As `counts`, of a commit of the repository at `root`."""
    wanted = ["git", "-C", str(root), "archive", commit, "--", "elastix", "docs", "README.md"]
    packed = subprocess.run(wanted, check=True, capture_output=True).stdout
    with TemporaryDirectory() as there, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(there, filter="data")
        return counts(Path(there))


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """In Markdown: both in columns beside each other."""

    def named(found: list[Any]) -> str:
        path, number = found
        return f"{number:,} (`{path.split(':')[-1]}`)"

    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("files, lines", lambda n: f"{n['files']}, {n['lines']:,}"),
        (
            "files and packages directly in `train`, arrows between them",
            lambda n: f"{n['train_rooms']}, {n['train_arrows']}",
        ),
        ("of these, in a circle", lambda n: str(n["train_circles"])),
        (
            "class names, file names that occur twice",
            lambda n: f"{len(n['class_names_twice'])}, {len(n['file_names_twice'])}",
        ),
        ("longest file", lambda n: named(n["longest_file"])),
        ("class with most attributes", lambda n: named(n["most_attributes"])),
        ("widest constructor", lambda n: named(n["widest_constructor"])),
        ("words in the table of words", lambda n: str(n["words"])),
    ]
    lines = ["| | before | after |", "|---|---|---|"]
    lines += [f"| {what} | {shown(before)} | {shown(after)} |" for what, shown in rows]
    return "\n".join(lines)


def counts(root: Path) -> dict[str, Any]:
    """The counts of the package `elastix` in the checkout at `root`."""
    package = root / "elastix"
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    lines = {path: len(path.read_text().splitlines()) for path in trees}
    classes = [(path, node) for path, tree in trees.items() for node in _classes(tree)]
    names = Counter(node.name for _, node in classes if not node.name.startswith("_"))
    files = Counter(path.name for path in trees if path.name != "__init__.py")
    attributes = {
        f"{_short(path, package)}:{node.name}": _attributes(node) for path, node in classes
    }
    widths = {f"{_short(path, package)}:{node.name}": _width(node) for path, node in classes}
    rooms, arrows = _rooms(trees, package, "train")
    return {
        "files": len(trees),
        "lines": sum(lines.values()),
        "train_rooms": len(rooms),
        "train_arrows": len(arrows),
        "train_circles": _circles(rooms, arrows),
        "class_names_twice": sorted(name for name, n in names.items() if n > 1),
        "file_names_twice": sorted(name for name, n in files.items() if n > 1),
        "files_over_400_lines": sum(n > 400 for n in lines.values()),
        "longest_file": _largest({_short(p, package): n for p, n in lines.items()}),
        "most_attributes": _largest(attributes),
        "widest_constructor": _largest(widths),
        "words": len(_words(root)),
    }


def _short(path: Path, package: Path) -> str:
    return path.relative_to(package).as_posix()


def _largest(found: dict[str, int]) -> list[Any]:
    name = max(found, key=lambda key: found[key])
    return [name, found[name]]


def _classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _attributes(node: ast.ClassDef) -> int:
    """Attributes that methods assign to `self`."""
    return len(
        {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
    )


def _width(node: ast.ClassDef) -> int:
    """Arguments of the constructor but `self`; fields of a dataclass are data, not counted."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            found = item.args
            return len(found.posonlyargs) + len(found.args) + len(found.kwonlyargs) - 1
    return 0


def _rooms(
    trees: dict[Path, ast.Module], package: Path, wing: str
) -> tuple[set[str], set[tuple[str, str]]]:
    """What lies directly in a package, files or packages, and which of them imports which."""
    inside = f"elastix.{wing}."
    rooms, arrows = set(), set()
    for path, tree in trees.items():
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] != wing or parts[1:] == ("__init__",):
            continue
        rooms.add(parts[1])
        for name in _imported(tree):
            if name.startswith(inside):
                other = name.removeprefix(inside).split(".")[0]
                if other != parts[1]:
                    arrows.add((parts[1], other))
    return rooms, {(a, b) for a, b in arrows if b in rooms}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _circles(rooms: set[str], arrows: set[tuple[str, str]]) -> int:
    """Rooms from which one comes back to the same room."""
    after: dict[str, set[str]] = defaultdict(set)
    for a, b in arrows:
        after[a].add(b)

    def reached(room: str) -> set[str]:
        found: set[str] = set()
        ahead = [room]
        while ahead:
            for other in after[ahead.pop()] - found:
                found.add(other)
                ahead.append(other)
        return found

    return sum(room in reached(room) for room in rooms)


def _words(root: Path) -> list[str]:
    """First column of the table of words, wherever the tree has it."""
    for name in ("docs/concepts.md", "README.md"):
        path = root / name
        text = path.read_text() if path.exists() else ""
        if (start := text.find("## Words")) >= 0:
            return _WORDS.findall(text[start:].partition("\n## ")[0])[1:]
    return []


if __name__ == "__main__":
    main()
