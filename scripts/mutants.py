"""Breaks the sources on purpose, one place at a time, and counts which tests notice.

    python scripts/mutants.py --count 20 --seed 1 --json mutants.json

A mutant is one changed place in a room of the package: a comparison, an ``and``, an ``or``, a ``not``, a constant, or a
call whose value nobody uses. It is killed if a test fails, and survives if none does. Each is made in a copy of what
git knows of this tree, so the tree may change meanwhile. It meets the test modules that run its line, in one process
until the first failure: those first that run most of its file in the least time. Which lines each module runs, in all
of its processes, is measured once (a quarter of an hour) and kept in ``build/mutants``: remove that once the sources
have changed much. Run it with the Python of the tree's environment.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import coverage

ROOT = Path(__file__).parents[1]
PACKAGE = "src/robust_dcp"
ROOMS = ("plan", "storage", "comm", "manager")
TESTS = ("plan", "storage", "comm", "manager", "staging", "drain", "promises")
REACHED = ROOT / "build" / "mutants"

OTHER_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
WITHOUT_EFFECT = ("debug", "info", "warning", "error", "exception")
"""Calls that only say something."""


@dataclass
class Mutant:
    """One changed place.

    Attributes:
        lines: those of its statement, or of the head of it.
        begin: where the place is in the file, in characters; ``end`` is behind it.
        outcome: ``killed``; ``survived``; or ``unfinished`` if the time was up before the tests had ended.
        by: the test that failed first.
    """

    room: str
    path: str
    lines: tuple[int, int]
    kind: str
    before: str
    after: str
    begin: int
    end: int
    outcome: str = ""
    by: str = ""
    seconds: float = 0.0


def mutants_of(room: str, path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        """AST counts columns in bytes of UTF-8."""
        text = source[starts[line - 1] : starts[line]].encode()
        return starts[line - 1] + len(text[:column].decode())

    tree = ast.parse(source)
    statement_of = {id(tree): (1, 1)}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            statement_of[id(child)] = statement_of[id(node)]
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                last = body[0].lineno - 1 if body else child.end_lineno or child.lineno
                statement_of[id(child)] = (child.lineno, max(last, child.lineno))
    not_run = {id(each) for node in ast.walk(tree) for each in _not_run(node)}
    for node in ast.walk(tree):
        if id(node) in not_run:
            continue
        for kind, after in _changes(node):
            assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None
            begin = place(node.lineno, node.col_offset)
            end = place(node.end_lineno, node.end_col_offset or 0)
            relative = str(path.relative_to(ROOT))
            yield Mutant(room, relative, statement_of[id(node)], kind, source[begin:end], after, begin, end)


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """What changes no behaviour: annotations, decorators, words, ``strict`` of zip, and constants that have a name
    (sizes, limits and times, of which another is as good)."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        yield from ast.walk(node)
    for name in ("annotation", "returns"):
        annotation = getattr(node, name, None)
        if annotation is not None:
            yield from ast.walk(annotation)
    for decorator in getattr(node, "decorator_list", ()):
        yield from ast.walk(decorator)
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and target.id.isupper():
            yield from ast.walk(node.value)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        yield from ast.walk(node)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What a node may be changed to, and the kind of the change."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[number] = OTHER_COMPARISONS[type(operator)]()
            yield "comparison", f"({ast.unparse(ast.Compare(node.left, operators, node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield "constant", f"({not node.value if isinstance(node.value, bool) else node.value + 1})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if not (isinstance(function, ast.Attribute) and function.attr in WITHOUT_EFFECT):
            yield "dropped call", "pass"


def drawn(count: int, seed: int) -> list[Mutant]:
    """Mutants of all rooms, drawn alike whatever their sizes are."""
    found: list[Mutant] = []
    for room in ROOMS:
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            found += mutants_of(room, path)
    print(f"{len(found)} mutants, of which {count} are drawn with seed {seed}", file=sys.stderr)
    return random.Random(seed).sample(found, min(count, len(found)))


