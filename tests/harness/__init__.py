"""What tests and torture share: real ranks, faults, disks, damage, pretended nodes, and state dicts of every kind."""
