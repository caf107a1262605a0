"""The doctor says one line a check, survives a device that dies or hangs, and tells nothing of who asks."""

import getpass
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from graphcap.ops import device, doctor, machine

ROOT = Path(__file__).resolve().parents[2]
NAMES = [machine.name_of(function) for function, *_ in (*machine.CHECKS, *device.DEVICE_CHECKS)]
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiles kernels where there is a GPU; tests/cuda looks at those"
)


@NO_GPU
def test_every_check_is_one_line_and_the_json_has_the_same_soon_and_without_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home_of_nobody"))
    monkeypatch.setenv("LOGNAME", "nobody_at_all")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "home_of_nobody" / "kernels_of_nobody_at_all" / "nobody_at_all"))
    lines, documents = [], []
    began = time.monotonic()
    code = doctor.run(False, lines.append)
    assert time.monotonic() - began < 60  # a hang, not a speed: a check of a GPU that is not there must not wait
    assert doctor.run(True, documents.append) == code
    assert [text[6:20].strip() for text in lines[:-1]] == NAMES and not any("\n" in text for text in lines)
    assert len(documents) == 1
    checks = json.loads(documents[0])
    assert [check["check"] for check in checks] == NAMES
    assert all(list(check) == ["check", "state", "found", "needed", "fix"] for check in checks)
    assert code == (2 if any(check["state"] == "fail" for check in checks) else 0)
    gpu = {check["check"]: check for check in checks}["gpu"]
    assert gpu["state"] == "skip" and gpu["found"].endswith("not checked")
    user = getpass.getuser()
    said = "\n".join(lines + documents)
    assert "~/kernels_of_nobody_at_all/USER" in said
    for private in (str(tmp_path), "home_of_nobody", socket.gethostname(), str(Path("~root").expanduser()), f"/{user}"):
        assert private not in said, private


def test_the_modules_load_no_torch():
    asked = "import sys, graphcap.ops.doctor; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_must_fail_an_exception_in_a_check_is_a_failed_line_and_the_exit_code_2(monkeypatch):
    def check_breaks():
        raise KeyError("two\nlines")

    monkeypatch.setattr(machine, "CHECKS", ((check_breaks, "something", "do this"),))
    monkeypatch.setattr(device, "DEVICE_CHECKS", ())
    lines = []
    assert doctor.run(False, lines.append) == 2
    assert lines[0].startswith("fail  breaks") and "KeyError" in lines[0] and lines[0].endswith("something. Fix: do this")
    assert "\n" not in lines[0] and "breaks" in lines[1]
    monkeypatch.setattr(machine, "CHECKS", ((lambda: ("warn", "odd"), "something", "do this"),))
    assert doctor.run(False, lines.append) == 0


@pytest.mark.parametrize(
    "death, said",
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("raise SystemExit('a word')", "a word"),
        ("import time; time.sleep(99)", ""),
    ],
)
def test_must_fail_a_process_of_device_checks_that_dies_or_hangs_fails_one_check_and_skips_the_rest(monkeypatch, death, said):
    first = json.dumps({"name": "driver", "state": "ok", "found": "x", "needed": "", "fix": ""})
    fake = f"import sys; print('noise'); print({first!r}, flush=True); {death}"
    real = subprocess.Popen
    monkeypatch.setattr(doctor, "DEVICE_S", 99 if said else 3)
    monkeypatch.setattr(doctor.subprocess, "Popen", lambda command, **options: real([*command[:2], fake], **options))
    driver, gpu, *rest = doctor.device_checks()
    assert (driver.state, gpu.name, gpu.state) == ("ok", "gpu", "fail") and (said or "no answer") in gpu.found
    assert [check.name for check in rest] == NAMES[-len(rest) :] and {check.state for check in rest} == {"skip"}


def test_home_user_and_host_are_left_out_and_words_that_only_begin_like_them_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/data/people/zoe")
    monkeypatch.setenv("USER", "zoe")
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "node-7.cluster.org")
    assert doctor.private("/data/people/zoe/x and /data/people/zoeller") == "~/x and /data/people/zoeller"
    assert doctor.private("'/home/someone/y': no") == "'~/y': no"
    assert doctor.private("/scratch/zoe/z on node-7 (node-7.cluster.org)") == "/scratch/USER/z on HOST (HOST)"
    monkeypatch.setenv("HOME", "/")
    assert doctor.private("/usr/bin/gcc") == "/usr/bin/gcc"
