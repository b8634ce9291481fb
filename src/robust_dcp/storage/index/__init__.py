"""``.robust_dcp.index``: the contents of ``.metadata`` in sorted columns, so that a load reads only what it asks for.

``plan.metadata`` builds the index, and the commit writes it beside ``.metadata``. The reader looks up items in it, and
a job that resumes finds its plan there. The coordinator of a load checks all of it first. If it is damaged, or does not
fit its ``.metadata``, that is read instead.
"""

from robust_dcp.storage.index.build import IndexTemplate
from robust_dcp.storage.index.form import DamagedIndex, Fragment, IndexFile, Section, fit_of, fit_of_file
from robust_dcp.storage.index.lazy import StoredChunks, StoredItems, index_of, lazy_metadata, look_up, stored_items_of
from robust_dcp.storage.index.stored_index import (
    ChunkKind,
    Overlap,
    StoredIndex,
    WholeChunks,
    fitting_index,
    opened_index,
)

__all__ = [
    "ChunkKind",
    "DamagedIndex",
    "Fragment",
    "IndexFile",
    "IndexTemplate",
    "Overlap",
    "Section",
    "StoredChunks",
    "StoredIndex",
    "StoredItems",
    "WholeChunks",
    "fit_of",
    "fit_of_file",
    "fitting_index",
    "index_of",
    "lazy_metadata",
    "look_up",
    "opened_index",
    "stored_items_of",
]
