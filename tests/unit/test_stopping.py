"""A process without a supervisor is asked to stop, and keeps its work; asked twice it ends."""

import os
import signal

import pytest

from graphcap.ops.stopping import Stop, asked_by_signals


def test_a_second_request_or_one_before_there_is_anything_to_keep_ends_at_once():
    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGTERM, None)
    stop = Stop()
    assert not stop.asked()
    stop.ask(signal.SIGHUP, None)
    try:
        stop.ask(signal.SIGHUP, None)
    except KeyboardInterrupt:
        pytest.fail("the shell's SIGHUP counts as a second request")
    assert stop.asked()
    with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGTERM, None)


def test_what_was_ignored_stays_ignored_and_handlers_come_back():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with asked_by_signals() as stop:
            assert not stop.asked()
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked()
        assert signal.getsignal(signal.SIGTERM) is handler and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
