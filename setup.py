"""Maps the fixed top-level folders to one import package, `overstory` (docs/decisions/0001)."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("orchestrator", "workers", "kernels", "clusters")


def packages() -> list[str]:
    """Every package under the mapped folders, by its import name."""
    found = []
    for folder in FOLDERS:
        found.append(f"overstory.{folder}")
        found += [f"overstory.{folder}.{name}" for name in find_namespace_packages(folder)]
    return found


setup(packages=packages())
