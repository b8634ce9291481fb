"""The command line ``robust-dcp``: one file for each command. None imports torch before its first line is out."""
