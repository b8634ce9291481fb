"""``python -m robust_dcp.megatron``: a script runs as it would have run by itself, but with the flag."""

from __future__ import annotations

from pathlib import Path

from tests.megatron.small_megatron import run_python, write_small_megatron

_LAUNCHER = ("-m", "robust_dcp.megatron")
_WITHOUT_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_a_script_takes_the_flag_where_autoload_is_off(tmp_path: Path) -> None:
    script = write_small_megatron(tmp_path)
    done = run_python(*_LAUNCHER, script, "--ckpt-planner", "robust_dcp", environment=_WITHOUT_AUTOLOAD)
    assert done.stdout.endswith("planner robust_dcp\n"), done.stderr


def test_a_module_takes_the_flag(tmp_path: Path) -> None:
    write_small_megatron(tmp_path)
    flag = ("--ckpt-planner", "robust_dcp")
    done = run_python(*_LAUNCHER, "-m", "pretrain_gpt", *flag, environment=_WITHOUT_AUTOLOAD, cwd=tmp_path)
    assert done.stdout.endswith("planner robust_dcp\n"), done.stderr


def test_torchrun_starts_it(tmp_path: Path) -> None:
    script = write_small_megatron(tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    flag = ("--ckpt-planner", "robust_dcp")
    done = run_python(*torchrun, *_LAUNCHER, script, *flag, environment=_WITHOUT_AUTOLOAD)
    assert done.stdout.endswith("planner robust_dcp\n"), done.stderr


def test_without_the_flag_the_planner_is_megatron_s(tmp_path: Path) -> None:
    done = run_python(*_LAUNCHER, write_small_megatron(tmp_path), environment=_WITHOUT_AUTOLOAD)
    assert done.stdout.endswith("planner default\n"), done.stderr


def test_the_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("")
    script.write_text("import sys, beside; print(__name__, __file__, sys.argv, sys.path[0])\n")
    alone = run_python(script, "--a", "b", cwd=tmp_path)
    assert alone.returncode == 0
    assert run_python(*_LAUNCHER, script, "--a", "b", cwd=tmp_path).stdout == alone.stdout


def test_a_module_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print(__name__, __file__, sys.argv, sys.path[0], __spec__.name)\n")
    alone = run_python("-m", "module", "--a", "b", cwd=tmp_path)
    assert alone.returncode == 0
    assert run_python(*_LAUNCHER, "-m", "module", "--a", "b", cwd=tmp_path).stdout == alone.stdout


def test_the_script_s_own_end_is_the_run_s(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def fail():\n    raise LookupError('of the script')\n\nfail()\n")
    failed = run_python(*_LAUNCHER, script)
    assert failed.returncode == 1
    assert f'File "{script}", line 4, in <module>' in failed.stderr
    assert failed.stderr.endswith("LookupError: of the script\n")
    script.write_text("import sys; sys.exit(7)\n")
    assert run_python(*_LAUNCHER, script).returncode == 7


def test_without_a_script_it_says_how_to_use_it() -> None:
    done = run_python(*_LAUNCHER)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "usage: python -m robust_dcp.megatron [-m module | script.py] [arguments of the script]\n"
    )
