"""PPO or GRPO: both on the same prompts and reward, and what their runs say (docs/choose.md)."""
