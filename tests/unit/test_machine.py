"""The checks of the machine read what programs, packages and files of the system say, and judge it."""

import random
import time
from pathlib import Path

import pytest

import graphcap
from graphcap.ops import machine
from tests.toys import fresh_seed


def check_of(function) -> machine.Check:
    return machine.guarded((function, "needed", "fix"))


def program(folder: Path, name: str, text: str) -> None:
    """A program that others find by PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """A PATH with nothing but this folder, for programs that answer as the test says."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    machine.gpus.cache_clear()
    return tmp_path


def test_a_program_that_hangs_is_ended_with_its_children_and_one_that_is_missing_is_skipped(programs):
    program(programs, "hangs", "echo started; /bin/sleep 98 & /bin/sleep 99")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="hangs gave no answer in 0.5 s"):
        machine.output(["hangs"], seconds=0.5)
    assert time.monotonic() - began < 30
    assert check_of(lambda: machine.output(["not-there"])).state == "skip"
    program(programs, "fine", "printf 'one\\ntwo'; echo bad >&2; exit 3")
    assert machine.output(["fine"]) == (3, "one\ntwobad\n")


# Versions and packages


def test_releases_are_compared_as_numbers_and_a_version_without_them_is_an_error():
    minor = random.Random(fresh_seed()).randrange(10, 99)
    assert machine.release(f"5.{minor}.0.dev3+g1") == (5, minor) > machine.release("5.9.1")
    for odd in ("", "nightly", "5"):
        with pytest.raises(ValueError, match="does not begin"):
            machine.release(odd)


@pytest.mark.parametrize(
    "function, version, state",
    [
        (machine.check_transformers, "5.17.0", "ok"),
        (machine.check_transformers, "5.24.1", "ok"),
        (machine.check_transformers, "5.25.0.dev0", "warn"),
        (machine.check_transformers, "4.57.3", "fail"),
        (machine.check_torch, "2.11.0+cu130", "ok"),
        (machine.check_torch, "2.99.0", "warn"),
        (machine.check_torch, "2.9.1", "fail"),
        (machine.check_torch, None, "fail"),
    ],
)
def test_versions_that_ran_newer_ones_and_too_old_ones(monkeypatch, function, version, state):
    def answer(name: str) -> str:
        if version is None:
            raise machine.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(machine.metadata, "version", answer)
    assert check_of(function).state == state


def test_must_fail_another_package_named_graphcap_is_found(tmp_path, monkeypatch):
    for name, state in (("graphcap-engine", "ok"), ("graphcap", "fail")):
        folder = tmp_path / name / f"{name.replace('-', '_')}-3.1.4.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1.4\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder.parent)
            check = check_of(machine.check_package)
        assert check.state == state and ("graphcap 3.1.4" in check.found) == (state == "fail")
    monkeypatch.setattr(graphcap, "__file__", str(tmp_path / "graphcap" / "__init__.py"))
    assert check_of(machine.check_package).state == "fail"


@pytest.mark.parametrize("gpu, state", [(True, "fail"), (False, "warn")])
def test_a_missing_compiler_fails_where_there_is_a_gpu_and_a_bare_cc_is_none_for_triton(programs, monkeypatch, gpu, state):
    monkeypatch.setattr(machine, "gpu_in_machine", lambda: gpu)
    assert (check_of(machine.check_compiler).state, check_of(machine.check_python_headers).state) in (
        (state, "skip"),
        (state, state),
    )
    program(programs, "cc", "exit 0")
    assert (check_of(machine.check_compiler).state, check_of(machine.check_compiler).fix) == (state, "export CC=cc")
    monkeypatch.setenv("CC", "not-there")
    assert "CC names no program" in check_of(machine.check_compiler).found
    monkeypatch.setenv("CC", "cc")
    assert check_of(machine.check_compiler).state == "ok"


def test_headers_count_only_if_the_compiler_takes_them(programs, monkeypatch):
    monkeypatch.setattr(machine, "gpu_in_machine", lambda: True)
    include = programs / "include"
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name, scheme: str(include))
    assert "no Python.h" in check_of(machine.check_python_headers).found
    include.mkdir()
    (include / "Python.h").write_text("")
    program(programs, "gcc", "exit 0")
    assert check_of(machine.check_python_headers).state == "ok"
    program(programs, "gcc", "echo 'stub.c:1: fatal error: stdio.h: No such file'; exit 1")
    check = check_of(machine.check_python_headers)
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
    found, options = machine.file_system(Path(path), MOUNTS)
    assert found == kind and bool(machine.NETWORK.fullmatch(found)) == network
    assert ("noexec" in options) == ("big disk" in path)
    assert machine.file_system(Path(path), "")[0] == "unknown"


