"""How much memory a run needs, from shapes alone: no torch, no download."""
