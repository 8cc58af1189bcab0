"""Ctrl-C between two looks and in the middle of one."""

import signal
import threading
import time

import pytest

from overstory.orchestrator.interrupts import Looks


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_look_is_not_interrupted_and_is_the_last_one() -> None:
    with Looks() as looks:
        assert looks.wait(0)
        interrupt()  # in a look
        assert not looks.wait(60)


def test_a_wait_ends_at_once() -> None:
    begun = time.monotonic()
    with Looks() as looks:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        assert not looks.wait(60)
        timer.join()
    assert time.monotonic() - begun < 30


def test_a_second_one_ends_even_a_look() -> None:
    with Looks():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_afterwards_ctrl_c_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Looks():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
