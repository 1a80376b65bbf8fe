"""Builds the copy kernels; everything else is in pyproject.toml.

The library has no Python in it (it is called through ctypes), so one build serves every Python 3. It is optional: where
there is no compiler the package is installed without it.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvdepot_cpu.kernels._copy_runs",
            [f"src/kvdepot_cpu/kernels/{name}.c" for name in ("copy_runs", "copy_summed", "move_tokens")],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
