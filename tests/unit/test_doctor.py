"""The doctor reads what programs and files say, survives what a check does, and tells nothing of who asks."""

import getpass
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import graphcap
from graphcap.model.attention import DenseAttention
from graphcap.ops import doctor
from tests.toys import fresh_seed

ROOT = Path(__file__).resolve().parents[2]
NAMES = [doctor.name_of(function) for function, *_ in (*doctor.CHECKS, *doctor.DEVICE_CHECKS)]
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiles kernels where there is a GPU; tests/cuda looks at those"
)


def check_of(function) -> doctor.Check:
    return doctor.guarded((function, "needed", "fix"))


def program(folder: Path, name: str, text: str) -> None:
    """A program that others find by PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A PATH with nothing but this folder, for programs that answer as the test says."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    doctor._smi.cache_clear()
    return tmp_path


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


def test_the_module_loads_no_torch():
    asked = "import sys, graphcap.ops.doctor; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_must_fail_an_exception_in_a_check_is_a_failed_line_and_the_exit_code_2(monkeypatch):
    def _breaks():
        raise KeyError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", ((_breaks, "something", "do this"),))
    monkeypatch.setattr(doctor, "DEVICE_CHECKS", ())
    lines = []
    assert doctor.run(False, lines.append) == 2
    assert lines[0].startswith("fail  breaks") and "KeyError" in lines[0] and lines[0].endswith("something. Fix: do this")
    assert "\n" not in lines[0] and "breaks" in lines[1]
    monkeypatch.setattr(doctor, "CHECKS", ((lambda: ("warn", "odd"), "something", "do this"),))
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
    driver, gpu, *rest = doctor._device_checks()
    assert (driver.state, gpu.name, gpu.state) == ("ok", "gpu", "fail") and (said or "no answer") in gpu.found
    assert [check.name for check in rest] == NAMES[-len(rest) :] and {check.state for check in rest} == {"skip"}


def test_a_program_that_hangs_is_ended_with_its_children_and_one_that_is_missing_is_skipped(machine):
    program(machine, "hangs", "echo started; /bin/sleep 98 & /bin/sleep 99")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="hangs gave no answer in 0.5 s"):
        doctor.output(["hangs"], seconds=0.5)
    assert time.monotonic() - began < 30
    assert check_of(lambda: doctor.output(["not-there"])).state == "skip"
    program(machine, "fine", "printf 'one\\ntwo'; echo bad >&2; exit 3")
    assert doctor.output(["fine"]) == (3, "one\ntwobad")


def test_home_user_and_host_are_left_out_and_words_that_only_begin_like_them_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/data/people/zoe")
    monkeypatch.setenv("USER", "zoe")
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "node-7.cluster.org")
    assert doctor.private("/data/people/zoe/x and /data/people/zoeller") == "~/x and /data/people/zoeller"
    assert doctor.private("'/home/someone/y': no") == "'~/y': no"
    assert doctor.private("/scratch/zoe/z on node-7 (node-7.cluster.org)") == "/scratch/USER/z on HOST (HOST)"
    monkeypatch.setenv("HOME", "/")
    assert doctor.private("/usr/bin/gcc") == "/usr/bin/gcc"


# Versions and packages


def test_releases_are_compared_as_numbers_and_a_version_without_them_is_an_error():
    minor = random.Random(fresh_seed()).randrange(10, 99)
    assert doctor.release(f"5.{minor}.0.dev3+g1") == (5, minor) > doctor.release("5.9.1")
    for odd in ("", "nightly", "5"):
        with pytest.raises(ValueError, match="does not begin"):
            doctor.release(odd)


@pytest.mark.parametrize(
    "function, version, state",
    [
        (doctor._transformers, "5.17.0", "ok"),
        (doctor._transformers, "5.24.1", "ok"),
        (doctor._transformers, "5.25.0.dev0", "warn"),
        (doctor._transformers, "4.57.3", "fail"),
        (doctor._torch, "2.11.0+cu130", "ok"),
        (doctor._torch, "2.99.0", "warn"),
        (doctor._torch, "2.9.1", "fail"),
        (doctor._torch, None, "fail"),
    ],
)
def test_versions_that_ran_newer_ones_and_too_old_ones(monkeypatch, function, version, state):
    def answer(name: str) -> str:
        if version is None:
            raise doctor.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor.metadata, "version", answer)
    assert check_of(function).state == state


def test_must_fail_another_package_named_graphcap_is_found(tmp_path, monkeypatch):
    for name, state in (("graphcap-engine", "ok"), ("graphcap", "fail")):
        folder = tmp_path / name / f"{name.replace('-', '_')}-3.1.4.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1.4\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder.parent)
            check = check_of(doctor._package)
        assert check.state == state and ("graphcap 3.1.4" in check.found) == (state == "fail")
    monkeypatch.setattr(graphcap, "__file__", str(tmp_path / "graphcap" / "__init__.py"))
    assert check_of(doctor._package).state == "fail"


@pytest.mark.parametrize("gpu, state", [(True, "fail"), (False, "warn")])
def test_a_missing_compiler_fails_where_there_is_a_gpu_and_a_bare_cc_is_none_for_triton(machine, monkeypatch, gpu, state):
    monkeypatch.setattr(doctor, "gpu_in_machine", lambda: gpu)
    assert (check_of(doctor._compiler).state, check_of(doctor._python_headers).state) in ((state, "skip"), (state, state))
    program(machine, "cc", "exit 0")
    assert (check_of(doctor._compiler).state, check_of(doctor._compiler).fix) == (state, "export CC=cc")
    monkeypatch.setenv("CC", "not-there")
    assert "CC names no program" in check_of(doctor._compiler).found
    monkeypatch.setenv("CC", "cc")
    assert check_of(doctor._compiler).state == "ok"


def test_headers_count_only_if_the_compiler_takes_them(machine, monkeypatch):
    monkeypatch.setattr(doctor, "gpu_in_machine", lambda: True)
    include = machine / "include"
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name, scheme: str(include))
    assert "no Python.h" in check_of(doctor._python_headers).found
    include.mkdir()
    (include / "Python.h").write_text("")
    program(machine, "gcc", "exit 0")
    assert check_of(doctor._python_headers).state == "ok"
    program(machine, "gcc", "echo 'stub.c:1: fatal error: stdio.h: No such file'; exit 1")
    check = check_of(doctor._python_headers)
    assert check.state == "fail" and "stdio.h" in check.found


# Files of the system

MOUNTS = """overlay / overlay rw,relatime 0 0
tmpfs /dev/shm tmpfs rw,nosuid,size=65536k 0 0
server:/export/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0n1 /home/big\\040disk ext4 rw,noexec,relatime 0 0
odd line
10.0.0.1@tcp:/fs /lustre lustre rw 0 0
/dev/sdb /lustre/local xfs rw 0 0
tmpfs /lustre/local tmpfs rw 0 0
gcsfuse /bucket fuse.gcsfuse rw 0 0
fuse-overlayfs /rootless fuse.fuse-overlayfs rw 0 0
"""


@pytest.mark.parametrize(
    "path, kind, network",
    [
        ("/opt/x", "overlay", False),
        ("/home/zoe/.cache", "nfs4", True),
        ("/homely/x", "overlay", False),
        ("/home/big disk/x", "ext4", False),
        ("/lustre/me", "lustre", True),
        ("/lustre/local/me", "tmpfs", False),
        ("/bucket", "fuse.gcsfuse", True),
        ("/rootless/x", "fuse.fuse-overlayfs", False),
    ],
)
def test_the_file_system_of_a_path_is_the_last_mount_nearest_to_it(path, kind, network):
    found, options = doctor.file_system(Path(path), MOUNTS)
    assert found == kind and bool(doctor.NETWORK.fullmatch(found)) == network
    assert ("noexec" in options) == ("big disk" in path)
    assert doctor.file_system(Path(path), "")[0] == "unknown"


@pytest.mark.parametrize("kind, options, state", [("ext4", [], "ok"), ("nfs", [], "warn"), ("ext4", ["noexec"], "fail")])
def test_caches_over_a_network_warn_and_those_that_cannot_run_or_be_written_fail(tmp_path, monkeypatch, kind, options, state):
    monkeypatch.setattr(doctor, "file_system", lambda path, mounts: (kind, options))
    for name in doctor.CACHES:
        monkeypatch.setenv(name, str(tmp_path / "not" / "there" / "yet"))
    assert check_of(doctor._caches).state == state
    assert list(tmp_path.iterdir()) == []

    def refuse(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    check = check_of(doctor._caches)
    assert check.state == "fail" and "Read-only" in check.found


def test_room_of_a_control_group_counts_cache_that_can_be_given_up():
    rng = random.Random(fresh_seed())
    limit, used, idle = rng.randrange(10**9, 10**10), rng.randrange(10**8, 10**9), rng.randrange(10**7)
    stat = f"anon 5\ninactive_file {idle}\nactive_file 7\n"
    assert doctor.cgroup_room(f"{limit}\n", f"{used}\n", stat) == limit - used + idle
    assert (
        doctor.cgroup_room(f"{limit}", f"{used}", f"inactive_file 1\ntotal_inactive_file {idle}".split("\n")[1])
        == limit - used + idle
    )
    assert doctor.cgroup_room(f"{limit}", f"{used}", "") == limit - used
    assert doctor.cgroup_room("max\n", f"{used}", stat) == float("inf")


def test_must_warn_low_room(monkeypatch):
    usage = type("usage", (), {})
    for function, least in ((doctor._shared_memory, doctor.SHARED_MIB * 2**20), (doctor._disk, doctor.DISK_GIB * 2**30)):
        for free, state in ((least, "ok"), (least - 1, "warn")):
            monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
            usage.free = free
            assert check_of(function).state == state
    monkeypatch.setattr(doctor, "_cgroup_rooms", lambda: [float("inf"), 3 * 2**20])
    check = check_of(doctor._memory)
    assert (check.state, check.found) == ("warn", "3 MiB free")


@pytest.mark.parametrize(
    "files, locked, fix",
    [
        ((4096, 4096), -1, ""),
        ((1024, 10**6), -1, "ulimit -n 4096"),
        ((1024, 1024), 64 * 2**20, "docker run --ulimit nofile=4096"),
        ((-1, -1), 65536, "docker run --ulimit memlock=-1"),
    ],
)
def test_limits_name_the_command_that_raises_them(monkeypatch, files, locked, fix):
    limits = {doctor.resource.RLIMIT_NOFILE: files, doctor.resource.RLIMIT_MEMLOCK: (locked, locked)}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: limits.get(kind, (0, 0)))
    check = check_of(doctor._limits)
    assert (
        check.state == ("warn" if fix else "ok")
        and check.fix.startswith(fix)
        and ("unlimited" in check.found) == (locked == -1)
    )


# The driver

XIDS = """[   12.1] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06
Jan 02 03:04:05 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python3, Ch 00000010, intr 00000000. MMU Fault
[99.9] NVRM: Xid (PCI:0000:86:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[100.0] usb 1-1: something else
"""


def test_the_last_xid_is_told_without_host_and_process():
    assert doctor.last_xid(XIDS) == "Xid 79 of PCI:0000:86:00: GPU has fallen off the bus."
    earlier = doctor.last_xid(XIDS.split("[99.9]")[0])
    assert earlier.startswith("Xid 31 of PCI:0000:3b:00: Ch") and "node7" not in earlier and "python3" not in earlier
    assert doctor.last_xid("[1] NVRM: Xid (PCI:0000:01:00): 119") == "Xid 119 of PCI:0000:01:00"
    assert doctor.last_xid("") == doctor.last_xid("[12.1] NVRM: loading\nXid of nothing 79") == ""


def test_a_log_that_cannot_be_read_is_skipped_and_the_second_reader_is_asked(machine):
    assert check_of(doctor._xid).state == "skip"
    program(machine, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted'; exit 1")
    program(machine, "journalctl", "exit 0")
    assert check_of(doctor._xid).state == "skip"
    program(machine, "journalctl", "echo 'Jan 1 x kernel: NVRM: Xid (PCI:0000:01:00): 48, DBE'")
    assert check_of(doctor._xid) == doctor.Check("xid", "warn", "Xid 48 of PCI:0000:01:00: DBE", "needed", "fix")
    program(machine, "dmesg", "echo '[0.0] Linux version 6.1'")
    assert check_of(doctor._xid).state == "ok"


def smi(machine: Path, gpus: str, apps: str = "", code: int = 0) -> tuple[doctor.Check, doctor.Check]:
    (machine / "gpus").write_text(gpus)
    (machine / "apps").write_text(apps)
    program(
        machine,
        "nvidia-smi",
        f'case "$1" in *compute*) /bin/cat {machine}/apps;; *) /bin/cat {machine}/gpus;; esac; exit {code}',
    )
    doctor._smi.cache_clear()
    return check_of(doctor._others), check_of(doctor._mig)


def test_nvidia_smi_tells_of_other_processes_also_of_those_a_container_hides_and_of_mig(machine):
    assert [check.state for check in (check_of(doctor._others), check_of(doctor._mig))] == ["skip", "skip"]
    idle = "0, GPU-aa, 4, Disabled\n1, GPU-bb, 590, [N/A]\n"
    assert [check.state for check in smi(machine, idle)] == ["ok", "ok"]
    others, _ = smi(machine, idle, "GPU-bb, 4242\nGPU-bb, 4243\n")
    assert (others.state, others.found) == ("warn", "GPU 1: 590 MiB in use, processes seen: 2")
    others, _ = smi(machine, idle.replace("590", "70123"))
    assert (others.state, others.found) == ("warn", "GPU 1: 70123 MiB in use, processes seen: 0")
    others, mig = smi(machine, idle.replace("4, Disabled", "[N/A], Enabled"))
    assert (others.state, mig.state, mig.found) == ("ok", "warn", "on for GPU 0")
    assert [check.state for check in smi(machine, "No devices were found\n", code=6)] == ["skip", "skip"]


@pytest.mark.parametrize(
    "answer", ["Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.65", ""]
)
def test_must_fail_an_nvidia_smi_that_answers_an_error(machine, answer):
    others, mig = smi(machine, answer, code=18)
    assert others.state == mig.state == "fail" and (answer.split("\n")[0] or "nothing") in others.found


@pytest.mark.parametrize(
    "driver, built, state",
    [
        (13000, "13.0", "ok"),
        (13010, "12.8", "ok"),
        (12080, "12.8", "ok"),
        (12040, "12.8", "warn"),
        (12090, "13.0", "fail"),
        (0, "12.8", "fail"),
    ],
)
def test_a_driver_of_an_older_major_than_torchs_cuda_fails(driver, built, state):
    assert doctor.driver_state(driver, built) == state


@pytest.mark.parametrize(
    "arch_list, capability, right",
    [
        (["sm_80", "sm_90", "sm_120"], (12, 0), True),
        (["sm_80", "sm_90", "sm_120"], (12, 1), True),
        (["sm_80", "sm_86"], (8, 9), True),
        (["sm_86", "sm_90"], (8, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["gfx942"], (9, 4), False),
        ([], (9, 0), False),
    ],
)
def test_code_runs_on_its_major_and_ptx_on_newer_ones(arch_list, capability, right):
    assert doctor.runs_on(arch_list, capability) == right


def test_the_comparison_of_attention_passes_what_is_right_and_notices_a_key_too_many():
    class Leaky(DenseAttention):
        def mask(self, visibility, num_queries):
            visible = super().mask(visibility, num_queries)
            visible[:, 511] = True  # the last context token, which no block sees
            return visible

    torch.manual_seed(fresh_seed())
    device = torch.device("cpu")
    assert max(doctor.attention_errors(DenseAttention(), device).values()) < 2 * doctor.ATTENTION_BOUND
    assert min(doctor.attention_errors(Leaky(), device).values()) > 2 * doctor.ATTENTION_BOUND
