"""How a described loop runs: recorded, compiled, stacked, and within which memory."""
