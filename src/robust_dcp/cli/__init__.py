"""The command line ``robust-dcp``: its words (``parser``), and one file for each command, imported when it runs."""
