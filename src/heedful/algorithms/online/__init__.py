"""Learning from rewards of the policy's own responses: one engine, and presets of it."""
