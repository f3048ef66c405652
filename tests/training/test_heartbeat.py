"""Processes that stop responding, without processes."""

import threading

import pytest
import torch.distributed as dist

from transformer_kernels._interruption import LIMIT, limit
from transformer_kernels.training.heartbeat import Heartbeat


@pytest.fixture
def beating():
    """Starts a heartbeat that ends with the test; returns it, its messages and an event that is set by the first."""
    started = []

    def begin(store, rank, count, seconds):
        messages, ended = [], threading.Event()
        heartbeat = Heartbeat(
            store, rank, count, seconds, lambda message, lost: (messages.append(message), ended.set())
        )
        started.append(heartbeat)
        heartbeat.start()
        return heartbeat, messages, ended

    yield begin
    for each in started:
        each.leave()


@pytest.mark.parametrize("begun, seconds", [(True, 1), (False, 3)])
def test_a_process_that_stops_or_never_begins_is_named_once(beating, begun, seconds):
    store = dist.HashStore()
    if begun:
        store.add("beats of 1", 1)
    others = [beating(store, rank, 3, 0.6) for rank in (0, 2)]
    for _, _, ended in others:
        assert ended.wait(20)
    (first,), (second,) = (messages for _, messages, _ in others)
    assert first.startswith(f"process 1 has not responded for {seconds} s: it is stopped or cannot be reached")
    assert second == ""


def test_processes_that_respond_or_have_left_are_not_lost(beating):
    store = dist.HashStore()
    heartbeats = [beating(store, rank, 2, 2.4) for rank in range(2)]
    heartbeats[1][0].leave()
    assert not heartbeats[0][2].wait(4.0)
    assert heartbeats[0][0].is_alive()


def test_a_store_that_has_ended_ends_the_heartbeat(beating):
    class Ended:
        def add(self, key, value):
            raise RuntimeError("connection refused")

    heartbeat, messages, _ = beating(Ended(), 0, 2, 0.12)
    heartbeat.join(20)
    assert not heartbeat.is_alive() and len(messages) == 1 and "the launcher has ended" in messages[0]
    heartbeat, messages, _ = beating(Ended(), 0, 2, 60.0)
    heartbeat.leave()  # the run saved and ended by itself
    assert not heartbeat.is_alive() and messages == []


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf"])
def test_the_limit_is_a_number_of_seconds(monkeypatch, text):
    monkeypatch.delenv("TRANSFORMER_KERNELS_PROCESS_TIMEOUT", raising=False)
    assert limit() == LIMIT
    monkeypatch.setenv("TRANSFORMER_KERNELS_PROCESS_TIMEOUT", text)
    with pytest.raises(ValueError, match="TRANSFORMER_KERNELS_PROCESS_TIMEOUT must be a positive number of seconds"):
        limit()
