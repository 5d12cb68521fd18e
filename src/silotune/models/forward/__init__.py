"""Forward passes of the backbone under mixes of parts: views of batches, and generation of answers."""
