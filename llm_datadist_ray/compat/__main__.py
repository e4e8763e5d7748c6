"""``python -m llm_datadist_ray.compat``: runs a program with ``llm_datadist`` being this package."""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

from llm_datadist_ray.compat import install

USAGE = """\
usage: python -m llm_datadist_ray.compat [--replace] SCRIPT [ARGS...]
       python -m llm_datadist_ray.compat [--replace] -m MODULE [ARGS...]

Runs a program as python does, with `import llm_datadist` giving the objects of llm_datadist_ray.

  --replace   even where the real llm_datadist is installed
  -h, --help  show this text\
"""


def main(arguments: list[str]) -> None:
    """Its exit code, and what it raises, are the program's own. Usage errors exit with 2."""
    replace = False
    while arguments and arguments[0].startswith("-"):
        option, *arguments = arguments
        if option in ("-h", "--help"):
            print(USAGE)
            return
        if option == "--replace":
            replace = True
        elif option == "-m" and arguments:
            _install(replace)
            _run_module(arguments)
            return
        else:
            _usage_error(f"unknown or incomplete option: {option}")
    if not arguments:
        _usage_error("SCRIPT or -m MODULE is missing")
    if not os.path.exists(arguments[0]):
        _usage_error(f"no such file: {arguments[0]}")
    _install(replace)
    _run_script(arguments)


def _usage_error(message: str) -> NoReturn:
    print(f"{USAGE}\n\n{message}", file=sys.stderr)
    sys.exit(2)


def _install(replace: bool) -> None:
    try:
        install(replace=replace)
    except ImportError as error:
        sys.exit(f"llm_datadist_ray.compat: {error}")


def _run_module(argv: list[str]) -> None:
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _run_script(argv: list[str]) -> None:
    script = argv[0]
    if not getattr(sys.flags, "safe_path", False):  # python -P: the first entry is not the working directory's
        if os.path.isfile(script):
            sys.path[0] = os.path.dirname(os.path.realpath(script))
        else:
            del sys.path[0]  # run_path puts the directory or archive there
    sys.argv = argv
    runpy.run_path(script, run_name="__main__")


main(sys.argv[1:])
