"""Files and directories: calls to the file system, names and paths, and the rules of direct I/O."""
