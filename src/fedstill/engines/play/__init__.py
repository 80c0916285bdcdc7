"""Who plays a step: node after node, in stacks, on streams, or without training."""
