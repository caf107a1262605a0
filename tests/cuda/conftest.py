"""Settings of every GPU test: those of a training run, made before the first CUDA call."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def deterministic_math():
    from graphcap.engine.guard import use_deterministic_math

    settings = use_deterministic_math()
    return settings
