"""What can be set: one frozen dataclass a command, the same names in Python, YAML and flags. Torch-free."""
