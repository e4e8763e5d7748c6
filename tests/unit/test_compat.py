"""``import llm_datadist`` gives this package's objects (spec api-types §1)."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import llm_datadist_ray
from llm_datadist_ray.compat.modules import HOMES

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "import sys, llm_datadist_ray.compat as compat\ncompat.install()\n"

# Spec api-types §1: the modules, and the names in them that clients use.
CLIENT_NAMES = {
    "llm_datadist.v2.llm_types": "Cache RegisterMemStatus TransferWithCacheKeyConfig CacheDesc CacheKey "
    "CacheKeyByIdAndIndex BlocksCacheKey Placement MemInfo Memtype LayerSynchronizer TransferConfig",
    "llm_datadist.v2.llm_utils": "TransferConfig LayerSynchronizer CacheTask",
    "llm_datadist.v2.cache_manager": "CacheManager",
    "llm_datadist.v2.llm_datadist": "LLMDataDist _shutdown_handler",
    "llm_datadist.v2.config": "LLMConfig LlmConfig",
    "llm_datadist.status": "LLMStatusCode LLMException Status code_2_status handle_llm_status raise_if_false "
    "raise_if_true",
    "llm_datadist.configs": "LLMRole LLMClusterInfo LlmConfig",
    "llm_datadist.data_type": "DataType dtype_to_np_dtype valid_np_dtypes np_dtype_to_dtype "
    "python_dtype_2_dwrapper_dtype get_python_dtype_from_wrapper_dtype",
    "llm_datadist.utils.utils": "check_isinstance check_dict check_inner check_uint8 check_uint16 check_uint32 "
    "check_uint64 check_int32 check_int64 check_list_int32 check_list_int64 check_list_uint64 "
    "check_positive_or_set_default",
    "llm_datadist.utils.log": "debug info warn error",
}


def python(*arguments: str, cwd: Path | None = None, code: int = 0) -> str:
    """What a fresh interpreter prints, to standard output or on failure to standard error."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd or ROOT, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return (done.stderr if code else done.stdout).strip()


def compat(*arguments: str, cwd: Path | None = None, code: int = 0) -> str:
    return python("-m", "llm_datadist_ray.compat", *arguments, cwd=cwd, code=code)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A directory with a package of upstream's name."""
    (tmp_path / "llm_datadist").mkdir()
    (tmp_path / "llm_datadist/__init__.py").write_text("LLMRole = 'of the real one'\n")
    return tmp_path


# What is imported


def test_1_top_level_names_are_this_packages_objects() -> None:
    program = (
        "import llm_datadist, llm_datadist_ray\n"
        "for name in llm_datadist_ray.v2_list + ['Tensor', 'TensorDesc', 'MemType']:\n"
        "    assert getattr(llm_datadist, name) is getattr(llm_datadist_ray, name), name\n"
        "assert llm_datadist.v2_list is llm_datadist_ray.v2_list\n"
        "assert len(set(llm_datadist.__all__)) == 26 and set(llm_datadist.v2_list) < set(llm_datadist.__all__)\n"
        "assert set(llm_datadist.__all__) <= set(dir(llm_datadist))\n"
        "from llm_datadist_ray.kv_cache import KvCacheManager\n"
        "assert llm_datadist.KvCacheManager is KvCacheManager\n"
        "import llm_datadist_v1\n"
        "assert llm_datadist_v1.LLMStatusCode is llm_datadist.LLMStatusCode\n"
    )
    python("-c", INSTALL + program)


def test_1_star_import() -> None:
    program = "from llm_datadist import *\nimport llm_datadist\nprint(set(llm_datadist.__all__) - set(globals()))"
    assert python("-c", INSTALL + program) == "set()"


