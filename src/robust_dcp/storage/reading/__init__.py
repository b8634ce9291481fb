"""From files to targets: the order of reads, pieces and blocks, threads and memory."""
