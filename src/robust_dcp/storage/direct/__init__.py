"""Whole pages to files that are open for direct I/O: what goes out as it is, and what is put together first."""