def test_1_submodules_and_their_names() -> None:
    program = (
        "import importlib, importlib.util, llm_datadist_ray\n"
        f"for module_name, names in {CLIENT_NAMES!r}.items():\n"
        "    module = importlib.import_module(module_name)\n"
        "    assert module.__spec__.name == module.__name__ == module_name and module.__loader__, module\n"
        "    assert module.__package__ == module_name.rpartition('.')[0]\n"
        "    assert importlib.util.find_spec(module_name) is module.__spec__\n"
        "    for name in names.split():\n"
        "        value = getattr(module, name)\n"
        "        if name in llm_datadist_ray.__all__:\n"
        "            assert value is getattr(llm_datadist_ray, name), (module_name, name)\n"
        "        if not name.startswith('_'):\n"
        "            assert name in dir(module), (module_name, name)\n"
    )
    python("-c", INSTALL + program)


def test_1_star_import_of_every_submodule_takes_no_module_of_ours() -> None:
    lines = "".join(f"from {name} import *\n" for name in CLIENT_NAMES)
    program = "import types\nprint([k for k, v in list(globals().items()) if type(v) is types.ModuleType])"
    assert python("-c", INSTALL + lines + program) == "['__builtins__', 'sys', 'compat', 'types']"


def test_1_submodules_are_attributes_after_import_of_the_package() -> None:
    program = "import llm_datadist\nprint(llm_datadist.v2.llm_types.Cache.__name__, llm_datadist.status.__name__)"
    assert python("-c", INSTALL + program) == "Cache llm_datadist.status"


def test_1_log_functions_write_to_the_logger() -> None:
    program = "from llm_datadist.utils import log\nlog.error('of %d', 7)\nlog.debug('not shown')"
    line = python("-c", INSTALL + program)
    assert line.startswith("[ERROR] LLM_DATADIST(")
    assert line.endswith(": of 7")


@pytest.mark.parametrize("module", sorted(HOMES))
def test_1_unknown_attributes(module: str) -> None:
    program = f"import importlib\nimportlib.import_module({module!r}).nonsense"
    assert f"AttributeError: module '{module}' has no attribute 'nonsense'" in python("-c", INSTALL + program, code=1)


@pytest.mark.parametrize(("statement", "text"), [
    ("from llm_datadist import nonsense", "cannot import name 'nonsense'"),
    ("from llm_datadist import DisaggCluster", "cannot import name 'DisaggCluster'"),
    ("from llm_datadist import CacheManager", "cannot import name 'CacheManager'"),
    ("import llm_datadist.nonsense", "No module named 'llm_datadist.nonsense'"),
])  # fmt: skip
def test_1_unknown_names_are_import_errors(statement: str, text: str) -> None:
    assert text in python("-c", INSTALL + statement, code=1)


def test_objects_pickle_and_old_names_unpickle() -> None:
    program = (
        "import pickle, llm_datadist, llm_datadist.status\n"
        "error = llm_datadist.LLMException('x', status_code=llm_datadist.LLMStatusCode.LLM_TIMEOUT)\n"
        "again = pickle.loads(pickle.dumps(error))\n"
        "assert type(again) is llm_datadist.LLMException and again.status_code == error.status_code\n"
        "assert pickle.loads(b'cllm_datadist.status\\nLLMException\\n.') is llm_datadist.LLMException\n"
    )
    python("-c", INSTALL + program)


@pytest.mark.parametrize("statement", ["", "import llm_datadist", "from llm_datadist import LLMConfig, CacheDesc"])
def test_installing_is_light(statement: str) -> None:
    program = (
        f"{statement}\n"
        "print(*(name for name in ('ray', 'torch', 'numpy', 'llm_datadist_ray._native') if name in sys.modules))"
    )
    assert python("-c", INSTALL + program) == ""


# The real package


def test_installing_twice_adds_one_finder() -> None:
    program = "before = list(sys.meta_path)\nimport llm_datadist\ncompat.install()\nprint(sys.meta_path == before)"
    assert python("-c", INSTALL + program) == "True"


def test_a_real_installation_is_not_shadowed(real: Path) -> None:
    error = python("-c", f"import sys\nsys.path.append({str(real)!r})\n{INSTALL}", code=1)
    assert f"ImportError: the real llm_datadist is installed, at {real}" in error
    assert "replace=True" in error


