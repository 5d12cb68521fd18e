"""The CSS of the HTML report."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ground: #fff; --card: #f6f7f9; --ink: #1d2630; --soft: #5a6673; --grid: #cfd6dd;
  --mark: #0b6b3a; --warn: #fff6e0; --warn-ink: #6b4a00; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --card: #1d232a; --ink: #e4e9ee; --soft: #9aa7b4;
  --grid: #3c4754; --mark: #6fd39b; --warn: #33290f; --warn-ink: #f0d9a0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1rem 1.2rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; }
section { margin-top: 2rem; min-width: 0; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); column-gap: 1.2rem; }
.figures > .wide { grid-column: 1 / -1; }

dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
#left dt { color: var(--ink); font-weight: 600; }
.warnings { background: var(--warn); color: var(--warn-ink); border-radius: .5rem; padding: .8rem 1rem; }
.warnings ul { margin: 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-bottom: .8rem; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
.caption { color: var(--soft); font-size: .9rem; margin: 0 0 .2rem; }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--ground); }
@media (max-width: 760px) { .figures { grid-template-columns: minmax(0, 1fr); }
  th:first-child { white-space: normal; max-width: 9.5rem; min-width: 8.5rem; overflow-wrap: break-word; } }
.best { font-weight: 700; color: var(--mark); }
.second { text-decoration: underline; text-underline-offset: .2em; }
.note, figcaption { color: var(--soft); font-size: .88rem; margin: .4rem 0 0; max-width: 75ch; }
figure { margin: 0; min-height: 0; background: var(--card); border-radius: .5rem; padding: .9rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 0 0 .6rem; padding: 0;
  font-size: .88rem; }
.legend span { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: .8rem; }
.single { max-width: 620px; }
.panel svg { display: block; width: 100%; height: auto; }
details { margin: .3rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--card); padding: .8rem; border-radius: .5rem; font-size: .82rem; }
"""
