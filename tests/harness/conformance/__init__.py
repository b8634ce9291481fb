"""Test suites for any storage or planner of ``torch.distributed.checkpoint``. They run under pytest.

.. code-block:: python

    from tests.harness.conformance import StorageConformance

    class TestMyStorage(StorageConformance):
        def writer(self, path):
            return MyWriter(path)

        def reader(self, path):
            return MyReader(path)
"""

import pytest

# This comes before the suites are imported, so that a failed assert shows what it compared.
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in ("durability", "planning", "storage")))

from tests.harness.conformance.durability import DurabilityConformance  # noqa: E402
from tests.harness.conformance.planning import PlannerConformance  # noqa: E402
from tests.harness.conformance.storage import StorageConformance  # noqa: E402

__all__ = ["DurabilityConformance", "PlannerConformance", "StorageConformance"]
