import signal
import threading

import pytest

from trueline.runs.interrupts import Interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_interrupt_is_a_request_and_the_second_an_end(number: signal.Signals) -> None:
    notes: list[str] = []
    with Interrupts(notes.append) as interrupts:
        assert not interrupts.has_request()
        signal.raise_signal(number)
        assert interrupts.has_request()
        assert len(notes) == 1
        assert "again" in notes[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_no_checkpoint_is_promised_where_none_is_written() -> None:
    notes: list[str] = []
    for saves in (True, False):
        with Interrupts(notes.append, saves):
            signal.raise_signal(signal.SIGINT)
    assert [note.partition(";")[0].partition(", ")[2] for note in notes] == [
        "with a checkpoint",
        "without a checkpoint",
    ]


def test_the_two_signals_count_together() -> None:
    with Interrupts(lambda note: None), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyError), Interrupts(lambda note: None):
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise KeyError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    """Python allows handlers in the main thread only."""
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with Interrupts(lambda note: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
