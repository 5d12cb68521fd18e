"""`load_yaml` and `dump_yaml`: YAML as values and back, by libyaml (ten times faster than Python) where it is safe."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MOST_VALUES = 2_000_000
"""Values of the largest document. A short YAML text can hold more than any memory by aliases of aliases."""

_LONGEST_FOR_LIBYAML = 10_000
"""Characters. libyaml's Python wrapper recurses in C, without a limit: in a longer text, brackets within brackets could
exhaust the stack and end the process. PyYAML's own parser raises RecursionError."""


class _Checks(yaml.constructor.SafeConstructor):
    """YAML in which a key given twice is an error instead of the last one winning."""

    def construct_document(self, node: yaml.Node) -> Any:
        if _expanded_size(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_VALUES} values, with aliases in place", node.start_mark
            )
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Loader(_Checks, yaml.SafeLoader):
    """PyYAML's own parser."""


if yaml.__with_libyaml__:

    class _FastLoader(_Checks, yaml.CSafeLoader):
        """The parser of libyaml."""

else:
    _FastLoader = _Loader  # type: ignore[misc,assignment]


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text, which may come from elsewhere.

    Raises:
        yaml.YAMLError: it is no YAML, has a key twice, or holds too many values.
        ValueError: a value cannot be, such as the 99th of a month.
        RecursionError: it is nested too deeply.
    """
    return yaml.load(text, _FastLoader if len(text) <= _LONGEST_FOR_LIBYAML else _Loader)  # both are safe loaders


def dump_yaml(tree: Any) -> str:
    """Return a value as YAML, mappings in their order."""
    dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
    return yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True)


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a YAML document in which every alias is replaced by a copy.

    Raises:
        RecursionError: an alias holds itself.
    """
    if id(node) not in sizes:
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [item for pair in inner for item in pair] if isinstance(node, yaml.MappingNode) else inner
        sizes[id(node)] = 1 + sum(_expanded_size(item, sizes) for item in nodes)
    return sizes[id(node)]
