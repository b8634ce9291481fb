"""How the items of a state dict are nested: its containers, with the names of items in place of their values.

    {"optimizer": {"state": {0: {"m": tensor}}}}  ->  {"optimizer": {"state": {0: {"m": "optimizer.state.0.m"}}}}

DCP knows an item by its path, which is made of strings for the keys of dicts and of integers for the places of lists
(``torch/distributed/checkpoint/_nested_dict.py``). So it forgets keys that are no strings, empty dicts, the class and
the order of dicts. An outline keeps them. A conversion leaves the outline of a file of ``torch.save`` beside
the checkpoint's ``.metadata``, and makes such a file of it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

__all__ = ["Outline", "Path", "filled", "outline_of", "outline_of_paths", "with_items"]

Path = tuple[str | int, ...]
"""The keys of an item in the nested state dict, as DCP has them."""

Outline = Any
"""The name of an item, or a dict or list of outlines."""

_NOTHING: Final = object()


def outline_of(state_dict: Mapping[Any, Any], items: Mapping[str, Any], paths: Mapping[str, Path]) -> Outline:
    """The outline of a nested state dict.

    Args:
        items, paths: the value and the path of each item, by its name, as ``flatten_state_dict`` returns them.
    """
    names = {path: name for name, path in paths.items()}

    def outlined(value: Any, path: Path) -> Outline:
        name = names.get(path)
        # In {0: {}, "0": 5} both values have the path of the item "0".
        if name is not None and items[name] is value:
            return name
        if isinstance(value, Mapping):
            return _like(value, ((key, outlined(each, (*path, str(key)))) for key, each in value.items()))
        return [outlined(each, (*path, place)) for place, each in enumerate(value)]

    return outlined(state_dict, ())


def outline_of_paths(paths: Mapping[str, Path]) -> Outline:
    """The outline of a state dict of which only the paths are known.

    Raises:
        ValueError: two items are in each other's way.
    """
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        _put(root, path, name)
    return _with_lists(root)


def with_items(outline: Outline, kept: Collection[str], others: Iterable[str]) -> Outline:
    """An outline with some of its items, and others that stand at the top under their names.

    A dict or list all of whose items are gone is gone as well. A list that has lost some becomes a dict by places.

    Raises:
        ValueError: two items are in each other's way.
    """
    found: set[str] = set()
    pruned = _pruned(outline, kept, found)
    root = pruned if isinstance(pruned, dict) else {}
    for name in (*(each for each in kept if each not in found), *others):
        _put(root, (name,), name)
    return root


def filled(outline: Outline, value_of: Callable[[str], Any]) -> Any:
    """The state dict with this outline."""
    if isinstance(outline, str):
        return value_of(outline)
    if isinstance(outline, dict):
        return _like(outline, ((key, filled(each, value_of)) for key, each in outline.items()))
    return [filled(each, value_of) for each in outline]


def _pruned(outline: Outline, kept: Collection[str], found: set[str]) -> Any:
    if isinstance(outline, str):
        if outline not in kept:
            return _NOTHING
        found.add(outline)
        return outline
    if not isinstance(outline, dict | list):
        return _NOTHING
    entries: Iterable[tuple[Any, Outline]] = outline.items() if isinstance(outline, dict) else enumerate(outline)
    pairs = [(key, left) for key, each in entries if (left := _pruned(each, kept, found)) is not _NOTHING]
    if outline and not pairs:
        return _NOTHING
    is_whole_list = isinstance(outline, list) and len(pairs) == len(outline)
    return [left for _, left in pairs] if is_whole_list else _like(outline, pairs)


def _like(container: Any, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict with these entries, and with the class of ``container`` and what modules attach to it."""
    if not isinstance(container, OrderedDict):
        return dict(pairs)
    made: OrderedDict[Any, Any] = OrderedDict(pairs)
    vars(made).update(vars(container))  # `_metadata` of Module.state_dict()
    return made


def _put(root: dict[Any, Any], path: Path, name: str) -> None:
    for place, key in enumerate(path[:-1]):
        root = root.setdefault(key, {})
        if not isinstance(root, dict):
            raise ValueError(f"{'.'.join(map(str, path[: place + 1]))} is an item and holds others; pass --flat")
    if path[-1] in root:
        raise ValueError(f"two items would stand at {'.'.join(map(str, path))}; pass --flat")
    root[path[-1]] = name


def _with_lists(value: Any) -> Any:
    """Turn dicts by places into lists, unless a place is empty."""
    if not isinstance(value, dict):
        return value
    values = {key: _with_lists(each) for key, each in value.items()}
    is_list = bool(values) and all(type(key) is int for key in values) and sorted(values) == list(range(len(values)))
    return [values[place] for place in range(len(values))] if is_list else values
