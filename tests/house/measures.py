"""Print the measures of size and order of a source tree: `python tests/house/measures.py [TREE]` (default: this one).

Lines are physical. The code is what `import_graph.py` reads: the three packages, scripts, train.py and eval.py.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from import_graph import ROOT, find_modules, read_graph

MIXER = "gated_deltanet"


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def function_lines(path: Path, name: str) -> int:
    """Lines of a function at the top of a file, its decorators left out."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return next(n.end_lineno - n.lineno + 1 for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name)


def measure(tree: Path) -> dict[str, object]:
    files = {path: path.read_text(encoding="utf-8") for path in find_modules(tree).values()}
    counts = read_graph(tree)["counts"]
    folders = defaultdict(list)
    for path in files:
        if not path.name.startswith("__"):  # __init__ and __main__ have no other name
            folders[path.name].append(path.parent.relative_to(tree).as_posix())
    same = {name: places for name, places in sorted(folders.items()) if len(places) > 1}
    readmes = {
        path.relative_to(tree).as_posix(): count_lines(path) for path in sorted(tree.glob("kernels/**/README.md"))
    }
    return {
        "lines of Python without tests": sum(map(count_lines, files)),
        "files": len(files),
        "longest file": max((count_lines(path), path.relative_to(tree).as_posix()) for path in files),
        "lines of train.py, eval.py": (count_lines(tree / "train.py"), count_lines(tree / "eval.py")),
        "lines of train.main": function_lines(tree / "train.py", "main"),
        f"files that name {MIXER}": sum(MIXER in text for text in files.values()),
        f"lines that name {MIXER}": sum(MIXER in line for text in files.values() for line in text.splitlines()),
        "lines of README.md": count_lines(tree / "README.md"),
        **{f"lines of {name}": lines for name, lines in readmes.items()},
        **counts,
        "names of several files": len(same),
        **{f"  {name}": ", ".join(places) for name, places in same.items()},
    }


if __name__ == "__main__":
    for name, value in measure(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT).items():
        print(f"{name:34} {value}")
