"""Online training on rewards of the policy's own responses: one engine with presets."""
