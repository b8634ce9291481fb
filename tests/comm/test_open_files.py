"""A rank may open the files that its connections need, or says how many it would need, before gloo ends the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(script: str) -> str:
    """What a program prints. It has a process of its own, because limits that were lowered cannot be raised again."""
    source = "import os, resource\nfrom robust_dcp.comm.open_files import ensure_open_files\n" + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_soft_limit_is_raised_so_that_all_ranks_can_be_connected_to() -> None:
    script = """
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4000))
        ensure_open_files(1000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1000)]
        print(1000 < soft < 4000, hard)
    """
    assert run(script) == "True 4000"


def test_a_limit_that_is_enough_stays_as_it_is() -> None:
    script = """
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, 4000))
        ensure_open_files(10)
        ensure_open_files(0)
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    assert run(script) == "(500, 4000)"


def test_a_hard_limit_that_is_too_low_is_an_error_that_says_what_to_set() -> None:
    script = """
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
        try:
            ensure_open_files(1000)
        except Exception as error:
            print(type(error).__name__, error)
    """
    said = run(script)
    assert said.startswith("RobustCheckpointError connecting to 1000 ranks needs 10")
    assert "this process may open 200; raise the hard limit (ulimit -Hn 2" in said
