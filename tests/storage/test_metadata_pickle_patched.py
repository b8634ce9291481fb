"""A pickle of ``.metadata`` that was patched says what one would say that was emitted from scratch."""

from __future__ import annotations

import io
import pickle
import pickletools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.storage.metadata.pickled import MetadataPickle
from tests.storage.test_metadata_pickle import READERS, Chunk, Content, Entry, contents, example, joined, names_of

Item = tuple[str, Chunk]


def told_of(entry: Entry) -> tuple[object, ...]:
    """What ``state_dict_metadata`` and ``planner_data`` say of a name."""
    return entry.properties, entry.size, entry.path, [(chunk.offset, chunk.size) for chunk in entry.chunks]


def items_of(content: Content) -> dict[int, list[Item]]:
    """What lies in each file."""
    found: dict[int, list[Item]] = {file: [] for file in range(content.n_files)}
    for entry in content.entries:
        for chunk in entry.chunks:
            found[chunk.file].append((entry.name, chunk))
    return found


def patched(pickled: MetadataPickle, before: Content, after: Content) -> MetadataPickle:
    known = {entry.name: told_of(entry) for entry in before.entries}
    is_new = {entry.name: known.get(entry.name) != told_of(entry) for entry in after.entries}
    was, now = items_of(before), items_of(after)
    is_stale = np.array([was.get(file) != items for file, items in now.items()], dtype=np.bool_)
    some = [replace(e, chunks=tuple(c for c in e.chunks if is_new[e.name] or is_stale[c.file])) for e in after.entries]
    columns = replace(after, entries=tuple(entry for entry in some if entry.chunks)).columns()
    told = np.array([is_new[name] for name in columns.names], dtype=np.bool_)
    return pickled.patched(columns, told, is_stale, known.keys() - is_new.keys())


def places_of(pickled: MetadataPickle, content: Content, shift: int = 0) -> np.ndarray:
    """The places of the items of variable size, in the order in which ``pickled`` wants them."""
    chunks = [chunk for entry in content.entries for chunk in entry.chunks if chunk.is_variable]
    by_file = {file: [c.place for c in chunks if c.file == file] for file in range(content.n_files)}
    wanted = [by_file[file].pop(0) for file in pickled.variable_files.tolist()]
    return np.array(wanted, dtype=np.int64).reshape(-1, 2) + shift


@settings(max_examples=60, deadline=None)
@given(st.lists(contents(), min_size=2, max_size=4), st.data())
def test_it_says_what_one_from_scratch_would(drawn: list[Content], data: st.DataObject) -> None:
    first, *others = drawn
    pickled, before = MetadataPickle(first.columns(), max_files=5), first
    for other in others:
        kept = [entry for entry in before.entries if data.draw(st.booleans())]
        names = {entry.name for entry in kept}
        entries = sorted([*kept, *(e for e in other.entries if e.name not in names)], key=lambda entry: entry.name)
        after = Content(tuple(entries), max(before.n_files, other.n_files), first.has_paths, first.attributes)
        pickled = patched(pickled, before, after)
        encoded = joined(pickled.encode(names_of(after.n_files), places_of(pickled, after), None))
        pickletools.dis(encoded, out=io.StringIO())
        for reader in ("pickle.load", "pickle in Python", "decode_metadata"):
            assert READERS[reader](encoded) == after.stock(names_of(after.n_files), None)
        before = after


def test_the_one_that_was_patched_stays_as_it_was() -> None:
    before, after = example(3), example(2)
    first = MetadataPickle(before.columns())
    second = patched(first, before, after)
    for pickled, content in ((first, before), (second, after), (first, before)):
        encoded = joined(pickled.encode(names_of(2), places_of(pickled, content), None))
        assert pickle.loads(encoded) == content.stock(names_of(2), None)


def test_a_patch_keeps_the_frames_in_which_nothing_has_changed() -> None:
    before = example(n_tensors=40_000)
    float32 = replace(before.entries[0], name="new", chunks=(Chunk((0, 0), (4, 4), 2, (0, 900)),))
    after = replace(before, entries=(*before.entries, float32), n_files=3)
    first = MetadataPickle(before.columns(), max_files=3)
    second = patched(first, before, after)
    kept = {id(fragment) for fragment in first.encode(names_of(2), places_of(first, before), None).fragments}
    encoded = second.encode(names_of(3), places_of(second, after), None)
    assert encoded.nbytes - sum(len(fragment) for fragment in encoded.fragments if id(fragment) in kept) < 3000
    assert pickle.loads(joined(encoded)) == after.stock(names_of(3), None)
