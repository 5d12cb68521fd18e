"""The registries of methods, tuners, heads, kinds of tasks, aggregations, codecs, which other packages add to.

They add by a call (`silotune.register_method`), or by an entry point of the group `silotune.methods`, and so on for
every kind. A process reads a group once: when a name is looked up that is not registered, or when all names are listed.
So every process of a run finds the same names.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from silotune.config.validators import NAME_RULE, is_name
from silotune.errors import InputError, unknown_name_error

T = TypeVar("T")
Class = TypeVar("Class", bound=type[Any])


class Registry(Mapping[str, T]):
    """Maps unique names to the objects of one kind: built-in ones and plug-ins.

    Args:
        kind: the kind in the singular, as error lines name it; the entry-point group is `silotune.<kind>s`.
        reserved: names that plug-ins cannot take: those of built-in objects that are loaded later, or made without
            this registry. They are listed first and known without an import.
        home: the module that sets `built_in`, the built-in objects in listing order; a look-up imports it.
    """

    def __init__(self, kind: str, home: str, reserved: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.home = home
        self.group = f"silotune.{kind}s"
        self.reserved = reserved
        self.problem: Callable[[object], str | None] = lambda value: None
        """Returns why an object cannot be registered, or None; the room that defines the objects sets it."""
        self.built_in: dict[str, T] = {}
        self._registered: dict[str, T] = {}
        self._loaded = False
        self._lock = threading.RLock()

    def register(self, name: str, value: T) -> None:
        """Add an object; adding the same object again changes nothing."""
        problem = self.problem(value)
        if not name:
            reason = problem or "has no name; set its attribute 'name'"
            raise InputError(f"{self.kind} {value!r}: {reason}")
        if not isinstance(name, str) or not is_name(name) or " " in name:
            raise InputError(f"{self.kind} {name!r}: cannot be a name; allowed: {NAME_RULE} (no spaces)")
        if name in self.reserved or self._known.get(name, value) is not value:
            raise InputError(f"{self.kind} {name!r}: there is one of this name already; choose another name")
        if problem:
            raise InputError(f"{self.kind} {name!r}: {problem}")
        self._registered[name] = value

    def register_class(self, value: Class) -> Class:
        """Make a class known in this process, under its `name`; also a decorator of it.

        Processes that a run starts know it if their script or an entry point of the registry's group registers it.
        """
        self.register(getattr(value, "name", ""), cast(T, value))
        return value

    def register_as(self, name: str, value: T | None = None) -> Any:
        """Add an object and return it; with the name alone, return a decorator that does so."""
        if not isinstance(name, str):
            raise InputError(f"{self.kind} {name!r}: give its name first, as in register_{self.kind}('name')")
        if value is None:
            return partial(self.register_as, name)
        self.register(name, value)
        return value

    @property
    def names(self) -> list[str]:
        """All names: the reserved ones first."""
        return [*self.reserved, *sorted({*self} - {*self.reserved})]

    def find(self, name: str) -> T:
        """Return the object of this name."""
        if name not in self:
            raise unknown_name_error(self.kind, name, self.names)
        return self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._known and name not in self.reserved:
            self._load_entry_points()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(tuple(self._known))

    def __len__(self) -> int:
        self._load_entry_points()
        return len(self._known)

    @property
    def _known(self) -> ChainMap[str, T]:
        """The built-in objects, then those that were registered."""
        import_module(self.home)
        return ChainMap(self._registered, self.built_in)

    def _load_entry_points(self) -> None:
        with self._lock:
            if self._loaded:
                return
            self._loaded = True  # before the imports: a plug-in may itself ask for names
            try:
                for entry in sorted(entry_points(group=self.group)):
                    self._load(entry)
            except BaseException:
                self._loaded = False
                raise

    def _load(self, entry: EntryPoint) -> None:
        """Import a plug-in and register it; a module registers its objects itself when it is imported."""
        where = f"entry point {entry.name!r} = {entry.value!r} of group {self.group}"
        if entry.dist is not None:
            where += f" (package {entry.dist.name})"
        try:
            value = entry.load()
            if not isinstance(value, ModuleType) and not any(value is other for other in self._known.values()):
                self.register(value.name if isinstance(getattr(value, "name", None), str) else entry.name, value)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{where}: cannot be imported ({type(error).__name__}: {reason})") from error


METHODS: Registry[Any] = Registry("method", "silotune.methods.catalog")

TUNERS: Registry[Any] = Registry("tuner", "silotune.models.tuners")

HEADS: Registry[Any] = Registry(
    "head", "silotune.models.heads", ("mlp", "linear", "verbalizer", "lm", "dpo", "entities", "retrieval")
)

KINDS: Registry[Any] = Registry(
    "kind",
    reserved=("classification", "regression", "multilabel", "generation", "entities", "retrieval"),
    home="silotune.data.kinds",
)
"""Kinds of tasks, subclasses of `silotune.data.kinds.Kind`."""

AGGREGATIONS: Registry[Any] = Registry(
    "aggregation",
    "silotune.methods.catalog",
    (
        *("uniform", "samples", "median", "flexlora", "hetlora", "fedsvd", "fedex-lora", "flora", "lora-fair"),
        *("rest-of-world", "flora-na", "trimmed-mean", "krum", "multi-krum"),
    ),
)
"""`runs.build.coordinator.make_aggregation` makes the reserved ones, whose options are keys of the section."""

CODECS: Registry[Any] = Registry("codec", "silotune.communication.uplink", ("fp16", "int8", "int4"))
"""`communication.uplink.make_pipeline` makes the reserved ones, whose options are keys of the section."""


def subclass_problem(base: type) -> Callable[[object], str | None]:
    """Make the `problem` of a registry of classes: allowed are complete subclasses of `base`."""

    def problem(value: object) -> str | None:
        if not (isinstance(value, type) and issubclass(value, base)):
            return f"must be a subclass of {base.__name__} (got {value!r})"
        missing = sorted(getattr(value, "__abstractmethods__", ()))
        return f"class {value.__name__} does not define {', '.join(missing)}" if missing else options_problem(value)

    return problem


def options_problem(value: object) -> str | None:
    """Return why a plug-in's `Options` cannot be used; None if they can, or if it has none."""
    options = getattr(value, "Options", None)
    if options is None or (isinstance(options, type) and issubclass(options, BaseModel)):
        return None
    return f"its Options must be a subclass of pydantic's BaseModel (got {options!r})"
