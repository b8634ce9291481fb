"""What holds for all modules of the package: shown by their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import robust_dcp

SOURCES = Path(__file__).parents[1] / "src"
TREES = {str(path.relative_to(SOURCES)): ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}

DECODERS = {"load", "loads", "decode", "Decoder", "JSONDecoder", "convert", "raw_decode", "unpackb", "literal_eval"}
MODULES = {"json", "msgspec", "msgpack", "yaml", "toml", "tomllib", "ast", "marshal", "orjson"}


def _dotted(node: ast.expr) -> list[str]:
    """The parts of ``a.b.c``; none of another expression."""
    if isinstance(node, ast.Attribute):
        parts = _dotted(node.value)
        return [*parts, node.attr] if parts else []
    return [node.id] if isinstance(node, ast.Name) else []


def decoders_in(tree: ast.Module) -> list[str]:
    """Each decoder of a text format that a module uses or imports, with its line."""
    found = []
    for node in ast.walk(tree):
        names: list[list[str]] = []
        if isinstance(node, ast.ImportFrom):
            names = [[*(node.module or "").split("."), each.name] for each in node.names]
        elif isinstance(node, ast.Call):
            names = [_dotted(node.func)]
        found += [
            f"{'.'.join(each)} in line {node.lineno}"  # type: ignore[attr-defined]
            for each in names
            if each and each[0] in MODULES and each[-1] in DECODERS
        ]
    return found


def test_one_module_decodes_json_and_msgpack() -> None:
    assert len(decoders_in(TREES["robust_dcp/decoding.py"])) == 3, "this test looks for other names than are used"
    others = {name: decoders_in(tree) for name, tree in TREES.items() if name != "robust_dcp/decoding.py"}
    assert {name: found for name, found in others.items() if found} == {}


NAMES = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): tree for name, tree in TREES.items()}
PARTS = {name.split(".")[1] for name in NAMES if "." in name}
_QUOTED = re.compile(r"(?::(?P<role>\w+):)?`{1,2}~?(?P<name>[A-Za-z_][\w./]*)(?:\(\))?`{1,2}")
_WHO_CALLS = re.compile(r"\b[Cc]alled by\b|`` calls? (it|this|its)\b", re.DOTALL)


def docstrings() -> Iterator[tuple[str, str]]:
    """Each docstring, and each string that stands for itself, with its place."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{name}:{node.lineno}", node.value.value


def names_in(tree: ast.Module) -> set[str]:
    """What a module defines, sets and imports."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for each in node.names
    }


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module of ours, of something in one, or public."""
    parts = name.removeprefix("robust_dcp.").split(".")
    for end in range(len(parts), 0, -1):
        module = NAMES.get(".".join(["robust_dcp", *parts[:end]]))
        if module is not None:
            return end == len(parts) or parts[end] in names_in(module)
    return name.startswith("robust_dcp.") and hasattr(robust_dcp, parts[0])


def is_of_this_package(name: str) -> bool:
    """Whether a dotted name begins with a module or folder of ours. Megatron is also a package of others."""
    return name.split(".")[0] in {"robust_dcp", *PARTS} and not re.match(r"megatron\.(core|training)\b", name)


def test_modules_and_files_that_docstrings_name_exist() -> None:
    loggers = {"robust_dcp.operations"}
    missing = []
    for place, text in docstrings():
        for quoted in _QUOTED.finditer(text):
            name = quoted["name"].rstrip(".")
            if name.endswith(".py"):
                is_there = (
                    any(f"/{each}".endswith(f"/{name}") for each in TREES) or "torch/" in name or "megatron_" in name
                )
            elif quoted["role"] == "mod" or ("." in name and "/" not in name and is_of_this_package(name)):
                is_there = exists(name) or name in loggers
            else:
                continue
            if not is_there:
                missing.append(f"{place}: {name}")
    assert missing == []
    assert not exists("storage.no_such_module") and not exists("plan.session.NoSuchClass") and exists("plan.session")


def test_no_docstring_says_who_calls() -> None:
    assert [place for place, text in docstrings() if _WHO_CALLS.search(text)] == []
