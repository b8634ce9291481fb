"""One stored item as bytes: the record of a tensor or an object, its checksum, and what may be unpickled."""
