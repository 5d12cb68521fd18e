"""Forward passes under mixes: views, pooling, activation caches, generation."""
