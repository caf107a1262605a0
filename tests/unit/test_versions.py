"""env.json holds versions and settings and nothing of the machine; an untried torch is said in one line."""

import getpass
import json
import socket
from pathlib import Path

from graphcap.versions import RAN_ON_GPU, environment, untested


def test_the_environment_is_an_allow_list_without_user_host_or_path(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    text = json.dumps(environment({"tf32": "off"}))
    assert "tf32" in text and "torch" in text
    for secret in ("planted", str(Path.home()), f'"{getpass.getuser()}"', socket.gethostname()):
        assert secret not in text, secret


def test_a_torch_that_has_not_run_on_a_gpu_is_named_and_one_that_has_is_not():
    assert untested(f"{RAN_ON_GPU[0]}.0+cu130") == ""
    assert "torch 9.9" in untested("9.9.1") and RAN_ON_GPU[0] in untested("9.9.1")
