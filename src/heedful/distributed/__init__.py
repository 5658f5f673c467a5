"""Several processes that train one model: what they tell each other, and who does what."""
