"""What a rank holds: the items of a state dict, their structure, and their data when it is written."""
