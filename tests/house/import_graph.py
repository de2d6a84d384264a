"""Draw which part of the code imports which: modules listed by room, an arrow from a room to each room that it uses.

    python tests/house/import_graph.py [TREE] [--out docs/house/before.png]

Reads the source of TREE (default: this repository) and runs none of it. A room is a folder at the top level or just
below a package (`efla_lm/training`); deeper folders belong to it. train.py, eval.py and a package's own `__init__` are
rooms too. Imports inside functions count; those under `if TYPE_CHECKING` do not.

A cycle is a largest set of modules that import each other in a circle. Floors put each room above all that it uses;
where rooms use each other, they stand so that few imports point upwards. The counts are printed; a JSON file beside the
picture holds them and all modules and imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"efla_kernels": "kernels", "efla_data": "data", "efla_lm": ".", "scripts": "."}  # name: the folder it is in
ENTRIES = ("train", "eval")
COLOURS = {"efla_kernels": "#dceaf7", "efla_data": "#e2f1dd", "efla_lm": "#fbeed3", "scripts": "#eee3f3"}
LINE, CHARACTER, ROWS = 0.17, 0.075, 14  # inches of a line and of a letter; modules in a column of a room
Edge = tuple[str, str]


def find_modules(tree: Path) -> dict[str, Path]:
    """The file of every module by its dotted name; a package's name is that of its `__init__`."""
    found = {name: tree / f"{name}.py" for name in ENTRIES}
    for package, folder in PACKAGES.items():
        base = tree / folder
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that the source below `node` may import, `a.b.c` for `from a.b import c`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*above, *filter(None, [child.module])])
            yield from (f"{base}.{alias.name}" for alias in child.names)
        yield from imported_names(child, package)


def find_imports(modules: dict[str, Path]) -> set[Edge]:
    """Pairs (importer, imported) of our modules."""
    edges = set()
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target in imported_names(ast.parse(path.read_text(encoding="utf-8")), package):
            while target and target not in modules:  # `a.b.c` may be what module `a.b` defines
                target = target.rpartition(".")[0]
            if target and target != name:
                edges.add((name, target))
    return edges


def room_of(module: str, path: Path) -> str:
    parts = module.split(".")
    if path.name == "__init__.py":
        return f"{parts[0]}/__init__" if len(parts) == 1 else "/".join(parts[:2])
    return "/".join(parts[: min(2, max(1, len(parts) - 1))])


def find_circles(edges: set[Edge]) -> list[list[str]]:
    """Largest sets of nodes that all reach each other, those of one node left out."""
    following: dict[str, list[str]] = {}
    for start, end in edges:
        following.setdefault(start, []).append(end)

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = set(following.get(todo.pop(), ())) - seen
            seen |= new
            todo += new
        return seen

    reach = {node: reached_from(node) for node in following}
    in_circle = [node for node in reach if node in reach[node]]
    circles = {tuple(sorted(m for m in in_circle if m in reach[n] and n in reach[m])) for n in in_circle}
    return [list(circle) for circle in sorted(circles)]


def find_upward(weights: Counter[Edge]) -> list[Edge]:
    """Arrows that point upwards when the rooms of each circle stand in a good order, the importer above.

    The order begins with the rooms that import most and are imported least; rooms then move one at a time, as long as
    a move leaves fewer imports that point upwards.
    """
    upward = []
    for circle in find_circles(set(weights)):
        inside = {pair: count for pair, count in weights.items() if pair[0] in circle and pair[1] in circle}

        def against(order: list[str], inside: dict[Edge, int] = inside) -> int:
            return sum(count for (a, b), count in inside.items() if order.index(a) > order.index(b))

        balance = {room: sum(n * ((room == a) - (room == b)) for (a, b), n in inside.items()) for room in circle}
        order = sorted(circle, key=lambda room: -balance[room])
        while True:
            others = {room: [r for r in order if r != room] for room in order}
            moved = ([*rest[:n], room, *rest[n:]] for room, rest in others.items() for n in range(len(order)))
            best = min(moved, key=against)
            if against(best) >= against(order):
                break
            order = best
        upward += [(a, b) for a, b in inside if order.index(a) > order.index(b)]
    return upward


def find_floors(nodes: list[str], edges: set[Edge]) -> dict[str, int]:
    """0 for what imports nothing, else one more than the highest that it imports; edges without circles."""
    floors: dict[str, int] = {}

    def floor(node: str) -> int:
        if node not in floors:
            floors[node] = 1 + max((floor(end) for start, end in edges if start == node), default=-1)
        return floors[node]

    return {node: floor(node) for node in nodes}


def read_graph(tree: Path) -> dict[str, Any]:
    """Modules by room, imports, rooms' arrows with the number of imports behind each, and all counts."""
    modules = find_modules(tree)
    imports = find_imports(modules)
    rooms = {name: room_of(name, path) for name, path in modules.items()}
    weights = Counter((rooms[a], rooms[b]) for a, b in imports if rooms[a] != rooms[b])
    upward = find_upward(weights)
    floors = find_floors(sorted(set(rooms.values())), set(weights) - set(upward))
    cycles = find_circles(imports)
    counts = {
        "modules": len(modules), "imports": len(imports), "rooms": len(floors), "arrows": len(weights),
        "floors": 1 + max(floors.values()), "cycles": len(cycles),
        "imports upwards": sum(weights[pair] for pair in upward),
    }  # fmt: skip
    return {
        "counts": counts,
        "cycles": cycles,
        "upward": [f"{a} -> {b}" for a, b in sorted(imports) if (rooms[a], rooms[b]) in upward],
        "rooms": {r: {"floor": floors[r], "modules": [m for m in rooms if rooms[m] == r]} for r in sorted(floors)},
        "arrows": [{"from": a, "to": b, "imports": weights[a, b], "up": (a, b) in upward} for a, b in sorted(weights)],
        "imports": sorted(imports),
    }


