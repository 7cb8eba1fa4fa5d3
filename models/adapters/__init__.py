"""Low-rank adapters (LoRA): what they add to a model's linear layers, by row of a pass."""
