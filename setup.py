"""Builds the package and its one native module; see native/build_binding.py for what is compiled."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

CXX_FLAGS = ["-std=c++17"]  # for .cc files only: the C compiler that sees the generated file would complain


class ParallelBuildExt(build_ext):
    """Compiles the sources in parallel, and again only those that changed.

    Objects stay in ``build/native`` also for an editable install, which otherwise builds in a folder of its own. An
    object is current when it is newer than everything in its dependency file and was compiled by the same command.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = os.path.join("build", "native")

    def build_extensions(self) -> None:
        compiler = self.compiler
        compile_one = compiler._compile

        def compile_if_changed(
            obj: str, source: str, suffix: str, cc_args: list, postargs: list, options: list
        ) -> None:
            flags = [*postargs, *(CXX_FLAGS if suffix == ".cc" else []), "-MMD", "-MF", f"{obj}.d"]
            command = repr((compiler.compiler_so, getattr(compiler, "compiler_so_cxx", None), cc_args, flags, options))
            record = Path(f"{obj}.command")
            if _is_current(Path(obj)) and record.is_file() and record.read_text() == command:
                return
            record.unlink(missing_ok=True)
            compile_one(obj, source, suffix, cc_args, flags, options)
            record.write_text(command)

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            _, objects, postargs, pp_options, build = compiler._setup_compile(
                options.get("output_dir"),
                options.get("macros"),
                options.get("include_dirs"),
                sources,
                None,
                options.get("extra_postargs"),
            )
            cc_args = compiler._get_cc_args(pp_options, options.get("debug"), options.get("extra_preargs"))
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                jobs = [pool.submit(compile_if_changed, o, *build[o], cc_args, postargs, pp_options) for o in objects]
                for job in jobs:
                    job.result()
            return objects

        compiler.compile = compile_all
        self.force = True  # the link is decided by this, and the objects by the above
        super().build_extensions()


def _is_current(obj: Path) -> bool:
    """Whether the object is newer than each file that its dependency file (a make rule) names."""
    depends = Path(f"{obj}.d")
    if not obj.is_file() or not depends.is_file():
        return False
    names = depends.read_text().replace("\\\n", " ").partition(":")[2].split()
    built_at = obj.stat().st_mtime_ns
    return all(os.path.isfile(name) and os.stat(name).st_mtime_ns < built_at for name in names)


setup(
    name="llm_datadist_ray",
    version="0.1.0",
    description="Prefill and decode of large language models in different Ray actors, over a native KV transport",
    packages=find_packages(include=["llm_datadist_ray", "llm_datadist_ray.*"]),
    package_data={"llm_datadist_ray": ["py.typed"], "llm_datadist_ray._native": ["*.pyi"]},
    python_requires=">=3.10",
    install_requires=[
        "ray>=2.40",
        "torch>=2.2",
        "numpy",
        "cffi>=1.16",
        "pydantic>=2",
        "click>=8",
        "rich>=13",
        "pyyaml>=6",
    ],
    extras_require={
        "npu": ["torch_npu"],
        "demo": ["transformers>=5.24", "gguf", "accelerate"],
        "serve": ["ray[serve]"],
        "test": ["ray[default]", "pytest>=8", "pytest-timeout", "hypothesis", "ruff", "mypy"],
    },
    cffi_modules=["native/build_binding.py:ffibuilder"],
    cmdclass={"build_ext": ParallelBuildExt},
    entry_points={"console_scripts": ["llm-datadist-ray = llm_datadist_ray.cli.main:main"]},
    zip_safe=False,
)
