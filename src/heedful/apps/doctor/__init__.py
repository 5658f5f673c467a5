"""What `heedful doctor` measures before a run: sampled responses with their rewards, episodes, and the first step."""
