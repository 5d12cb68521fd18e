"""The documentation as a site, by Sphinx: `make docs` builds it into build/docs, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.version import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = "https://github.com/silotune/silotune/blob/main"

project = "silotune"
author = "silotune contributors"
copyright = author
default_role = "code"  # docstrings write names between single backticks
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"silotune {release}"
html_static_path = ["static"]
html_js_files = ["accessible.js"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True

_OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")


def _lead_to_the_repository(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn links to files outside of docs/ into links to the repository."""
    source[0] = _OUTSIDE.sub(rf"]({REPOSITORY}/\1)", source[0])


def _write_commands(app: Sphinx) -> None:
    """Write `reference-cli.md`: every command with its arguments and options, as `--help` says them."""
    import typer
    from typer.cli import get_docs_for_click

    from silotune.cli.app import add_commands
    from silotune.cli.app import app as commands

    add_commands()
    group = typer.main.get_command(commands)
    _keep_first_sentences_whole(group)
    context = typer.Context(group, info_name="silotune")
    text = get_docs_for_click(obj=group, ctx=context, name="silotune", title="Commands")
    text = re.sub(r"\*\*Usage\*\*:\n\n```console", "**Usage**:\n\n```text", text)
    page = Path(app.srcdir) / "reference-cli.md"
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def _keep_first_sentences_whole(command: Any) -> None:
    """Keep Click from cutting the summaries of commands after 45 characters."""
    command.short_help = command.short_help or (command.help or "").split("\n\n")[0].replace("\n", " ")
    for below in getattr(command, "commands", {}).values():
        _keep_first_sentences_whole(below)


def setup(app: Sphinx) -> None:
    """Connect what the build adds to the pages."""
    from pygments.lexers.special import TextLexer

    app.add_lexer("mermaid", TextLexer)  # GitHub draws them; a site that works offline shows their text
    app.connect("builder-inited", _write_commands)
    app.connect("source-read", _lead_to_the_repository)
