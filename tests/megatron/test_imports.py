"""What importing robust_dcp brings in, and what it does not."""

from __future__ import annotations

import subprocess
import sys


def test_importing_robust_dcp_does_not_import_megatron() -> None:
    code = "import sys, robust_dcp; sys.exit(any(name.partition('.')[0] == 'megatron' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
