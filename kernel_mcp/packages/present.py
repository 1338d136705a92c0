"""What a session has before an installation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from kernel_mcp.environments.metadata import provided_modules
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.packages.layer import Generation, Layer, versions


@dataclass(frozen=True, slots=True)
class Present:
    """Versions and modules by package, and what has been installed so far.

    requested  requirements of earlier installs
    permitted  modules that may be imported because of them
    folders    sys.path entries of the layer, in order
    """

    versions: Mapping[str, str]
    modules: Mapping[str, tuple[str, ...]]
    requested: tuple[str, ...] = ()
    permitted: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, environment: KernelEnvironment, layer: Layer) -> Present:
        """Read it from disk."""
        modules = {name: tuple(found) for name, found in provided_modules(environment).items()}
        return cls(
            versions={**versions(environment.packages), **layer.packages()},
            modules={**modules, **layer.modules()},
            requested=layer.requested(),
            permitted=layer.permitted(),
            folders=tuple(layer.folders()),
        )

    def satisfies(self, text: str) -> bool:
        """Whether a requirement is certain to be met; with extras or markers it never is."""
        requirement = Requirement(text)
        version = self.versions.get(requirement.name)
        if version is None or requirement.extras or requirement.marker is not None:
            return False
        return requirement.specifier.contains(version, prereleases=True)

    def lacks(self, generation: Generation) -> bool:
        """Whether a generation would add anything."""
        return bool(
            generation.packages
            or not set(generation.requested) <= set(self.requested)
            or not set(generation.permitted) <= self.permitted
        )


def all_versions(environment: KernelEnvironment, layer: Path | None) -> dict[str, str]:
    """The version of every package that a session's next kernel will have, by name. Blocks."""
    added = {} if layer is None else Layer(layer).packages()
    return dict(sorted({**versions(environment.packages), **added}.items()))