def test_caches_are_looked_at_where_each_variable_says_and_else_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*machine.CACHES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert machine.check_caches()[1].startswith("~/.cache/graphcap (") and "," not in machine.check_caches()[1]
    monkeypatch.setenv(machine.CACHES[1], str(tmp_path / "kernels"))
    assert machine.cache_folders() == [Path("~/.cache/graphcap"), tmp_path / "kernels"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert machine.cache_folders() == [Path("/scratch/graphcap"), tmp_path / "kernels"]
    monkeypatch.setenv(machine.CACHES[0], str(tmp_path / "kernels"))
    assert machine.cache_folders() == [tmp_path / "kernels"]


@pytest.mark.parametrize("kind, options, state", [("ext4", [], "ok"), ("nfs", [], "warn"), ("ext4", ["noexec"], "fail")])
def test_caches_over_a_network_warn_and_those_that_cannot_run_or_be_written_fail(tmp_path, monkeypatch, kind, options, state):
    monkeypatch.setattr(machine, "file_system", lambda path, mounts: (kind, options))
    for name in machine.CACHES:
        monkeypatch.setenv(name, str(tmp_path / "not" / "there" / "yet"))
    assert check_of(machine.check_caches).state == state
    assert list(tmp_path.iterdir()) == []

    def refuse(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    check = check_of(machine.check_caches)
    assert check.state == "fail" and "Read-only" in check.found


def test_room_of_a_control_group_counts_cache_that_can_be_given_up():
    rng = random.Random(fresh_seed())
    limit, used, idle = rng.randrange(10**9, 10**10), rng.randrange(10**8, 10**9), rng.randrange(10**7)
    stat = f"anon 5\ninactive_file {idle}\nactive_file 7\n"
    assert machine.cgroup_room(f"{limit}\n", f"{used}\n", stat) == limit - used + idle
    assert (
        machine.cgroup_room(f"{limit}", f"{used}", f"inactive_file 1\ntotal_inactive_file {idle}".split("\n")[1])
        == limit - used + idle
    )
    assert machine.cgroup_room(f"{limit}", f"{used}", "") == limit - used
    assert machine.cgroup_room("max\n", f"{used}", stat) == float("inf")


def test_must_warn_low_room(monkeypatch):
    usage = type("usage", (), {})
    for function, least in (
        (machine.check_shared_memory, machine.SHARED_MIB * 2**20),
        (machine.check_disk, machine.DISK_GIB * 2**30),
    ):
        for free, state in ((least, "ok"), (least - 1, "warn")):
            monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
            usage.free = free
            assert check_of(function).state == state
    monkeypatch.setattr(machine, "cgroup_rooms", lambda: [float("inf"), 3 * 2**20])
    check = check_of(machine.check_memory)
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
    limits = {machine.resource.RLIMIT_NOFILE: files, machine.resource.RLIMIT_MEMLOCK: (locked, locked)}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: limits.get(kind, (0, 0)))
    check = check_of(machine.check_limits)
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
    assert machine.last_xid(XIDS) == "Xid 79 of PCI:0000:86:00: GPU has fallen off the bus."
    earlier = machine.last_xid(XIDS.split("[99.9]")[0])
    assert earlier.startswith("Xid 31 of PCI:0000:3b:00: Ch") and "node7" not in earlier and "python3" not in earlier
    assert machine.last_xid("[1] NVRM: Xid (PCI:0000:01:00): 119") == "Xid 119 of PCI:0000:01:00"
    assert machine.last_xid("") == machine.last_xid("[12.1] NVRM: loading\nXid of nothing 79") == ""


def test_a_log_that_cannot_be_read_is_skipped_and_the_second_reader_is_asked(programs):
    assert check_of(machine.check_xid).state == "skip"
    program(programs, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted'; exit 1")
    program(programs, "journalctl", "exit 0")
    assert check_of(machine.check_xid).state == "skip"
    program(programs, "journalctl", "echo 'Jan 1 x kernel: NVRM: Xid (PCI:0000:01:00): 48, DBE'")
    assert check_of(machine.check_xid) == machine.Check("xid", "warn", "Xid 48 of PCI:0000:01:00: DBE", "needed", "fix")
    program(programs, "dmesg", "echo '[0.0] Linux version 6.1'")
    assert check_of(machine.check_xid).state == "ok"


def smi(programs: Path, gpus: str, apps: str = "", code: int = 0) -> tuple[machine.Check, machine.Check]:
    (programs / "gpus").write_text(gpus)
    (programs / "apps").write_text(apps)
    program(
        programs,
        "nvidia-smi",
        f'case "$1" in *compute*) /bin/cat {programs}/apps;; *) /bin/cat {programs}/gpus;; esac; exit {code}',
    )
    machine.gpus.cache_clear()
    return check_of(machine.check_others), check_of(machine.check_mig)


def test_nvidia_smi_tells_of_other_processes_also_of_those_a_container_hides_and_of_mig(programs):
    assert [check.state for check in (check_of(machine.check_others), check_of(machine.check_mig))] == ["skip", "skip"]
    idle = "0, GPU-aa, 4, Disabled\n1, GPU-bb, 590, [N/A]\n"
    assert [check.state for check in smi(programs, idle)] == ["ok", "ok"]
    others, _ = smi(programs, idle, "GPU-bb, 4242\nGPU-bb, 4243\n")
    assert (others.state, others.found) == ("warn", "GPU 1: 590 MiB in use, processes seen: 2")
    others, _ = smi(programs, idle.replace("590", "70123"))
    assert (others.state, others.found) == ("warn", "GPU 1: 70123 MiB in use, processes seen: 0")
    others, mig = smi(programs, idle.replace("4, Disabled", "[N/A], Enabled"))
    assert (others.state, mig.state, mig.found) == ("ok", "warn", "on for GPU 0")
    assert [check.state for check in smi(programs, "No devices were found\n", code=6)] == ["skip", "skip"]


@pytest.mark.parametrize(
    "answer", ["Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.65", ""]
)
def test_must_fail_an_nvidia_smi_that_answers_an_error(programs, answer):
    others, mig = smi(programs, answer, code=18)
    assert others.state == mig.state == "fail" and (answer.split("\n")[0] or "nothing") in others.found
