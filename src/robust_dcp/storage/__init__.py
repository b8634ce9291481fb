"""The bytes of a checkpoint: layouts, records, writer, commit, reader, and the metadata file."""
