"""Long campaigns of random faults: ``make torture``. Each is reproducible from its seed. The tests run short ones."""
