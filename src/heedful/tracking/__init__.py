"""Metrics sent to the trackers of others, from processes of their own that cannot stop a run."""
