"""What a caller finds in stock's writer after a save by robust_dcp is what stock leaves there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.switch.programs import run


@pytest.mark.parametrize("environment", [{}, {"ROBUST_DCP": "1"}])
def test_the_writer_has_the_id_of_the_save_that_is_in_the_metadata(environment: dict[str, str], tmp_path: Path) -> None:
    """PyTorch's own tests compare them (test_compatibility.py)."""
    script = """
        writer = FileSystemWriter(path)
        for save_again in (save, lambda *args, **kwargs: async_save(*args, **kwargs).result()):
            save_again(state, storage_writer=writer)
            found = FileSystemReader(path).read_metadata().storage_meta
            assert writer.save_id == found.save_id, (writer.save_id, found)
            assert str(found.checkpoint_id) == path
    """
    run(tmp_path, script, **environment)
