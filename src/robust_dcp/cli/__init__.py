"""The command line ``robust-dcp``: one module for each command, with its help, its options and its work."""
