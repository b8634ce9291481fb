"""The pickle of ``.metadata``, emitted from columns instead of from an object for each item.

What a plan determines is emitted once and shared by all checkpoints that are written by it. ``plan.metadata`` makes the
columns, the commit writes the fragments, and every reader of DCP's own files reads them.
"""

from robust_dcp.storage.metadata.pickled.columns import MetadataColumns, Path
from robust_dcp.storage.metadata.pickled.emit import EncodedMetadata, MetadataPickle

__all__ = ["EncodedMetadata", "MetadataColumns", "MetadataPickle", "Path"]
