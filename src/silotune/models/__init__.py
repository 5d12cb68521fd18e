"""From token ids to logits under a mix of parts: backbone, tuners, forward passes, heads."""