def copy_tree(target: Path) -> None:
    """Copy what git knows, changed or not, and what Python has compiled of it."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in filter(None, names.split("\0"))]
    compiled = [each for folder in {file.parent for file in files} for each in folder.glob("__pycache__/*.pyc")]
    for file in filter(Path.is_file, files + compiled):
        copy = target / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


Reached = dict[str, tuple[float, dict[str, list[int]]]]
"""For each test module the seconds that it takes, and the lines that it runs of each file."""


def measure_reached(tree: Path) -> Reached:
    """Which lines the test modules run, from what an earlier call has kept, or measured now."""
    kept = REACHED / "reached.json"
    if kept.exists():
        reached: Reached = json.loads(kept.read_text())
        return reached
    modules = [
        str(path.relative_to(ROOT)) for each in TESTS for path in sorted((ROOT / "tests" / each).rglob("test_*.py"))
    ]
    with ThreadPoolExecutor(2) as threads:
        reached = dict(zip(modules, threads.map(lambda module: _reached_by(tree, module), modules), strict=True))
    REACHED.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(reached))
    return reached


def _reached_by(tree: Path, module: str) -> tuple[float, dict[str, list[int]]]:
    with tempfile.TemporaryDirectory(prefix="reached-") as directory:
        began = time.monotonic()
        where = {"COVERAGE_FILE": f"{directory}/data"}  # of its ranks and other children, too
        _run(tree, ["-m", "coverage", "run", *PYTEST, module], 900, where)
        seconds = round(time.monotonic() - began, 1)
        _run(tree, ["-m", "coverage", "combine", "--quiet"], 900, where)
        data = coverage.CoverageData(f"{directory}/data")
        data.read()
        paths = {path: str(path)[str(path).find(PACKAGE) :] for path in data.measured_files() if PACKAGE in path}
        print(f"{module}: {seconds} s, {len(paths)} files", file=sys.stderr)
        return seconds, {relative: sorted(data.lines(path) or ()) for path, relative in paths.items()}


PYTEST = ("-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider")


def _run(
    tree: Path, arguments: Sequence[str], seconds: float, more: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "CI": "true", "PYTHONDONTWRITEBYTECODE": "", **more}
    command = ["timeout", "--kill-after=10", str(seconds), sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


def try_mutant(mutant: Mutant, whole: Path, reached: Reached, seconds: float) -> None:
    """Note in the mutant how it ended, in a copy of the tree ``whole``."""
    statement = {*range(mutant.lines[0], mutant.lines[1] + 1)}
    modules = [name for name, (_, lines) in reached.items() if statement & {*lines.get(mutant.path, ())}]
    modules.sort(key=lambda name: reached[name][0] / len(reached[name][1][mutant.path]))
    if not modules:
        mutant.outcome, mutant.by = "survived", "no test runs this line"
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(shutil.copytree(whole, directory, dirs_exist_ok=True))
        source = (tree / mutant.path).read_text()
        (tree / mutant.path).write_text(source[: mutant.begin] + mutant.after + source[mutant.end :])
        ended = _run(tree, [*PYTEST, "-x", *modules], seconds)
    mutant.seconds = round(time.monotonic() - began, 1)
    if ended.returncode in (124, 137):
        mutant.outcome, mutant.by = "unfinished", f"the time was up, of {len(modules)} modules"
    elif ended.returncode:
        failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        mutant.outcome, mutant.by = "killed", failed[0] if failed else ended.stdout[-200:]
    else:
        mutant.outcome = "survived"


def main() -> None:
    """Try the mutants, and print each, and a table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="how many are tried beside each other")
    parser.add_argument("--limit-seconds", type=float, default=600, help="for each mutant")
    parser.add_argument("--json", type=Path, help="where all mutants are written, after each of them")
    arguments = parser.parse_args()
    mutants = drawn(arguments.count, arguments.seed)
    tried: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(arguments.at_once) as threads:
        copy_tree(whole := Path(directory))
        reached = measure_reached(whole)
        trials = {
            threads.submit(try_mutant, mutant, whole, reached, arguments.limit_seconds): mutant for mutant in mutants
        }
        for trial in as_completed(trials):
            trial.result()
            mutant = trials[trial]
            tried.append(mutant)
            where = f"{mutant.path}:{mutant.lines[0]}: {mutant.before[:60]!r} -> {mutant.after[:60]!r}"
            print(
                f"{len(tried)}/{len(mutants)} {mutant.outcome} in {mutant.seconds:g} s: {where} {mutant.by}", flush=True
            )
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(each) for each in tried], indent=1))
    print("| mutants | drawn | killed | survived | unfinished |\n| --- | --- | --- | --- | --- |")
    for name in (*ROOMS, *sorted({mutant.kind for mutant in mutants}), "all"):
        counts = Counter(each.outcome for each in mutants if name in (each.room, each.kind, "all"))
        print(f"| {name} | {counts.total()} | {counts['killed']} | {counts['survived']} | {counts['unfinished']} |")


if __name__ == "__main__":
    main()
