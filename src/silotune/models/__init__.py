"""From token ids to logits under a mix of parts.

Folders, each importing only those before it:
    backbone: the frozen model, and how a forward of it is changed.
    tuners: the parts that change it.
    forward: forwards under mixes of parts.
    heads: from states to logits.

`initializers` draws new tensors for tuners and heads.
"""
