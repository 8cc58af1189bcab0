"""Attention and tree ops: contracts, plain references, CUDA sources.

Imported as `overstory.kernels`. Transformers imports a package of another project named `kernels`:
where the repository root stands on `sys.path` (`python -m ...` from the checkout, a Ray worker that
inherits the driver's folder), this folder would shadow it, so under that bare name it steps aside.
`importlib.util.find_spec("kernels")` still finds this folder there: harmless, as the other package
comes with SGLang, so the name can be imported.
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    _here = Path(__file__).resolve().parent.parent
    _elsewhere = [p for p in sys.path if Path(p or ".").resolve() != _here]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _elsewhere)
    if _spec is None or _spec.loader is None:
        raise ModuleNotFoundError("No module named 'kernels'", name="kernels")
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["kernels"] = _module
    _spec.loader.exec_module(_module)
