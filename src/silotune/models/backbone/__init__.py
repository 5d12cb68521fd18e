"""The frozen Hugging Face model, and how one forward of it is changed.

Files, each importing only those before it:
    allocator: the C library's allocator keeps freed memory for the next batch.
    architectures: table of model families, the names of their modules and their positions.
    shared_activations: activations below the first part, shared by forwards over the same rows.
    kv_prefix: prefixes as transformers' past keys and values.
    kv_cache: the growing cache of a generation.
    virtual_tokens: prompts and prefixes put before a batch: embeddings, masks, positions.
    base_forward: one forward of an encoder, decoder or encoder–decoder over such a batch.
    forward_plan: what one forward adds to or replaces in the backbone.
    stacking: several views of the same rows in one forward.
    segments: rows of several silos in one forward.
    hooks: hooks that apply a plan to the modules.
    quantization: linear layers stored in 8 or 4 bits.
    lm_head: the model's own language-model head, over given states.
    backbone: `Backbone`, which runs plans.
    shared_weights: weights that loading converts, once per machine.
    memory: a device's free memory, and whether weights fit into it.
    fingerprint: the digest of stored weights, kept between starts.
    loading: a `Backbone` from the hub, a folder or the offline default.
"""
