"""The source code that the pair was trained on: packages and their licences.

Everything is Python source under a permissive licence. Packages whose style is far from
the standard library's or which repeat themselves, give a part of their files only, as do all
packages' test folders.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A package by its import name (a folder in a `site-packages`) and licence."""

    package: str
    licence: str
    share: float = 1.0
    """Share of the package's files taken, chosen by a hash of their paths."""


STANDARD_LIBRARY_LICENCE = "PSF-2.0"

TEST_SHARE = 0.4
"""Share of the files in packages' test folders that is taken."""

INSTALLED = (
    Source("_pytest", "MIT"),
    Source("aiohttp", "Apache-2.0 AND MIT"),
    Source("anyio", "MIT"),
    Source("click", "BSD-3-Clause"),
    Source("compressed_tensors", "Apache-2.0"),
    Source("cryptography", "Apache-2.0 OR BSD-3-Clause"),
    Source("cupy", "MIT"),
    Source("cupyx", "MIT"),
    Source("datasets", "Apache-2.0"),
    Source("elftools", "Unlicense (public domain)"),
    Source("fastapi", "MIT"),
    Source("filelock", "MIT"),
    Source("fsspec", "BSD-3-Clause"),
    Source("gguf", "MIT"),
    Source("grpc", "Apache-2.0"),
    Source("huggingface_hub", "Apache-2.0"),
    Source("IPython", "BSD-3-Clause"),
    Source("jedi", "MIT"),
    Source("jinja2", "BSD-3-Clause"),
    Source("joblib", "BSD-3-Clause"),
    Source("jsonschema", "MIT"),
    Source("llvmlite", "BSD-2-Clause AND Apache-2.0 WITH LLVM-exception"),
    Source("modelscope", "Apache-2.0", 0.25),
    Source("mpmath", "BSD-3-Clause"),
    Source("mypy", "MIT"),
    Source("mypyc", "MIT"),
    Source("narwhals", "MIT"),
    Source("networkx", "BSD-3-Clause"),
    Source("numba", "BSD-2-Clause"),
    Source("numpy", "BSD-3-Clause"),
    Source("openai", "Apache-2.0", 0.25),
    Source("opentelemetry", "Apache-2.0", 0.5),
    Source("packaging", "Apache-2.0 OR BSD-2-Clause"),
    Source("pandas", "BSD-3-Clause"),
    Source("PIL", "MIT-CMU"),
    Source("pip", "MIT"),
    Source("prompt_toolkit", "BSD-3-Clause"),
    Source("pyarrow", "Apache-2.0"),
    Source("pydantic", "MIT"),
    Source("pygments", "BSD-2-Clause"),
    Source("ray", "Apache-2.0", 0.7),
    Source("rich", "MIT"),
    Source("scipy", "BSD-3-Clause"),
    Source("setuptools", "MIT"),
    Source("sglang", "Apache-2.0", 0.3),
    Source("sklearn", "BSD-3-Clause"),
    Source("sympy", "BSD-3-Clause"),
    Source("tilelang", "MIT", 0.3),
    Source("timm", "Apache-2.0", 0.5),
    Source("torch", "BSD-3-Clause", 0.7),
    Source("torchaudio", "BSD-2-Clause"),
    Source("torchvision", "BSD-3-Clause"),
    Source("transformers", "Apache-2.0", 0.3),
    Source("triton", "MIT", 0.5),
    Source("typer", "MIT"),
    Source("urllib3", "MIT"),
    Source("virtualenv", "MIT"),
    Source("websockets", "BSD-3-Clause"),
)
"""Packages that Overstory's own environment brings."""

DOWNLOADED = (
    Source("astropy", "BSD-3-Clause"),
    Source("babel", "BSD-3-Clause"),
    Source("black", "MIT"),
    Source("blib2to3", "PSF-2.0"),
    Source("bokeh", "BSD-3-Clause"),
    Source("celery", "BSD-3-Clause"),
    Source("dask", "BSD-3-Clause"),
    Source("distributed", "BSD-3-Clause"),
    Source("django", "BSD-3-Clause"),
    Source("fontTools", "MIT"),
    Source("gevent", "MIT"),
    Source("kombu", "BSD-3-Clause"),
    Source("lark", "MIT"),
    Source("matplotlib", "PSF-based (matplotlib)"),
    Source("mpl_toolkits", "PSF-based (matplotlib)"),
    Source("nltk", "Apache-2.0"),
    Source("playhouse", "MIT"),
    Source("skimage", "BSD-3-Clause"),
    Source("sphinx", "BSD-2-Clause"),
    Source("sqlalchemy", "MIT"),
    Source("statsmodels", "BSD-3-Clause"),
    Source("tornado", "Apache-2.0"),
    Source("trio", "MIT OR Apache-2.0"),
    Source("twisted", "MIT"),
    Source("werkzeug", "BSD-3-Clause"),
    Source("xarray", "Apache-2.0"),
)
"""Packages fetched for training only, from wheels unpacked into one folder."""