def label(module: str, room: str) -> str:
    """A module's name inside its room."""
    name = module.removeprefix(room.removesuffix("/__init__").replace("/", "."))
    return name.lstrip(".") or "__init__"


def arrange(graph: dict[str, Any]) -> dict[str, tuple[float, float, float, float]]:
    """Left, bottom, width and height of every room's box, in inches; a room stands near those that use it."""
    rooms, arrows = graph["rooms"], graph["arrows"]
    sizes = {}
    for room, about in rooms.items():
        names = [label(module, room) for module in about["modules"]]
        columns = math.ceil(len(names) / ROWS)
        width = max(columns * (max(map(len, names)) + 2) * CHARACTER, (len(room) + 2) * CHARACTER * 1.3)
        sizes[room] = width, LINE * (2 + math.ceil(len(names) / columns))
    floors = [[room for room in rooms if rooms[room]["floor"] == n] for n in range(graph["counts"]["floors"])]
    gap = 0.35
    widths = [sum(sizes[room][0] + gap for room in floor) for floor in floors]
    places: dict[str, tuple[float, float, float, float]] = {}
    bottom = sum(max(sizes[room][1] for room in floor) + 0.9 for floor in floors)

    def middle(room: str) -> float:
        above = [places[a["from"]] for a in arrows if a["to"] == room and a["from"] in places]
        return sum(left + width / 2 for left, _, width, _ in above) / len(above) if above else max(widths) / 2

    for floor, total in reversed(list(zip(floors, widths))):
        bottom -= max(sizes[room][1] for room in floor) + 0.9
        left = (max(widths) - total) / 2
        for room in sorted(floor, key=middle):
            places[room] = left, bottom, *sizes[room]
            left += sizes[room][0] + gap
    return places


def draw(graph: dict[str, Any], out: Path) -> None:
    """The picture: who imports stands above, arrows point down; one that points up is red."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    places = arrange(graph)
    right = max(left + width for left, _, width, _ in places.values())
    top = max(bottom + height for _, bottom, _, height in places.values())
    figure, axes = pyplot.subplots(figsize=(right + 0.6, top + 0.9), dpi=75)
    axes.set(xlim=(-0.3, right + 0.3), ylim=(-0.3, top + 0.6))
    axes.axis("off")
    for room, (left, bottom, width, height) in places.items():
        colour = COLOURS.get(room.split("/")[0], "#f2f2f2")
        axes.add_patch(FancyBboxPatch((left, bottom), width, height, "round,pad=0.05", fc=colour, ec="#777", zorder=2))
        axes.text(left + width / 2, bottom + height - LINE / 2, room, ha="center", va="center", weight="bold", size=9)
        names = sorted(label(module, room) for module in graph["rooms"][room]["modules"])
        rows = round(height / LINE) - 2
        for number, name in enumerate(names):
            x = left + 0.05 + number // rows * width / math.ceil(len(names) / rows)
            axes.text(x, bottom + height - LINE * (number % rows + 2), name, va="center", size=7, family="monospace")
    for arrow in graph["arrows"]:
        (ax, ay, aw, ah), (bx, by, bw, bh) = places[arrow["from"]], places[arrow["to"]]
        ends = (ax + aw / 2, ay + ah + 0.05 if arrow["up"] else ay - 0.05), (
            bx + bw / 2, by - 0.05 if arrow["up"] else by + bh + 0.05,
        )  # fmt: skip
        colour = "#d03030" if arrow["up"] else "#4060a0"
        axes.add_patch(
            FancyArrowPatch(
                *ends, arrowstyle="-|>", mutation_scale=9, lw=0.5 + 0.5 * math.log2(arrow["imports"] + 1), color=colour,
                alpha=0.9 if arrow["up"] else 0.45, connectionstyle="arc3,rad=0.06", zorder=3 if arrow["up"] else 1,
            )
        )  # fmt: skip
    axes.text(0, top + 0.35, "   ".join(f"{count} {name}" for name, count in graph["counts"].items()), size=12)
    figure.savefig(out, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, nargs="?", default=ROOT, help="source tree; default: this repository")
    parser.add_argument("--out", type=Path, help="picture (png); the counts and the graph go beside it as json")
    arguments = parser.parse_args()
    graph = read_graph(arguments.tree)
    for name, count in graph["counts"].items():
        print(f"{name:16} {count}")
    for circle in graph["cycles"]:
        print("cycle:", ", ".join(circle))
    for edge in graph["upward"]:
        print("upwards:", edge)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        draw(graph, arguments.out)
        arguments.out.with_suffix(".json").write_text(json.dumps(graph) + "\n")


if __name__ == "__main__":
    main()
