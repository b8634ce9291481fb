"""docs/errors.md treats every error and every warning of robust_dcp, and quotes none that there is not."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import chain

from robust_dcp import errors
from tests.docs.pages import DOCS, ROOT

CLASSES = {
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.RobustCheckpointError)
}
_FEWEST_LETTERS = 4
"""What has fewer is a form of words that only its place makes an error."""
_QUOTE = re.compile(r"`([^`]+)`")


def _has_words(text: str) -> bool:
    return len(re.findall(r"\w", text)) >= _FEWEST_LETTERS


def text_of(node: ast.expr) -> str | None:
    """A string of the source as the page quotes it: ``…`` for each value; ``None`` if it is put together elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left)
    return None


@cache
def trees() -> dict[str, ast.Module]:
    sources = sorted((ROOT / "src" / "robust_dcp").rglob("*.py"))
    return {str(source.relative_to(ROOT)): ast.parse(source.read_text()) for source in sources}


@cache
def all_texts() -> frozenset[str]:
    """All strings of the source, docstrings included."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.expr)]
    return frozenset(text for text in map(text_of, nodes) if text is not None)


@cache
def raised() -> list[tuple[str, str, str]]:
    """Class, place and text of each error that the source makes with a text of its own."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
                text = text_of(node.args[0])
                if text is not None and _has_words(text):
                    found.append((node.func.id, f"{name}:{node.lineno}", text))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("CorruptCheckpoint.of_file"):
                given = {keyword.arg: text_of(keyword.value) for keyword in node.keywords}
                what = "item … in …" if "item" in given else "…"
                text = f"{what} {given.get('problem', 'cannot be used')}: expected …, found …"
                found.append(("CorruptCheckpoint", f"{name}:{node.lineno}", text))
    return found


@cache
def logged() -> list[tuple[str, str]]:
    """Place and text of each line that the source logs at WARNING or above; ``…`` for each value."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            if (
                is_call
                and node.func.attr in ("warning", "error", "exception")
                and ast.unparse(node.func.value) == "logger"
            ):
                text = re.sub(r"%[-.0-9]*[a-z]", "…", text_of(node.args[0]) or "")
                if _has_words(text):
                    found.append((f"{name}:{node.lineno}", text))
    return found


@cache
def quotes() -> dict[str, list[str]]:
    """What the first column of each section's table quotes, by the class in its heading."""
    sections = re.split(r"^## ", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        title, _, body = section.partition("\n")
        cells = [line.split(" | ")[0] for line in body.splitlines() if line.startswith("| `")]
        quoted = [quote for cell in cells for quote in _QUOTE.findall(cell)]
        found[title.split(" ")[0]] = [quote for quote in quoted if _has_words(quote)]
    return found


def begins_with(text: str, quote: str) -> bool:
    """Whether an error begins as the page says; ``…`` of the page stands for any words of the source."""
    pattern = re.escape(quote.rstrip("… ")).replace("…", ".*?")
    return re.match(pattern, text, re.DOTALL) is not None


def test_every_warning_of_the_source_is_in_the_section_of_warnings() -> None:
    assert len(logged()) > 40
    missing = [each for each in logged() if not any(begins_with(each[1], quote) for quote in quotes()["Warnings"])]
    assert not missing, "docs/errors.md does not treat these"


def test_every_class_has_a_section() -> None:
    assert set(quotes()) >= CLASSES == {name for name, _, _ in raised()}


def test_every_error_of_the_source_is_in_the_section_of_its_class() -> None:
    assert raised()
    missing = [(place, text) for name, place, text in raised() if not any(begins_with(text, q) for q in quotes()[name])]
    assert not missing, "docs/errors.md does not treat these"


def test_every_quoted_beginning_is_in_the_source() -> None:
    everything = "\0".join([*all_texts(), *(text for _, text in logged()), *(text for _, _, text in raised())])
    found = {quote: re.escape(quote.strip("… ")).replace("…", "[^\0]*?") for quote in chain(*quotes().values())}
    unknown = [quote for quote, pattern in found.items() if not re.search(pattern, everything)]
    assert not unknown, "no error of the source begins so"
