"""One stored item as bytes: the record of a tensor, of an object, its checksum, and what may be unpickled."""
