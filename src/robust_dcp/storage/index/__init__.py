"""``.robust_dcp.index``: the contents of ``.metadata`` in sorted columns, so that a load reads only what it asks for.

``plan.metadata`` builds the index, and the commit writes it beside ``.metadata``. The reader looks up items in it, and
a job that resumes finds its plan there. ``.metadata`` is always right: an index that does not fit it, or is damaged, is
not used.
"""

from robust_dcp.storage.index.build import IndexTemplate
from robust_dcp.storage.index.fit import fit_of, fit_of_file
from robust_dcp.storage.index.form import DamagedIndex, Fragment, Section
from robust_dcp.storage.index.index_file import IndexFile
from robust_dcp.storage.index.lazy import StoredChunks, ask_index, lazy_metadata, look_up
from robust_dcp.storage.index.opened import fitting_index, index_called
from robust_dcp.storage.index.overlap import Overlap
from robust_dcp.storage.index.stored_index import StoredIndex
from robust_dcp.storage.index.stored_items import StoredItems, stored_items_of
from robust_dcp.storage.index.whole_chunks import ChunkKind, WholeChunks, find_whole_chunks

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
    "ask_index",
    "find_whole_chunks",
    "fit_of",
    "fit_of_file",
    "fitting_index",
    "index_called",
    "lazy_metadata",
    "look_up",
    "stored_items_of",
]
