"""Settings: one frozen dataclass per command, with the same names in Python, YAML and flags. Torch-free."""
