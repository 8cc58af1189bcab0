"""Maps the fixed top-level folders to one import package, `overstory` (docs/decisions/0001)."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("orchestrator", "workers", "kernels", "clusters")


def packages() -> list[str]:
    """Every package under the mapped folders, by its import name."""
    found = []
    for folder in FOLDERS:
        inner = find_namespace_packages(folder, exclude=["*__pycache__*"])
        found += [f"overstory.{folder}", *(f"overstory.{folder}.{name}" for name in inner)]
    return found


setup(packages=packages())
