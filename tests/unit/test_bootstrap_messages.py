"""Messages: what arrives is what was sent, and what is refused leaves no descriptor."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from array import array
from typing import Any

import pytest
from bootstrap_tools import memfd, open_fds, pairs, take_text
from hypothesis import given
from hypothesis import strategies as st

from bireme.bootstrap import messages
from bireme.errors import EngineError, PeerLost, Timeout

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(), JSON, max_size=4))
def test_a_value_arrives_as_it_was(value: dict[str, Any]) -> None:
    with pairs() as (left, right):
        messages.send(left, value)
        assert messages.receive(right, 5.0) == (value, [])


@given(data=st.binary(min_size=1, max_size=200))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    with pairs() as (left, right):
        left.send(data)
        try:
            value, _ = messages.receive(right, 5.0)
        except EngineError:
            return
        assert isinstance(value, dict)


@pytest.mark.parametrize("count", [0, 1, messages.MAX_FDS])
def test_descriptors_arrive_in_order_and_close_on_exec(count: int) -> None:
    with pairs() as (left, right):
        for index in range(count):
            with memfd(b"%d" % index) as fd:
                messages.send(left, {"index": index}, [fd] * (index + 1))
        for index in range(count):
            value, fds = messages.receive(right, 5.0)
            assert value == {"index": index}
            assert not any(os.get_inheritable(fd) for fd in fds)
            assert [take_text(fd) for fd in fds] == [b"%d" % index] * (index + 1)


def test_the_largest_message() -> None:
    text = "x" * (messages.MAX_BYTES - len('{"text":""}'))
    with pairs() as (left, right):
        messages.send(left, {"text": text})
        assert messages.receive(right, 5.0) == ({"text": text}, [])
        with pytest.raises(ValueError, match=r"at most 65536 bytes of JSON.*found 65537"):
            messages.send(left, {"text": text + "x"})


def test_what_cannot_be_sent() -> None:
    with pairs() as (left, _):
        with pytest.raises(TypeError, match="expected a dict as message, found list"):
            messages.send(left, [1])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not JSON serializable"):
            messages.send(left, {"set": {1}})
        with pytest.raises(ValueError, match="at most 16 descriptors, found 17"):
            messages.send(left, {}, [0] * 17)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"hello", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 60000, "not JSON"),
        (b"9" * 60000, "not JSON"),
        (b"[1]", "expected a JSON object as message, found list"),
        (b"null", "found NoneType"),
        (b"{}" + b" " * messages.MAX_BYTES, "more than 65536 bytes"),
    ],
    ids=lambda value: repr(value[:10]),
)
def test_garbage_is_refused_and_its_descriptors_closed(data: bytes, reason: str) -> None:
    with pairs() as (left, right):
        before = open_fds()
        with memfd(b"") as fd:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd, fd]))]
            left.sendmsg([data], rights)
        with pytest.raises(EngineError, match=reason):
            messages.receive(right, 5.0)
        assert open_fds() == before


def test_too_many_descriptors_are_refused_and_closed() -> None:
    with pairs() as (left, right):
        before = open_fds()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0] * 100))]
        left.sendmsg([b"{}"], rights)
        with pytest.raises(EngineError, match="more than 16 descriptors"):
            messages.receive(right, 5.0)
        assert open_fds() == before


def test_other_ancillary_data_is_no_descriptor() -> None:
    with pairs() as (left, right):
        right.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        messages.send(left, {"a": 1})
        assert messages.receive(right, 5.0) == ({"a": 1}, [])


@pytest.mark.parametrize("unread", [False, True])
def test_the_other_end_has_closed(unread: bool) -> None:
    with pairs() as (left, right):
        if unread:  # then the kernel says "connection reset" first
            messages.send(left, {})
        right.close()
        with pytest.raises(PeerLost, match="has closed"):
            messages.receive(left, 5.0)
        with pytest.raises(PeerLost, match="has closed"):
            messages.send(left, {})


def test_an_empty_datagram_is_an_end() -> None:
    with pairs() as (left, right):
        left.send(b"")
        with pytest.raises(PeerLost, match="has closed"):
            messages.receive(right, 5.0)


def fill(sock: socket.socket) -> int:
    """Send until the socket takes no more; return how many messages it took."""
    for sent in range(1000):
        try:
            messages.send_now(sock, b'{"text":"%s"}' % (b"x" * 60000))
        except BlockingIOError:
            return sent
    raise AssertionError("a socket without a limit")


def test_deadlines() -> None:
    with pairs() as (left, right):
        with pytest.raises(Timeout, match=r"no message came .* within 0.05 s"):
            messages.receive(right, 0.05)
        fill(left)
        with pytest.raises(Timeout, match=r"nobody read our message .* within 0.05 s"):
            messages.send(left, {"text": "x" * 60000}, timeout_s=0.05)


def test_a_wait_ends_when_the_message_comes() -> None:
    with pairs() as (left, right):
        later = threading.Timer(0.05, messages.send, (left, {"late": True}))
        later.start()
        assert messages.receive(right, 10.0) == ({"late": True}, [])
        later.join()


def test_a_full_socket_takes_the_message_later() -> None:
    with pairs() as (left, right):
        sent = fill(left)

        def drain() -> None:
            time.sleep(0.05)
            for _ in range(sent):
                messages.receive(right, 5.0)

        reader = threading.Thread(target=drain)
        reader.start()
        messages.send(left, {"last": True}, timeout_s=10.0)
        reader.join()
        assert messages.receive(right, 5.0) == ({"last": True}, [])


class _Crowded:
    """A socket that first says that too many descriptors are under way."""

    def __init__(self, code: int) -> None:
        self.code = code

    def sendmsg(self, *_: object) -> None:
        raise OSError(self.code, os.strerror(self.code))


def test_too_many_descriptors_under_way_is_no_error_yet() -> None:
    crowded: Any = _Crowded(errno.ETOOMANYREFS)
    with pytest.raises(BlockingIOError):
        messages.send_now(crowded, b"{}")
    broken: Any = _Crowded(errno.EBADF)
    with pytest.raises(OSError, match="Bad file descriptor"):
        messages.send_now(broken, b"{}")


def test_closing_twice_is_skipped() -> None:
    fd = os.memfd_create("test")
    messages.close_all([fd, fd])
