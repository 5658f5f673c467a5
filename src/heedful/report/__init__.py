"""Runs shown to people: a self-contained page, the same in the terminal, and the page served while a run goes on."""
