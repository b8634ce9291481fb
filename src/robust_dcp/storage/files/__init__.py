"""Files and directories: the disk, names and paths, what direct I/O asks for."""
