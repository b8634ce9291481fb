"""What holds for all modules of the package: shown by their sources."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
TREES = {str(path.relative_to(SOURCES)): ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}

DECODERS = {"load", "loads", "decode", "Decoder", "JSONDecoder", "raw_decode", "unpackb", "literal_eval"}
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
    assert len(decoders_in(TREES["robust_dcp/decoding.py"])) == 2, "this test looks for other names than are used"
    others = {name: decoders_in(tree) for name, tree in TREES.items() if name != "robust_dcp/decoding.py"}
    assert {name: found for name, found in others.items() if found} == {}
