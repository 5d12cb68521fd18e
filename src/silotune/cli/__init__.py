"""The command line: the entry point `main`, and one module per group of commands.

`main` is the entry point and `app` the typer application. `console` prints, `text_input` reads texts, `init_template`
holds the example of `silotune init`. Every other file defines the commands it is named after (`catalog`: methods,
presets, parts and init; `report`: report, watch and personalization).
"""

from __future__ import annotations
