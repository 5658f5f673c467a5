"""What `heedful doctor` measures before a run: sampled responses with their rewards, and the first step."""
