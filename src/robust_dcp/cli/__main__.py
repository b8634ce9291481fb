"""``python -m robust_dcp.cli``, the same as ``robust-dcp``."""

from robust_dcp.cli.app import main

main()
