"""Neural networks: loading, saving, heads, devices, and tiny models for tests and first steps."""
