"""What can be known to go wrong with a run before it begins: checks that return findings."""
