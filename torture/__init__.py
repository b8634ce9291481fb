"""Long campaigns of random faults, each reproducible from its seed: ``make torture``. The tests run short ones."""