def test_a_real_installation_is_replaced_when_asked_to(real: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(real)!r})\nimport llm_datadist_ray.compat\n"
        "llm_datadist_ray.compat.install(replace=True)\nimport llm_datadist\nprint(llm_datadist.LLMRole.MIX)"
    )
    assert python("-c", program) == "LLMRole.MIX"


@pytest.mark.parametrize("replace", [False, True])
def test_a_real_one_that_is_imported_already(real: Path, replace: bool) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(real)!r})\nimport llm_datadist, llm_datadist_ray.compat\n"
        f"llm_datadist_ray.compat.install(replace={replace})"
    )
    error = python("-c", program, code=1)
    assert "ImportError: llm_datadist has been imported already, from" in error
    assert str(real) in error


def test_a_mere_directory_of_that_name_is_no_installation(tmp_path: Path) -> None:
    (tmp_path / "llm_datadist").mkdir()
    program = f"import llm_datadist\nprint(llm_datadist.LLMRole.MIX)\nassert {str(tmp_path)!r} in sys.path"
    assert python("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{INSTALL}{program}") == "LLMRole.MIX"


# The command


def test_command_runs_a_script_as_python_does(tmp_path: Path) -> None:
    script = tmp_path / "scripts/client.py"
    script.parent.mkdir()
    script.with_name("beside.py").write_text("NAME = 'beside'\n")
    body = "import sys, beside\nprint(__name__, __file__, sys.argv, sys.path, beside.NAME)\n"
    script.write_text(body)
    by_python = python(str(script), "-m", "--help", "x y", cwd=tmp_path)
    script.write_text(f"import llm_datadist\nassert llm_datadist.LLMRole\n{body}")
    assert compat(str(script), "-m", "--help", "x y", cwd=tmp_path) == by_python


def test_command_runs_a_module_as_python_does(tmp_path: Path) -> None:
    package = tmp_path / "client"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:], sys.path)\n")
    by_python = python("-m", "client", "-m", "--replace", cwd=tmp_path)
    (package / "__main__.py").write_text(
        "import sys, llm_datadist\nprint(__name__, __package__, sys.argv[1:], sys.path)\n"
    )
    assert compat("-m", "client", "-m", "--replace", cwd=tmp_path) == by_python


def test_command_lets_the_programs_classes_pickle(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import pickle, llm_datadist\n"
        "class Mine(llm_datadist.LayerSynchronizer):\n    def synchronize_layer(self, layer, timeout): return True\n"
        "print(type(pickle.loads(pickle.dumps(Mine()))) is Mine)\n"
    )
    assert compat(str(script)) == "True"


def test_command_exit_code_and_exception_are_the_programs(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text("import sys\nsys.exit(7)\n")
    compat(str(script), code=7)
    script.write_text("raise KeyError('mine')\n")
    assert compat(str(script), code=1).endswith("KeyError: 'mine'")


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["--replace", "--help"]])
def test_command_help(arguments: list[str]) -> None:
    text = compat(*arguments)
    assert "--replace" in text
    assert "-m MODULE" in text


@pytest.mark.parametrize(("arguments", "text"), [
    ([], "SCRIPT or -m MODULE is missing"),
    (["--replace"], "SCRIPT or -m MODULE is missing"),
    (["--nonsense", "x.py"], "unknown or incomplete option: --nonsense"),
    (["-m"], "unknown or incomplete option: -m"),
    (["no_such_file.py"], "no such file: no_such_file.py"),
])  # fmt: skip
def test_command_usage_errors(arguments: list[str], text: str) -> None:
    assert text in compat(*arguments, code=2)


def test_command_and_a_real_installation(real: Path) -> None:
    """``python -m`` has the working directory on its path."""
    script = real / "client.py"
    script.write_text("import llm_datadist\nprint(llm_datadist.LLMRole)\n")
    assert f"the real llm_datadist is installed, at {real}" in compat(str(script), cwd=real, code=1)
    assert compat("--replace", str(script), cwd=real) == "<enum 'LLMRole'>"


def test_every_home_exists() -> None:
    for homes in HOMES.values():
        for home in homes:
            assert importlib.import_module(home)
    assert llm_datadist_ray.v2_list
