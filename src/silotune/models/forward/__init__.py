"""Forward passes under mixes of parts.

Files, each importing only those before it:
    pooling: from states to one vector per row.
    mixing: entries and weights of a mix, and its plan.
    encoding: states of the same rows under several mixes, in as few forwards as possible.
    activation_cache: activations below the first part, kept for the whole run.
    view_cache: pooled views that do not change during a phase, kept for that phase.
    views: pooled views of batches, computed from all of the above.
    decoding: a generation in progress, one token at a time.
    end_tokens: the tokens that end an answer.
    beam_search: the best answers of all rows of a batch.
    generation: answers to prompts, greedy or by beams.
"""
