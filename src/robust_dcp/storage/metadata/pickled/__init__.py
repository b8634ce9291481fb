"""Makes the pickle of ``.metadata`` from columns, without a Python object for each item.

The part that a plan determines is made once and shared by all checkpoints that the plan writes. ``plan.metadata`` makes
the columns, the commit writes the fragments, and any reader of DCP's own files can read them.
"""

from robust_dcp.storage.metadata.pickled.columns import MetadataColumns, Path
from robust_dcp.storage.metadata.pickled.emit import EncodedMetadata, MetadataPickle

__all__ = ["EncodedMetadata", "MetadataColumns", "MetadataPickle", "Path"]
