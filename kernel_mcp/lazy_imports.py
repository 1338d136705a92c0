"""Deferred imports: a module is imported when one of its names is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class LazyName:
    """A name of a module that is imported once the name is called, accessed or inherited from.

    Unions with it are lazy, too, as long as imports are deferred.
    """

    def __init__(self, finder: LazyImportFinder, load: Callable[[], Any]) -> None:
        self._finder, self._load = finder, load

    def _found(self) -> Any:
        self._finder.end()
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self._finder in sys.meta_path:  # as typing asks of any type
            raise AttributeError(name)
        return getattr(self._found(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found()(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._found()[key]

    def __or__(self, other: Any) -> Any:
        return self._finder.later(lambda: self._found() | other)

    def __ror__(self, other: Any) -> Any:
        return self._finder.later(lambda: other | self._found())

    def __get_pydantic_core_schema__(self, _source: Any, handler: Callable[[Any], Any]) -> Any:
        """See pydantic, which takes it for a type."""
        return handler(self._found())

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._found(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._found())


class _LazyModule(ModuleType):
    """Placeholder of a module: its names are `LazyName`s until `LazyImportFinder.end`."""

    finder: LazyImportFinder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.finder.later(lambda: getattr(import_module(self.__name__), name))


class LazyImportFinder(MetaPathFinder, Loader):
    """Import finder that supplies placeholders for some packages, until one of them is used."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)
        self._modules: list[_LazyModule] = []

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        parts = name.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return ModuleSpec(name, self, is_package=True) if above & self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `Loader`."""
        module = _LazyModule(spec.name)
        module.finder = self
        self._modules.append(module)
        return module

    def exec_module(self, _module: ModuleType) -> None:
        """See `Loader`."""

    def later(self, load: Callable[[], Any]) -> Any:
        """Return the result of `load`, while imports are deferred as a `LazyName`."""
        return LazyName(self, load) if self in sys.meta_path else load()

    def end(self) -> None:
        """Stop deferring: from now on imports of these modules return the real ones."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._modules:
            module = self._modules.pop()
            sys.modules.pop(module.__name__, None)
            package, _, name = module.__name__.rpartition(".")
            vars(sys.modules.get(package, module)).pop(name, None)


@contextmanager
def lazy_imports(*packages: str) -> Iterator[None]:
    """Defer first imports of these packages within the block until a name of one is used.

    After the block, imports are immediate again.
    """
    finder = LazyImportFinder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.end()
