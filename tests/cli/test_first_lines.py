"""Commands answer without waiting for torch: an import of it takes longer than a person likes to wait."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# It runs a command, and notes whether torch and numpy were there when the first line came, and at the end.
_PROGRAM = """
import json, sys
heavy = lambda: sorted({"torch", "numpy", "megatron"} & set(sys.modules))
class Watched:
    first = None
    def __init__(self, stream): self.stream = stream
    def write(self, text):
        if Watched.first is None and text.strip():
            Watched.first = heavy()
        return len(text)
    def flush(self): pass
    def isatty(self): return False
    def __getattr__(self, name): return getattr(self.stream, name)
sys.stdout, sys.stderr = Watched(sys.stdout), Watched(sys.stderr)
from robust_dcp.cli.app import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv, Watched.first = ["robust-dcp", *words], None
    try:
        main()
    except SystemExit as ended:
        found.append([ended.code, Watched.first, heavy()])
sys.__stdout__.write(json.dumps(found))
"""


def watched(*commands: list[str]) -> list[tuple[int, list[str], list[str]]]:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ROBUST_DCP": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return [(code, first, end) for code, first, end in json.loads(ran.stdout)]


def test_help_listings_and_the_doctor_never_import_torch_or_numpy(originals: Path, tmp_path: Path) -> None:
    for number, kind in enumerate(("ours", "stock", "ours", "megatron")):
        shutil.copytree(originals / kind, tmp_path / f"step_{number}")
    (tmp_path / ".robust_dcp.removing.step_9").mkdir()
    note = '{"target": "s3://bucket/step_0", "digest": "another", "is_complete": false}'
    (tmp_path / "step_0/.robust_dcp.drain.json").write_text(note)
    root = str(tmp_path)
    commands = [
        ["--help"],
        ["--version"],
        ["ls", root],
        ["ls", root, "--json"],
        ["prune", root, "--keep-last", "1", "--dry-run"],
        ["report", root, "--output", f"{root}/page.html"],
        ["report", root, "--json"],
        ["doctor", root],
    ]
    for command, (code, first, end) in zip(commands, watched(*commands), strict=True):
        assert (code, first, end) == (0, [], []), command


def test_an_error_about_a_path_imports_neither(tmp_path: Path) -> None:
    nowhere, file = str(tmp_path / "nowhere"), tmp_path / "file"
    file.write_bytes(b"x")
    commands = [
        *([name, path] for name in ("ls", "verify", "doctor", "report") for path in (nowhere, str(file))),
        *(["prune", path, "--keep-last", "1"] for path in (nowhere, str(file))),
        ["verify", str(tmp_path)],
        ["copy", nowhere, str(file), "--limit", "fast"],
        ["no-such-command"],
        ["verify"],
    ]
    for command, (code, first, end) in zip(commands, watched(*commands), strict=True):
        assert (code, first, end) == (2, [], []), command
