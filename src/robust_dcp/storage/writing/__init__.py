"""Writing items to durable files: the order of pieces, threads and memory, and the commit."""
