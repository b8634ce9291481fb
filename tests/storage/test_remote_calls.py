"""Which failures of a store are worth another try."""

from __future__ import annotations

import pytest
import requests

from robust_dcp import StorageError
from robust_dcp.storage.remote.calls import Calls


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (429, 3), (503, 3)])
def test_the_status_of_a_store_that_answers_by_requests_decides(status: int, tries: int) -> None:
    """As of ``hf://``, ``github://`` and ``webhdfs://``: the error has no status, but its response has."""
    made: list[int] = []

    def call() -> None:
        made.append(status)
        response = requests.Response()
        response.status_code = status
        response.raise_for_status()

    with pytest.raises(StorageError, match=str(status)):
        Calls(retries=2).run("read", "hf://a/b", call)
    assert len(made) == tries
