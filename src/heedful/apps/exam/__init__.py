"""The exam of a reward before PPO optimises it: what it measures, its score, its page (docs/exam.md)."""
